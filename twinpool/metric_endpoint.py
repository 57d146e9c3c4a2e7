# SPDX-License-Identifier: Apache-2.0
"""Where a process shows its metrics."""

from __future__ import annotations

from prometheus_client import REGISTRY, start_http_server

from twinpool.errors import TwinpoolError


def start_http(host: str = "127.0.0.1", port: int = 0) -> int:
    """Serves /metrics on a thread of its own until the process ends. Returns the bound port.

    Raises PORT_UNAVAILABLE.
    """
    try:
        server, _thread = start_http_server(port, addr=host, registry=REGISTRY)
    except OSError as error:
        raise TwinpoolError(
            "PORT_UNAVAILABLE", f"cannot serve metrics on {host}:{port}: {error.strerror}"
        ) from None
    return int(server.server_port)
