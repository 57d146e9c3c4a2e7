# SPDX-License-Identifier: Apache-2.0
"""Operations against a store, with workers and pools of the test's own: what is recorded, resumed, refused, given up."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import pytest

from tests.support.waiting import until
from twinpool import rpc
from twinpool.config import RpcConfig, TwinpoolConfig
from twinpool.control import leaves as module
from twinpool.control.operations import Operations
from twinpool.control.view import ClusterView
from twinpool.errors import TwinpoolError
from twinpool.membership import Registration
from twinpool.store import Keys, Store, StoreServer, connect_store, start_store
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2, worker_pb2_grpc

DRAIN, RESTART = pb.OPERATION_KIND_DRAIN, pb.OPERATION_KIND_RESTART
WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    made = start_store(tmp_path_factory.mktemp("store"), prefer_embedded=True)
    yield made
    made.stop()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A cluster of its own for each test."""
    return f"ops-{abs(hash(request.node.name)) % 10**8}"


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """A registered worker that leaves when it is told to, unless it is ``stubborn``."""

    def __init__(self, store: Store, cluster: str, incarnation: int, *, stubborn: bool = False) -> None:
        self.key = worker_pb2.WorkerId(name="w0", incarnation=incarnation)
        self.asked: list[worker_pb2.DrainRequest] = []
        self._store, self._cluster = store, cluster
        self._stubborn = stubborn
        self._server = rpc.Server(RpcConfig())
        self._registration: Registration | None = None

    async def start(self) -> "Worker":
        self._server.add(
            "twinpool.v1.WorkerService", worker_pb2_grpc.add_WorkerServiceServicer_to_server, self
        )
        port = self._server.bind("127.0.0.1")
        await self._server.start()
        record = pb.WorkerRecord(
            worker=self.key,
            pool="default",
            role=worker_pb2.ROLE_DECODE,
            state=pb.WORKER_STATE_READY,
            endpoint=f"127.0.0.1:{port}",
            fingerprint="f",
            model="m",
            num_blocks=8,
            block_tokens=16,
            kv_bytes_per_token=4,
            max_num_seqs=4,
            max_context_tokens=64,
            vocab_size=100,
        )
        self._registration = Registration(self._store, self._cluster, record, ttl_seconds=10)
        await self._registration.start()
        return self

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> worker_pb2.DrainResponse:
        self.asked.append(request)
        if not self._stubborn and self._registration is not None:
            await self._registration.stop()
        return worker_pb2.DrainResponse()

    async def stop(self) -> None:
        if self._registration is not None:
            await self._registration.stop()
        await self._server.stop(0)


@dataclass
class FakePools:
    """Says that it runs ``w0`` if ``managed``; starts what ``successor`` makes."""

    managed: bool = False
    done: list[str] = field(default_factory=list)
    broken: bool = False

    def manages(self, name: str) -> bool:
        return self.managed

    async def retire(self, name: str) -> None:
        self.done.append(f"retire {name}")

    async def add(self, role: str, name: str) -> None:
        self.done.append(f"add {role} {name}")

    def check_one(self, name: str) -> None:
        if self.broken:
            raise TwinpoolError("CHECKPOINT_INVALID", "planted")


@dataclass
class World:
    store: Store
    cluster: str
    view: ClusterView
    pools: FakePools
    operations: Operations

    async def ended(self, operation: pb.Operation) -> pb.Operation:
        await until(lambda: operation.state != pb.OPERATION_STATE_RUNNING, WAIT_SECONDS)
        return operation

    def recorded(self, operation: pb.Operation) -> pb.Operation:
        item = self.store.get(Keys(self.cluster).operation(operation.id))
        assert item is not None
        return pb.Operation.FromString(item.value)


@asynccontextmanager
async def world(server: StoreServer, name: str, pools: FakePools | None = None) -> AsyncIterator[World]:
    """A control process, as far as operations go."""
    config = TwinpoolConfig.model_validate(
        {
            "cluster": {"name": name, "etcd_endpoints": [server.endpoint]},
            "pools": {"start_timeout_seconds": 30},
        }
    )
    store = connect_store(config.cluster)
    view = ClusterView(store, config)
    await view.start()
    made = pools or FakePools()

    def connect(endpoint: str) -> grpc.aio.Channel:
        return rpc.channel(endpoint, config.rpc)

    operations = Operations(store, config, view, made, connect)
    await operations.load()
    try:
        yield World(store, name, view, made, operations)
    finally:
        await operations.stop()
        await view.stop()
        store.close()


