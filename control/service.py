# SPDX-License-Identifier: Apache-2.0
"""The ControlService: what operators call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc.aio

from twinpool.config import TwinpoolConfig
from twinpool.control.operations import Operations
from twinpool.control.overview.collect import Collector
from twinpool.control.view import ClusterView
from twinpool.errors import TwinpoolError
from twinpool.rpc import AuditLog, Server, join_address
from twinpool.v1 import control_pb2, control_pb2_grpc

SERVICE = "twinpool.v1.ControlService"
STOP_GRACE_SECONDS = 1.0
TIMEOUT_SECONDS_MAX = 86400.0

INTERVAL_SECONDS: Final = 1.0
INTERVAL_SECONDS_MIN: Final = 0.2
INTERVAL_SECONDS_MAX: Final = 60.0


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Answers from the view of the store."""

    def __init__(self, view: ClusterView, operations: Operations, collector: Collector) -> None:
        self._view = view
        self._collector = collector
        self._operations = operations
        self._stopping = asyncio.Event()

    async def ListWorkers(
        self,
        request: control_pb2.ListWorkersRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> control_pb2.ListWorkersResponse:
        """Lists the workers that the store knows."""
        return control_pb2.ListWorkersResponse(workers=self._view.workers(request.pool))

    async def DrainWorker(
        self,
        request: control_pb2.DrainWorkerRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> control_pb2.DrainWorkerResponse:
        """See ``Operations.begin``."""
        kind = control_pb2.OPERATION_KIND_DRAIN
        operation = await self._operations.begin(kind, request.worker, _seconds(request))
        return control_pb2.DrainWorkerResponse(operation=operation)

    async def RestartWorker(
        self,
        request: control_pb2.RestartWorkerRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> control_pb2.RestartWorkerResponse:
        """See ``Operations.begin``."""
        kind = control_pb2.OPERATION_KIND_RESTART
        operation = await self._operations.begin(kind, request.worker, _seconds(request))
        return control_pb2.RestartWorkerResponse(operation=operation)

    async def GetOperation(
        self,
        request: control_pb2.GetOperationRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> control_pb2.GetOperationResponse:
        """See ``Operations.get``."""
        return control_pb2.GetOperationResponse(operation=self._operations.get(request.id))

    async def ListOperations(
        self,
        request: control_pb2.ListOperationsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> control_pb2.ListOperationsResponse:
        """All that are known."""
        return control_pb2.ListOperationsResponse(operations=self._operations.all())

    async def GetOverview(
        self,
        request: control_pb2.GetOverviewRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> control_pb2.GetOverviewResponse:
        """See ``Collector.overview``."""
        return control_pb2.GetOverviewResponse(overview=await self._collector.overview(request.pool))

    async def WatchOverview(
        self,
        request: control_pb2.WatchOverviewRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[control_pb2.WatchOverviewResponse]:
        """The first one at once, then one each interval, until the caller ends it or this process stops."""
        interval = _interval(request)
        while not self._stopping.is_set():
            overview = await self._collector.overview(request.pool)
            yield control_pb2.WatchOverviewResponse(overview=overview)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), interval)

    async def ListRequests(
        self,
        request: control_pb2.ListRequestsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> control_pb2.ListRequestsResponse:
        """See ``Collector.requests``."""
        return await self._collector.requests(request)

    def stop(self) -> None:
        """Ends the streams."""
        self._stopping.set()


def _seconds(request: control_pb2.DrainWorkerRequest | control_pb2.RestartWorkerRequest) -> float | None:
    """The timeout that was asked for. Raises INVALID_ARGUMENT."""
    if not request.HasField("timeout"):
        return None
    seconds = request.timeout.ToNanoseconds() / 1e9
    if not 0 <= seconds <= TIMEOUT_SECONDS_MAX:
        raise TwinpoolError(
            "INVALID_ARGUMENT", f"timeout: {seconds:g} s is not in 0..{TIMEOUT_SECONDS_MAX:g}"
        )
    return seconds


def _interval(request: control_pb2.WatchOverviewRequest) -> float:
    """Seconds between two overviews. Raises INVALID_ARGUMENT."""
    if not request.HasField("interval"):
        return INTERVAL_SECONDS
    seconds = request.interval.ToNanoseconds() / 1e9
    if not INTERVAL_SECONDS_MIN <= seconds <= INTERVAL_SECONDS_MAX:
        raise TwinpoolError(
            "INVALID_ARGUMENT",
            f"interval: {seconds:g} s is not in {INTERVAL_SECONDS_MIN:g}..{INTERVAL_SECONDS_MAX:g}",
        )
    return seconds


class ControlServer:
    """The gRPC server of the control process."""

    def __init__(
        self, config: TwinpoolConfig, view: ClusterView, operations: Operations, collector: Collector
    ) -> None:
        self._config = config
        self._servicer = ControlServicer(view, operations, collector)
        self._server = Server(config.rpc, config.tls, audit=AuditLog(config.audit.file, "control"))
        self._server.add(SERVICE, control_pb2_grpc.add_ControlServiceServicer_to_server, self._servicer)
        self.endpoint = ""

    async def start(self) -> None:
        """Binds, publishes ``endpoint`` and serves."""
        host = self._config.control.host
        self.endpoint = join_address(host, self._server.bind(host, self._config.control.port))
        await self._server.start()
        await self._server.set_serving(True)

    async def stop(self) -> None:
        """Stops to serve."""
        self._servicer.stop()
        await self._server.stop(STOP_GRACE_SECONDS)
