# SPDX-License-Identifier: Apache-2.0
"""The ControlService: what operators call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final, TypeAlias

import grpc.aio

from twinpool.config import TwinpoolConfig
from twinpool.control.applying import ConfigDesk
from twinpool.control.desk import PoolDesk
from twinpool.control.events import Filter
from twinpool.control.operations import Operations
from twinpool.control.overview.collect import Collector
from twinpool.control.rebalance.desk import RebalanceDesk
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

Timed: TypeAlias = (
    control_pb2.DrainWorkerRequest
    | control_pb2.RestartWorkerRequest
    | control_pb2.FlipWorkerRequest
    | control_pb2.ScalePoolRequest
    | control_pb2.RebalancePoolRequest
)


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Answers from the view of the store, and lets operations begin where this process leads."""

    def __init__(
        self,
        view: ClusterView,
        operations: Operations,
        desk: PoolDesk | None = None,
        rebalance: RebalanceDesk | None = None,
        collector: Collector | None = None,
        applying: ConfigDesk | None = None,
    ) -> None:
        """``desk`` None: operations on workers are all there is, and nobody else leads. ``rebalance`` None: nobody rebalances
        pools. ``collector`` None: nobody asks workers and routers how they are. ``applying`` None: nobody changes the
        configuration."""
        self._rebalance = rebalance
        self._view = view
        self._asked = collector
        self._applying = applying
        self._operations = operations
        self._stopping = asyncio.Event()
        self._own_desk = desk

    def _check(self, *, changes: bool) -> None:
        if self._own_desk is not None:
            self._own_desk.check(changes=changes)

    def _desk(self, *, changes: bool = False) -> PoolDesk:
        """Raises NOT_LEADER or UNIMPLEMENTED."""
        if self._own_desk is None:
            raise TwinpoolError("UNIMPLEMENTED", "this process looks after no pools")
        self._own_desk.check(changes=changes)
        return self._own_desk

    def _collector(self) -> Collector:
        """Raises UNIMPLEMENTED."""
        if self._asked is None:
            raise TwinpoolError("UNIMPLEMENTED", "this control process collects no overview")
        return self._asked

    def stop(self) -> None:
        """Ends the streams."""
        self._stopping.set()

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
        self._check(changes=True)
        kind = control_pb2.OPERATION_KIND_DRAIN
        operation = await self._operations.begin(kind, request.worker, _seconds(request))
        return control_pb2.DrainWorkerResponse(operation=operation)

    async def RestartWorker(
        self,
        request: control_pb2.RestartWorkerRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> control_pb2.RestartWorkerResponse:
        """See ``Operations.begin``."""
        self._check(changes=True)
        kind = control_pb2.OPERATION_KIND_RESTART
        operation = await self._operations.begin(kind, request.worker, _seconds(request))
        return control_pb2.RestartWorkerResponse(operation=operation)

    async def FlipWorker(
        self,
        request: control_pb2.FlipWorkerRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> control_pb2.FlipWorkerResponse:
        """See ``Operations.begin``."""
        self._check(changes=True)
        kind, seconds = control_pb2.OPERATION_KIND_FLIP, _seconds(request)
        operation = await self._operations.begin(
            kind, request.worker, seconds, request.role, force=request.force
        )
        return control_pb2.FlipWorkerResponse(operation=operation)

    async def GetOperation(
        self,
        request: control_pb2.GetOperationRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> control_pb2.GetOperationResponse:
        """See ``Operations.get``."""
        self._check(changes=False)
        return control_pb2.GetOperationResponse(operation=self._operations.get(request.id))

    async def ListOperations(
        self,
        request: control_pb2.ListOperationsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> control_pb2.ListOperationsResponse:
        """All that are known."""
        self._check(changes=False)
        return control_pb2.ListOperationsResponse(operations=self._operations.all())

    async def GetOverview(
        self,
        request: control_pb2.GetOverviewRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> control_pb2.GetOverviewResponse:
        """See ``Collector.overview``."""
        return control_pb2.GetOverviewResponse(overview=await self._collector().overview(request.pool))

    async def WatchOverview(
        self,
        request: control_pb2.WatchOverviewRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[control_pb2.WatchOverviewResponse]:
        """The first one at once, then one each interval, until the caller ends it or this process stops."""
        interval = _interval(request)
        while not self._stopping.is_set():
            overview = await self._collector().overview(request.pool)
            yield control_pb2.WatchOverviewResponse(overview=overview)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), interval)

    async def ListRequests(
        self,
        request: control_pb2.ListRequestsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> control_pb2.ListRequestsResponse:
        """See ``Collector.requests``."""
        return await self._collector().requests(request)

    async def ListPools(
        self,
        request: control_pb2.ListPoolsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> control_pb2.ListPoolsResponse:
        """See ``PoolDesk.list_pools``."""
        return control_pb2.ListPoolsResponse(pools=self._desk().list_pools(request.pool))

    async def ScalePool(
        self,
        request: control_pb2.ScalePoolRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> control_pb2.ScalePoolResponse:
        """See ``Scaling.begin``."""
        operation = await self._desk(changes=True).scale(request, _seconds(request))
        return control_pb2.ScalePoolResponse(operation=operation)

    async def CordonWorker(
        self,
        request: control_pb2.CordonWorkerRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> control_pb2.CordonWorkerResponse:
        """See ``Cordons.set``."""
        told = await self._desk(changes=True).cordon(request.worker, True)
        return control_pb2.CordonWorkerResponse(told=told)

    async def UncordonWorker(
        self,
        request: control_pb2.UncordonWorkerRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> control_pb2.UncordonWorkerResponse:
        """See ``Cordons.set``."""
        told = await self._desk(changes=True).cordon(request.worker, False)
        return control_pb2.UncordonWorkerResponse(told=told)

    async def DescribeWorker(
        self,
        request: control_pb2.DescribeWorkerRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> control_pb2.DescribeWorkerResponse:
        """See ``PoolDesk.describe``."""
        return await self._desk().describe(request.worker)

    async def ListEvents(
        self,
        request: control_pb2.ListEventsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> control_pb2.ListEventsResponse:
        """See ``EventLog.all``."""
        return control_pb2.ListEventsResponse(events=self._desk().events(_filter(request)))

    async def WatchEvents(
        self,
        request: control_pb2.WatchEventsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[control_pb2.WatchEventsResponse]:
        """See ``EventLog.follow``."""
        async for event in self._desk().follow(_filter(request)):
            yield control_pb2.WatchEventsResponse(event=event)

    async def RebalancePool(
        self,
        request: control_pb2.RebalancePoolRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> control_pb2.RebalancePoolResponse:
        """See ``RebalanceDesk.rebalance``."""
        if self._rebalance is None:
            raise TwinpoolError("UNIMPLEMENTED", "this control process does not rebalance pools")
        self._check(changes=True)
        return await self._rebalance.rebalance(request, _seconds(request))

    async def GetConfig(
        self,
        request: control_pb2.GetConfigRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> control_pb2.GetConfigResponse:
        """See ``ConfigDesk.get``."""
        return self._config_desk(changes=False).get()

    async def ApplyConfig(
        self,
        request: control_pb2.ApplyConfigRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> control_pb2.ApplyConfigResponse:
        """See ``ConfigDesk.apply``."""
        return await self._config_desk(changes=True).apply(request)

    def _config_desk(self, *, changes: bool) -> ConfigDesk:
        """Raises NOT_LEADER or UNIMPLEMENTED."""
        if self._applying is None:
            raise TwinpoolError("UNIMPLEMENTED", "this control process changes no configuration")
        self._check(changes=changes)
        return self._applying


def _filter(request: control_pb2.ListEventsRequest | control_pb2.WatchEventsRequest) -> Filter:
    """The events that are asked for. Raises INVALID_ARGUMENT."""
    since = None
    if request.HasField("since"):
        since = request.since.ToNanoseconds() / 1e9
        if since < 0:
            raise TwinpoolError("INVALID_ARGUMENT", f"since: {since:g} s is below 0")
    return Filter(request.pool, request.subject, since, request.warning)


def _seconds(request: Timed) -> float | None:
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
        self,
        config: TwinpoolConfig,
        view: ClusterView,
        operations: Operations,
        desk: PoolDesk | None = None,
        rebalance: RebalanceDesk | None = None,
        collector: Collector | None = None,
        applying: ConfigDesk | None = None,
    ) -> None:
        """See ``ControlServicer``."""
        self._config = config
        self._servicer = ControlServicer(view, operations, desk, rebalance, collector, applying)
        self._server = Server(config.rpc, config.tls, audit=AuditLog(config.audit.file, "control"))
        self._server.add(SERVICE, control_pb2_grpc.add_ControlServiceServicer_to_server, self._servicer)
        self.endpoint = ""

    async def start(self) -> None:
        """Binds, publishes ``endpoint`` and serves."""
        host = self._config.control.host
        port = self._server.bind(host, self._config.control.port)
        self._server.bind_loopback(host, port)
        self.endpoint = join_address(host, port)
        await self._server.start()
        await self._server.set_serving(True)

    async def stop(self) -> None:
        """Stops to serve."""
        self._servicer.stop()
        await self._server.stop(STOP_GRACE_SECONDS)
