# SPDX-License-Identifier: Apache-2.0
"""What is kept of operations, and what an operation is while it is taken back or could not be recorded."""

import asyncio

import pytest
from test_control_operations import DRAIN, WAIT_SECONDS, FakePools, Worker, sees, world

from tests.support.waiting import until
from twinpool.control import operations as operations_module
from twinpool.errors import TwinpoolError
from twinpool.store import Keys, StoreServer
from twinpool.v1 import control_pb2 as pb


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A cluster of its own for each test."""
    return f"kept-{abs(hash(request.node.name)) % 10**8}"


async def test_the_newest_operations_are_kept_and_what_is_needed_yet(
    server: StoreServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations_module, "KEPT", 3)
    async with world(server, name, FakePools(managed=True)) as made:

        async def do(operation: pb.Operation) -> None:
            if operation.reason == "stay":
                await asyncio.Event().wait()

        made.operations.register(pb.OPERATION_KIND_SCALE, {"do": do})

        async def begun(number: int, reason: str = "", parent: str = "") -> pb.Operation:
            operation = pb.Operation(
                id=f"o{number}",
                kind=pb.OPERATION_KIND_SCALE,
                state=pb.OPERATION_STATE_RUNNING,
                pool="default",
            )
            operation.reason, operation.parent = reason, parent
            operation.created_at.GetCurrentTime()
            return await made.operations.submit(operation)

        worker = await Worker(made.store, name, 1).start()
        await sees(made, worker)
        drained = await made.ended(await made.operations.begin(DRAIN, "w0", None))
        parent = await begun(0, reason="stay")
        child = await made.ended(await begun(1, parent=parent.id))
        for number in range(2, 8):
            ended = await made.ended(await begun(number))
            assert ended.ended_at.ToNanoseconds() >= ended.created_at.ToNanoseconds()
        # Of those that have ended three, when the last one began; beside them what is under way, and its parts, and who keeps a
        # place empty.
        kept = ["o7", "o6", "o5", "o4", child.id, parent.id, drained.id]
        await until(lambda: [op.id for op in made.operations.all()] == kept, WAIT_SECONDS)
        found = made.store.list_prefix(Keys(name).operations).items.values()
        assert {pb.Operation.FromString(item.value).id for item in found} == set(kept)
        assert made.operations.retired == {"w0"}
        # A place that is filled again makes the drain one of many.
        await made.operations.release("default", "o7")
        assert made.operations.retired == set()
        assert made.recorded(drained).released == "o7"
        await begun(8)
        await until(lambda: made.store.get(Keys(name).operation(drained.id)) is None, WAIT_SECONDS)
        await worker.stop()


async def test_a_failed_operation_is_under_way_until_it_is_taken_back(server: StoreServer, name: str) -> None:
    """Who looks meanwhile, as the reconciler does, must not mend what it mends itself."""
    states: list[int] = []

    async def refuse(_: pb.Operation) -> None:
        raise TwinpoolError("FLIP_FAILED", "planted")

    async def undo(operation: pb.Operation) -> None:
        states.append(operation.state)

    async with world(server, name, FakePools()) as made:
        worker = await Worker(made.store, name, 1).start()
        await sees(made, worker)
        made.operations.surround(DRAIN, {"refuse": refuse}, prepare=lambda _: None, undo=undo)
        ended = await made.ended(await made.operations.begin(DRAIN, "w0", None))
        assert (states, ended.state) == ([pb.OPERATION_STATE_RUNNING], pb.OPERATION_STATE_FAILED)
        await worker.stop()


async def test_one_that_cannot_be_recorded_is_none(
    server: StoreServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(server, name) as made:
        put = made.store.put

        def unanswered(key: str, value: bytes) -> None:
            put(key, value)
            raise TwinpoolError("STORE_UNAVAILABLE", "planted")

        monkeypatch.setattr(made.store, "put", unanswered)
        with pytest.raises(TwinpoolError, match="planted"):
            await made.operations.submit(pb.Operation(id="o", state=pb.OPERATION_STATE_RUNNING))
        assert made.operations.all() == []
        # Written though nobody said so: it is deleted, and no leader to come goes on with it.
        await until(lambda: not made.operations._tasks)
        assert made.store.get(Keys(name).operation("o")) is None
