# SPDX-License-Identifier: Apache-2.0
import secrets
from collections.abc import Iterator

import pytest

from tests.support.stores import KINDS, running
from twinpool.store import EtcdStore, Keys, StoreServer


@pytest.fixture(scope="session", params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    """One store process of each kind for all tests that do not harm it."""
    yield from running(request.param, tmp_path_factory.mktemp("store"))


@pytest.fixture
def store(server: StoreServer) -> Iterator[EtcdStore]:
    client = EtcdStore([server.endpoint])
    yield client
    client.close()


@pytest.fixture
def root() -> str:
    """A prefix of this test alone."""
    return f"/test/{secrets.token_hex(4)}/"


@pytest.fixture
def keys() -> Keys:
    """Keys of a cluster of this test alone."""
    return Keys(f"c{secrets.token_hex(4)}")
