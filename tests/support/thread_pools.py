# SPDX-License-Identifier: Apache-2.0
"""Workers without an engine, in this process, in the place of Ray's actors: they register, drain, are cordoned and counted as real
ones. They outlive the control processes that look after them, as those of a Ray cluster that was joined do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from twinpool import rpc
from twinpool.config import RpcConfig, TwinpoolConfig
from twinpool.control.actors import Look
from twinpool.control.pools import RayPools
from twinpool.control.reconcile.observe import ROLE_VALUES
from twinpool.errors import TwinpoolError
from twinpool.ids import new_incarnation
from twinpool.membership import Registration
from twinpool.store import Store
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2, worker_pb2_grpc


class ThreadWorker(worker_pb2_grpc.WorkerServiceServicer):
    """One incarnation of one worker."""

    def __init__(self, site: Site, name: str, role: str, pool: str) -> None:
        self.site, self.name, self.role, self.pool = site, name, role, pool
        self.key = worker_pb2.WorkerId(name=name, incarnation=new_incarnation())
        self.requests = 0
        self.told: list[bool] = []
        self.registration: Registration | None = None
        self._server = rpc.Server(RpcConfig())

    async def start(self) -> None:
        service = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
        self._server.add(service, worker_pb2_grpc.add_WorkerServiceServicer_to_server, self)
        port = self._server.bind("127.0.0.1")
        await self._server.start()
        record = pb.WorkerRecord(
            worker=self.key,
            pool=self.pool,
            role=ROLE_VALUES[self.role],
            state=pb.WORKER_STATE_READY,
            endpoint=f"127.0.0.1:{port}",
            fingerprint="f",
            model="m",
            num_blocks=8,
            block_tokens=16,
            max_num_seqs=4,
        )
        record.started_at.GetCurrentTime()
        ttl = self.site.lease_seconds
        self.registration = Registration(self.site.store, self.site.cluster, record, ttl_seconds=ttl)
        await self.registration.start()

    async def stop(self) -> None:
        if self.registration is not None:
            await self.registration.stop()
        await self._server.stop(0)

    async def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> worker_pb2.DrainResponse:
        self.site.drained.append(self.name)
        if self.name not in self.site.stubborn:
            assert self.registration is not None
            self.registration.update_state(pb.WORKER_STATE_DRAINING)
            self.site.begin(self.registration.stop())
        return worker_pb2.DrainResponse()

    async def Cordon(self, request: worker_pb2.CordonRequest, context: Any) -> worker_pb2.CordonResponse:
        self.told.append(request.cordoned)
        assert self.registration is not None
        self.registration.update_cordoned(request.cordoned)
        return worker_pb2.CordonResponse()

    async def Inspect(self, request: worker_pb2.InspectRequest, context: Any) -> worker_pb2.InspectResponse:
        return worker_pb2.InspectResponse(worker=self.key, requests=self.requests)


class Site:
    """Where the workers run. ``places``: how many there is room for; ``broken``: names of those that cannot start."""

    def __init__(self, store: Store, cluster: str, lease_seconds: int) -> None:
        self.store, self.cluster, self.lease_seconds = store, cluster, lease_seconds
        self.workers: dict[str, ThreadWorker] = {}
        self.waiting: dict[str, tuple[str, str]] = {}
        self.places = 100
        self.broken: set[str] = set()
        self.stubborn: set[str] = set()
        self.started: list[str] = []
        self.drained: list[str] = []
        self.ended: list[str] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def add(self, name: str, role: str, pool: str) -> None:
        self.started.append(name)
        if len(self.workers) >= self.places:
            self.waiting[name] = (role, pool)
        elif name not in self.broken:
            self.workers[name] = ThreadWorker(self, name, role, pool)
            await self.workers[name].start()

    async def make_room(self, places: int) -> None:
        self.places, waiting = places, self.waiting
        self.waiting = {}
        for name, (role, pool) in waiting.items():
            await self.add(name, role, pool)

    async def end(self, name: str) -> None:
        self.waiting.pop(name, None)
        worker = self.workers.pop(name, None)
        self.ended.append(name)
        if worker is not None:
            await worker.stop()

    async def close(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self.end(name) for name in list(self.workers)))


class ThreadPools(RayPools):
    """A control process's hold on those of a pool's workers that are on a site."""

    def __init__(self, config: TwinpoolConfig, site: Site) -> None:
        super().__init__(config, Path("/nonexistent"))
        self.site = site
        self._pool = config.worker.pool
        self._mine: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self._mine)

    def role_of(self, name: str) -> str:
        return self._mine.get(name, "")

    def manages(self, name: str) -> bool:
        return name in self._mine

    async def start(self) -> None:
        pass

    async def adopt(self) -> None:
        run = {name: (worker.role, worker.pool) for name, worker in self.site.workers.items()}
        self._mine = {
            name: role for name, (role, pool) in (run | self.site.waiting).items() if pool == self._pool
        }

    async def add(self, role: str, name: str) -> None:
        if name not in self._mine:
            self._mine[name] = role
            await self.site.add(name, role, self._pool)

    async def retire(self, name: str) -> None:
        await self.site.end(name)
        self._mine.pop(name, None)

    async def look(self, names: Iterable[str]) -> dict[str, Look]:
        waiting = self.site.waiting
        return {
            name: Look("PENDING_CREATION" if name in waiting else "ALIVE", 0, "", name not in waiting)
            for name in names
        }

    async def lacking(self, role: str) -> tuple[int, str]:
        waiting = list(self.site.waiting.values())
        return waiting.count((role, self._pool)), "it needs CPU 1; missing CPU" if waiting else ""

    def check_one(self, name: str) -> None:
        if name in self.site.broken and name in self._mine:
            raise TwinpoolError("CHECKPOINT_INVALID", f"{name}: planted")

    def started(self, name: str) -> bool:
        return name in self.site.workers

    async def lives(self, name: str) -> bool | None:
        return name in self.site.workers

    async def disown(self) -> None:
        self._mine.clear()

    async def stop(self) -> None:
        self._mine.clear()
