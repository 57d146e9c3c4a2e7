# SPDX-License-Identifier: Apache-2.0
"""``quantization_config`` of a checkpoint whose linear layers hold float8 weights, as DeepSeek publishes them."""

from typing import Any

from twinpool.engine.config_values import Values

KEY = "quantization_config"

FLOAT8: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
"""What DeepSeek-V3 says of itself: codes are float8_e4m3fn, each block of 128 x 128 has a scale."""

# The first names modules that are plain, the second what transformers does with the weights: the tensors say both.
_NEUTRAL = {"modules_to_not_convert", "dequantize"}


def read_float8(values: Values) -> bool:
    """Whether the linear layers of a model hold float8 codes and scales. Raises CheckpointError for any other form."""
    raw = values.get(KEY)
    if raw is None:
        return False
    if not isinstance(raw, dict):
        raise values.error(KEY, raw, "must be an object")
    found = Values({key: value for key, value in raw.items() if value is not None}, f"{KEY}.")
    found.choice("quant_method", ("fp8",))
    found.choice("fmt", ("e4m3",), default="e4m3")
    found.choice("activation_scheme", ("dynamic",))
    # Scales that are powers of two: they multiply as any other.
    found.choice("scale_fmt", ("ue8m0",), default="ue8m0")
    size = found.get("weight_block_size")
    if size != FLOAT8["weight_block_size"]:
        raise found.error("weight_block_size", size, "is not supported (supported: [128, 128])")
    for key, value in raw.items():
        if value is not None and key not in FLOAT8.keys() | _NEUTRAL | {"scale_fmt"}:
            raise found.error(key, value, "is not supported")
    return True
