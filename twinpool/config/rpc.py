# SPDX-License-Identifier: Apache-2.0
"""How calls are carried."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from twinpool.config.base import Section
from twinpool.config.sections import MiB


class RpcConfig(Section):
    """gRPC settings of connections inside the cluster, and keep-alive of all."""

    max_message_bytes: int = Field(
        default=64 * MiB,
        ge=MiB,
        le=1 << 30,
        description="Largest message between router and workers, in bytes. gRPC's default of 4 MiB is too small for long prompts.",
    )
    keepalive_seconds: float = Field(
        default=10.0,
        ge=1,
        le=3600,
        description="Time between two HTTP/2 pings on a silent connection, in seconds.",
    )
    keepalive_timeout_seconds: float = Field(
        default=5.0, ge=0.1, le=600, description="A ping unanswered for so many seconds ends the connection."
    )
    connect_timeout_seconds: float = Field(
        default=5.0, ge=0.1, le=600, description="Longest wait for a connection, in seconds."
    )
    transport: Literal["auto", "python", "native"] = Field(
        default="auto",
        description="What carries a router's calls: `python` is gRPC for Python; `native` is gRPC's C core under the router's own "
        "adapter, which costs some 0.7 times the CPU; `auto` takes `native` where its gRPC is 1.73 or newer. An older one, as Debian "
        "12 has it, can be silenced by one client.",
    )
