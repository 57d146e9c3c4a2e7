# SPDX-License-Identifier: Apache-2.0
"""A worker in one process is told to change its role, by the call that operators' tools make."""

from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest
from test_worker_host import _config, _health, _threads
from worker_pair import random_prompt

from tests.support.fleet import available_port
from tests.support.quiescence import assert_quiescent, inspect
from tests.support.waiting import until, until_told
from tests.support.worker_client import AttemptFailedError, Request, RouterSession, generate, next_message
from twinpool import rpc
from twinpool.config import RpcConfig
from twinpool.engine.tiny import write_tiny
from twinpool.errors import TwinpoolError, from_rpc_error
from twinpool.ids import WorkerKey
from twinpool.store import Keys, Store, StoreServer, connect_store, start_store
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1 import worker_pb2_grpc
from twinpool.v1.control_pb2 import (
    WORKER_STATE_FLIPPING,
    WORKER_STATE_READY,
    RoleRecord,
    WorkerRecord,
)
from twinpool.worker.host import WorkerHost
from twinpool.worker.role_book import RoleBook

PREFILL, DECODE = pb.ROLE_PREFILL, pb.ROLE_DECODE
COMMITTED, ROLLED_BACK = pb.ROLE_CHANGE_PHASE_COMMITTED, pb.ROLE_CHANGE_PHASE_ROLLED_BACK
SERVING = 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"), "llama", layers=2, hidden=32, vocab=300)


@pytest.fixture(autouse=True)
def no_threads() -> Iterator[None]:
    """No worker leaves one behind."""
    yield
    assert _threads() == set()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    made = start_store(tmp_path_factory.mktemp("store"), prefer_embedded=True)
    yield made
    made.stop()


class Flipped:
    """A started worker; ``name`` is its own in each test, since the role is kept under it."""

    def __init__(self, host: WorkerHost, store: Store, name: str) -> None:
        self.host, self.store, self.name = host, store, name

    @property
    def id(self) -> pb.WorkerId:
        return pb.WorkerId(name=self.name, incarnation=self.host.key.incarnation)

    def record(self) -> WorkerRecord:
        item = self.store.get(Keys("unit").worker("default", self.name))
        return WorkerRecord() if item is None else WorkerRecord.FromString(item.value)

    def kept(self) -> RoleRecord:
        item = self.store.get(Keys("unit").role("default", self.name))
        return RoleRecord() if item is None else RoleRecord.FromString(item.value)

    async def ask(
        self, role: pb.Role.ValueType, epoch: int, seconds: float = 60.0, worker: pb.WorkerId | None = None
    ) -> pb.ChangeRoleResponse:
        """Raises TwinpoolError."""
        request = pb.ChangeRoleRequest(worker=worker or self.id, role=role, epoch=epoch)
        request.timeout.FromNanoseconds(int(seconds * 1e9))
        async with rpc.channel(self.host.endpoint, RpcConfig()) as channel:
            try:
                return await worker_pb2_grpc.WorkerServiceStub(channel).ChangeRole(request, timeout=60)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from None

    async def refused(self, role: pb.Role.ValueType, epoch: int, worker: pb.WorkerId | None = None) -> str:
        with pytest.raises(TwinpoolError) as caught:
            await self.ask(role, epoch, worker=worker)
        return caught.value.reason

    async def ends(self, role: pb.Role.ValueType, epoch: int, seconds: float = 60.0) -> pb.ChangeRoleResponse:
        """Asks until it is over."""
        answer = pb.ChangeRoleResponse()

        async def over() -> bool:
            answer.CopyFrom(await self.ask(role, epoch, seconds))
            return answer.phase in (COMMITTED, ROLLED_BACK)

        await until_told(over)
        return answer

    async def serves(self) -> bool:
        """Whether it says that it takes work."""
        return await _health(self.host.endpoint) == SERVING

    async def role(self) -> pb.Role.ValueType:
        return (await inspect(self.host.endpoint)).role


