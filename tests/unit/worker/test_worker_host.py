# SPDX-License-Identifier: Apache-2.0
"""A worker's life in one process: ready, stopped, failed, interrupted. It leaves nothing behind, whatever happens."""

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from worker_pair import random_prompt

from tests.support.quiescence import assert_quiescent, inspect
from tests.support.waiting import until
from tests.support.worker_client import AttemptFailedError, Request, RouterSession, next_message
from twinpool import logs, rpc
from twinpool.config import RpcConfig, TwinpoolConfig, to_yaml
from twinpool.engine.tiny import write_tiny
from twinpool.errors import ConfigError, TwinpoolError
from twinpool.store import Keys, StoreServer, connect_store, start_store
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.control_pb2 import WORKER_STATE_READY, WORKER_STATE_STARTING, WorkerRecord
from twinpool.worker import host as host_module
from twinpool.worker import leave
from twinpool.worker.actor import HostThread, WorkerActor
from twinpool.worker.host import WorkerHost
from twinpool.worker.stack import LoadProgress

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"), "llama", layers=2, hidden=32, vocab=300)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    server = start_store(tmp_path_factory.mktemp("store"), prefer_embedded=True)
    yield server
    server.stop()


def _config(path: Path, store: str = "127.0.0.1:1", **sections: dict[str, object]) -> TwinpoolConfig:
    base: dict[str, dict[str, object]] = {
        "cluster": {"name": "unit", "etcd_endpoints": [store], "etcd_timeout_seconds": 0.5},
        "model": {"path": str(path)},
        "kv": {"num_blocks": 24, "block_tokens": 16},
        "transfer": {"backend": "loopback"},
        "worker": {"name": "w0"},
        "metrics": {"enabled": False},
    }
    return TwinpoolConfig.model_validate(
        {key: base.get(key, {}) | sections.get(key, {}) for key in base | sections}
    )


def _threads() -> set[str]:
    return {
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith(("twinpool", "registration"))
    }


def _record(server: StoreServer, config: TwinpoolConfig) -> WorkerRecord | None:
    client = connect_store(config.cluster)
    try:
        item = client.get(Keys("unit").worker("default", "w0"))
        return None if item is None else WorkerRecord.FromString(item.value)
    finally:
        client.close()


async def _health(endpoint: str) -> int:
    """Whether the worker does what it is asked for."""
    async with rpc.channel(endpoint, RpcConfig()) as channel:
        asked = health_pb2.HealthCheckRequest(service="twinpool.v1.WorkerService")
        answer = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=60)
        return int(answer.status)


async def test_ready_then_stopped(model: Path, store: StoreServer) -> None:
    config = _config(model, store.endpoint)
    host = WorkerHost(config, "decode")
    await host.start()
    try:
        assert await _health(host.endpoint) == SERVING
        health = host.health()
        assert (health["live"], health["worker"], health["role"]) == (True, "w0", "decode")
        await until(lambda: host.ready)
        for _ in range(6000):
            record = await asyncio.to_thread(_record, store, config)
            if record is not None and record.state == WORKER_STATE_READY:
                break
            await asyncio.sleep(0.01)
        assert record is not None
        assert record.worker.incarnation == host.key.incarnation
        assert (record.endpoint, record.num_blocks, record.block_tokens) == (host.endpoint, 24, 16)
        assert record.vocab_size == 300
        assert record.eos_token_ids
        assert record.kv_bytes_per_token > 0
        for cost in (record.prefill_cost, record.step_cost):
            coefficients = [cost.base_seconds, cost.unit_seconds, cost.context_seconds]
            assert min(coefficients) >= 0
            assert 0 < sum(coefficients) < 10
        await assert_quiescent([host.endpoint])
        counts = await inspect(host.endpoint)
        assert (counts.free_blocks, counts.cached_blocks) == (24, 0)
    finally:
        await host.stop()
    assert _record(store, config) is None
    assert _threads() == set()
    with pytest.raises(grpc.aio.AioRpcError):
        await _health(host.endpoint)
    await host.stop()


async def test_without_calibration_the_record_has_none(model: Path, store: StoreServer) -> None:
    config = _config(model, store.endpoint, worker={"calibration_seconds": 0.0})
    host = WorkerHost(config, "prefill")
    await host.start()
    try:
        await until(lambda: (found := _record(store, config)) and found.state == WORKER_STATE_READY)
        record = _record(store, config)
        assert record is not None
        assert not record.HasField("prefill_cost")
        assert not record.HasField("step_cost")
    finally:
        await host.stop()


