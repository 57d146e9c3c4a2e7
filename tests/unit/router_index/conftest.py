# SPDX-License-Identifier: Apache-2.0
import secrets
from collections.abc import Iterator

import pytest

from tests.support.stores import ONE_KIND, running
from tests.support.tcp_proxy import TcpProxy
from twinpool.store import EtcdStore, StoreServer


@pytest.fixture(scope="session", params=ONE_KIND)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    yield from running(request.param, tmp_path_factory.mktemp("store"))


@pytest.fixture
def store(server: StoreServer) -> Iterator[EtcdStore]:
    client = EtcdStore([server.endpoint])
    yield client
    client.close()


@pytest.fixture
def proxy(server: StoreServer) -> Iterator[TcpProxy]:
    made = TcpProxy(server.endpoint)
    yield made
    made.close()


@pytest.fixture
def far(proxy: TcpProxy) -> Iterator[EtcdStore]:
    """The store through the proxy."""
    client = EtcdStore([proxy.endpoint], timeout_seconds=0.5)
    yield client
    client.close()


@pytest.fixture
def cluster() -> str:
    """A cluster of this test alone."""
    return f"c{secrets.token_hex(4)}"
