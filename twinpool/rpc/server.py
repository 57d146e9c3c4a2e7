# SPDX-License-Identifier: Apache-2.0
"""A gRPC server with health, reflection, limits and a clean stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from twinpool.config import RpcConfig, TlsConfig
from twinpool.errors import TwinpoolError
from twinpool.logs import get_logger
from twinpool.rpc.audit import AuditLog
from twinpool.rpc.guard import ErrorInterceptor
from twinpool.rpc.options import join_address, loopback_beside, server_options
from twinpool.rpc.roles import RoleGuard
from twinpool.rpc.tls import server_credentials
from twinpool.rpc.transport import native_server

LIVE: Final = "live"
"""Name under which health says whether the process's loops tick. That it answers shows that its event loop does; "" and
the services say whether calls are welcome."""

_log = get_logger(__name__)

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Server:
    """Add services, bind, start, mark as serving, stop. All on one event loop.

    Servicers may raise TwinpoolError: the client gets its status. Health of the process ("") and of each
    service is NOT_SERVING until :meth:`set_serving`.
    """

    def __init__(
        self,
        config: RpcConfig,
        tls: TlsConfig | None = None,
        *,
        max_message_bytes: int | None = None,
        reuse_port: bool = False,
        audit: AuditLog | None = None,
        native: bool = False,
    ) -> None:
        """``max_message_bytes``: of both directions; None takes ``rpc.max_message_bytes``. ``audit``: where administrative calls are
        written down; it is closed with the server. ``native``: over gRPC's C core; see ``transport``. It is then made on the event
        loop."""
        self._tls = tls if tls is not None and tls.enabled else None
        self._audit = audit
        domain = self._tls.role_domain if self._tls is not None else ""
        options = server_options(config, max_message_bytes=max_message_bytes, reuse_port=reuse_port)
        guard = ErrorInterceptor(RoleGuard(domain) if domain else None, audit)
        self._native = native
        self.raw: Any = (
            native_server(options, guard, self._tls)
            if native
            else grpc.aio.server(options=options, interceptors=(guard,))
        )
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self.services: list[str] = []
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.raw)

    def add(self, service: str, register: Callable[[Any, Any], None], servicer: object) -> None:
        """Adds a service: its full name, the generated ``add_..._to_server``, and the servicer.

        ``server.add("twinpool.v1.WorkerService", add_WorkerServiceServicer_to_server, servicer)``
        """
        register(servicer, self.raw)
        self.services.append(service)

    def bind(self, host: str, port: int = 0) -> int:
        """Binds and returns the port, which is the system's choice for 0. Raises PORT_UNAVAILABLE."""
        address = join_address(host, port)
        bound = self._add(address)
        if bound == 0:
            raise TwinpoolError(
                "PORT_UNAVAILABLE", f"cannot listen on {address}: in use, or not an address of this host"
            )
        return bound

    def bind_loopback(self, host: str, port: int) -> None:
        """Listens on the loopback as well where ``host`` leaves it out. Without it the server is as good to all others, so a
        failure is only logged."""
        if (loopback := loopback_beside(host)) is not None:
            address = join_address(loopback, port)
            if self._add(address) == 0:
                _log.warning("loopback_not_bound", address=address)

    def _add(self, address: str) -> int:
        """The port; 0: it cannot be bound."""
        try:
            if self._tls is None or self._native:
                return int(self.raw.add_insecure_port(address))
            return int(self.raw.add_secure_port(address, server_credentials(self._tls)))
        except RuntimeError:
            return 0

    async def start(self) -> None:
        """Starts to answer, with health NOT_SERVING. Adds reflection of all services added so far."""
        names = (*self.services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.raw)
        await self.set_serving(False)
        await self.set_serving(True, LIVE)
        await self.raw.start()

    async def set_serving(self, serving: bool, service: str | None = None) -> None:
        """Sets health of one service or of LIVE, or of the process and all its services."""
        status = _SERVING if serving else _NOT_SERVING
        for name in ("", *self.services) if service is None else (service,):
            await self._health.set(name, status)

    async def stop(self, grace_seconds: float) -> None:
        """Health goes to NOT_SERVING, new calls are refused; running ones have ``grace_seconds`` to end.

        After that they are cancelled; their ``finally`` blocks may still run when this returns.
        """
        await self._health.enter_graceful_shutdown()
        await self.raw.stop(grace_seconds)
        if self._audit is not None:
            self._audit.close()

    async def wait(self) -> None:
        """Returns when the server has stopped."""
        await self.raw.wait_for_termination()
