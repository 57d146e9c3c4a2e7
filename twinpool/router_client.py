# SPDX-License-Identifier: Apache-2.0
"""A client of RouterService: what operators ask of a router."""

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

import grpc

from twinpool.config import RpcConfig, TlsConfig
from twinpool.errors import from_rpc_error
from twinpool.rpc import channel
from twinpool.v1 import router_pb2 as pb
from twinpool.v1 import router_pb2_grpc

TIMEOUT_SECONDS = 10.0
RECORDING_TIMEOUT_SECONDS = 300.0


class RouterClient:
    """One channel to a router. Errors of the server are raised as TwinpoolError with the server's reason."""

    def __init__(
        self, endpoint: str, rpc: RpcConfig | None = None, tls: TlsConfig | None = None, *, key: str = ""
    ) -> None:
        """``key``: an operator's API key, where the cluster has tenants."""
        self.endpoint = endpoint
        self._channel = channel(endpoint, rpc or RpcConfig(), tls, key=key)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close(None)

    async def inspect(self) -> pb.InspectRouterResponse:
        """What the router knows of the workers and of their caches."""
        try:
            return await self._stub.InspectRouter(pb.InspectRouterRequest(), timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def lookup(self, request: pb.LookupPrefixRequest) -> pb.LookupPrefixResponse:
        """Which workers hold the beginning of a prompt."""
        try:
            return await self._stub.LookupPrefix(request, timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def trace(self, request_id: str) -> pb.TraceRequestResponse:
        """What happened to a request. Raises REQUEST_NOT_FOUND."""
        try:
            return await self._stub.TraceRequest(
                pb.TraceRequestRequest(request_id=request_id), timeout=TIMEOUT_SECONDS
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def recording(self) -> AsyncIterator[pb.FetchRecordingResponse]:
        """Pieces of the log of the router's core, in order. Raises RECORDING_OFF."""
        try:
            async for piece in self._stub.FetchRecording(
                pb.FetchRecordingRequest(), timeout=RECORDING_TIMEOUT_SECONDS
            ):
                yield piece
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