async def sees(world: World, worker: Worker) -> None:
    await until(lambda: worker.key in [record.worker for record in world.view.workers()], WAIT_SECONDS)


async def test_a_drain_ends_a_worker_for_good(server: StoreServer, name: str) -> None:
    async with world(server, name, FakePools(managed=True)) as made:
        worker = await Worker(made.store, name, 1).start()
        await sees(made, worker)
        operation = await made.operations.begin(DRAIN, "w0", 7.0)
        assert await made.operations.begin(DRAIN, "w0", None) is operation, "asked twice is asked once"
        with pytest.raises(TwinpoolError) as caught:
            await made.operations.begin(RESTART, "w0", None)
        assert caught.value.reason == "OPERATION_RUNNING"
        await made.ended(operation)
        assert operation.state == pb.OPERATION_STATE_SUCCEEDED
        assert [step.name for step in operation.steps] == ["ask", "leave", "end"]
        await until(lambda: made.recorded(operation).state == pb.OPERATION_STATE_SUCCEEDED)
        assert made.pools.done == ["retire w0"]
        (asked,) = worker.asked
        assert (asked.worker, asked.timeout.seconds) == (worker.key, 7)
        assert made.operations.retired == {"w0"}
        await worker.stop()
    async with world(server, name) as later:
        assert later.operations.retired == {"w0"}, "who comes after does not start it"


async def test_a_restart_waits_for_another_incarnation(server: StoreServer, name: str) -> None:
    async with world(server, name, FakePools(managed=True)) as made:
        worker = await Worker(made.store, name, 1).start()
        await sees(made, worker)
        operation = await made.operations.begin(RESTART, "w0", None)
        await until(lambda: len(operation.steps) == 5, WAIT_SECONDS)
        assert operation.steps[-1].name == "ready"
        assert made.pools.done == ["retire w0", "add decode w0"]
        successor = await Worker(made.store, name, 2).start()
        assert (await made.ended(operation)).state == pb.OPERATION_STATE_SUCCEEDED
        assert operation.successor == successor.key
        assert made.operations.retired == set()
        await successor.stop()
        await worker.stop()


async def test_what_was_drained_for_good_comes_back_with_a_restart(server: StoreServer, name: str) -> None:
    async with world(server, name, FakePools(managed=True)) as made:
        worker = await Worker(made.store, name, 1).start()
        await sees(made, worker)
        drained = await made.ended(await made.operations.begin(DRAIN, "w0", None))
        await until(lambda: not made.view.workers(), WAIT_SECONDS)
        operation = await made.operations.begin(RESTART, "w0", None)
        successor = await Worker(made.store, name, 2).start()
        assert (await made.ended(operation)).state == pb.OPERATION_STATE_SUCCEEDED
        assert made.operations.retired == set()
        # What was before is history.
        assert [found.id for found in made.operations.all()] == [operation.id, drained.id]
        assert made.recorded(drained).state == pb.OPERATION_STATE_SUCCEEDED
        await successor.stop()
        await worker.stop()


@pytest.mark.parametrize("steps", [[], ["ask"], ["ask", "leave"], ["ask", "leave", "end"]])
async def test_who_comes_after_goes_on_where_the_last_one_was(
    server: StoreServer, name: str, steps: list[str]
) -> None:
    """Whatever the last control process had recorded when it ended, the result is the same."""
    key = f"{name}-{len(steps)}"
    async with world(server, key, FakePools(managed=True)) as made:
        worker = await Worker(made.store, key, 1).start()
        await sees(made, worker)
        operation = pb.Operation(
            id="w0-left",
            kind=RESTART,
            worker=worker.key,
            pool="default",
            role=worker_pb2.ROLE_DECODE,
            state=pb.OPERATION_STATE_RUNNING,
        )
        operation.created_at.GetCurrentTime()
        operation.timeout.seconds = 5
        for step in steps:
            entry = operation.steps.add(name=step)
            entry.began_at.GetCurrentTime()
            if step != steps[-1]:
                entry.done_at.GetCurrentTime()
        if "leave" in steps:
            await worker.stop()
        made.store.put(Keys(key).operation(operation.id), operation.SerializeToString())
        await made.operations.load()
        made.operations.resume()
        made.operations.resume()
        known = made.operations.get("w0-left")
        await until(lambda: len(known.steps) == 5, WAIT_SECONDS)
        successor = await Worker(made.store, key, 2).start()
        assert (await made.ended(known)).state == pb.OPERATION_STATE_SUCCEEDED
        assert made.pools.done == ["retire w0", "add decode w0"]
        await successor.stop()
        await worker.stop()


