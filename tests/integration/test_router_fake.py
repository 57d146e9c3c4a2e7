# SPDX-License-Identifier: Apache-2.0
"""The router as a process: found in etcd, following etcd, serving without etcd, stopping cleanly.

The workers are fake, so this needs no model; store, registrations, router and gRPC are the real ones.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.fake_cluster import Answer, collect, generate, prompt
from tests.support.fake_worker import Fabric, FakeWorker, Script
from tests.support.waiting import until
from twinpool.config import TwinpoolConfig, load_config, to_env
from twinpool.membership import Registration, RouterWatch
from twinpool.store import EtcdStore, StoreServer, connect_store, start_store
from twinpool.v1 import control_pb2, inference_pb2_grpc
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import worker_pb2 as worker

pytestmark = pytest.mark.integration

CLUSTER = "fake"
_RUN = """
import sys
from twinpool.config import load_config
from twinpool.launch import run_process
sys.exit(run_process("router", load_config()))
"""


@dataclass
class System:
    """A store, a router process, fake workers that are registered."""

    config: TwinpoolConfig
    server: StoreServer
    store: EtcdStore
    process: asyncio.subprocess.Process
    routers: RouterWatch
    model_path: Path
    log: Path
    fabric: Fabric = field(default_factory=Fabric)
    workers: dict[str, FakeWorker] = field(default_factory=dict)
    registrations: dict[str, Registration] = field(default_factory=dict)

    async def add(self, name: str, role: "worker.Role.ValueType", script: Script | None = None) -> FakeWorker:
        made = self.workers[name] = FakeWorker(
            name, role, self.fabric, script, model_path=str(self.model_path)
        )
        await made.start()
        await self.register(made)
        return made

    async def register(self, made: FakeWorker) -> None:
        registration = Registration(self.store, CLUSTER, made.record(), ttl_seconds=4)
        self.registrations[made.key.name] = registration
        await registration.start()
        assert await registration.wait_registered(5)

    @property
    def record(self) -> control_pb2.RouterRecord:
        (record,) = self.routers.records()
        return record

    async def ask(self, request: pb.GenerateRequest) -> Answer:
        async with grpc.aio.insecure_channel(self.record.endpoint) as channel:
            return await collect(
                inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=60)
            )

    async def servable(self, prefill: int, decode: int) -> None:
        """The router lists the model with so many workers, and answers."""
        async with grpc.aio.insecure_channel(self.record.endpoint) as channel, asyncio.timeout(60):
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            while True:
                models = (await stub.ListModels(pb.ListModelsRequest())).models
                if [(m.ready, m.prefill_workers, m.decode_workers) for m in models] == [
                    (True, prefill, decode)
                ]:
                    break
                await asyncio.sleep(0.05)
        async with asyncio.timeout(60):
            while (await self.ask(generate(max_tokens=1))).error is not None:  # noqa: ASYNC110 - over the wire
                await asyncio.sleep(0.05)


@asynccontextmanager
async def running(directory: Path, **settings: object) -> AsyncIterator[System]:
    model_path = write_byte_tokenizer(directory / "model")
    server = await asyncio.to_thread(start_store, directory / "store")
    overrides = {
        "cluster.name": CLUSTER,
        "cluster.etcd_endpoints": [server.endpoint],
        "cluster.etcd_timeout_seconds": 1.0,
        "cluster.lease_ttl_seconds": 4,
        "log.format": "json",
    }
    config = load_config(None, overrides | settings, env={})
    env = {key: value for key, value in os.environ.items() if not key.startswith("TWINPOOL_")} | to_env(
        config
    )
    store = connect_store(config.cluster)
    routers = RouterWatch(store, CLUSTER)
    log = directory / "router.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _RUN, env=env, stdout=output, stderr=output
        )
    system = System(config, server, store, process, routers, model_path, log)
    try:
        await routers.start()
        await until(lambda: routers.records() or process.returncode is not None)
        assert process.returncode is None, log.read_text()
        yield system
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        for registration in system.registrations.values():
            await registration.stop()
        for made in system.workers.values():
            await made.kill()
        await routers.stop()
        await asyncio.to_thread(store.close)
        await asyncio.to_thread(server.kill)


async def test_it_is_found_serves_and_stops(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        record = system.record
        assert record.pid == system.process.pid
        assert record.name.startswith("router-")
        assert int(record.endpoint.rpartition(":")[2]) > 0, "port 0 became a real one"
        await system.add("p0", worker.ROLE_PREFILL)
        await system.add("d0", worker.ROLE_DECODE, Script(step_seconds=0.02))
        await system.servable(1, 1)
        running_stream = asyncio.create_task(system.ask(generate(max_tokens=40)))
        await until(lambda: any(session.running for session in system.workers["d0"].sessions))
        system.process.send_signal(signal.SIGTERM)
        answer = await running_stream
        assert answer.finished.usage.completion_tokens == 40, "a stop waits for running streams"
        assert await asyncio.wait_for(system.process.wait(), 60) == 0
        await until(lambda: not system.routers.records())
        text = system.log.read_text()
        assert '"event": "router_stopped"' in text
        assert "Traceback" not in text


async def test_it_follows_the_registrations(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await system.add("p0", worker.ROLE_PREFILL)
        await system.add("d0", worker.ROLE_DECODE)
        await system.servable(1, 1)
        await system.add("d1", worker.ROLE_DECODE)
        await system.servable(1, 2)
        await system.registrations["d0"].stop()
        await system.servable(1, 1)
        for seed in range(4):
            assert (await system.ask(generate(prompt(40, seed)))).finished.decode_worker == "d1"
        system.registrations["d1"].update_state(control_pb2.WORKER_STATE_DRAINING)
        await system.register(system.workers["d0"])
        await system.servable(1, 1)
        for seed in range(4):
            assert (await system.ask(generate(prompt(40, seed)))).finished.decode_worker == "d0"


async def test_it_serves_on_without_etcd(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await system.add("p0", worker.ROLE_PREFILL)
        await system.add("d0", worker.ROLE_DECODE)
        await system.servable(1, 1)
        await asyncio.to_thread(system.server.kill)
        for seed in range(20):
            assert (await system.ask(generate(prompt(40, seed)))).error is None
            await asyncio.sleep(0.05)


async def test_a_killed_worker_costs_no_request(tmp_path: Path) -> None:
    """Long before its lease ends: the router hears of it by its stream."""
    async with running(tmp_path) as system:
        await system.add("p0", worker.ROLE_PREFILL)
        for name in ("d0", "d1"):
            await system.add(name, worker.ROLE_DECODE)
        await system.servable(1, 2)
        asks = []
        for number in range(30):
            if number == 10:
                await system.workers["d0"].kill()
            asks.append(asyncio.create_task(system.ask(generate(prompt(40, number), max_tokens=2))))
            await asyncio.sleep(0.02)
        answers = await asyncio.gather(*asks)
        failed = [answer.error for answer in answers if answer.error is not None]
        assert len(failed) <= 1, failed


async def test_a_taken_port_ends_it_with_the_reason(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        overrides: dict[str, object] = {
            "router.port": taken.getsockname()[1],
            "cluster.etcd_endpoints": ["127.0.0.1:1"],
        }
        env = dict(os.environ) | to_env(load_config(None, overrides, env={}))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _RUN, env=env, stderr=asyncio.subprocess.PIPE
        )
        _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert b"PORT_UNAVAILABLE" in errors
    assert b"Traceback" not in errors
