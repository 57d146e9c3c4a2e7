# SPDX-License-Identifier: Apache-2.0
"""Whether this machine can have hosts of its own, and helm."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.chart import Helm, NoHelmError, find_helm
from tests.support.netns import NoNamespacesError, check_machine
from twinpool.engine.tiny import write_tiny


@pytest.fixture(scope="session")
def hosts() -> None:
    """Skips where namespaces or etcd are not to be had."""
    for binary in ("etcd", "etcdctl"):
        if shutil.which(binary) is None:
            pytest.skip(f"no {binary}")
    try:
        check_machine()
    except NoNamespacesError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def helm(hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Renders the chart; skips where there is no helm to be had."""
    try:
        return Helm(find_helm(), tmp_path_factory.mktemp("helm"))
    except NoHelmError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same that the pods write for themselves, for the oracle."""
    path = tmp_path_factory.mktemp("oracle") / "tiny"
    write_tiny(path, "deepseek_v3", seed=0)
    return path
