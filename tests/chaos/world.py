# SPDX-License-Identifier: Apache-2.0
"""The cluster that chaos happens to: etcd behind a proxy, workers that Ray restarts, routers that this process restarts.

Each worker is a host of its own where the machine has namespaces for us. Then its packets, NIXL's included, take a link that
can be cut and delayed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.actor import HostedWorker
from tests.chaos.network import Network
from tests.chaos.schedule import ROUTERS, WORKERS, Fault
from tests.support.tcp_proxy import TcpProxy
from tests.support.worker_client import start_router
from twinpool.client import Client
from twinpool.config import ClusterConfig, load_config, to_yaml
from twinpool.errors import TwinpoolError
from twinpool.store import Keys, Store, StoreServer, connect_store, start_store
from twinpool.v1.control_pb2 import WORKER_STATE_READY, RouterRecord, WorkerRecord

CLUSTER = "test"
BLOCK = 16
OBJECT_STORE_BYTES = 80 << 20
RAY_STARTS_SECONDS = 600.0
READY_SECONDS = 300.0
POLL_SECONDS = 0.1
LEASE_SECONDS = 5.0
"""Of offered blocks: how long quiescence may take after a reader is gone for good."""

SHARED: dict[str, object] = {
    "cluster.name": CLUSTER,
    "cluster.lease_ttl_seconds": 5,
    # A peer that is stopped or cut off is given up sooner than a stop lasts.
    "rpc.keepalive_seconds": 2,
    "rpc.keepalive_timeout_seconds": 2,
    "log.format": "json",
}
WORKER: dict[str, object] = {
    "kv.num_blocks": 512,
    "kv.block_tokens": BLOCK,
    "kv.poison_freed": True,
    "scheduler.ahead": "on",
    "scheduler.max_chunk_tokens": 64,
    "scheduler.max_batched_tokens": 256,
    "transfer.digest": "always",
    "transfer.lease_seconds": LEASE_SECONDS,
    "transfer.read_deadline_seconds": 3,
    "transfer.fetch_deadline_seconds": 2,
    "worker.calibration_seconds": 0,
    "worker.drain_timeout_seconds": 5,
}
ROUTER: dict[str, object] = {
    "router.quarantine_seconds": 1,
    "router.queue_ttl_seconds": 300,
    # One request may meet many of the faults.
    "router.max_attempts": 20,
    "router.max_resumes": 100,
    "router.local_prefill": True,
}


class World:
    """Start, hit, stop; all on one event loop but for ``start_ray``, which comes first."""

    def __init__(self, directory: Path, model: Path, network: Network | None) -> None:
        self.model = model
        self.network = network
        self.directory = directory
        self.applied: Counter[str] = Counter()
        self.restarts = 0
        self._incarnations: dict[str, int] = {}
        self._actors: dict[str, Any] = {}
        self._routers: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: dict[str, int] = {}
        self._server: StoreServer | None = None
        self._proxy: TcpProxy | None = None
        self._store: Store | None = None

    # --- life

    def start_store(self) -> None:
        self._server = start_store(self.directory / "store")
        host = self.network.gateway if self.network is not None else "127.0.0.1"
        self._proxy = TcpProxy(self._server.endpoint, host)
        self._store = connect_store(ClusterConfig(etcd_endpoints=(self._server.endpoint,)))

    def start_ray(self) -> None:
        """Starts Ray and the workers. Raises what a worker's start raises."""
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - so Ray spells it
        root = str(Path(__file__).parents[2])
        os.environ["PYTHONPATH"] = os.pathsep.join((root, os.environ.get("PYTHONPATH", "")))
        import ray

        ray.init(
            num_cpus=len(WORKERS),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            configure_logging=False,
        )
        actor = ray.remote(HostedWorker)
        for name, role in WORKERS.items():
            namespace = self.network.namespace(name) if self.network is not None else ""
            options = {"name": name, "num_cpus": 1, "max_restarts": -1, "max_concurrency": 8}
            self._actors[name] = actor.options(**options).remote(
                self._worker_config(name), role, str(self.directory / f"{name}.log"), namespace
            )
        ray.get([each.start.remote() for each in self._actors.values()], timeout=RAY_STARTS_SECONDS)

    def _worker_config(self, name: str) -> str:
        address = self.network.address(name) if self.network is not None else "127.0.0.1"
        assert self._proxy is not None
        settings = (
            SHARED
            | WORKER
            | {
                "cluster.etcd_endpoints": self._proxy.endpoint,
                "model.path": str(self.model),
                "worker.name": name,
                "worker.host": address,
                "metrics.host": address,
                # Bytes over the link too, and not by the way that processes of one machine have.
                "transfer.ucx_tls": "tcp,self" if self.network is not None else "tcp,sm,self",
            }
        )
        return to_yaml(load_config(None, settings, env={}))

    async def start_routers(self, ports: list[int]) -> None:
        """Starts all and waits until each can use every worker."""
        self._ports = {f"router-{number}": ports[number] for number in range(ROUTERS)}
        for name in self._ports:
            self._start_router(name)
        await self.serving()

    def _start_router(self, name: str) -> None:
        assert self._proxy is not None
        directory = self.directory / name
        directory.mkdir(exist_ok=True)
        settings = SHARED | ROUTER | {"router.name": name, "router.port": self._ports[name]}
        self._routers[name] = start_router(self.model, self._proxy.endpoint, directory, settings)

    def stop(self) -> None:
        """Ends everything, in order."""
        import ray

        for process in self._routers.values():
            process.terminate()
        for process in self._routers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            process.kill()
            process.wait()
        if ray.is_initialized():
            with contextlib.suppress(Exception):
                ray.get([actor.stop.remote(1.0) for actor in self._actors.values()], timeout=60)
            for actor in self._actors.values():
                ray.kill(actor, no_restart=True)
            ray.shutdown()
        if self._store is not None:
            self._store.close()
        if self._proxy is not None:
            self._proxy.close()
        if self._server is not None:
            self._server.stop()

    # --- views

    @property
    def endpoints(self) -> list[str]:
        """Of the routers."""
        return [f"127.0.0.1:{port}" for port in self._ports.values()]

    async def records(self) -> dict[str, WorkerRecord]:
        """The registered workers, as the store has them; raises TwinpoolError while it is away."""
        assert self._store is not None
        items = (await asyncio.to_thread(self._store.list_prefix, Keys(CLUSTER).workers(None))).items
        records = [WorkerRecord.FromString(item.value) for item in items.values()]
        for record in records:
            known = self._incarnations.setdefault(record.worker.name, record.worker.incarnation)
            if known != record.worker.incarnation:
                self._incarnations[record.worker.name] = record.worker.incarnation
                self.restarts += 1
        return {record.worker.name: record for record in records}

    async def routers(self) -> list[RouterRecord]:
        """The registered routers."""
        assert self._store is not None
        items = (await asyncio.to_thread(self._store.list_prefix, Keys(CLUSTER).routers)).items
        return [RouterRecord.FromString(item.value) for item in items.values()]

    async def ready(self, name: str) -> WorkerRecord:
        """Waits until a worker is ready and its process is there."""
        async with asyncio.timeout(READY_SECONDS):
            while True:
                with contextlib.suppress(TwinpoolError):
                    record = (await self.records()).get(name)
                    if record is not None and record.state == WORKER_STATE_READY and _alive(record.pid):
                        return record
                await asyncio.sleep(POLL_SECONDS)

    async def serving(self) -> None:
        """Waits until every router can use every worker."""
        wanted = [sum(role == each for role in WORKERS.values()) for each in ("prefill", "decode")]
        async with asyncio.timeout(READY_SECONDS):
            for endpoint in self.endpoints:
                async with Client(endpoint) as client:
                    while not await _sees(client, wanted):  # noqa: ASYNC110 - of other processes
                        await asyncio.sleep(POLL_SECONDS)

    # --- faults

    async def hit(self, fault: Fault) -> None:
        """Does it, and undoes it when its time is over. A worker that is not back from the last one is waited for."""
        await getattr(self, f"_{fault.kind}")(fault)

    async def _kill(self, fault: Fault) -> None:
        record = await self.ready(fault.targets[0])
        self.applied[f"kill_{WORKERS[fault.targets[0]]}"] += 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGKILL)

    async def _stop(self, fault: Fault) -> None:
        record = await self.ready(fault.targets[0])
        self.applied[f"stop_{WORKERS[fault.targets[0]]}"] += 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGCONT)

    async def _link_cut(self, fault: Fault) -> None:
        network = self._links
        await self._meanwhile(
            fault, lambda: network.cut(*fault.targets), lambda: network.mend(*fault.targets)
        )

    async def _link_delay(self, fault: Fault) -> None:
        network = self._links
        await self._meanwhile(
            fault,
            lambda: network.delay(fault.targets[0], fault.targets[1], fault.delay),
            lambda: network.mend(*fault.targets),
        )

    async def _isolate(self, fault: Fault) -> None:
        network, (host,) = self._links, fault.targets
        await self._meanwhile(fault, lambda: network.isolate(host), lambda: network.rejoin(host))

    async def _etcd_cut(self, fault: Fault) -> None:
        assert self._proxy is not None
        await self._meanwhile(fault, self._proxy.cut, self._proxy.heal)

    async def _etcd_stall(self, fault: Fault) -> None:
        assert self._proxy is not None
        await self._meanwhile(fault, self._proxy.stall, self._proxy.heal)

    async def _etcd_restart(self, fault: Fault) -> None:
        assert self._server is not None
        port = int(self._server.endpoint.rpartition(":")[2])
        await self._meanwhile(fault, self._server.kill, lambda: self._restart_store(port))

    def _restart_store(self, port: int) -> None:
        self._server = start_store(self.directory / "store", port=port)

    async def _router_kill(self, fault: Fault) -> None:
        (name,) = fault.targets
        self.applied[fault.kind] += 1
        process = self._routers[name]
        process.kill()
        await asyncio.to_thread(process.wait)
        self._start_router(name)

    async def _meanwhile(self, fault: Fault, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self.applied[fault.kind] += 1
        await asyncio.to_thread(begin)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            await asyncio.to_thread(end)

    @property
    def _links(self) -> Network:
        assert self.network is not None, "the plan has faults of links, but there are none"
        return self.network


async def _sees(client: Client, wanted: list[int]) -> bool:
    try:
        models = await client.models()
    except TwinpoolError:
        return False
    return any(model.ready and [model.prefill_workers, model.decode_workers] == wanted for model in models)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
