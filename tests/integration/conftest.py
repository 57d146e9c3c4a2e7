# SPDX-License-Identifier: Apache-2.0
"""Clusters that the tests of this folder share: one a model family."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, running_cluster
from twinpool.engine.tiny import write_tiny

FAMILIES = ("deepseek_v3", "deepseek_v2", "llama", "qwen3")
AHEAD = ("deepseek_v2", "qwen3")
"""One with latent attention and one without work ahead, as workers on a GPU do."""


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random tiny checkpoint of each family."""
    root = tmp_path_factory.mktemp("models")
    paths = {}
    for family in FAMILIES:
        paths[family] = root / family
        write_tiny(paths[family], family, seed=7)
    return paths


@pytest.fixture(scope="module", params=FAMILIES)
def cluster(
    request: pytest.FixtureRequest, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """One prefill and one decode worker with small poisoned pools, a router, a store, Ray."""
    family: str = request.param
    settings = {"scheduler.ahead": "on" if family in AHEAD else "auto"}
    with running_cluster(tmp_path_factory.mktemp(family), checkpoints[family], settings) as running:
        yield running
