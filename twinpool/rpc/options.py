# SPDX-License-Identifier: Apache-2.0
"""Channel arguments. None that matters is left to gRPC's defaults (4 MiB messages, shared ports, proxies)."""

from __future__ import annotations

import contextlib
import ipaddress

from twinpool.config import RpcConfig

Options = list[tuple[str, int | str]]

MAX_STREAMS = 4096
"""Most calls at a time on one connection. A client that wants more waits, or opens another connection."""

HANDSHAKE_SECONDS = 10
"""A peer that has not spoken TLS and HTTP/2 after so long is disconnected: it may be no peer at all."""

# 16 KiB leaves room for a status with details and a trace context; the default of 8 KiB drops long ones.
_MAX_METADATA_BYTES = 16 * 1024
_MIN_RECONNECT_MS = 50
_MAX_RECONNECT_MS = 2000


def _common(config: RpcConfig, max_message_bytes: int) -> Options:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * _MAX_METADATA_BYTES),
        ("grpc.keepalive_time_ms", int(config.keepalive_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", int(config.keepalive_timeout_seconds * 1000)),
        # The keep-alive's own timeout does not end a silent connection; this one does (60 s by default).
        ("grpc.http2.ping_timeout_ms", int(config.keepalive_timeout_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(
    config: RpcConfig, *, max_message_bytes: int | None = None, reuse_port: bool = False
) -> Options:
    """Options of a server. ``max_message_bytes``: both directions; None takes ``rpc.max_message_bytes``.

    ``reuse_port`` lets several processes share a port; off, a second bind fails and steals no connections.
    """
    return [
        *_common(config, config.max_message_bytes if max_message_bytes is None else max_message_bytes),
        ("grpc.so_reuseport", int(reuse_port)),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
        # A client that pings as configured, or up to twice as often, is not told to go away.
        ("grpc.http2.min_ping_interval_without_data_ms", int(config.keepalive_seconds * 500)),
    ]


def client_options(
    config: RpcConfig, *, max_message_bytes: int | None = None, server_name: str = ""
) -> Options:
    """Options of a channel. ``server_name``: expected in the server's certificate instead of the host."""
    options: Options = [
        *_common(config, config.max_message_bytes if max_message_bytes is None else max_message_bytes),
        # Retries are the router's decision: gRPC must not repeat a call behind its back.
        ("grpc.enable_retries", 0),
        # A proxy of the environment must not see traffic inside the cluster.
        ("grpc.enable_http_proxy", 0),
        # Channels to one address must not share a connection in back-off: a restarted peer is tried at once.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", _MIN_RECONNECT_MS),
        # Despite its name this bounds the time of one attempt to connect.
        ("grpc.min_reconnect_backoff_ms", int(config.connect_timeout_seconds * 1000)),
        ("grpc.max_reconnect_backoff_ms", _MAX_RECONNECT_MS),
    ]
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    return options


def loopback_beside(host: str) -> str | None:
    """The loopback, where ``host`` is an address that leaves it out, as a pod's is: `kubectl port-forward` and who is in the same
    pod dial there."""
    with contextlib.suppress(ValueError):
        found = ipaddress.ip_address(host.strip("[]"))
        if not (found.is_loopback or found.is_unspecified):
            return "127.0.0.1" if found.version == 4 else "::1"
    return None


def join_address(host: str, port: int) -> str:
    """host:port, with the brackets that an IPv6 host needs."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
