# SPDX-License-Identifier: Apache-2.0
"""A pool's record follows workers that change their role, over a store that may be away."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from twinpool.config import TwinpoolConfig
from twinpool.control.flip_counts import FlipCounts, scaled
from twinpool.control.operations import Operations
from twinpool.control.reconcile.spec import PoolSpecs, desired
from twinpool.errors import TwinpoolError
from twinpool.store import StoreServer, connect_store
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2

Step = Callable[[pb.Operation], Awaitable[None]]


class Surrounded:
    """Operations as far as they are surrounded, and those under way."""

    def __init__(self) -> None:
        self.under_way: list[pb.Operation] = []
        self.first: Mapping[str, Step] = {}
        self.prepare: Callable[[pb.Operation], None] = lambda _: None
        self.undo: Step | None = None

    def surround(self, kind: int, first: Mapping[str, Step], prepare: Any, undo: Step) -> None:
        assert kind == pb.OPERATION_KIND_FLIP
        self.first, self.prepare, self.undo = first, prepare, undo

    def running(self, kind: int | None = None) -> list[pb.Operation]:
        return [each for each in self.under_way if kind in (None, each.kind)]

    def flip(self, worker: str, role: int, to: int, pool: str = "default") -> pb.Operation:
        """A new one, completed; raises what refuses it."""
        operation = pb.Operation(
            id=f"{worker}-{len(self.under_way)}",
            kind=pb.OPERATION_KIND_FLIP,
            pool=pool,
            worker=worker_pb2.WorkerId(name=worker),
            role=cast(Any, role),
            target_role=cast(Any, to),
        )
        self.prepare(operation)
        self.under_way.append(operation)
        return operation

    async def write(self, operation: pb.Operation) -> None:
        step = operation.steps.add(name="write")
        await self.first["write"](operation)
        step.done_at.GetCurrentTime()


P, D = worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE


@asynccontextmanager
async def world(
    server: StoreServer, name: str, **pools: object
) -> AsyncIterator[tuple[Surrounded, PoolSpecs]]:
    config = TwinpoolConfig.model_validate(
        {
            "cluster": {"name": name, "etcd_endpoints": [server.endpoint]},
            "pools": {"prefill_workers": 2, "decode_workers": 2} | pools,
        }
    )
    store = connect_store(config.cluster)
    try:
        specs, made = PoolSpecs(store, config), Surrounded()
        await specs.load()
        FlipCounts(cast(Operations, made), specs, ["default"])
        yield made, specs
    finally:
        store.close()


async def test_the_numbers_follow_and_come_back_if_it_fails(server: StoreServer) -> None:
    async with world(server, "counts-follow") as (made, specs):
        one = made.flip("default-decode-0", D, P)
        assert (one.prefill, one.decode) == (3, 1)
        assert desired(specs.get("default")) == {"prefill": 2, "decode": 2}, (
            "nothing is written before it is recorded"
        )
        await made.write(one)
        await made.first["write"](one)  # by the next control process
        assert desired(specs.get("default")) == {"prefill": 3, "decode": 1}
        assert made.undo is not None
        await made.undo(one)
        await made.undo(one)
        assert desired(specs.get("default")) == {"prefill": 2, "decode": 2}


async def test_two_at_once_add_up(server: StoreServer) -> None:
    async with world(server, "counts-two", decode_workers=3) as (made, specs):
        one = made.flip("default-decode-0", D, P)
        # The first one's numbers are not written yet.
        two = made.flip("default-decode-1", D, P)
        assert (two.prefill, two.decode) == (4, 1)
        await made.write(one)
        await made.write(two)
        assert desired(specs.get("default")) == {"prefill": 4, "decode": 1}
        # The first one fails: its part is taken back, and the other one's stays.
        assert made.undo is not None
        await made.undo(one)
        await made.undo(one)
        assert desired(specs.get("default")) == {"prefill": 3, "decode": 2}
        assert list(specs.get("default").counted) == [two.id]


async def test_one_that_waits_for_etcd_does_not_write_over_a_later_scale(server: StoreServer) -> None:
    """Whether the flip has written before the scale, or comes to it only afterwards: the operator's numbers are those of the end."""
    async with world(server, "counts-scaled", decode_workers=3) as (made, specs):
        early, late = made.flip("default-decode-0", D, P), made.flip("default-decode-1", D, P)
        await made.write(early)
        await specs.change("default", lambda record: scaled(record, 2, 5, made.under_way))
        record = specs.get("default")
        assert (desired(record), list(record.counted)) == ({"prefill": 2, "decode": 5}, [])
        assert list(record.settled) == [early.id, late.id]
        await made.write(late)
        await made.write(early)
        assert made.undo is not None
        await made.undo(early)
        await made.undo(late)
        assert specs.get("default") == record
        # By the next control process, too.
        await specs.refresh("default")
        await made.first["write"](late)
        assert specs.get("default") == record
        # Ended ones are forgotten with the next change.
        del made.under_way[:]
        await made.write(made.flip("default-decode-2", D, P))
        assert (desired(specs.get("default")), list(specs.get("default").settled)) == (
            {"prefill": 3, "decode": 4},
            [],
        )


async def test_bounds_and_a_scale_under_way_refuse_it(server: StoreServer) -> None:
    async with world(server, "counts-refused", decode_least=2) as (made, _):
        with pytest.raises(TwinpoolError) as caught:
            made.flip("default-decode-0", D, P)
        assert caught.value.reason == "POOL_BOUNDS"
        scale = pb.Operation(id="scale-1", kind=pb.OPERATION_KIND_SCALE, pool="default")
        made.under_way.append(scale)
        with pytest.raises(TwinpoolError) as caught:
            made.flip("default-prefill-0", P, D)
        assert caught.value.reason == "OPERATION_RUNNING"


async def test_workers_of_other_pools_are_none_of_its_business(server: StoreServer) -> None:
    async with world(server, "counts-others") as (made, specs):
        other = made.flip("other-decode-0", D, P, pool="other")
        await made.write(other)
        assert made.undo is not None
        await made.undo(other)
        assert (other.prefill, other.decode) == (0, 0)
        assert desired(specs.get("default")) == {"prefill": 2, "decode": 2}
