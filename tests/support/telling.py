# SPDX-License-Identifier: Apache-2.0
"""Workers and routers that only tell of themselves, over real gRPC, for what the control process makes of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from google.protobuf.duration_pb2 import Duration

from twinpool.config import TwinpoolConfig
from twinpool.control.overview.collect import Collector
from twinpool.errors import TwinpoolError
from twinpool.rpc import Server
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import router_pb2, router_pb2_grpc, telemetry_pb2, worker_pb2, worker_pb2_grpc


def seconds(value: float) -> Duration:
    """A duration of so many seconds."""
    message = Duration()
    message.FromNanoseconds(int(value * 1e9))
    return message


class TellingWorker(worker_pb2_grpc.WorkerServiceServicer):
    """``says`` is what it answers to Inspect, once ``gate`` is open."""

    def __init__(self, record: pb.WorkerRecord) -> None:
        self.record = record
        self.says = worker_pb2.InspectResponse(
            worker=record.worker, role=record.role, total_blocks=100, free_blocks=60, cached_blocks=30
        )
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = 0

    def did(
        self, uptime: float, busy: float, prompt: int = 0, drawn: int = 0, queried: int = 0, hit: int = 0
    ) -> None:
        """Totals since the start."""
        self.says.uptime.CopyFrom(seconds(uptime))
        self.says.busy.CopyFrom(seconds(busy))
        self.says.prompt_tokens, self.says.generation_tokens = prompt, drawn
        self.says.query_tokens, self.says.hit_tokens = queried, hit

    async def Inspect(self, request: worker_pb2.InspectRequest, context: Any) -> worker_pb2.InspectResponse:
        self.asked += 1
        await self.gate.wait()
        return self.says


class TellingRouter(router_pb2_grpc.RouterServiceServicer):
    """``telemetry``, ``requests`` and ``prefixes`` are what it answers; ``error``: what it answers instead."""

    def __init__(self, record: pb.RouterRecord) -> None:
        self.record = record
        self.telemetry = telemetry_pb2.RouterTelemetry()
        self.requests: list[telemetry_pb2.RequestSummary] = []
        self.prefixes: list[telemetry_pb2.HotPrefix] = []
        self.asked: list[router_pb2.ListRouterRequestsRequest] = []
        self.keys: list[str] = []
        self.error: TwinpoolError | None = None

    async def GetTelemetry(
        self, request: router_pb2.GetTelemetryRequest, context: Any
    ) -> router_pb2.GetTelemetryResponse:
        self.keys.append(dict(context.invocation_metadata()).get("authorization", ""))
        if self.error is not None:
            raise self.error
        return router_pb2.GetTelemetryResponse(router=self.record.name, telemetry=self.telemetry)

    async def ListRouterRequests(
        self, request: router_pb2.ListRouterRequestsRequest, context: Any
    ) -> router_pb2.ListRouterRequestsResponse:
        self.asked.append(request)
        if self.error is not None:
            raise self.error
        return router_pb2.ListRouterRequestsResponse(requests=self.requests, found=len(self.requests))

    async def ListHotPrefixes(
        self, request: router_pb2.ListHotPrefixesRequest, context: Any
    ) -> router_pb2.ListHotPrefixesResponse:
        return router_pb2.ListHotPrefixesResponse(prefixes=self.prefixes)


class Cluster:
    """What the store would say of them, and a collector that asks them."""

    def __init__(self, config: TwinpoolConfig, stack: AsyncExitStack) -> None:
        self.config = config
        self._stack = stack
        self.tellers: dict[str, TellingWorker] = {}
        self.routes: dict[str, TellingRouter] = {}
        self.operations: list[pb.Operation] = []
        self.servers: dict[str, Server] = {}
        self.collector = Collector(config, self, lambda: self.operations)

    def workers(self, pool: str = "") -> list[pb.WorkerRecord]:
        return [one.record for _, one in sorted(self.tellers.items())]

    def routers(self) -> list[pb.RouterRecord]:
        return [one.record for _, one in sorted(self.routes.items())]

    async def worker(self, name: str, role: "worker_pb2.Role.ValueType", **record: Any) -> TellingWorker:
        """Registers one that is ready."""
        fields: dict[str, Any] = {"pool": "default", "state": pb.WORKER_STATE_READY} | record
        worker = worker_pb2.WorkerId(name=name, incarnation=7)
        made = TellingWorker(pb.WorkerRecord(worker=worker, role=role, **fields))
        made.record.endpoint = await self._serve(
            name, "WorkerService", worker_pb2_grpc.add_WorkerServiceServicer_to_server, made
        )
        self.tellers[name] = made
        return made

    async def router(self, name: str) -> TellingRouter:
        """Registers one."""
        made = TellingRouter(pb.RouterRecord(name=name, incarnation=9))
        made.record.endpoint = await self._serve(
            name, "RouterService", router_pb2_grpc.add_RouterServiceServicer_to_server, made
        )
        self.routes[name] = made
        return made

    async def _serve(self, name: str, service: str, register: Any, servicer: object) -> str:
        server = self.servers[name] = Server(self.config.rpc)
        server.add(f"twinpool.v1.{service}", register, servicer)
        port = server.bind("127.0.0.1")
        await server.start()
        self._stack.push_async_callback(server.stop, 0)
        return f"127.0.0.1:{port}"


@asynccontextmanager
async def telling_cluster(**control: Any) -> AsyncIterator[Cluster]:
    """Nobody is there yet. ``control``: the section's keys."""
    config = TwinpoolConfig.model_validate(
        {"control": {"http_port": 0} | control, "pools": {"prefill_workers": 2, "decode_workers": 1}}
    )
    async with AsyncExitStack() as stack:
        made = Cluster(config, stack)
        stack.push_async_callback(made.collector.close)
        yield made
