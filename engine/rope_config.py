# SPDX-License-Identifier: Apache-2.0
"""Rotary position parameters of a checkpoint, in either of the two forms that config files use."""

from dataclasses import dataclass
from typing import Any, Literal, cast

from twinpool.engine.config_values import Values

RopeKind = Literal["default", "linear", "llama3", "yarn"]
_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of ``dim`` values. Fields beyond ``factor`` are used by the kinds that define them."""

    kind: RopeKind
    dim: int
    theta: float
    factor: float
    original_max_positions: int
    low_freq_factor: float
    high_freq_factor: float
    attention_factor: float | None
    beta_fast: float
    beta_slow: float
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool


def read_rope(values: Values, dim: int, max_positions: int) -> RopeConfig:
    """Reads ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (older files).

    Precedence, spellings and defaults are those of transformers: ``rope_scaling`` wins over ``rope_parameters``,
    ``type`` is an old name of ``rope_type``, a theta inside wins over one outside.
    """
    raw = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(raw, dict):
        raise values.error("rope_parameters", raw, "must be an object")
    inner = Values(_with_outer(raw, values), where="rope_parameters.")
    kind = cast(RopeKind, inner.choice("rope_type", _KINDS, default=raw.get("type") or "default"))
    if inner.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise inner.error("partial_rotary_factor", inner.get("partial_rotary_factor"), "is not supported")
    original = inner.integer("original_max_position_embeddings", default=max_positions)
    if kind == "default":
        factor = 1.0
    elif kind == "yarn" and inner.get("factor") is None:
        factor = max_positions / original
    else:
        factor = inner.number("factor", minimum=1e-6)
    return RopeConfig(
        kind=kind,
        dim=dim,
        theta=inner.number("rope_theta", default=10_000.0, minimum=1e-6),
        factor=factor,
        original_max_positions=original,
        low_freq_factor=inner.number("low_freq_factor") if kind == "llama3" else 1.0,
        high_freq_factor=inner.number("high_freq_factor") if kind == "llama3" else 1.0,
        attention_factor=inner.optional_number("attention_factor"),
        # Zero means "unset" to transformers, which reads these with `or`.
        beta_fast=inner.number("beta_fast", default=32.0) or 32.0,
        beta_slow=inner.number("beta_slow", default=1.0) or 1.0,
        mscale=inner.optional_number("mscale"),
        mscale_all_dim=inner.optional_number("mscale_all_dim"),
        truncate=inner.boolean("truncate", default=True),
    )


def _with_outer(raw: dict[str, Any], values: Values) -> dict[str, Any]:
    merged = {"rope_theta": values.get("rope_theta")} | raw
    # A top-level value is the authors' pretraining length and takes precedence where a kind needs it.
    outer = values.get("original_max_position_embeddings")
    if outer is not None:
        merged["original_max_position_embeddings"] = outer
    return merged
