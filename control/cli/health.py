# SPDX-License-Identifier: Apache-2.0
"""``twinpool health``: asks one process of a cluster whether it is live or ready, also over mutual TLS."""

import asyncio
from pathlib import Path
from typing import Annotated, Any, get_args

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.markup import escape

from twinpool.control.cli.access import Access, access
from twinpool.control.cli.output import EXIT_FAILED, EXIT_UNAVAILABLE, EXIT_USAGE, err, fail
from twinpool.errors import ConfigError, from_rpc_error
from twinpool.rpc import channel, join_address
from twinpool.rpc.roles import PeerRole

TIMEOUT_SECONDS = 3.0


def health(
    target: Annotated[str, typer.Argument(help="The process: host:port, or its host if --port is given.")],
    port: Annotated[int | None, typer.Option(help="Its port; the host may then be an IPv6 address.")] = None,
    service: Annotated[
        str, typer.Option(help="What is asked: live, a service's full name, or nothing for the process.")
    ] = "",
    role: Annotated[
        str,
        typer.Option(help="What its certificate must name where tls.role_domain is set: router, worker ..."),
    ] = "",
    timeout: Annotated[float, typer.Option(help="Longest wait, in seconds.", min=0.1)] = TIMEOUT_SECONDS,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML file.", envvar="TWINPOOL_CONFIG")
    ] = None,
) -> None:
    """Ask a process whether it is ready: exit status 0 if it serves, 1 if it does not, 3 if it does not answer."""
    known: PeerRole | None = next((name for name in get_args(PeerRole) if name == role), None)
    if role and known is None:
        raise fail(f"unknown role {role!r}; known: {', '.join(get_args(PeerRole))}", EXIT_USAGE)
    endpoint = target if port is None else join_address(target, port)
    try:
        status = asyncio.run(_ask(endpoint, service, access(), known, timeout))
    except ConfigError as error:
        raise fail(error.message, EXIT_USAGE) from error
    except grpc.aio.AioRpcError as error:
        # Of all services that are asked for, only one that the process does not have is unknown to it.
        code = EXIT_USAGE if error.code() is grpc.StatusCode.NOT_FOUND else EXIT_UNAVAILABLE
        known_cause = access().explained(from_rpc_error(error))
        said = (
            known_cause.message
            if known_cause.reason != "SERVER_UNREACHABLE"
            else f"{endpoint}: {error.details()}"
        )
        raise fail(escape(f"{error.code().name}: {said}"), code) from error
    err.print(status)
    if status != "SERVING":
        raise typer.Exit(EXIT_FAILED)


async def _ask(endpoint: str, service: str, way: Access, role: PeerRole | None, timeout: float) -> str:
    async with channel(endpoint, way.config.rpc, way.dial(endpoint, role)) as connection:
        stub: Any = health_pb2_grpc.HealthStub(connection)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name
