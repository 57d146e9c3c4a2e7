# SPDX-License-Identifier: Apache-2.0
"""Which records stay for a while when they are missing after an outage: those whose owners are seen alive."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from test_membership import View, run_on, worker

from tests.support.stores import ONE_KIND, launch, port_of, running
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import until
from twinpool.store import EtcdStore, Keys, StoreServer

# Within it the second outage must begin, however slow the machine.
GRACE_SECONDS = 6.0


@pytest.fixture(scope="module", params=ONE_KIND)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    yield from running(request.param, tmp_path_factory.mktemp("store"))


@pytest.fixture
async def proxied(server: StoreServer) -> AsyncIterator[tuple[TcpProxy, EtcdStore]]:
    proxy = TcpProxy(server.endpoint)
    store = EtcdStore([proxy.endpoint], timeout_seconds=0.5)
    yield proxy, store
    store.close()
    await asyncio.to_thread(proxy.close)


async def test_after_a_wipe_only_the_living_get_a_grace(tmp_path: Path, keys: Keys) -> None:
    server = await run_on(lambda: launch("embedded", tmp_path))
    port = port_of(server)
    store = EtcdStore([server.endpoint], timeout_seconds=0.5)
    try:
        for name in ("alive", "dead"):
            store.put(keys.worker("default", name), worker(name).SerializeToString())
        options = {"is_alive": lambda record: record.worker.name == "alive", "grace_seconds": 600.0}
        async with View(store, keys, **options) as view:
            await until(lambda: len(view.events) == 2)
            await asyncio.to_thread(server.kill)
            await until(lambda: not view.watch.connected)
            server = await run_on(lambda: launch("embedded", tmp_path, port))
            await until(lambda: len(view.events) == 3)
            assert view.events[2][:2] == ("removed", "dead")
            assert [record.worker.name for record in view.watch.records()] == ["alive"]
    finally:
        store.close()
        await asyncio.to_thread(server.stop)


async def test_a_grace_does_not_end_while_etcd_is_away_again(
    store: EtcdStore, keys: Keys, proxied: tuple[TcpProxy, EtcdStore]
) -> None:
    proxy, far = proxied
    store.put(keys.worker("default", "alive"), worker("alive").SerializeToString())
    async with View(far, keys, is_alive=lambda record: True, grace_seconds=GRACE_SECONDS) as view:
        await until(lambda: view.events and view.watch.connected)
        proxy.cut()
        await until(lambda: not view.watch.connected)
        store.delete_prefix(keys.workers())
        proxy.heal()
        await until(lambda: view.watch._held)
        proxy.cut()
        await until(lambda: not view.watch.connected)
        before = dict(view.watch._held)
        await until(lambda: view.watch._held != before)
        assert [record.worker.name for record in view.watch.records()] == ["alive"]
        proxy.heal()
        await until(lambda: len(view.events) == 2)
        assert view.events[1][:2] == ("removed", "alive")
