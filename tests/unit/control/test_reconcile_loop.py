# SPDX-License-Identifier: Apache-2.0
"""Control processes over a real store, with workers of the test's own: pools become what they shall be, whatever happens."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from tests.support.controls import TTL_SECONDS, Control
from tests.support.thread_pools import Site
from tests.support.waiting import until, until_told
from twinpool.config import RpcConfig, TwinpoolConfig
from twinpool.control.cli.calls import ask
from twinpool.control.events import REASONS, Filter
from twinpool.control.reconcile.spec import configured, resized
from twinpool.errors import TwinpoolError, from_rpc_error
from twinpool.rpc import channel
from twinpool.rpc.audit import METHODS
from twinpool.store import Keys, Store, StoreServer, connect_store
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import control_pb2_grpc

SERVICE = "ControlService/"

READY = pb.REPLICA_PHASE_READY


async def ended(operation: pb.Operation, state: "pb.OperationState.ValueType") -> pb.Operation:
    await until(lambda: operation.state != pb.OPERATION_STATE_RUNNING)
    assert operation.state == state, operation.error
    return operation


@pytest.fixture
async def site(server: StoreServer, request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    name = f"loop-{abs(hash(request.node.name)) % 10**8}"
    config = TwinpoolConfig.model_validate({"cluster": {"etcd_endpoints": [server.endpoint]}})
    store = connect_store(config.cluster)
    made = Site(store, name, TTL_SECONDS)
    yield made
    await made.close()
    store.close()


@asynccontextmanager
async def control(server: StoreServer, site: Site, **pools: object) -> AsyncIterator[Control]:
    made = await Control(server, site, **pools).start()
    try:
        yield made
    finally:
        await made.stop()


def put(store: Store, key: str, message: pb.PoolSpec | pb.Operation) -> None:
    store.put(key, message.SerializeToString())


async def test_a_pool_grows_and_shrinks_and_names_are_used_again(server: StoreServer, site: Site) -> None:
    async with control(server, site) as made:
        await made.settled()
        assert sorted(site.workers) == ["default-decode-0", "default-prefill-0"]
        await ended(await made.scale(2, 3), pb.OPERATION_STATE_SUCCEEDED)
        assert len(site.workers) == 5
        # The idle ones go, whatever their numbers are.
        for name in ("default-decode-0", "default-decode-2", "default-prefill-1"):
            site.workers[name].requests = 2
        operation = await made.scale(1, 2, reason="night")
        await ended(operation, pb.OPERATION_STATE_SUCCEEDED)
        assert sorted(site.workers) == ["default-decode-0", "default-decode-2", "default-prefill-1"]
        assert sorted(site.drained) == ["default-decode-1", "default-prefill-0"]
        drains = [op for op in made.controller.operations.all() if op.kind == pb.OPERATION_KIND_DRAIN]
        assert {op.parent for op in drains} == {operation.id}
        # Who was drained for a scale is not kept out.
        await ended(await made.scale(2, None), pb.OPERATION_STATE_SUCCEEDED)
        assert "default-prefill-0" in site.workers
        assert site.started.count("default-prefill-0") == 2
        await made.controller.events.drained()
        await made.tells("PoolScaled")
        assert set(made.reasons()) <= set(REASONS)
        event = next(event for event in made.controller.events.all() if event.operation == operation.id)
        assert event.subject == "default"
        assert any(event.message.endswith(": night") for event in made.controller.events.all())


async def test_bounds_zero_and_foreign_pools_are_refused(server: StoreServer, site: Site) -> None:
    async with control(server, site, decode_most=3) as made:
        for prefill, decode, reason, part in (
            (None, 4, "POOL_BOUNDS", "not within 0 and 3"),
            (0, None, "POOL_BOUNDS", "--force"),
        ):
            with pytest.raises(TwinpoolError, match=part) as caught:
                await made.scale(prefill, decode)
            assert caught.value.reason == reason
        with pytest.raises(TwinpoolError) as caught:
            await made.controller.scaling.begin("other", 1, 1)
        assert caught.value.reason == "POOL_NOT_FOUND"
        await made.settled()
        await ended(await made.scale(0, None, force=True), pb.OPERATION_STATE_SUCCEEDED)
        assert sorted(site.workers) == ["default-decode-0"]
        # From none it needs no force to stay there.
        await ended(await made.scale(None, 2), pb.OPERATION_STATE_SUCCEEDED)


async def test_a_later_scale_takes_the_place_of_one_under_way(server: StoreServer, site: Site) -> None:
    async with control(server, site) as made:
        await made.settled()
        site.places = 2
        first = await made.scale(1, 3)
        assert await made.scale(1, 3) is first, "asked twice is asked once"
        await until(lambda: site.waiting)
        second = await made.scale(1, 1)
        await ended(second, pb.OPERATION_STATE_SUCCEEDED)
        assert first.error.startswith(f"OPERATION_SUPERSEDED: {second.id}")
        assert sorted(site.workers) == ["default-decode-0", "default-prefill-0"]
        assert site.drained == [], "who never had a place is ended, not drained"


async def test_who_has_no_place_is_told_with_the_cause(server: StoreServer, site: Site) -> None:
    site.places = 2
    async with control(server, site, pending_timeout_seconds=3) as made:
        await made.settled()
        operation = await made.scale(1, 2)
        event = await made.tells("ReplicaPending")
        assert (event.subject, event.warning) == ("default-decode-1", True)
        assert "missing CPU" in event.message
        await ended(operation, pb.OPERATION_STATE_FAILED)
        assert operation.error.startswith("REPLICA_PENDING: default-decode-1")
        assert "missing CPU" in operation.error
        assert made.status()["default-decode-1"] == pb.REPLICA_PHASE_PENDING
        # The wish stays: with room it comes true.
        await site.make_room(3)
        await made.settled()
        await made.tells("ReplicaPlaced")
        assert made.status()["default-decode-1"] == READY


async def test_who_cannot_start_is_tried_again_ever_later(server: StoreServer, site: Site) -> None:
    site.broken = {"default-decode-1"}
    async with control(server, site) as made:
        await made.settled()
        operation = await made.scale(1, 2)
        event = await made.tells("WorkerStartFailed")
        assert "CHECKPOINT_INVALID: default-decode-1: planted" in event.message
        looping = await made.tells("WorkerCrashLooping")
        assert "has ended 3 times" in looping.message
        await ended(operation, pb.OPERATION_STATE_FAILED)
        assert operation.error.startswith("REPLICA_CRASHING: default-decode-1")
        assert made.status()["default-decode-1"] == pb.REPLICA_PHASE_BACKOFF
        assert site.started.count("default-decode-1") == 3
        site.broken = set()
        await made.settled()
        assert site.started.count("default-decode-1") == 4


async def test_a_worker_that_an_operator_drains_is_not_replaced_until_the_pool_is_scaled(
    server: StoreServer, site: Site
) -> None:
    async with control(server, site, decode_workers=2) as made:
        await made.settled()
        drain = await made.controller.operations.begin(pb.OPERATION_KIND_DRAIN, "default-decode-0", None)
        await ended(drain, pb.OPERATION_STATE_SUCCEEDED)
        await until(lambda: made.status().get("default-decode-0") == pb.REPLICA_PHASE_HELD)
        assert made.reconciler.turns
        turns = made.reconciler.turns
        await until(lambda: made.reconciler.turns > turns + 2)
        assert sorted(site.workers) == ["default-decode-1", "default-prefill-0"]
    # Whoever comes after keeps it out, too.
    async with control(server, site, decode_workers=2) as made:
        await until(lambda: made.reconciler.turns > 2)
        assert sorted(site.workers) == ["default-decode-1", "default-prefill-0"]
        # A scale to the very same number says that so many are to work.
        await ended(await made.scale(None, 2), pb.OPERATION_STATE_SUCCEEDED)
        assert sorted(site.workers) == ["default-decode-0", "default-decode-1", "default-prefill-0"]


async def test_a_cordon_outlives_the_worker_but_not_its_end_for_good(server: StoreServer, site: Site) -> None:
    name = "default-decode-0"
    async with control(server, site, decode_workers=2) as made:
        await made.settled()
        view, cordons = made.controller.view, made.controller.cordons

        def cordoned() -> bool:
            return any(record.worker.name == name and record.cordoned for record in view.workers())

        assert await made.controller.cordons.set(
            name, True, next(each for each in view.workers() if each.worker.name == name)
        )
        await until(cordoned)
        before = site.workers[name].key
        restart = await made.controller.operations.begin(pb.OPERATION_KIND_RESTART, name, None)
        await ended(restart, pb.OPERATION_STATE_SUCCEEDED)
        assert site.workers[name].key != before
        await until(cordoned)
        assert site.workers[name].told == [True]
        with pytest.raises(TwinpoolError) as caught:
            await cordons.set("nobody", True, None)
        assert caught.value.reason == "WORKER_NOT_FOUND"
        # A cordoned worker goes first, and the next one under its name is another one.
        await ended(await made.scale(None, 1), pb.OPERATION_STATE_SUCCEEDED)
        assert name not in site.workers
        await until(lambda: site.store.get(Keys(site.cluster).cordon(name)) is None)
        await ended(await made.scale(None, 2), pb.OPERATION_STATE_SUCCEEDED)
        assert not cordoned()
        assert {"WorkerCordoned"} <= set(made.reasons())


STEPS = [[], ["write"], ["write", "converge"]]


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("steps", STEPS, ids=["none", "write", "converge"])
async def test_who_comes_after_ends_a_scale_where_the_last_one_was(
    server: StoreServer, site: Site, steps: list[str], written: bool
) -> None:
    """Whatever the last control process had recorded when it ended, and whether the record of the pool was written."""
    site.cluster += f"-{len(steps)}{written:d}"
    keys = Keys(site.cluster)
    async with control(server, site) as made:
        await made.settled()
    operation = pb.Operation(
        id="scale-left",
        kind=pb.OPERATION_KIND_SCALE,
        state=pb.OPERATION_STATE_RUNNING,
        pool="default",
        prefill=2,
        decode=2,
    )
    operation.timeout.seconds = 600
    operation.created_at.GetCurrentTime()
    for number, name in enumerate(steps):
        step = operation.steps.add(name=name)
        step.began_at.GetCurrentTime()
        if number < len(steps) - 1:
            step.done_at.GetCurrentTime()
    if written or len(steps) == 2:
        put(site.store, keys.pool("default"), resized(configured(made.config), 2, 2))
    put(site.store, keys.operation("scale-left"), operation)
    async with control(server, site) as later:
        found = later.controller.operations.get("scale-left")
        await ended(found, pb.OPERATION_STATE_SUCCEEDED)
        assert [step.name for step in found.steps] == ["write", "converge"]
        assert len(site.workers) == 4
        assert "OperationResumed" in later.reasons() or await later.tells("OperationResumed")
        # What was done before was not done again.
        assert sorted(site.started) == sorted(site.workers)


async def answer_of(endpoint: str, method: str) -> str:
    """The reason for which a method is refused; "": it is not."""
    name = method.removeprefix(SERVICE)
    async with channel(endpoint, RpcConfig()) as connection:
        call = getattr(control_pb2_grpc.ControlServiceStub(connection), name)
        try:
            await call(getattr(pb, f"{name}Request")(), timeout=30)
        except grpc.RpcError as error:
            return from_rpc_error(error).reason
    return ""


async def test_one_leads_and_the_other_takes_over_when_it_dies(server: StoreServer, site: Site) -> None:
    first = await Control(server, site).start()
    second = await Control(server, site).start(leads=False)
    try:
        await first.settled()
        await until(lambda: second.controller.view.workers())
        endpoint = second.controller.endpoint

        async def pools_of(stub: control_pb2_grpc.ControlServiceStub) -> pb.ListPoolsResponse:
            return await stub.ListPools(pb.ListPoolsRequest(), timeout=30)  # type: ignore[misc,no-any-return]

        def refused() -> TwinpoolError:
            with pytest.raises(TwinpoolError) as caught:
                second.controller.check_leads()
            return caught.value

        # Whoever asks the one that stands by is told whom to ask, once that one knows; and the command line does.
        await until(lambda: refused().metadata)
        assert refused().reason == "NOT_LEADER"
        assert refused().metadata == {"leader": first.controller.endpoint}
        changing = [name for name, each in METHODS.items() if each.changes and name.startswith(SERVICE)]
        assert "ControlService/FlipWorker" in changing
        assert {name: await answer_of(endpoint, name) for name in changing} == dict.fromkeys(
            changing, "NOT_LEADER"
        )
        answer = await ask(endpoint, pools_of)  # type: ignore[arg-type]
        assert [pool.spec.pool for pool in answer.pools] == ["default"]
        # It dies in the middle of a scale that cannot end yet.
        site.stubborn = {"default-decode-0"}
        site.workers["default-decode-0"].requests = 0
        operation = await first.scale(2, 1)
        await until(lambda: len(operation.steps) == 2)
        await first.die()
        await second.controller.wait_leading()
        found = second.controller.operations.get(operation.id)
        await ended(found, pb.OPERATION_STATE_SUCCEEDED)
        assert sorted(site.workers) == ["default-decode-0", "default-prefill-0", "default-prefill-1"]
        assert site.ended == []
        answer = await ask(endpoint, pools_of)  # type: ignore[arg-type]
        assert answer.pools[0].spec.prefill.desired == 2
    finally:
        await second.stop()
        with contextlib.suppress(Exception):
            await first.stop()


async def test_without_etcd_nothing_is_done_and_afterwards_it_goes_on(
    server: StoreServer, site: Site
) -> None:
    async with control(server, site) as made:
        await made.settled()
        made.proxy.cut()
        await until(lambda: made.reconciler.status().waiting)
        started, ended_before = list(site.started), list(site.ended)
        # A worker is lost meanwhile. Nobody knows, and nobody acts.
        await site.end("default-decode-0")
        await until(lambda: not made.controller._leadership.leads())  # type: ignore[union-attr]
        assert (site.started, site.ended) == (started, [*ended_before, "default-decode-0"])
        with pytest.raises(TwinpoolError) as caught:
            made.controller.check_leads()
        assert caught.value.reason == "NOT_LEADER"
        assert "etcd may be away" in caught.value.message
        # What it knew it still tells.
        made.controller.check_reads()
        made.proxy.heal()
        await made.controller.wait_leading()
        event = await made.tells("StoreAway")
        assert "nothing is changed for" in event.message
        await made.settled()
        await ended(await made.scale(2, 1), pb.OPERATION_STATE_SUCCEEDED)


async def test_etcd_away_during_a_scale_is_waited_for(server: StoreServer, site: Site) -> None:
    async with control(server, site) as made:
        await made.settled()
        site.places = 2
        operation = await made.scale(2, 2)
        await until(lambda: len(site.waiting) == 2)
        made.proxy.cut()
        await until(
            lambda: (
                "etcd is away" in made.reconciler.status().waiting or not made.controller._leadership.leads()
            )
        )  # type: ignore[union-attr]
        await site.make_room(4)
        made.proxy.heal()
        await until_told(lambda: _is_up(made))
        found = made.controller.operations.get(operation.id)
        await ended(found, pb.OPERATION_STATE_SUCCEEDED)
        assert len(site.workers) == 4
        assert site.ended == []


async def _is_up(made: Control) -> bool:
    return made.controller._led.is_set() and made.controller.view.connected


async def test_an_empty_etcd_ends_no_worker(server: StoreServer, site: Site) -> None:
    """The records are gone, and come back: nobody is ended or started for that."""
    async with control(server, site, decode_workers=2) as made:
        await made.settled()
        before = sorted(site.started)
        for name in site.workers:
            await asyncio.to_thread(site.store.delete, Keys(site.cluster).worker("default", name))
        turns = made.reconciler.turns
        await until(lambda: made.reconciler.turns > turns + 2 and len(made.controller.view.workers()) == 3)
        await made.settled()
        assert (sorted(site.started), site.ended, site.drained) == (before, [], [])


async def test_old_events_are_deleted_and_new_ones_followed(
    server: StoreServer, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinpool.control.events.EVENTS_MAX", 10)
    monkeypatch.setattr("twinpool.control.events.TRIM_BATCH", 5)
    async with control(server, site) as made:
        await made.settled()
        events = made.controller.events
        for number in range(40):
            events.record("WorkerLost", f"number {number}", pool="default", subject="w", warning=True)
        await events.drained()
        await until(lambda: len(events.all()) <= 15 and events.all()[-1].message == "number 39")
        assert all(event.message.startswith("number") for event in events.all(Filter(subject="w")))
        assert events.all(Filter(pool="other")) == []
        assert events.all(Filter(since_seconds=0.0)) == []
        following = events.follow(Filter(subject="x"))
        task = asyncio.ensure_future(anext(following))
        events.record("WorkerReady", "here", pool="default", subject="x")
        assert (await asyncio.wait_for(task, 60)).message == "here"
        await following.aclose()  # type: ignore[attr-defined]
