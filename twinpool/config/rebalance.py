# SPDX-License-Identifier: Apache-2.0
"""The section of the rebalancer, which moves workers between the roles of a pool."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from twinpool.config.base import RELOADABLE, Section


class RebalanceSection(Section):
    """When the control process moves workers between prefill and decode. See docs/rebalancing.md."""

    auto: bool = Field(
        default=False,
        description="Whether the control process rebalances by itself a pool that is new to it; then the pool's own setting counts.",
    )
    dry_run: bool = Field(
        default=False,
        description="Decide and record what would be done, but do nothing by itself.",
        json_schema_extra=RELOADABLE,
    )
    scale: bool = Field(
        default=False,
        description="Let it also ask for more workers, or give some back, within the bounds of the pool. Off: it only flips.",
        json_schema_extra=RELOADABLE,
    )
    ttft_seconds: float = Field(
        default=2.0,
        gt=0,
        le=3600,
        description="Objective of the time to first token, in seconds.",
        json_schema_extra=RELOADABLE,
    )
    itl_seconds: float = Field(
        default=0.1,
        gt=0,
        le=60,
        description="Objective of the time between two tokens, in seconds.",
        json_schema_extra=RELOADABLE,
    )
    interval_seconds: float = Field(
        default=5.0,
        ge=0.1,
        le=3600,
        description="Time between two decisions, in seconds.",
        json_schema_extra=RELOADABLE,
    )
    window_seconds: float = Field(
        default=60.0,
        ge=0.5,
        le=3600,
        description="Time over which load is averaged, in seconds. Several bursts long: a burst is no change of the load.",
        json_schema_extra=RELOADABLE,
    )
    confirm_seconds: float = Field(
        default=10.0,
        ge=0,
        le=3600,
        description="How long a role that is short of all its capacity again must have asked for a worker before it gets one, in "
        "seconds. One that is short of less asks longer, two windows at most.",
        json_schema_extra=RELOADABLE,
    )
    dwell_seconds: float = Field(
        default=120.0,
        ge=0,
        le=86400,
        description="How long a worker keeps a role that it was given, in seconds.",
        json_schema_extra=RELOADABLE,
    )
    cooldown_seconds: float = Field(
        default=10.0,
        ge=0,
        le=86400,
        description="Pause of a pool after the end of a flip, in seconds, so that its effect shows before the next one.",
        json_schema_extra=RELOADABLE,
    )
    reversal_seconds: float = Field(
        default=300.0,
        ge=0,
        le=86400,
        description="In any window of so many seconds at most one flip goes against the direction of the one before it.",
        json_schema_extra=RELOADABLE,
    )
    utilisation_high: float = Field(
        default=0.85,
        gt=0,
        le=2,
        description="Share of a role's capacity within the objectives from which on it asks for a worker.",
        json_schema_extra=RELOADABLE,
    )
    utilisation_low: float = Field(
        default=0.65,
        gt=0,
        le=2,
        description="With utilisation_high the dead band: a role gives a worker only if it is better off afterwards than the "
        "taker is now by low / high. Also the share below which a role can be scaled down.",
        json_schema_extra=RELOADABLE,
    )
    max_flips: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Most flips of a pool under way at a time.",
        json_schema_extra=RELOADABLE,
    )
    flip_seconds: float = Field(
        default=5.0,
        ge=0,
        le=3600,
        description="What a flip takes besides its drain, in seconds, until flips of the pool were measured.",
        json_schema_extra=RELOADABLE,
    )
    horizon_seconds: float = Field(
        default=300.0,
        gt=0,
        le=86400,
        description="Time over which a flip has to win more than it costs, in seconds. About as long as a load lasts.",
        json_schema_extra=RELOADABLE,
    )


def rebalance_rules(section: RebalanceSection) -> Iterator[str]:
    """The rules between keys that the section breaks; each message starts with the key at fault."""
    if section.utilisation_low >= section.utilisation_high:
        yield (
            f"rebalance.utilisation_low: {section.utilisation_low} is not below rebalance.utilisation_high = "
            f"{section.utilisation_high}; without a band between them the pool would swing"
        )
    if section.window_seconds < section.interval_seconds:
        yield (
            f"rebalance.window_seconds: {section.window_seconds} is below rebalance.interval_seconds = "
            f"{section.interval_seconds}; a window must hold at least one interval"
        )
