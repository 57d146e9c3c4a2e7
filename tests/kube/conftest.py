# SPDX-License-Identifier: Apache-2.0
"""A real cluster for the tests of this directory, and a release in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kube.cluster import Cluster
from tests.kube.release import Release
from tests.support.chart import find_helm, find_kubectl
from tests.support.netns import NoNamespacesError, check_machine
from twinpool.engine.tiny import write_tiny

BINARIES = "TWINPOOL_KUBE_BINARIES"
IMAGES = "TWINPOOL_KUBE_IMAGES"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same that the pods write for themselves, for the oracle."""
    path = tmp_path_factory.mktemp("oracle") / "tiny"
    write_tiny(path, "deepseek_v3", seed=0)
    return path


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes. docs/operations.md says where their binaries come from."""
    if not (binaries := os.environ.get(BINARIES)) or not (images := os.environ.get(IMAGES)):
        pytest.skip(f"{BINARIES} and {IMAGES} say where Kubernetes's binaries and the images are")
    try:
        check_machine()
    except NoNamespacesError as error:
        pytest.skip(str(error))
    work = tmp_path_factory.mktemp("cluster")
    with Cluster(Path(binaries), [Path(name) for name in images.split(os.pathsep)], work) as made:
        yield made


@pytest.fixture(scope="session")
def release(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Release:
    """How the release "rel" is reached; not installed yet."""
    return Release(cluster, find_helm(), find_kubectl(), tmp_path_factory.mktemp("release"))