async def test_without_etcd_it_serves_all_the_same(model: Path) -> None:
    host = WorkerHost(_config(model), "prefill")
    await host.start()
    assert await _health(host.endpoint) == SERVING
    await host.stop()
    assert _threads() == set()


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"model": {"path": ""}}, "CONFIG_INVALID"),
        ({"model": {"path": "/nowhere"}}, "CHECKPOINT_INVALID"),
        ({"model": {"max_context_tokens": 1 << 20}}, "CONFIG_INVALID"),
        ({"worker": {"host": "203.0.113.9"}}, "PORT_UNAVAILABLE"),
    ],
)
async def test_a_start_that_fails_names_why_and_leaves_nothing(
    model: Path, section: dict[str, dict[str, object]], reason: str
) -> None:
    host = WorkerHost(_config(model, **section), "prefill")
    with pytest.raises(TwinpoolError) as caught:
        await host.start()
    assert caught.value.reason == reason
    assert _threads() == set()
    assert not host.ready


def test_an_unknown_role_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="unknown role 'both'"):
        WorkerHost(_config(model), "both")


async def test_a_start_can_be_interrupted_while_the_model_loads(
    model: Path, store: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record says *starting* meanwhile; the interrupted load ends soon, and so does the record."""
    config = _config(model, store.endpoint)
    real, entered = host_module.build_stack, threading.Event()

    def slow(*args: object, on_checked: object, cancelled: object) -> object:
        progress = LoadProgress(on_checked, cancelled)  # type: ignore[arg-type]
        entered.set()
        while True:
            progress(1, 1000)
            threading.Event().wait(0.01)

    monkeypatch.setattr(host_module, "build_stack", slow)
    starting = asyncio.create_task(WorkerHost(config, "prefill").start())
    await asyncio.to_thread(entered.wait, 60)
    for _ in range(6000):
        record = await asyncio.to_thread(_record, store, config)
        if record is not None:
            break
        await asyncio.sleep(0.01)
    assert record is not None
    assert record.state == WORKER_STATE_STARTING
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(starting, 60)
    assert await asyncio.to_thread(_record, store, config) is None
    assert _threads() == set()
    assert real is not slow


async def test_a_step_loop_that_gives_up_is_a_failure_of_the_worker(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = WorkerHost(_config(model), "prefill")
    await host.start()
    assert host._serving is not None
    role = host._serving._loop.role

    def broken(now: float) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(role, "on_clock", broken)
    failure = await asyncio.wait_for(host.failure(), 60)
    assert "RuntimeError" in failure.detail
    assert not failure.superseded
    await host.stop(1.0)
    assert _threads() == set()


async def test_a_worker_that_stops_tells_its_router(model: Path) -> None:
    host = WorkerHost(_config(model, scheduler={"max_chunk_tokens": 16}), "prefill")
    await host.start()
    record = WorkerRecord(
        worker=pb.WorkerId(name=host.key.name, incarnation=host.key.incarnation), endpoint=host.endpoint
    )
    session = RouterSession(record)
    await session.open()
    reader = WorkerRecord(worker=pb.WorkerId(name="d0", incarnation=3))
    request = Request(random_prompt(40), "r", "unit", max_tokens=2)
    queue = session.attempt("r")
    session.send(request.prefill(reader, 0))
    assert (await next_message(queue, "prefill")).WhichOneof("message") == "prefill_done"
    # Nobody reads: the offer stands until the drain gives up on it.
    await host.stop(0.1)
    with pytest.raises(AttemptFailedError) as caught:
        await next_message(queue, "prefill")
    assert caught.value.reason == pb.FAILURE_REASON_NOT_SERVING
    await until(session.ended.done)
    await session.close()


def test_its_node_asks_a_worker_in_an_actor_to_leave(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the options of its node, but for its name and pool."""
    file = tmp_path / "node.yaml"
    file.write_text(to_yaml(_config(model)))
    monkeypatch.setenv("TWINPOOL_CONFIG", str(file))
    monkeypatch.setenv("TWINPOOL_WORKER__NAME", "of-the-node")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # An actor has a process of its own, whose log it sets up.
    monkeypatch.setattr(logs, "setup", lambda *_: None)
    actor = WorkerActor("worker: {name: given, pool: mine}", "decode", from_node=True)
    assert asyncio.run(actor.start())["worker"] == "given"
    assert [path.name for path in leave.directory().iterdir()] == ["given.sock"]
    assert leave.leave(leave.directory()) == 1
    assert asyncio.run(actor.health())["ready"] is False
    assert asyncio.run(actor.stop(0.1))
    assert _threads() == set()


def test_a_thread_of_its_own_for_ray(model: Path) -> None:
    thread = HostThread(_config(model), "decode")
    assert thread.health() == {"ready": False}
    thread.start()
    ready = thread.ready.result(30)
    assert ready["live"] is True
    assert thread.health()["incarnation"] == ready["incarnation"]
    assert thread.stop(0.1, 10)
    assert thread.health()["ready"] is False
    broken = HostThread(_config(Path("/nowhere")), "decode")
    broken.start()
    with pytest.raises(TwinpoolError) as caught:
        broken.ready.result(30)
    assert caught.value.reason == "CHECKPOINT_INVALID"
    assert broken.stop(0.1, 10)
    assert _threads() == set()
