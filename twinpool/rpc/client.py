# SPDX-License-Identifier: Apache-2.0
"""Channels to other processes."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from twinpool.config import RpcConfig, TlsConfig
from twinpool.errors import TwinpoolError
from twinpool.rpc.keys import key_interceptors
from twinpool.rpc.options import client_options
from twinpool.rpc.roles import PeerRole, server_name
from twinpool.rpc.tls import channel_credentials
from twinpool.rpc.transport import native_channel


def channel(
    target: str,
    config: RpcConfig,
    tls: TlsConfig | None = None,
    *,
    max_message_bytes: int | None = None,
    key: str = "",
    role: PeerRole | None = None,
    native: bool = False,
) -> grpc.aio.Channel:
    """A channel to ``target`` (host:port), whose calls show the API key ``key``. It connects on first use. The caller closes it.
    ``role``: what the certificate there must name, where ``tls.role_domain`` is set. ``native``: calls that are streams both ways go
    over gRPC's C core; see ``transport``.

    Raises ConfigError if TLS is on and a file cannot be used.
    """
    secured = tls is not None and tls.enabled
    options = client_options(
        config,
        max_message_bytes=max_message_bytes,
        server_name=server_name(role, tls.role_domain, tls.server_name)
        if tls is not None and secured
        else "",
    )
    if tls is not None and secured:
        made = grpc.aio.secure_channel(
            target, channel_credentials(tls), options=options, interceptors=key_interceptors(key)
        )
    else:
        made = grpc.aio.insecure_channel(target, options=options, interceptors=key_interceptors(key))
    return native_channel(target, options, tls if secured else None, made) if native else made


async def wait_ready(connection: grpc.aio.Channel, target: str, timeout_seconds: float) -> None:
    """Returns once the channel is connected. Raises SERVER_UNREACHABLE after ``timeout_seconds``."""
    try:
        async with asyncio.timeout(timeout_seconds):
            await connection.channel_ready()
    except TimeoutError:
        raise TwinpoolError(
            "SERVER_UNREACHABLE",
            f"no connection to {target} within {timeout_seconds:g} s",
            metadata={"target": target},
        ) from None
