# SPDX-License-Identifier: Apache-2.0
"""A store that the tests of this folder share; each has a cluster of its own in it."""

from collections.abc import Iterator

import pytest

from twinpool.store import StoreServer, start_store


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    made = start_store(tmp_path_factory.mktemp("store"), prefer_embedded=True)
    yield made
    made.stop()
