# SPDX-License-Identifier: Apache-2.0
"""What a worker says of itself follows what its loops and its transfer path do, and so does whom it serves."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.hangs import BreakableAgent, GatedRunner
from tests.support.waiting import until
from tests.support.worker_client import RouterSession
from twinpool import rpc
from twinpool.config import RpcConfig, TwinpoolConfig
from twinpool.engine.tiny import write_tiny
from twinpool.ids import WorkerKey
from twinpool.store import Keys, StoreServer, connect_store, start_store
from twinpool.transfer.base import TransferAgent
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.control_pb2 import WORKER_STATE_READY, WORKER_STATE_UNREADY, WorkerRecord
from twinpool.worker import serving as serving_module
from twinpool.worker.host import WorkerHost
from twinpool.worker.outbox import Receiver
from twinpool.worker.step_loop import Runner
from twinpool.worker.watchdog import EventLoopBeat, Stillness, Watchdog

SERVING = health_pb2.HealthCheckResponse.SERVING
WAIT_SECONDS = 60.0


class Breakable:
    """A seam whose parts break on command."""

    def __init__(self) -> None:
        self.broken: BreakableAgent | None = None
        self.gated: GatedRunner | None = None

    def agent(self, real: TransferAgent) -> TransferAgent:
        self.broken = BreakableAgent(real)
        return self.broken

    def receiver(self, real: Receiver) -> Receiver:
        return real

    def runner(self, real: Runner) -> Runner:
        self.gated = GatedRunner(real)
        return self.gated


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"), "llama", layers=2, hidden=32, vocab=300)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    server = start_store(tmp_path_factory.mktemp("store"), prefer_embedded=True)
    yield server
    server.stop()


@pytest.fixture
def seam(monkeypatch: pytest.MonkeyPatch) -> Breakable:
    made = Breakable()
    monkeypatch.setattr(serving_module, "seam_of", lambda worker: made)
    return made


@asynccontextmanager
async def running(model: Path, store: StoreServer, **worker: object) -> AsyncIterator[WorkerHost]:
    """A worker that hangs after a second, but never gives up unless told to."""
    host = WorkerHost(
        TwinpoolConfig.model_validate(
            {
                "cluster": {"name": "unit", "etcd_endpoints": [store.endpoint], "etcd_timeout_seconds": 0.5},
                "model": {"path": str(model)},
                "kv": {"num_blocks": 24, "block_tokens": 16},
                "transfer": {"backend": "loopback"},
                "worker": {"name": "w0", "hang_seconds": 1.0, "give_up_seconds": 0, "calibration_seconds": 0}
                | worker,
                "metrics": {"enabled": False},
            }
        ),
        "decode",
    )
    await host.start()
    try:
        await until(lambda: host.ready, WAIT_SECONDS)
        yield host
    finally:
        await host.stop(0.0)


def record_of(host: WorkerHost) -> WorkerRecord:
    return WorkerRecord(
        worker=pb.WorkerId(name=host.key.name, incarnation=host.key.incarnation), endpoint=host.endpoint
    )


async def says(endpoint: str, service: str = "") -> bool:
    async with rpc.channel(endpoint, RpcConfig()) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        return bool(answer.status == SERVING)


async def comes_to_say(endpoint: str, *, live: bool, ready: bool) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            if (await says(endpoint, "live"), await says(endpoint)) == (live, ready):
                return
            await asyncio.sleep(0.02)


async def comes_to_state(store: StoreServer, host: WorkerHost, state: int) -> None:
    client = connect_store(host._config.cluster)
    key = Keys("unit").worker("default", "w0")
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                item = await asyncio.to_thread(client.get, key)
                if item is not None and WorkerRecord.FromString(item.value).state == state:
                    return
                await asyncio.sleep(0.02)
    finally:
        await asyncio.to_thread(client.close)


def test_stillness_is_counted_only_while_it_is_watched() -> None:
    watched = Stillness(period_seconds=1.0)
    assert watched.look(100.0, {"a": 1, "b": 1}) == {"a": 0.0, "b": 0.0}
    assert watched.look(101.0, {"a": 1, "b": 2}) == {"a": 1.0, "b": 0.0}
    # The process stood still as a whole for an hour: one look, not an hour.
    assert watched.look(3701.0, {"a": 1, "b": 2}) == {"a": 3.0, "b": 2.0}
    assert watched.look(3702.0, {"a": 2, "b": 2}) == {"a": 0.0, "b": 3.0}


async def test_an_event_loop_beats_until_it_is_closed() -> None:
    beat = EventLoopBeat(asyncio.get_running_loop())
    first = beat()
    await asyncio.sleep(0)
    assert beat() == first + 1
    assert beat() == first + 1  # not answered yet
    closed = asyncio.new_event_loop()
    closed.close()
    with pytest.raises(RuntimeError):
        EventLoopBeat(closed)()


def test_a_watchdog_names_what_stands_still_and_gives_it_up_once() -> None:
    beats = {"moving": 0, "still": 0}
    given_up: list[str] = []
    came = threading.Event()

    def moving() -> int:
        beats["moving"] += 1
        return beats["moving"]

    def gave_up(name: str) -> None:
        given_up.append(name)
        came.set()

    dog = Watchdog(
        {"moving": moving, "still": lambda: beats["still"]},
        hang_seconds=0.5,
        give_up_seconds=1.0,
        on_given_up=gave_up,
    )
    dog.start()
    assert came.wait(WAIT_SECONDS)
    assert dog.still == {"still"}
    dog.stop()
    assert given_up == ["still"]


async def test_a_step_loop_that_stands_still_loses_its_sessions(
    model: Path, store: StoreServer, seam: Breakable
) -> None:
    async with running(model, store) as host:
        session = RouterSession(record_of(host))
        await session.open()
        assert host._serving is not None
        release = threading.Event()
        host._serving._loop.post(lambda: release.wait(WAIT_SECONDS))
        await until(session.ended.done, WAIT_SECONDS)
        await session.close()
        await comes_to_say(host.endpoint, live=False, ready=False)
        assert host.health()["causes"] == ["step_loop"]
        await comes_to_state(store, host, WORKER_STATE_UNREADY)
        again = RouterSession(record_of(host), "other-router")
        with pytest.raises(Exception, match=r"stands still|UNAVAILABLE|ended"):
            await again.open()
        await again.close()
        release.set()
        await comes_to_say(host.endpoint, live=True, ready=True)
        await comes_to_state(store, host, WORKER_STATE_READY)
        session = RouterSession(record_of(host))
        await session.open()
        await session.close()


async def test_an_idle_worker_never_stands_still(model: Path, store: StoreServer, seam: Breakable) -> None:
    async with running(model, store) as host:
        assert host._health is not None
        before = host._serving.step_progress  # type: ignore[union-attr]
        await until(lambda: host._serving.step_progress > before + 3, WAIT_SECONDS)  # type: ignore[union-attr]
        assert host._health.live


async def test_a_broken_transfer_path_makes_a_worker_unready_but_ends_nothing(
    model: Path, store: StoreServer, seam: Breakable
) -> None:
    async with running(model, store) as host:
        session = RouterSession(record_of(host))
        await session.open()
        assert seam.broken is not None
        seam.broken.mode = "refuse"
        await comes_to_say(host.endpoint, live=True, ready=False)
        assert host.health()["causes"] == ["transfer"]
        await comes_to_state(store, host, WORKER_STATE_UNREADY)
        assert not session.ended.done()
        seam.broken.mode = ""
        await comes_to_say(host.endpoint, live=True, ready=True)
        await comes_to_state(store, host, WORKER_STATE_READY)
        await session.close()


async def test_a_transfer_thread_that_stands_still_is_as_bad_as_a_step_loop(
    model: Path, store: StoreServer, seam: Breakable
) -> None:
    async with running(model, store) as host:
        session = RouterSession(record_of(host))
        await session.open()
        assert seam.broken is not None
        seam.broken.mode = "hang"
        try:
            await until(session.ended.done, WAIT_SECONDS)
            await comes_to_say(host.endpoint, live=False, ready=False)
            assert "transfer_thread" in host.health()["causes"]  # type: ignore[operator]
        finally:
            seam.broken.mode = ""
            seam.broken.gate.set()
        await comes_to_say(host.endpoint, live=True, ready=True)
        await session.close()


async def test_a_transfer_thread_that_dies_is_the_end_of_the_worker(
    model: Path, store: StoreServer, seam: Breakable
) -> None:
    async with running(model, store) as host:
        assert seam.broken is not None
        seam.broken.mode = "raise"
        failure = await asyncio.wait_for(host.failure(), WAIT_SECONDS)
        assert failure.detail == "the transfer thread has ended"


async def test_a_loop_that_stands_still_for_too_long_is_the_end_of_the_worker(
    model: Path, store: StoreServer, seam: Breakable
) -> None:
    async with running(model, store, give_up_seconds=2.0) as host:
        assert host._serving is not None
        release = threading.Event()
        host._serving._loop.post(lambda: release.wait(WAIT_SECONDS))
        failure = await asyncio.wait_for(host.failure(), WAIT_SECONDS)
        assert failure.detail == "the step_loop stands still"
        release.set()


async def test_a_transfer_path_that_stays_broken_is_the_end_of_the_worker(
    model: Path, store: StoreServer, seam: Breakable
) -> None:
    async with running(model, store, give_up_seconds=2.0) as host:
        assert seam.broken is not None
        seam.broken.mode = "refuse"
        failure = await asyncio.wait_for(host.failure(), WAIT_SECONDS)
        assert failure.detail.startswith("its transfer path stays broken: ")


async def test_a_worker_without_a_lease_is_not_ready_but_serves(
    model: Path, tmp_path: Path, seam: Breakable
) -> None:
    server = start_store(tmp_path / "store", prefer_embedded=True)
    async with running(model, server) as host:
        server.stop()
        await comes_to_say(host.endpoint, live=True, ready=False)
        assert host.health()["causes"] == ["lease"]
        session = RouterSession(record_of(host))
        await session.open()
        assert not session.ended.done()
        await session.close()


def test_a_seam_that_is_not_used_changes_nothing() -> None:
    from twinpool.worker.seam import Bare

    bare, part = Bare(), object()
    assert (bare.agent(part), bare.receiver(part), bare.runner(part)) == (part, part, part)  # type: ignore[arg-type]
    assert WorkerKey("w", 1)
