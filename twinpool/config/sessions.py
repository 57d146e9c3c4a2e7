# SPDX-License-Identifier: Apache-2.0
"""The section of sessions and of prefixes that are pinned for them."""

from __future__ import annotations

from pydantic import Field

from twinpool.config.base import Section


class SessionsSection(Section):
    """Sessions of agents, and prefixes that stay cached for them. Routers and workers read it."""

    max_sessions: int = Field(
        default=1 << 16,
        ge=1,
        le=1 << 22,
        description="Sessions whose last turn a router remembers, some 400 bytes each; the one unused longest is forgotten first.",
    )
    ttl_seconds: float = Field(
        default=600.0,
        gt=0,
        le=86400,
        description="How long a router remembers where the last turn of a session ran, in seconds.",
    )
    max_noted_sessions: int = Field(
        default=4096,
        ge=1,
        le=1 << 20,
        description="Sessions whose last turn's blocks a worker knows, to evict them first once the session is released: "
        "12 bytes a block.",
    )
    max_pin_seconds: float = Field(
        default=3600.0, gt=0, le=86400 * 7, description="Longest time for which one Warm may pin, in seconds."
    )
    max_pinned_tokens: int = Field(
        default=1 << 17,
        ge=0,
        le=1 << 40,
        description="Most tokens that a tenant may have pinned on one worker, where the tenants file says nothing; 0: none.",
    )
    max_pinned_ratio: float = Field(
        default=0.25,
        ge=0,
        lt=1,
        description="Largest share of a worker's blocks that pins of all tenants may hold together; 0: nothing is pinned.",
    )
    max_pins: int = Field(default=4096, ge=1, le=1 << 20, description="Most pins of a worker.")
    call_timeout_seconds: float = Field(
        default=5.0,
        ge=0.1,
        le=600,
        description="Longest wait for a worker that is asked to pin or to release, in seconds. It answers between two steps.",
    )