async def test_a_control_process_that_ends_leaves_an_operation_running(
    server: StoreServer, name: str
) -> None:
    async with world(server, name) as made:
        worker = await Worker(made.store, name, 1, stubborn=True).start()
        await sees(made, worker)
        operation = await made.operations.begin(DRAIN, "w0", None)
        await until(lambda: worker.asked, WAIT_SECONDS)
    async with world(server, name) as later:
        found = later.recorded(operation)
        assert found.state == pb.OPERATION_STATE_RUNNING
        assert not found.error
        await worker.stop()


async def test_a_failed_operation_ends_though_it_cannot_be_taken_back(server: StoreServer, name: str) -> None:
    async def refuse(_: pb.Operation) -> None:
        raise TwinpoolError("POOL_BOUNDS", "no")

    async with world(server, name, FakePools()) as made:
        worker = await Worker(made.store, name, 1).start()
        await sees(made, worker)
        made.operations.surround(DRAIN, {"refuse": refuse}, prepare=lambda _: None, undo=refuse)
        begun = await made.operations.begin(DRAIN, "w0", None)
        await until(lambda: begun.state == pb.OPERATION_STATE_FAILED and not made.operations._tasks)
        assert begun.error == "POOL_BOUNDS: no"
        await worker.stop()


async def test_who_does_not_leave_in_time_is_ended_or_the_operation_fails(
    server: StoreServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAVE_SECONDS", 0.5)
    for managed, state in ((True, pb.OPERATION_STATE_SUCCEEDED), (False, pb.OPERATION_STATE_FAILED)):
        key = f"{name}-{managed:d}"
        async with world(server, key, FakePools(managed=managed)) as made:
            worker = await Worker(made.store, key, 1, stubborn=True).start()
            await sees(made, worker)
            operation = await made.ended(await made.operations.begin(DRAIN, "w0", 0.0))
            assert operation.state == state
            assert operation.error.startswith("DEADLINE_EXCEEDED") is not managed
            assert (made.operations.retired == {"w0"}) is managed
            await worker.stop()


async def test_a_worker_that_cannot_start_fails_its_restart(server: StoreServer, name: str) -> None:
    async with world(server, name, FakePools(managed=True, broken=True)) as made:
        worker = await Worker(made.store, name, 1).start()
        await sees(made, worker)
        operation = await made.ended(await made.operations.begin(RESTART, "w0", None))
        assert operation.state == pb.OPERATION_STATE_FAILED
        assert operation.error == "CHECKPOINT_INVALID: planted"
        await worker.stop()


async def test_unknown_names_are_refused_and_damaged_records_left_out(
    server: StoreServer, name: str, tmp_path: Path
) -> None:
    async with world(server, name) as made:
        for kind in (DRAIN, RESTART):
            with pytest.raises(TwinpoolError) as caught:
                await made.operations.begin(kind, "nobody", None)
            assert caught.value.reason == "WORKER_NOT_FOUND"
        with pytest.raises(TwinpoolError) as caught:
            made.operations.get("nothing")
        assert caught.value.reason == "OPERATION_NOT_FOUND"
        made.store.put(Keys(name).operation("damaged"), b"\xff\xff\xff")
        made.store.put(Keys(name).operation("foreign"), pb.Operation(id="other").SerializeToString())
        await made.operations.load()
        assert made.operations.all() == []
        await asyncio.sleep(0)
