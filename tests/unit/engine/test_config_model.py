# SPDX-License-Identifier: Apache-2.0
"""Reading config.json: equal to transformers where it is silent, exact errors where it is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from twinpool.engine.config import FAMILIES, Family, ModelConfig
from twinpool.engine.tiny import tiny_config
from twinpool.errors import CheckpointError

CLASSES: dict[str, Any] = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "deepseek_v2": transformers.DeepseekV2Config,
    "deepseek_v3": transformers.DeepseekV3Config,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_silent_config_means_what_transformers_assumes(family: Family) -> None:
    extra = {"num_experts_per_tok": 6} if family == "deepseek_v2" else {}
    theirs = CLASSES[family](**extra)
    ours = ModelConfig.from_dict({"model_type": family, **extra})
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope.kind == theirs.rope_parameters["rope_type"]
    if ours.mla is None:
        default = theirs.hidden_size // theirs.num_attention_heads
        assert ours.head_dim == getattr(theirs, "head_dim", default)
        assert ours.moe is None
        return
    assert ours.moe is not None
    for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        assert getattr(ours.mla, name) == getattr(theirs, name)
    assert ours.moe.num_experts == theirs.n_routed_experts
    assert ours.moe.num_shared_experts == theirs.n_shared_experts
    assert ours.moe.experts_per_token == theirs.num_experts_per_tok
    assert ours.moe.intermediate_size == theirs.moe_intermediate_size
    assert ours.moe.routed_scaling_factor == theirs.routed_scaling_factor
    assert ours.moe.first_dense_layers == theirs.first_k_dense_replace
    if family == "deepseek_v3":
        assert (ours.moe.num_groups, ours.moe.groups_per_token) == (theirs.n_group, theirs.topk_group)
        assert ours.moe.normalize == theirs.norm_topk_prob


def test_both_forms_of_rope_parameters_mean_the_same() -> None:
    old = tiny_config("deepseek_v3")
    new = tiny_config("deepseek_v3")
    scaling = new.pop("rope_scaling")
    scaling = {"rope_type": scaling.pop("type"), "rope_theta": new.pop("rope_theta"), **scaling}
    new["rope_parameters"] = scaling
    assert ModelConfig.from_dict(old).rope == ModelConfig.from_dict(new).rope


def test_top_level_original_length_wins_and_yarn_factor_can_be_implied() -> None:
    raw = tiny_config("qwen3", overrides={"max_position_embeddings": 4096})
    raw["rope_scaling"] = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512}
    assert ModelConfig.from_dict(raw).rope.factor == 8.0
    raw["original_max_position_embeddings"] = 1024
    rope = ModelConfig.from_dict(raw).rope
    assert (rope.original_max_positions, rope.factor) == (1024, 4.0)


def test_null_query_rank_is_not_the_default_rank() -> None:
    without = ModelConfig.from_dict(tiny_config("deepseek_v2", overrides={"q_lora_rank": None}))
    assert without.mla is not None
    assert without.mla.q_lora_rank is None
    silent = tiny_config("deepseek_v2")
    del silent["q_lora_rank"]
    default = ModelConfig.from_dict(silent)
    assert default.mla is not None
    assert default.mla.q_lora_rank == 1536


def test_stop_ids_come_from_generation_config_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama")))
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == (1,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3, 1]}))
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == (1, 3)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 512}))
    with pytest.raises(CheckpointError, match=r"eos_token_id = 512.*below vocab_size 512"):
        ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("family", "key", "value", "message"),
    [
        ("llama", "hidden_size", 0, "hidden_size = 0: must be an integer of at least 1"),
        ("llama", "hidden_size", "96", "hidden_size = '96': must be an integer"),
        ("llama", "hidden_size", True, "hidden_size = True: must be an integer"),
        ("llama", "rms_norm_eps", float("nan"), "rms_norm_eps = nan: must be a finite number"),
        ("llama", "num_key_value_heads", 4, "num_key_value_heads = 4: must divide num_attention_heads 6"),
        ("llama", "head_dim", 15, "head_dim = 15: must be even"),
        ("llama", "hidden_act", "gelu", "hidden_act = 'gelu': is not supported"),
        ("llama", "quantization_config", "fp8", "quantization_config = 'fp8': must be an object"),
        ("llama", "tie_word_embeddings", "yes", "tie_word_embeddings = 'yes': must be true or false"),
        ("llama", "rope_scaling", {"type": "dynamic", "factor": 2.0}, "rope_type = 'dynamic'.*supported: default"),
        ("llama", "rope_scaling", {"rope_type": "linear"}, "rope_parameters.factor = None: is required"),
        ("llama", "rope_scaling", [1], r"rope_parameters = \[1\]: must be an object"),
        ("llama", "rope_scaling", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: is not supported"),
        ("qwen2", "use_sliding_window", True, "use_sliding_window = True: is not supported"),
        ("qwen3", "layer_types", ["sliding_attention"], "layer_types.*only full_attention"),
        ("deepseek_v2", "topk_method", "noaux_tc", "topk_method = 'noaux_tc': is not supported"),
        ("deepseek_v3", "scoring_func", "softmax", "scoring_func = 'softmax': is not supported"),
        ("deepseek_v3", "n_group", 3, "n_group = 3: must divide n_routed_experts 8"),
        ("deepseek_v3", "topk_group", 1, "topk_group = 1: leaves fewer than 3 experts"),
        ("deepseek_v3", "num_experts_per_tok", 9, "num_experts_per_tok = 9: must be at most 8"),
        ("deepseek_v3", "qk_rope_head_dim", 7, "qk_rope_head_dim = 7: must be even"),
    ],
)  # fmt: skip
def test_errors_name_key_and_value(family: Family, key: str, value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        ModelConfig.from_dict(tiny_config(family, overrides={key: value}))
    assert caught.value.metadata["file"] == "config.json"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json does not exist"),
        ("{", "cannot be read as JSON"),
        ("[]", "holds a list, not an object"),
        ('{"model_type": "gpt2"}', "model_type 'gpt2' is not supported .*deepseek_v3"),
        ("{}", "model_type None is not supported"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_pretrained(tmp_path)
