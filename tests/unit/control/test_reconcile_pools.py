# SPDX-License-Identifier: Apache-2.0
"""A control process with several pools, over a real store, with workers of the test's own: what one waits for holds up no other."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.controls import TTL_SECONDS, Control
from tests.support.thread_pools import Site
from tests.support.waiting import until
from twinpool.config import TwinpoolConfig
from twinpool.control.reconcile.spec import desired
from twinpool.errors import TwinpoolError
from twinpool.store import Keys, StoreServer, connect_store
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2

READY = pb.REPLICA_PHASE_READY
FURTHER: dict[str, object] = {
    "long": {"decode_workers": 2, "decode_most": 3, "prompt_tokens_least": 100},
    "chat": {"model": {"path": "/models/chat"}},
}
ALL = {
    "default": ["default-decode-0", "default-prefill-0"],
    "long": ["long-decode-0", "long-decode-1", "long-prefill-0"],
    "chat": ["chat-decode-0", "chat-prefill-0"],
}


@pytest.fixture
async def site(server: StoreServer, request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    name = f"pools-{abs(hash(request.node.name)) % 10**8}"
    config = TwinpoolConfig.model_validate({"cluster": {"etcd_endpoints": [server.endpoint]}})
    store = connect_store(config.cluster)
    made = Site(store, name, TTL_SECONDS)
    yield made
    await made.close()
    store.close()


@asynccontextmanager
async def control(server: StoreServer, site: Site, **pools: object) -> AsyncIterator[Control]:
    made = await Control(server, site, **({"further": FURTHER} | pools)).start()
    try:
        yield made
    finally:
        await made.stop()


async def ended(operation: pb.Operation) -> pb.Operation:
    await until(lambda: operation.state != pb.OPERATION_STATE_RUNNING)
    assert operation.state == pb.OPERATION_STATE_SUCCEEDED, operation.error
    return operation


def run(site: Site, pool: str) -> dict[str, int]:
    return {name: each.key.incarnation for name, each in site.workers.items() if each.pool == pool}


def configured(made: Control) -> list[str]:
    return [event.pool for event in made.controller.events.all() if event.reason == "PoolConfigured"]


async def test_each_pool_has_its_record_and_its_workers(server: StoreServer, site: Site) -> None:
    async with control(server, site) as made:
        await made.settled()
        assert {pool: sorted(run(site, pool)) for pool in ALL} == ALL
        assert made.controller.wanted() == {"prefill": 3, "decode": 4}
        assert made.controller.wanted(["long"]) == {"prefill": 1, "decode": 2}
        for pool in ALL:
            item = site.store.get(Keys(site.cluster).pool(pool))
            assert item is not None
            assert pb.PoolSpec.FromString(item.value).pool == pool
            assert set(made.status(pool).values()) == {READY}
        await until(lambda: sorted(configured(made)) == sorted(ALL))


async def test_a_scale_is_of_one_pool_within_its_own_bounds(server: StoreServer, site: Site) -> None:
    async with control(server, site) as made:
        await made.settled()
        others = {pool: run(site, pool) for pool in ("default", "chat")}
        await ended(await made.scale(2, 3, "long"))
        assert len(run(site, "long")) == 5
        with pytest.raises(TwinpoolError, match=r"pools\.further\.long\.decode_most") as caught:
            await made.scale(None, 4, "long")
        assert caught.value.reason == "POOL_BOUNDS"
        await ended(await made.scale(1, 1, "long"))
        assert {name[:4] for name in site.drained} == {"long"}
        assert {pool: run(site, pool) for pool in others} == others
        with pytest.raises(TwinpoolError) as caught:
            await made.scale(1, 1, "nobody")
        assert caught.value.reason == "POOL_NOT_FOUND"


async def test_two_pools_scale_at_the_same_time(server: StoreServer, site: Site) -> None:
    async with control(server, site) as made:
        await made.settled()
        one, other = await made.scale(2, None, "chat"), await made.scale(2, None, "long")
        await ended(one)
        await ended(other)
        assert desired(made.controller.specs.get("chat")) == {"prefill": 2, "decode": 1}
        assert desired(made.controller.specs.get("long")) == {"prefill": 2, "decode": 2}


async def test_what_one_pool_waits_for_holds_up_no_other(server: StoreServer, site: Site) -> None:
    """One has a worker that cannot start, and gets no place for another: the others are made, scaled and healed."""
    site.broken = {"chat-prefill-0"}
    async with control(server, site, pending_timeout_seconds=3) as made:
        calm = [made.controller.reconcilers[pool] for pool in ("default", "long")]
        await until(lambda: all(each.turns and each.settled() for each in calm))
        await made.tells("WorkerCrashLooping")
        with pytest.raises(TwinpoolError) as caught:
            made.controller.check_start()
        assert caught.value.reason == "CHECKPOINT_INVALID"
        site.places = len(site.workers)
        stuck = await made.scale(None, 2, "chat")
        await until(lambda: site.waiting)
        await ended(await made.scale(None, 1, "long"))
        await until(lambda: stuck.state == pb.OPERATION_STATE_FAILED)
        assert stuck.error.partition(":")[0] in ("REPLICA_PENDING", "REPLICA_CRASHING")
        assert all(each.hindrance() is None for each in calm)
        victim = site.workers.pop("default-decode-0")
        before = made.controller.reconcilers["default"].turns
        await victim.stop()
        await made.tells("WorkerLost")
        assert made.controller.reconcilers["default"].status().waiting == ""
        await until(lambda: made.controller.reconcilers["default"].turns > before)
        warned = {
            event.pool for event in made.controller.events.all() if event.reason == "WorkerCrashLooping"
        }
        assert warned == {"chat"}


async def test_operations_find_the_pool_of_their_worker(server: StoreServer, site: Site) -> None:
    async with control(server, site) as made:
        await made.settled()
        before = site.workers["long-decode-1"].key.incarnation
        kind = pb.OPERATION_KIND_RESTART
        operation = await ended(await made.controller.operations.begin(kind, "long-decode-1", 5.0))
        assert operation.pool == "long"
        assert site.workers["long-decode-1"].key.incarnation != before
        assert site.workers["long-decode-1"].pool == "long"
        await ended(await made.controller.operations.begin(pb.OPERATION_KIND_DRAIN, "chat-decode-0", 5.0))
        assert "chat-decode-0" not in site.workers
        assert made.status("chat")["chat-decode-0"] == pb.REPLICA_PHASE_HELD
        assert await made.controller.cordons.set(
            "long-prefill-0", True, made.controller.view.workers("long")[-1]
        )
        await until(lambda: site.workers["long-prefill-0"].told == [True])


async def test_a_flip_is_counted_in_the_pool_of_its_worker(server: StoreServer, site: Site) -> None:
    async with control(server, site) as made:
        await made.settled()
        operation = pb.Operation(
            id="f",
            kind=pb.OPERATION_KIND_FLIP,
            pool="long",
            worker=worker_pb2.WorkerId(name="long-decode-1"),
            role=worker_pb2.ROLE_DECODE,
            target_role=worker_pb2.ROLE_PREFILL,
        )
        made.controller.operations._prepare[pb.OPERATION_KIND_FLIP](operation)
        assert (operation.prefill, operation.decode) == (2, 1)


async def test_the_next_control_process_finds_each_pool_as_it_was(server: StoreServer, site: Site) -> None:
    async with control(server, site) as made:
        await made.settled()
        await ended(await made.scale(None, 3, "long"))
    before = {pool: run(site, pool) for pool in ALL}
    async with control(server, site) as made:
        await made.settled()
        assert {pool: run(site, pool) for pool in ALL} == before
        assert desired(made.controller.specs.get("long")) == {"prefill": 1, "decode": 3}


async def test_a_default_pool_that_wants_no_worker_is_none(server: StoreServer, site: Site) -> None:
    async with control(server, site, prefill_workers=0, decode_workers=0) as made:
        await made.settled()
        assert sorted(made.controller.reconcilers) == ["chat", "long"]
        assert run(site, "default") == {}
        assert [spec.pool for spec in made.controller.specs.all()] == ["chat", "long"]
