# SPDX-License-Identifier: Apache-2.0
"""Typed access to the keys of a ``config.json``, with errors that name key, value and what is allowed."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinpool.errors import CheckpointError

_MISSING: Any = object()

INTEGER_MAX = (1 << 31) - 1
"""No size of a model is larger, and products of two fit in 64 bits."""

_GQA: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}
# What transformers' configuration classes assume where a config.json is silent.
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _GQA | {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048}
    | {"bos_token_id": 1, "eos_token_id": 2},
    "qwen2": _GQA | {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
    | {"num_key_value_heads": 32},
    "qwen3": _GQA | {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
    | {"num_key_value_heads": 32, "head_dim": 128},
    "deepseek_v2": _GQA | {
        "vocab_size": 102400,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "v_head_dim": 128,
        "moe_intermediate_size": 1407,
    },
    "deepseek_v3": _GQA | {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
}  # fmt: skip


def unreadable(path: Path, error: PermissionError) -> CheckpointError:
    """What to say of a file or directory that exists and that this process' user may not read."""
    message = f"{path}: user {os.geteuid()} may not read it: {error}"
    return CheckpointError(message, file=path.name, reason="CHECKPOINT_UNREADABLE")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint's file. Raises CheckpointError naming the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist", file=path.name) from None
    except PermissionError as error:
        raise unreadable(path, error) from error
    # JSON may be nested deeper than Python follows.
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}", file=path.name) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not an object", file=path.name)
    return found


class Values:
    """The keys of a configuration. ``default`` applies to a key that is absent or null; without one it is required."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._values = values
        self._where = where

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def error(self, key: str, value: object, problem: str) -> CheckpointError:
        """An error about one key; to be raised by the caller."""
        return CheckpointError(f"config.json: {self._where}{key} = {value!r}: {problem}", file="config.json")

    def _take(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            if default is _MISSING:
                raise self.error(key, None, "is required")
            return default
        return value

    def integer(
        self, key: str, *, default: Any = _MISSING, minimum: int = 1, maximum: int = INTEGER_MAX
    ) -> int:
        value = self._take(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(key, value, f"must be an integer of at least {minimum}")
        if value > maximum:
            raise self.error(key, value, f"must be at most {maximum}")
        return value

    def optional_integer(self, key: str, *, minimum: int = 1) -> int | None:
        return None if self._values.get(key) is None else self.integer(key, minimum=minimum)

    def number(self, key: str, *, default: Any = _MISSING, minimum: float = 0.0) -> float:
        value = self._take(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise self.error(key, value, "must be a finite number")
        if value < minimum:
            raise self.error(key, value, f"must be at least {minimum}")
        return float(value)

    def optional_number(self, key: str, *, minimum: float = 0.0) -> float | None:
        return None if self._values.get(key) is None else self.number(key, minimum=minimum)

    def boolean(self, key: str, *, default: Any = _MISSING) -> bool:
        value = self._take(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "must be true or false")
        return value

    def string(self, key: str, *, default: Any = _MISSING) -> str:
        value = self._take(key, default)
        if not isinstance(value, str):
            raise self.error(key, value, "must be a string")
        return value

    def choice(self, key: str, allowed: tuple[str, ...], *, default: Any = _MISSING) -> str:
        value = self.string(key, default=default)
        if value not in allowed:
            raise self.error(key, value, f"is not supported (supported: {', '.join(allowed)})")
        return value
