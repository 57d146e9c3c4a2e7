# SPDX-License-Identifier: Apache-2.0
"""Random tiny checkpoints in Hugging Face format: config, safetensors, tokenizer, generation config.

They are for tests: every mechanism of the family is on, a forward pass takes milliseconds, and weights are scaled so
that greedy tokens do not hang on rounding and do depend on the whole context (attention is peaked, not flat).
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from twinpool.engine.checkpoint import INDEX_FILE, SINGLE_FILE, share
from twinpool.engine.config import FAMILIES, Family, ModelConfig
from twinpool.engine.float8_config import FLOAT8, KEY
from twinpool.engine.kernels import REGISTRY, Capability, Kernels
from twinpool.engine.kernels.torch_fp8_moe import pack_weight
from twinpool.engine.loader import DTYPES
from twinpool.engine.models.decoder import PagedDecoder
from twinpool.engine.models.weights import SCALES, WeightSlot
from twinpool.engine.tiny_tokenizer import BOS, EOS, IM_END, PAD, SPECIAL_TOKENS, write_tokenizer

_ARCHITECTURES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
_GQA: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
_MLA: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}
_YARN: dict[str, Any] = {"type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1}
_FAMILY: dict[Family, dict[str, Any]] = {
    "llama": _GQA
    | {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    },
    "qwen2": _GQA | {"rope_theta": 1000000.0, "use_sliding_window": False},
    "qwen3": _GQA | {"rope_theta": 1000000.0, "use_sliding_window": False},
    "deepseek_v2": _MLA
    | {
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.0,
        "rope_theta": 10000.0,
        "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v3": _MLA
    | {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        "rope_theta": 10000.0,
        "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
}
# Standard deviations are gain / sqrt(inputs). Peaked attention needs large scores; what a gated MLP loses in its
# activation, its last layer makes up for.
_GAINS = {
    "q_proj": 1.4,
    "q_b_proj": 1.4,
    "k_proj": 1.4,
    "o_proj": 1.5,
    "down_proj": 1.5,
    "gate": 2.0,
    "lm_head": 4.0,
}


def tiny_config(
    family: Family,
    *,
    layers: int = 3,
    hidden: int = 96,
    vocab: int = 512,
    max_context: int = 4096,
    dtype: str = "float32",
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The ``config.json`` of a tiny model of ``family``; ``overrides`` replace keys. ValueError for a bad family."""
    if family not in FAMILIES:
        raise ValueError(f"family {family!r} is not one of {', '.join(FAMILIES)}")
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        "max_position_embeddings": max_context,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": SPECIAL_TOKENS.index(BOS),
        "eos_token_id": SPECIAL_TOKENS.index(EOS),
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "use_cache": True,
        "dtype": dtype,
    } | json.loads(json.dumps(_FAMILY[family]))
    scaling = config.get("rope_scaling")
    if scaling and scaling.get("type") == "yarn":
        scaling["original_max_position_embeddings"] = max(max_context // scaling["factor"], 1)
    return config | dict(overrides or {})


def write_tiny(
    path: str | Path,
    family: Family,
    *,
    seed: int = 0,
    layers: int = 3,
    hidden: int = 96,
    vocab: int = 512,
    max_context: int = 4096,
    dtype: str = "float32",
    shards: int = 1,
    float8: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a random checkpoint of ``family`` into ``path`` (made if absent) and returns it.

    The same arguments give the same bytes. ``vocab`` is also the tokenizer's size; ``overrides`` replace keys of
    ``config.json``; ``shards`` > 1 writes an index. ``float8`` packs the same weights' linear layers as DeepSeek does: codes
    and a scale for each block of 128 x 128. Raises ValueError for a bad argument, CheckpointError for
    overrides that make no valid model.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if shards < 1:
        raise ValueError(f"shards must be at least 1, not {shards}")
    raw = tiny_config(
        family,
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        max_context=max_context,
        dtype=dtype,
        overrides=({KEY: FLOAT8} if float8 else {}) | dict(overrides or {}),
    )
    config = ModelConfig.from_dict(raw)
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory, config.vocab_size, config.max_position_embeddings)
    _write_json(directory / "config.json", raw)
    generation = {
        "bos_token_id": SPECIAL_TOKENS.index(BOS),
        "eos_token_id": [SPECIAL_TOKENS.index(EOS), SPECIAL_TOKENS.index(IM_END)],
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
    }
    _write_json(directory / "generation_config.json", generation)
    _write_weights(directory, _random_weights(config, seed, DTYPES[dtype]), shards)
    return directory


def _random_weights(config: ModelConfig, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A tensor for each slot of the model. Each depends on its name and the seed alone."""
    weights: dict[str, Tensor] = {}
    for slot in _slots(replace(config, float8_weights=False)):
        # 32 bits: torch's CPU generator ignores the rest of a seed.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {slot.name}".encode()))
        noise = torch.randn(slot.shape, generator=generator)
        weights[slot.name] = _scaled(slot.name, noise).to(_stored_dtype(slot.name, dtype))
    for slot in _slots(config):
        if slot.form in ("codes", "widened"):
            weights[slot.name], weights[slot.name + SCALES] = pack_weight(weights[slot.name])
    return weights


def _slots(config: ModelConfig) -> Iterator[WeightSlot]:
    kernels = Kernels.select(REGISTRY, Capability("cpu"), torch.float32)
    return PagedDecoder(config, kernels, device="meta").slots()


def _scaled(name: str, noise: Tensor) -> Tensor:
    module, kind = name.rsplit(".", 2)[-2:]
    if kind != "weight":
        return noise * 0.1  # biases, the routing correction included
    if "norm" in module:
        return 1.0 + noise * 0.1
    if module == "embed_tokens":
        return noise
    gain: float = _GAINS.get(module, 1.0) / noise.shape[-1] ** 0.5
    return noise * gain


def _stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Routing stays float32 in checkpoints of any dtype."""
    return torch.float32 if name.endswith("e_score_correction_bias") else dtype


def _write_weights(directory: Path, weights: dict[str, Tensor], shards: int) -> None:
    for old in [*directory.glob("*.safetensors"), directory / INDEX_FILE]:
        old.unlink(missing_ok=True)
    if shards == 1:
        _save(weights, directory / SINGLE_FILE)
        return
    total = sum(tensor.nbytes for tensor in weights.values())
    parts: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    passed = 0
    for name, tensor in weights.items():
        parts[min(passed * shards // total, shards - 1)][name] = tensor
        passed += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        _save(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(directory / INDEX_FILE, index)


def _save(weights: dict[str, Tensor], path: Path) -> None:
    save_file(weights, path, metadata={"format": "pt"})
    share(path)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
