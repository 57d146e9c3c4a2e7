# SPDX-License-Identifier: Apache-2.0
"""Registrations and the views of them, on a real etcd and on the embedded one."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from tests.support.stores import ONE_KIND, launch, port_of, running
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import until
from twinpool.membership import EventKind, Registration, RouterWatch, WorkerWatch
from twinpool.store import EtcdStore, Keys, StoreServer
from twinpool.store.embedded import EmbeddedEtcd
from twinpool.v1.control_pb2 import (
    WORKER_STATE_DRAINING,
    WORKER_STATE_READY,
    WORKER_STATE_STARTING,
    RouterRecord,
    WorkerRecord,
)
from twinpool.v1.worker_pb2 import ROLE_DECODE, ROLE_PREFILL, WorkerId

TTL = 2


@pytest.fixture(scope="module", params=ONE_KIND)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    yield from running(request.param, tmp_path_factory.mktemp("store"))


def worker(name: str = "w", incarnation: int = 7, **fields: Any) -> WorkerRecord:
    values: dict[str, Any] = {
        "worker": WorkerId(name=name, incarnation=incarnation),
        "pool": "default",
        "role": ROLE_PREFILL,
        "state": WORKER_STATE_STARTING,
        "endpoint": "127.0.0.1:1000",
        "num_blocks": 8,
        "block_tokens": 16,
        "max_num_seqs": 4,
    }
    return WorkerRecord(**(values | fields))


class View:
    """A started WorkerWatch with its events as (kind, name, incarnation, state)."""

    def __init__(self, store: EtcdStore, keys: Keys, **options: Any) -> None:
        self.events: list[tuple[str, str, int, int]] = []
        self.watch = WorkerWatch(store, keys.cluster, on_event=self._on_event, **options)

    def _on_event(self, event: Any) -> None:
        record = event.record
        self.events.append((event.kind.value, record.worker.name, record.worker.incarnation, record.state))

    async def __aenter__(self) -> "View":
        await self.watch.start()
        assert await self.watch.wait_synced(60)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.watch.stop()


class Registered:
    """A registration that is stopped at the end."""

    def __init__(self, store: EtcdStore, keys: Keys, record: Any, **options: Any) -> None:
        self.registration = Registration(store, keys.cluster, record, ttl_seconds=TTL, **options)

    async def __aenter__(self) -> Registration:
        await self.registration.start()
        assert await self.registration.wait_registered(60)
        return self.registration

    async def __aexit__(self, *_: object) -> None:
        await self.registration.stop()


@pytest.fixture
async def proxied(server: StoreServer) -> AsyncIterator[tuple[TcpProxy, EtcdStore]]:
    proxy = TcpProxy(server.endpoint)
    store = EtcdStore([proxy.endpoint], timeout_seconds=0.5)
    yield proxy, store
    store.close()
    await asyncio.to_thread(proxy.close)


async def test_a_worker_comes_changes_and_goes(store: EtcdStore, keys: Keys) -> None:
    changes: list[bool] = []
    async with View(store, keys) as view:
        async with Registered(store, keys, worker(), on_change=changes.append) as registration:
            registration.update_state(WORKER_STATE_READY)
            registration.update_state(WORKER_STATE_READY, ROLE_DECODE)
            await until(lambda: view.watch.records() and view.watch.records()[0].role == ROLE_DECODE)
            assert view.watch.get("w") == worker(state=WORKER_STATE_READY, role=ROLE_DECODE)
            assert store.get(keys.worker("default", "w")) is not None
        await until(lambda: len(view.events) >= 3 and view.events[-1][0] == "removed")
        assert [event[0] for event in view.events if event[0] != "updated"] == ["added", "removed"]
        assert view.watch.records() == []
        assert changes == [True, False]


async def test_a_registration_outlives_its_ttl_without_news(store: EtcdStore, keys: Keys) -> None:
    async with View(store, keys) as view, Registered(store, keys, worker()):
        await until(lambda: view.events)
        await asyncio.sleep(TTL * 1.5)
        assert view.events == [("added", "w", 7, WORKER_STATE_STARTING)]


async def test_routers_register_too(store: EtcdStore, keys: Keys) -> None:
    watch = RouterWatch(store, keys.cluster)
    await watch.start()
    record = RouterRecord(name="r", incarnation=3, endpoint="127.0.0.1:5")
    async with Registered(store, keys, record) as registration:
        await until(watch.records)
        assert watch.get("r") == record
        with pytest.raises(TypeError, match="only a worker"):
            registration.update_state(WORKER_STATE_READY)
    await until(lambda: not watch.records())
    await watch.stop()


async def test_a_restarted_worker_replaces_its_old_incarnation(store: EtcdStore, keys: Keys) -> None:
    superseded = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with View(store, keys) as view:
        old = Registered(
            store, keys, worker(), on_superseded=lambda: loop.call_soon_threadsafe(superseded.set)
        )
        async with old as first, Registered(store, keys, worker(incarnation=8, state=WORKER_STATE_READY)):
            await until(lambda: len(view.events) == 3)
            assert view.events == [
                ("added", "w", 7, WORKER_STATE_STARTING),
                ("removed", "w", 7, WORKER_STATE_STARTING),
                ("added", "w", 8, WORKER_STATE_READY),
            ]
            await asyncio.wait_for(superseded.wait(), 60)
            assert first.superseded
            assert not first.registered
            # The loser's news and its end leave the winner's record alone.
            first.update_state(WORKER_STATE_DRAINING)
            await first.stop()
            await asyncio.sleep(TTL)
            assert [record.worker.incarnation for record in view.watch.records()] == [8]
            assert len(view.events) == 3


async def test_a_lost_lease_is_noticed_and_made_good(store: EtcdStore, keys: Keys) -> None:
    changes: list[bool] = []
    async with (
        View(store, keys) as view,
        Registered(store, keys, worker(), on_change=changes.append) as registration,
    ):
        item = store.get(keys.worker("default", "w"))
        assert item is not None
        losses = REGISTRY.get_sample_value("twinpool_membership_lease_losses_total") or 0
        store.revoke(item.lease_id)
        await until(lambda: [event[0] for event in view.events] == ["added", "removed", "added"])
        # The callback comes on the loop, a moment after the state.
        await until(lambda: registration.registered and changes == [True, False, True])
        assert REGISTRY.get_sample_value("twinpool_membership_lease_losses_total") == losses + 1


@pytest.mark.parametrize("harm", ["delete", "garbage"])
async def test_a_record_that_somebody_harmed_is_put_again(store: EtcdStore, keys: Keys, harm: str) -> None:
    key = keys.worker("default", "w")
    async with Registered(store, keys, worker()) as registration:
        if harm == "delete":
            store.delete(key)
        else:
            item = store.get(key)
            assert item is not None
            store.put(key, b"\xff\xff", item.lease_id)

        def intact() -> bool:
            found = store.get(key)
            return found is not None and WorkerRecord.FromString(found.value) == worker()

        await until(lambda: (store.get(key) or registration) and _parses(store, key) and intact())
        assert registration.registered


def _parses(store: EtcdStore, key: str) -> bool:
    item = store.get(key)
    return item is not None and item.value != b"\xff\xff"


async def test_records_that_make_no_sense_are_skipped_and_counted(store: EtcdStore, keys: Keys) -> None:
    def count(cause: str) -> float:
        return REGISTRY.get_sample_value("twinpool_membership_invalid_records_total", {"cause": cause}) or 0

    before = {cause: count(cause) for cause in ("key", "decode", "content")}
    base = keys.workers("default")
    store.put(base + "garbage", b"\xff\xff\xff")
    async with View(store, keys) as view:
        store.put(base + "empty", b"")
        store.put(base + "norole", worker("norole", role=0).SerializeToString())
        store.put(base + "noend", worker("noend", endpoint="nowhere").SerializeToString())
        store.put(base + "other", worker("w").SerializeToString())
        store.put(base + "deep/er", worker("w").SerializeToString())
        store.put(base + "good", worker("good").SerializeToString())
        await until(lambda: view.events)
        assert view.events == [("added", "good", 7, WORKER_STATE_STARTING)]
        assert {cause: count(cause) - before[cause] for cause in before} == {
            "key": 2,
            "decode": 1,
            "content": 3,
        }
        # A good one that turns bad is gone: whoever wrote it cannot be understood.
        store.put(base + "good", b"\xff")
        await until(lambda: len(view.events) == 2)
        assert view.events[1][:2] == ("removed", "good")
        store.put(base + "good", worker("good", 9).SerializeToString())
        await until(lambda: len(view.events) == 3)


async def test_one_pool_is_not_its_namesake(store: EtcdStore, keys: Keys) -> None:
    async with View(store, keys, pool="a") as view:
        for pool in ("ab", "a-b", "a"):
            store.put(keys.worker(pool, "w"), worker(pool=pool).SerializeToString())
        await until(lambda: view.events)
        assert [record.pool for record in view.watch.records()] == ["a"]


async def test_events_begin_with_what_there_is_and_end_with_stop(store: EtcdStore, keys: Keys) -> None:
    store.put(keys.worker("default", "a"), worker("a").SerializeToString())
    seen: list[tuple[EventKind, str]] = []

    async def follow(watch: WorkerWatch) -> None:
        async for event in watch.events():
            seen.append((event.kind, event.record.worker.name))

    async with View(store, keys) as view:
        tasks = [asyncio.create_task(follow(view.watch)) for _ in range(2)]
        await until(lambda: len(seen) == 2)
        store.put(keys.worker("default", "b"), worker("b").SerializeToString())
        store.delete(keys.worker("default", "a"))
        await until(lambda: len(seen) == 6)
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert sorted(seen, key=str) == sorted(
        [(EventKind.ADDED, "a"), (EventKind.ADDED, "b"), (EventKind.REMOVED, "a")] * 2, key=str
    )


# --- faults --------------------------------------------------------------------------------


async def test_a_ghost_is_gone_soon_after_the_cut_heals(
    store: EtcdStore, keys: Keys, proxied: tuple[TcpProxy, EtcdStore]
) -> None:
    proxy, far = proxied
    for name in ("stays", "ghost"):
        store.put(keys.worker("default", name), worker(name).SerializeToString())
    async with View(far, keys) as view:
        await until(lambda: len(view.events) == 2 and view.watch.connected)
        proxy.cut()
        await until(lambda: not view.watch.connected)
        store.delete(keys.worker("default", "ghost"))
        store.compact(store.put(keys.worker("default", "fresh"), worker("fresh").SerializeToString()))
        assert len(view.watch.records()) == 2, "without etcd the last view stays"
        proxy.heal()
        await until(lambda: len(view.events) == 4)
        assert {event[:2] for event in view.events[2:]} == {("removed", "ghost"), ("added", "fresh")}


async def test_after_an_outage_the_living_get_a_grace(
    store: EtcdStore, keys: Keys, proxied: tuple[TcpProxy, EtcdStore]
) -> None:
    proxy, far = proxied
    for name in ("alive", "dead"):
        store.put(keys.worker("default", name), worker(name).SerializeToString())
    options = {"is_alive": lambda record: record.worker.name == "alive", "grace_seconds": 3.0}
    async with View(far, keys, **options) as view:
        await until(lambda: len(view.events) == 2 and view.watch.connected)
        proxy.cut()
        await until(lambda: not view.watch.connected)
        store.delete_prefix(keys.workers())
        proxy.heal()
        await until(lambda: view.events[2:] == [("removed", "dead", 7, WORKER_STATE_STARTING)])
        store.put(keys.worker("default", "alive"), worker("alive").SerializeToString())
        await asyncio.sleep(3.5)
        assert len(view.events) == 3, "it came back in time, so nothing happened"
        # A removal that the watch itself reports is a removal, alive or not.
        store.delete_prefix(keys.workers())
        await until(lambda: len(view.events) == 4)


@pytest.mark.slow
async def test_a_short_black_hole_costs_nothing(
    store: EtcdStore, keys: Keys, proxied: tuple[TcpProxy, EtcdStore]
) -> None:
    proxy, far = proxied
    async with View(store, keys) as view, Registered(far, keys, worker()):
        await until(lambda: view.events)
        for _ in range(3):
            proxy.stall()
            await asyncio.sleep(0.6)
            proxy.heal()
            await asyncio.sleep(0.4)
        assert len(view.events) == 1


@pytest.mark.slow
async def test_a_long_black_hole_ends_in_a_new_registration(
    store: EtcdStore, keys: Keys, proxied: tuple[TcpProxy, EtcdStore]
) -> None:
    proxy, far = proxied
    async with View(store, keys) as view, Registered(far, keys, worker()) as registration:
        await until(lambda: view.events)
        proxy.stall()
        await until(lambda: not registration.registered)
        await until(lambda: len(view.events) == 2)
        registration.update_state(WORKER_STATE_READY)
        proxy.heal()
        await until(lambda: len(view.events) == 3)
        assert [event[0] for event in view.events] == ["added", "removed", "added"]
        assert view.events[2][3] == WORKER_STATE_READY, "what changed meanwhile is not forgotten"
        await until(lambda: registration.registered)


async def run_on(call: Callable[[], StoreServer]) -> StoreServer:
    return await asyncio.to_thread(call)


@pytest.mark.parametrize("kind", ONE_KIND)
async def test_a_killed_store_changes_nothing(kind: str, tmp_path: Path, keys: Keys) -> None:
    """The real one restarts with its data, the embedded one with none: nobody notices either."""
    server = await run_on(lambda: launch(kind, tmp_path))
    port = port_of(server)
    stores = [EtcdStore([server.endpoint], timeout_seconds=0.5) for _ in range(2)]
    try:
        async with View(stores[0], keys) as view, Registered(stores[1], keys, worker()) as registration:
            await until(lambda: view.events)
            await asyncio.to_thread(server.kill)
            await until(lambda: not view.watch.connected)
            await asyncio.sleep(TTL if kind == "embedded" else 0.2)
            server = await run_on(lambda: launch(kind, tmp_path, port))
            await until(lambda: view.watch.connected)
            await until(lambda: registration.registered and stores[0].get(keys.worker("default", "w")))
            await asyncio.sleep(0.3)
            assert view.events == [("added", "w", 7, WORKER_STATE_STARTING)]
    finally:
        for store in stores:
            store.close()
        await asyncio.to_thread(server.stop)


@pytest.mark.slow
async def test_who_does_not_come_back_after_a_wipe_is_removed(tmp_path: Path, keys: Keys) -> None:
    server = await run_on(lambda: launch("embedded", tmp_path))
    port = port_of(server)
    store = EtcdStore([server.endpoint], timeout_seconds=0.5)
    try:
        store.put(keys.worker("default", "w"), worker().SerializeToString())
        async with View(store, keys, grace_seconds=6.0) as view:
            await until(lambda: view.events)
            await asyncio.to_thread(server.kill)
            await until(lambda: not view.watch.connected)
            server = await run_on(lambda: launch("embedded", tmp_path, port))
            await until(lambda: view.watch.connected)
            assert len(view.watch.records()) == 1
            await until(lambda: len(view.events) == 2)
            assert view.events[1][0] == "removed"
    finally:
        store.close()
        await asyncio.to_thread(server.stop)


async def test_a_registration_may_begin_before_the_store(keys: Keys) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = EtcdStore([f"127.0.0.1:{port}"], timeout_seconds=0.5)
    registration = Registration(store, keys.cluster, worker(), ttl_seconds=TTL)
    watch = WorkerWatch(store, keys.cluster)
    await registration.start()
    await watch.start()
    assert not await watch.wait_synced(0.3)
    assert not registration.registered
    server = EmbeddedEtcd(port=port)
    server.start()
    try:
        assert await registration.wait_registered(60)
        await until(watch.records)
    finally:
        await watch.stop()
        await asyncio.to_thread(server.stop)
        # Without a store the stop is still bounded, and raises nothing.
        await asyncio.wait_for(registration.stop(), 60)
        store.close()