@asynccontextmanager
async def worker(
    model: Path, endpoint: str, name: str, role: str, **sections: dict[str, object]
) -> AsyncIterator[Flipped]:
    config = _config(model, endpoint, **({"worker": {"name": name}} | sections))
    host = WorkerHost(config, role)
    await host.start()
    store = connect_store(config.cluster)
    try:
        yield Flipped(host, store, name)
    finally:
        store.close()
        await host.stop(0.1)


@asynccontextmanager
async def offering(made: Flipped) -> AsyncIterator[RouterSession]:
    """The worker has computed a prompt that nobody reads: it holds the attempt for its lease."""
    session = RouterSession(made.record())
    await session.open()
    request = Request(random_prompt(40), "r", "unit", max_tokens=2)
    queue = session.attempt("r")
    session.send(request.prefill(WorkerRecord(worker=pb.WorkerId(name="d0", incarnation=3)), 0))
    assert (await next_message(queue, "prefill")).WhichOneof("message") == "prefill_done"
    yield session
    await session.close()


async def test_it_changes_to_and_fro_and_stays_who_it_is(model: Path, server: StoreServer) -> None:
    async with worker(model, server.endpoint, "w-fro", "decode") as made:
        await until(lambda: made.record().state == WORKER_STATE_READY)
        before = made.record()
        assert (before.role, before.epoch) == (DECODE, 1)
        for epoch, role, text in ((1, PREFILL, "prefill"), (2, DECODE, "decode"), (3, PREFILL, "prefill")):
            answer = await made.ends(role, epoch)
            assert (answer.phase, answer.role, answer.epoch) == (COMMITTED, role, epoch + 1)
            # Whoever asks again hears the same, and nothing begins.
            assert await made.ask(role, epoch) == answer
            await until(lambda epoch=epoch: made.record().epoch == epoch + 1)
            wanted = WorkerRecord.FromString(before.SerializeToString())
            wanted.role, wanted.epoch = role, epoch + 1
            assert made.record() == wanted, "all else is as it was"
            assert made.kept() == RoleRecord(worker=made.id, role=role, epoch=epoch + 1)
            counts = await inspect(made.host.endpoint)
            assert (counts.role, counts.epoch, counts.worker) == (role, epoch + 1, made.id)
            assert made.host.health()["role"] == text
            await until(lambda: made.host.ready)
        assert await _health(made.host.endpoint) == SERVING


async def test_who_asks_for_what_is_not_is_refused(model: Path, server: StoreServer) -> None:
    async with worker(model, server.endpoint, "w-odd", "decode") as made:
        assert (await made.ask(DECODE, 1)).phase == COMMITTED, "it has that role"
        assert await made.refused(PREFILL, 2) == "STALE_EPOCH"
        assert await made.refused(PREFILL, 0) == "STALE_EPOCH"
        assert await made.refused(pb.ROLE_UNSPECIFIED, 1) == "INVALID_ARGUMENT"
        other = pb.WorkerId(name="w-odd", incarnation=1)
        assert await made.refused(PREFILL, 1, other) == "INCARNATION_MISMATCH"
        await made.ends(PREFILL, 1)
        assert await made.refused(DECODE, 1) == "STALE_EPOCH"
        assert (await made.ask(PREFILL, 1)).phase == COMMITTED


async def test_it_computes_and_decodes_with_what_it_became(model: Path, server: StoreServer) -> None:
    """Two workers exchange their roles: the answers are the same, and what was cached is found."""
    async with (
        worker(model, server.endpoint, "w-one", "prefill", transfer={"backend": "nixl"}) as one,
        worker(model, server.endpoint, "w-two", "decode", transfer={"backend": "nixl"}) as two,
    ):
        for made in (one, two):
            await until(lambda made=made: made.record().state == WORKER_STATE_READY)
        tokens: list[list[int]] = []
        cached = []
        for turn, (prefill, decode) in enumerate(((one, two), (two, one), (one, two))):
            if turn:
                await prefill.ends(PREFILL, turn)
                await decode.ends(DECODE, turn)
                for made in (one, two):
                    await until(lambda made=made, turn=turn: made.record().epoch == turn + 1)
            sessions = [RouterSession(made.record()) for made in (prefill, decode)]
            for session in sessions:
                await session.open()
                assert session.welcome is not None
                assert session.welcome.epoch == turn + 1
            request = Request(random_prompt(50), f"r{turn}", one.record().fingerprint, max_tokens=6)
            answer = await generate(*sessions, request)
            tokens += answer.tokens
            cached.append(answer.prefill_cached_tokens)
            for session in sessions:
                await session.close()
            await assert_quiescent([one.host.endpoint, two.host.endpoint])
        assert tokens[1:] == tokens[:1] * 2
        assert cached == [0, 48, 48]


