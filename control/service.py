# SPDX-License-Identifier: Apache-2.0
"""The ControlService: what operators call."""

from __future__ import annotations

from typing import Any

import grpc.aio

from twinpool.config import TwinpoolConfig
from twinpool.control.view import ClusterView
from twinpool.rpc import Server, join_address
from twinpool.v1 import control_pb2, control_pb2_grpc

SERVICE = "twinpool.v1.ControlService"
STOP_GRACE_SECONDS = 1.0


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Answers from the view of the store."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view

    async def ListWorkers(
        self,
        request: control_pb2.ListWorkersRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> control_pb2.ListWorkersResponse:
        """Lists the workers that the store knows."""
        return control_pb2.ListWorkersResponse(workers=self._view.workers(request.pool))


class ControlServer:
    """The gRPC server of the control process."""

    def __init__(self, config: TwinpoolConfig, view: ClusterView) -> None:
        self._config = config
        self._server = Server(config.rpc, config.tls)
        self._server.add(
            SERVICE, control_pb2_grpc.add_ControlServiceServicer_to_server, ControlServicer(view)
        )
        self.endpoint = ""

    async def start(self) -> None:
        """Binds, publishes ``endpoint`` and serves."""
        host = self._config.control.host
        self.endpoint = join_address(host, self._server.bind(host, self._config.control.port))
        await self._server.start()
        await self._server.set_serving(True)

    async def stop(self) -> None:
        """Stops to serve."""
        await self._server.stop(STOP_GRACE_SECONDS)
