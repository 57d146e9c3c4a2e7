# SPDX-License-Identifier: Apache-2.0
"""Rotary tables and expert routing against transformers; which attention path runs when."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_oracle import PagedRun, random_prompts
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.config import Family, ModelConfig, MoeConfig
from twinpool.engine.kernels import REGISTRY, KernelRegistry, torch_fused
from twinpool.engine.kernels.operations import ExpertWeights, Routing
from twinpool.engine.kernels.registry import Kernel
from twinpool.engine.loader import load_model
from twinpool.engine.models.moe import Experts, Router
from twinpool.engine.models.paths import expand_is_cheaper
from twinpool.engine.models.rotary import RotaryEmbedding, deinterleave, inverse_frequencies, softmax_scale
from twinpool.engine.tiny import write_tiny

V3_ROPE = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
           "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip
ROPES: dict[str, tuple[Family, dict[str, Any]]] = {
    "default": ("llama", {}),
    "linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama 3.1": ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA31, "max_position_embeddings": 131072}),
    "qwen yarn": ("qwen3", {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                                                               "original_max_position_embeddings": 32768}}),
    "yarn with its own factor": ("qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False,
                                                            "attention_factor": 1.25,
                                                            "original_max_position_embeddings": 32768}}),
    "deepseek v3": ("deepseek_v3", {"rope_scaling": V3_ROPE, "max_position_embeddings": 163840}),
    "deepseek v2 lite": ("deepseek_v2", {"num_experts_per_tok": 6, "max_position_embeddings": 163840,
                                         "rope_scaling": V3_ROPE | {"mscale": 0.707, "mscale_all_dim": 0.707}}),
    "no correction": ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0,
                                                       "original_max_position_embeddings": 4096}}),
}  # fmt: skip


def theirs(family: Family, raw: dict[str, Any]) -> Any:
    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}  # fmt: skip
    return getattr(transformers, f"{names[family]}Config")(**raw)


@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_and_scales_are_those_of_transformers(rope: str) -> None:
    family, raw = ROPES[rope]
    config = ModelConfig.from_dict({"model_type": family, **raw})
    reference = theirs(family, raw)
    found, factor = inverse_frequencies(config.rope)
    kind = reference.rope_parameters["rope_type"]
    assert config.rope.kind == kind
    if kind == "default":
        expected, scaling = (
            1.0 / 10000.0 ** (torch.arange(0, found.numel() * 2, 2) / (found.numel() * 2)),
            1.0,
        )
    else:
        expected, scaling = ROPE_INIT_FUNCTIONS[kind](reference)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(scaling, rel=1e-12)
    if config.mla is not None:
        module = transformers.models.deepseek_v3.modeling_deepseek_v3
        scale = module.yarn_apply_mscale(reference.rope_parameters, reference.qk_head_dim**-0.5)
        assert softmax_scale(config.rope, config.mla.qk_head_dim) == pytest.approx(scale, rel=1e-12)


def test_rotation_keeps_scores_a_function_of_distance() -> None:
    config = ModelConfig.from_dict({"model_type": "llama"})
    rotary = RotaryEmbedding(config.rope)
    query, key = torch.randn(2, 1, 1, 128).unbind()
    scores = []
    for start in (0, 1000):
        tables = rotary.tables(torch.tensor([start + 7, start]), torch.float32, torch_fused.rotary_tables)
        rotated = tables.rotate(torch.cat((query, key)))
        scores.append(float((rotated[0] * rotated[1]).sum()))
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)
    assert scores[0] != pytest.approx(float((query * key).sum()), abs=1e-3)


def test_deinterleaving_only_renames_pairs() -> None:
    values = torch.arange(8)
    assert values[deinterleave(8)].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def moe(family: Family, **raw: Any) -> tuple[MoeConfig, Any]:
    base = {"n_routed_experts": 16, "num_experts_per_tok": 4, "hidden_size": 32, "moe_intermediate_size": 8,
            "n_group": 4, "topk_group": 2} | raw  # fmt: skip
    config = ModelConfig.from_dict(
        {"model_type": family, "num_attention_heads": 4, "num_key_value_heads": 4, **base}
    )
    assert config.moe is not None
    return config.moe, theirs(family, base)


@pytest.mark.parametrize(
    ("family", "raw"),
    [
        ("deepseek_v2", {"topk_method": "greedy", "routed_scaling_factor": 1.0}),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}),
        ("deepseek_v3", {"routed_scaling_factor": 2.5}),
        ("deepseek_v3", {"norm_topk_prob": False, "n_group": 1, "topk_group": 1}),
    ],
)
def test_routing_is_that_of_transformers(family: Family, raw: dict[str, Any]) -> None:
    config, reference = moe(family, **raw)
    kind = DeepseekV2TopkRouter if family == "deepseek_v2" else DeepseekV3TopkRouter
    other = kind(reference)
    ours = Router(config, 32, device="cpu")
    torch.manual_seed(0)
    weight, hidden = torch.randn(16, 32), torch.randn(200, 32)
    other.weight.data.copy_(weight)
    ours.weight.copy_(weight)
    if ours.bias is not None:
        ours.bias.copy_(torch.randn(16) * 0.3)
        other.e_score_correction_bias.copy_(ours.bias)
    with torch.no_grad():
        _, expected_weights, expected_experts = other(hidden)
    weights, experts, _ = torch_fused.route(hidden, ours.weight, ours.bias, ours.spec)
    for found, expected in ((experts, expected_experts), (weights, expected_weights)):
        dense = [torch.zeros(200, 16).scatter_(1, ids, values.float()) for ids, values in
                 ((experts, found), (expected_experts, expected))]  # fmt: skip
        torch.testing.assert_close(dense[0], dense[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_experts_sum_what_each_token_chose(tokens: int) -> None:
    config, _ = moe("deepseek_v3")
    experts = Experts(config, 32, dtype=torch.float32, device="cpu")
    torch.manual_seed(1)
    experts.gate_up.normal_(std=0.2)
    experts.down.normal_(std=0.2)
    hidden, weights = torch.randn(tokens, 32), torch.rand(tokens, 4)
    chosen = (
        torch.stack([torch.randperm(16)[:4] for _ in range(tokens)]) if tokens else torch.empty(0, 4).long()
    )
    found = torch_fused.moe(hidden, Routing(weights, chosen), ExpertWeights(experts.gate_up, experts.down))
    expected = torch.zeros(tokens, 32)
    for token in range(tokens):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            gate, up = (experts.gate_up[expert] @ hidden[token]).chunk(2)
            expected[token] += weight * (experts.down[expert] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_layers_with_experts_follow_first_dense_and_frequency() -> None:
    config, _ = moe("deepseek_v3", first_k_dense_replace=2, moe_layer_freq=2)
    assert [config.is_moe_layer(layer) for layer in range(7)] == [
        False,
        False,
        True,
        False,
        True,
        False,
        True,
    ]


def counting_registry(calls: list[str]) -> KernelRegistry:
    """The built-in kernels, each that reads or writes KV noting its name when it runs."""
    registry = KernelRegistry()
    for kernel in REGISTRY.kernels():

        def run(*args: Any, _kernel: Kernel = kernel, **kwargs: Any) -> Any:
            if _kernel.operation.endswith(("attention", "rows", "write_kv")):
                calls.append(_kernel.operation)
            return _kernel.function(*args, **kwargs)

        registry.add(replace(kernel, function=run))
    return registry


MLA, GQA, EXPANDED = "mla_paged_attention", "gqa_paged_attention", "mla_expanded_attention"


@pytest.mark.parametrize(
    ("family", "options", "prefill", "decode"),
    [
        ("llama", {"attention": "gqa"}, {GQA}, {GQA}),
        ("llama", {"attention": "latent"}, {GQA}, {MLA}),
        ("llama", {"attention": "latent", "prefill": "absorbed"}, {MLA}, {MLA}),
        ("deepseek_v3", {}, {EXPANDED}, {MLA}),
        ("deepseek_v3", {"attention": "gqa"}, {EXPANDED}, {MLA}),
        ("deepseek_v3", {"prefill": "absorbed"}, {MLA}, {MLA}),
    ],
)
def test_each_path_runs_its_own_kernels(
    tmp_path: Path, family: Family, options: dict[str, Any], prefill: set[str], decode: set[str]
) -> None:
    calls: list[str] = []
    model = load_model(write_tiny(tmp_path, family), registry=counting_registry(calls), **options)
    run = PagedRun(model)
    for seq in (0, 1):
        run.add(seq, random_prompts([40], 512)[0])
    run.step([(0, 39)])
    write = {"write_kv" if family == "llama" else "mla_rows"}
    assert set(calls) == prefill | write
    calls.clear()
    run.step([(0, 1)])
    assert set(calls) == decode | write
    calls.clear()
    run.tokens[0].append(5)
    run.step([(0, 1), (1, 40)])
    assert set(calls) == prefill | decode | write
    assert sum(call in write for call in calls) == model.config.num_layers


@pytest.mark.parametrize(
    ("queries", "context", "cheaper"), [(512, 512, True), (64, 64, True), (8, 4096, False)]
)
def test_deepseek_v3_expands_fresh_prompts_and_not_short_chunks(
    queries: int, context: int, cheaper: bool
) -> None:
    config = ModelConfig.from_dict({"model_type": "deepseek_v3"})
    assert config.mla is not None
    batch = AttentionBatch.build(
        q_start=np.array([0, queries], np.int32),
        context=np.array([context], np.int32),
        block_table=np.zeros((1, 64), np.int32),
        slots=np.zeros(queries, np.int64),
        block_tokens=64,
        num_decodes=0,
    )
    assert expand_is_cheaper(batch, config.mla) is cheaper