READER = WorkerRecord(worker=pb.WorkerId(name="d0", incarnation=3))


async def told(session: RouterSession, name: str, epoch: int) -> pb.FailureReason.ValueType:
    """What becomes of a prompt of that epoch: why it is refused, or FAILURE_REASON_UNSPECIFIED."""
    queue = session.attempt(name)
    command = Request(random_prompt(20), name, "unit", max_tokens=2).prefill(READER, 0)
    command.prefill.epoch = epoch
    session.send(command)
    try:
        assert (await next_message(queue, "prefill")).WhichOneof("message") == "prefill_done"
    except AttemptFailedError as failed:
        return failed.reason
    return pb.FAILURE_REASON_UNSPECIFIED


async def test_no_new_work_comes_while_what_runs_ends(model: Path, server: StoreServer) -> None:
    async with worker(model, server.endpoint, "w-busy", "prefill") as made:
        await until(lambda: made.record().state == WORKER_STATE_READY)
        async with offering(made) as session:
            answer = await made.ask(DECODE, 1)
            assert (answer.phase, answer.attempts) == (pb.ROLE_CHANGE_PHASE_DRAINING, 1)
            await until(lambda: made.record().state == WORKER_STATE_FLIPPING)
            assert not made.host.ready
            await until_told(lambda: negated(made.serves()))
            assert await told(session, "new", 1) == pb.FAILURE_REASON_NOT_SERVING
            await until_told(partial(waits_for, made, "what runs has not ended"))
        # Its router is gone, and with it all that it had asked for.
        assert (await made.ends(DECODE, 1)).phase == COMMITTED
        await until_told(made.serves)


async def waits_for(made: Flipped, detail: str) -> bool:
    return (await made.ask(DECODE, 1)).detail == detail


async def negated(told: Awaitable[bool]) -> bool:
    return not await told


async def test_what_does_not_end_in_time_rolls_it_back(model: Path, server: StoreServer) -> None:
    async with worker(model, server.endpoint, "w-back", "prefill") as made:
        await until(lambda: made.record().state == WORKER_STATE_READY)
        async with offering(made) as session:
            answer = await made.ends(DECODE, 1, 1.0)
            assert (answer.phase, answer.role, answer.epoch) == (ROLLED_BACK, PREFILL, 2)
            assert "what runs has not ended" in answer.detail
            # As it was, in the next epoch: commands of the former one are refused, and others taken.
            await until(lambda: (made.record().state, made.record().epoch) == (WORKER_STATE_READY, 2))
            assert made.record().role == PREFILL
            assert made.kept() == RoleRecord()
            await until_told(made.serves)
            assert await told(session, "stale", 1) == pb.FAILURE_REASON_STALE_EPOCH
            assert await told(session, "right", 2) == pb.FAILURE_REASON_UNSPECIFIED
            assert await made.refused(DECODE, 3) == "STALE_EPOCH"
        assert (await made.ends(DECODE, 2)).phase == COMMITTED


async def test_one_change_at_a_time(model: Path, server: StoreServer) -> None:
    async with worker(model, server.endpoint, "w-two-at-once", "prefill") as made:
        await until(lambda: made.record().state == WORKER_STATE_READY)
        async with offering(made):
            await made.ask(DECODE, 1)
            assert await made.refused(PREFILL, 1) == "OPERATION_RUNNING"
            assert (await made.ask(DECODE, 1)).phase == pb.ROLE_CHANGE_PHASE_DRAINING
        assert (await made.ends(DECODE, 1)).phase == COMMITTED


