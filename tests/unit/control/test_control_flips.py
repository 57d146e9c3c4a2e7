# SPDX-License-Identifier: Apache-2.0
"""Flips as operations, against a store and workers of the test's own: what is asked, followed, resumed, refused, given up."""

from __future__ import annotations

from collections.abc import Iterator

import grpc.aio
import pytest
from test_control_operations import World, world

from tests.support.waiting import until
from twinpool import rpc
from twinpool.config import RpcConfig
from twinpool.control import flips as module
from twinpool.errors import TwinpoolError
from twinpool.membership import Registration
from twinpool.store import Keys, Store, StoreServer, start_store
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2, worker_pb2_grpc

FLIP, RUNNING = pb.OPERATION_KIND_FLIP, pb.OPERATION_STATE_RUNNING
SUCCEEDED, FAILED = pb.OPERATION_STATE_SUCCEEDED, pb.OPERATION_STATE_FAILED
PREFILL, DECODE = worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE
DRAINING, COMMITTING = worker_pb2.ROLE_CHANGE_PHASE_DRAINING, worker_pb2.ROLE_CHANGE_PHASE_COMMITTING
COMMITTED, ROLLED_BACK = worker_pb2.ROLE_CHANGE_PHASE_COMMITTED, worker_pb2.ROLE_CHANGE_PHASE_ROLLED_BACK
WAIT_SECONDS = 60.0
STEPS = ["ask", "drain", "commit"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    made = start_store(tmp_path_factory.mktemp("store"), prefer_embedded=True)
    yield made
    made.stop()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A cluster of its own for each test."""
    return f"flip-{abs(hash(request.node.name)) % 10**8}"


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """A registered worker that is as far with its change as the test says."""

    def __init__(
        self,
        store: Store,
        cluster: str,
        name: str,
        incarnation: int = 1,
        role: worker_pb2.Role.ValueType = DECODE,
        state: pb.WorkerState.ValueType = pb.WORKER_STATE_READY,
    ) -> None:
        self.key = worker_pb2.WorkerId(name=name, incarnation=incarnation)
        self.role, self.epoch, self.state = role, 1, state
        self.phase = DRAINING
        self.detail = ""
        self.refuses = ""
        self.asked: list[worker_pb2.ChangeRoleRequest] = []
        self._store, self._cluster = store, cluster
        self._server = rpc.Server(RpcConfig())
        self._registration: Registration | None = None

    async def start(self) -> Worker:
        self._server.add(
            "twinpool.v1.WorkerService", worker_pb2_grpc.add_WorkerServiceServicer_to_server, self
        )
        port = self._server.bind("127.0.0.1")
        await self._server.start()
        record = pb.WorkerRecord(
            worker=self.key,
            pool="default",
            role=self.role,
            state=self.state,
            endpoint=f"127.0.0.1:{port}",
            fingerprint="f",
            model="m",
            num_blocks=8,
            block_tokens=16,
            max_num_seqs=4,
            epoch=self.epoch,
        )
        self._registration = Registration(self._store, self._cluster, record, ttl_seconds=10)
        await self._registration.start()
        return self

    async def ChangeRole(
        self, request: worker_pb2.ChangeRoleRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.ChangeRoleResponse:
        self.asked.append(request)
        if self.refuses:
            raise TwinpoolError(self.refuses, "planted")
        return worker_pb2.ChangeRoleResponse(
            phase=self.phase, role=self.role, epoch=self.epoch, detail=self.detail
        )

    def keep(self) -> None:
        """etcd has the new role: it counts."""
        other = PREFILL if self.role == DECODE else DECODE
        record = pb.RoleRecord(worker=self.key, role=other, epoch=self.epoch + 1)
        key = Keys(self._cluster).role("default", self.key.name)
        self._store.put(key, record.SerializeToString())

    def show(self) -> None:
        """And its record says so."""
        assert self._registration is not None
        self.role = PREFILL if self.role == DECODE else DECODE
        self.epoch += 1
        self._registration.update_state(pb.WORKER_STATE_READY, self.role, self.epoch)

    async def stop(self) -> None:
        if self._registration is not None:
            await self._registration.stop()
        await self._server.stop(0)


class Fleet:
    """Workers of one cluster."""

    def __init__(self, made: World) -> None:
        self.world = made
        self.workers: list[Worker] = []

    async def add(self, name: str, *arguments: object) -> Worker:
        worker = await Worker(self.world.store, self.world.cluster, name, *arguments).start()  # type: ignore[arg-type]
        self.workers.append(worker)
        await until(
            lambda: worker.key in [record.worker for record in self.world.view.workers()], WAIT_SECONDS
        )
        return worker

    async def stop(self) -> None:
        for worker in self.workers:
            await worker.stop()

    async def refused(self, name: str, role: worker_pb2.Role.ValueType, *, force: bool = False) -> str:
        with pytest.raises(TwinpoolError) as caught:
            await self.world.operations.begin(FLIP, name, None, role, force=force)
        return caught.value.reason


async def test_it_is_asked_once_and_followed_to_its_end(server: StoreServer, name: str) -> None:
    async with world(server, name) as made:
        fleet = Fleet(made)
        worker = await fleet.add("w0")
        await fleet.add("w1")
        operation = await made.operations.begin(FLIP, "w0", 7.0, PREFILL)
        assert await made.operations.begin(FLIP, "w0", None, PREFILL) is operation, (
            "asked twice is asked once"
        )
        assert await fleet.refused("w0", DECODE) == "OPERATION_RUNNING"
        worker.detail = "what runs has not ended"
        await until(lambda: len(worker.asked) > 3 and operation.steps[-1].detail, WAIT_SECONDS)
        assert [step.name for step in operation.steps] == STEPS[:2]
        assert operation.steps[-1].detail == worker.detail
        (asked,) = {request.SerializeToString(deterministic=True) for request in worker.asked}
        request = worker_pb2.ChangeRoleRequest.FromString(asked)
        assert (request.worker, request.role, request.epoch) == (worker.key, PREFILL, 1)
        assert request.timeout.seconds == 7
        worker.phase = COMMITTING
        await until(lambda: len(operation.steps) == 3, WAIT_SECONDS)
        worker.keep()
        worker.phase, worker.detail = COMMITTED, ""
        # Not before everybody can see it.
        before = len(worker.asked)
        await until(lambda: len(worker.asked) > before + 3, WAIT_SECONDS)
        assert operation.state == RUNNING
        worker.show()
        assert (await made.ended(operation)).state == SUCCEEDED
        assert [step.name for step in operation.steps] == STEPS
        assert (operation.role, operation.target_role, operation.epoch) == (DECODE, PREFILL, 1)
        assert not operation.HasField("successor")
        assert made.operations.retired == set()
        await until(lambda: made.recorded(operation).state == SUCCEEDED)
        await fleet.stop()


async def test_what_the_worker_gives_up_fails(server: StoreServer, name: str) -> None:
    async with world(server, name) as made:
        fleet = Fleet(made)
        worker = await fleet.add("w0")
        await fleet.add("w1")
        operation = await made.operations.begin(FLIP, "w0", 7.0, PREFILL)
        await until(lambda: len(operation.steps) == 2, WAIT_SECONDS)
        worker.phase, worker.detail = ROLLED_BACK, "after 7 s: planted"
        assert (await made.ended(operation)).state == FAILED
        assert operation.error == "FLIP_FAILED: w0 is a decode worker still, after 7 s: planted"
        await fleet.stop()


@pytest.mark.parametrize("reason", ["STALE_EPOCH", "FLIP_REFUSED", "OPERATION_RUNNING"])
async def test_what_the_worker_refuses_fails(server: StoreServer, name: str, reason: str) -> None:
    async with world(server, name) as made:
        fleet = Fleet(made)
        (await fleet.add("w0")).refuses = reason
        await fleet.add("w1")
        operation = await made.ended(await made.operations.begin(FLIP, "w0", 7.0, PREFILL))
        assert (operation.state, operation.error) == (FAILED, f"{reason}: planted")
        await fleet.stop()


@pytest.mark.parametrize("steps", [[], ["ask"], ["ask", "drain"], ["ask", "drain", "commit"]])
async def test_who_comes_after_goes_on_where_the_last_one_was(
    server: StoreServer, name: str, steps: list[str]
) -> None:
    key = f"{name}-{len(steps)}"
    async with world(server, key) as made:
        fleet = Fleet(made)
        worker = await fleet.add("w0")
        operation = pb.Operation(
            id="w0-left",
            kind=FLIP,
            worker=worker.key,
            pool="default",
            role=DECODE,
            target_role=PREFILL,
            epoch=1,
            state=RUNNING,
        )
        operation.created_at.GetCurrentTime()
        operation.timeout.seconds = 5
        for step in steps:
            entry = operation.steps.add(name=step)
            entry.began_at.GetCurrentTime()
            if step != steps[-1]:
                entry.done_at.GetCurrentTime()
        made.store.put(Keys(key).operation(operation.id), operation.SerializeToString())
        await made.operations.load()
        made.operations.resume()
        made.operations.resume()
        known = made.operations.get("w0-left")
        await until(lambda: worker.asked, WAIT_SECONDS)
        worker.phase = COMMITTED
        worker.keep()
        worker.show()
        assert (await made.ended(known)).state == SUCCEEDED
        assert [step.name for step in known.steps] == STEPS
        assert all(request.epoch == 1 for request in worker.asked)
        await fleet.stop()


@pytest.mark.parametrize("counted", [True, False])
async def test_a_worker_that_ends_in_the_middle(server: StoreServer, name: str, counted: bool) -> None:
    async with world(server, name) as made:
        fleet = Fleet(made)
        worker = await fleet.add("w0")
        await fleet.add("w1")
        operation = await made.operations.begin(FLIP, "w0", 7.0, PREFILL)
        await until(lambda: len(operation.steps) == 2, WAIT_SECONDS)
        if counted:
            worker.keep()
        await worker.stop()
        if counted:
            successor = await fleet.add("w0", 2, PREFILL)
            assert (await made.ended(operation)).state == SUCCEEDED
            assert operation.successor == successor.key
        else:
            await fleet.add("w0", 2, DECODE)
            assert (await made.ended(operation)).state == FAILED
            assert operation.error == "FLIP_FAILED: w0 has ended before it changed; it comes back as decode"
        await fleet.stop()


async def test_one_that_ends_and_does_not_come_back(
    server: StoreServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GONE_SECONDS", 0.5)
    async with world(server, name) as made:
        fleet = Fleet(made)
        worker = await fleet.add("w0")
        await fleet.add("w1")
        operation = await made.operations.begin(FLIP, "w0", 7.0, PREFILL)
        await until(lambda: worker.asked, WAIT_SECONDS)
        await worker.stop()
        assert (await made.ended(operation)).state == FAILED
        assert operation.error.startswith("FLIP_FAILED")
        await fleet.stop()


async def test_one_that_cannot_be_asked_fails_after_its_time(
    server: StoreServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.5)
    async with world(server, name) as made:
        fleet = Fleet(made)
        worker = await fleet.add("w0")
        worker.refuses = "WORKER_HUNG"
        await fleet.add("w1")
        operation = await made.ended(await made.operations.begin(FLIP, "w0", 0.5, PREFILL))
        assert (operation.state, operation.error) == (FAILED, "WORKER_HUNG: planted")
        assert len(worker.asked) > 1, "it is asked again until then"
        await fleet.stop()


async def test_no_role_loses_its_last_worker_unless_it_is_forced(server: StoreServer, name: str) -> None:
    async with world(server, name) as made:
        fleet = Fleet(made)
        await fleet.add("p0", 1, PREFILL)
        await fleet.add("d0")
        starting = await fleet.add("d1", 1, DECODE, pb.WORKER_STATE_STARTING)
        assert await fleet.refused("d0", PREFILL) == "LAST_OF_ROLE"
        assert await fleet.refused("d1", PREFILL) == "FLIP_REFUSED"
        assert await fleet.refused("d0", DECODE, force=True) == "FLIP_REFUSED"
        assert await fleet.refused("d0", worker_pb2.ROLE_UNSPECIFIED) == "INVALID_ARGUMENT"
        assert await fleet.refused("nobody", PREFILL) == "WORKER_NOT_FOUND"
        assert starting._registration is not None
        starting._registration.update_state(pb.WORKER_STATE_READY)
        await until(
            lambda: all(record.state == pb.WORKER_STATE_READY for record in made.view.workers()), WAIT_SECONDS
        )
        # One of them may go; then the other one is the last, although it is still there.
        operation = await made.operations.begin(FLIP, "d0", None, PREFILL)
        assert await fleet.refused("d1", PREFILL) == "LAST_OF_ROLE"
        forced = await made.operations.begin(FLIP, "d1", None, PREFILL, force=True)
        assert (operation.state, forced.state) == (RUNNING, RUNNING)
        await fleet.stop()


async def test_one_that_was_drained_for_good_has_no_last_role(server: StoreServer, name: str) -> None:
    async with world(server, name) as made:
        worker = await Worker(made.store, name, "w0").start()
        await until(lambda: made.view.workers(), WAIT_SECONDS)
        worker.keep()
        key = Keys(name).role("default", "w0")
        assert made.store.get(key) is not None
        operation = await made.operations.begin(pb.OPERATION_KIND_DRAIN, "w0", 0.0)
        await worker.stop()
        assert (await made.ended(operation)).state == SUCCEEDED
        assert made.store.get(key) is None