async def test_the_next_incarnation_begins_in_the_last_role(model: Path, server: StoreServer) -> None:
    async with worker(model, server.endpoint, "w-next", "decode") as made:
        await made.ends(PREFILL, 1)
    async with worker(model, server.endpoint, "w-next", "decode") as later:
        await until(lambda: later.record().state == WORKER_STATE_READY)
        assert (later.record().role, later.record().epoch) == (PREFILL, 1)
        assert (await inspect(later.host.endpoint)).role == PREFILL
        # And can change back.
        await later.ends(DECODE, 1)
    async with worker(model, server.endpoint, "w-next", "prefill") as last:
        assert (await inspect(last.host.endpoint)).role == DECODE


async def test_one_that_starts_without_etcd_follows_once_it_is_there(model: Path, tmp_path: Path) -> None:
    port = available_port()
    server = start_store(tmp_path, prefer_embedded=True, port=port)
    endpoint = server.endpoint
    try:
        config = _config(model, endpoint)
        store = connect_store(config.cluster)
        await RoleBook(store, "unit", "default", WorkerKey("w-late", 5)).write(PREFILL, 4)
        value = store.get(Keys("unit").role("default", "w-late"))
        assert value is not None
        store.close()
        server.stop()
        async with worker(model, endpoint, "w-late", "decode") as made:
            assert (await inspect(made.host.endpoint)).role == DECODE, "it serves all the same"
            server = start_store(tmp_path, prefer_embedded=True, port=port)
            made.store.put(Keys("unit").role("default", "w-late"), value.value)
            await until(lambda: made.record().role == PREFILL)
            assert await made.role() == PREFILL
    finally:
        server.stop()


async def test_etcd_that_does_not_come_back_in_time_rolls_it_back(model: Path, tmp_path: Path) -> None:
    port = available_port()
    server = start_store(tmp_path, prefer_embedded=True, port=port)
    try:
        async with worker(model, server.endpoint, "w-away", "decode") as made:
            await until(lambda: made.record().state == WORKER_STATE_READY)
            server.stop()
            answer = await made.ends(PREFILL, 1, 1.0)
            assert answer.phase == ROLLED_BACK
            assert "etcd" in answer.detail
            assert (await inspect(made.host.endpoint)).role == DECODE
            server = start_store(tmp_path, prefer_embedded=True, port=port)
            await until(lambda: (made.record().role, made.record().epoch) == (DECODE, 2))
            assert (await made.ends(PREFILL, 2)).phase == COMMITTED
    finally:
        server.stop()


async def test_it_leaves_in_the_middle_of_a_change(model: Path, server: StoreServer) -> None:
    async with worker(model, server.endpoint, "w-leaves", "prefill") as made:
        await until(lambda: made.record().state == WORKER_STATE_READY)
        async with offering(made):
            await made.ask(DECODE, 1)
            await until(lambda: made.record().state == WORKER_STATE_FLIPPING)
            await made.host.stop(0.1)
        assert made.record() == WorkerRecord()
        assert made.kept() == RoleRecord(), "it has not counted"


async def test_one_that_is_not_fit_does_not_change(model: Path, server: StoreServer) -> None:
    async with worker(model, server.endpoint, "w-unfit", "prefill") as made:
        health = made.host._health
        assert health is not None
        health.causes = ("transfer",)
        flip = made.host._flip
        assert flip is not None
        with pytest.raises(TwinpoolError, match="transfer") as caught:
            flip.ask(DECODE, 1, None)
        assert caught.value.reason == "FLIP_REFUSED"
        health.causes = ()
        health.drain()
        with pytest.raises(TwinpoolError, match="leaves") as caught:
            flip.ask(DECODE, 1, None)
        assert caught.value.reason == "FLIP_REFUSED"
