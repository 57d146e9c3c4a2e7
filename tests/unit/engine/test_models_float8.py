# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with float8 weights against transformers on what the codes stand for: logits and greedy tokens."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_oracle import Oracle, PagedRun, random_prompts

from tests.support.float8 import read_all, widen, write_widened
from twinpool.engine.config import FAMILIES, Family, ModelConfig
from twinpool.engine.fingerprint import fingerprint
from twinpool.engine.kernels import REGISTRY, Capability, Kernel, KernelRegistry, Kernels
from twinpool.engine.loader import load_model
from twinpool.engine.models.decoder import PagedDecoder
from twinpool.engine.models.mla import MlaAttention
from twinpool.engine.models.packed import PackedLinear
from twinpool.engine.tiny import write_tiny

LENGTH, NEW_TOKENS = 61, 12
TOLERANCE = 1e-4
"""Logits have a standard deviation of 4; the weights are the same float32 numbers on both sides."""


@dataclass(frozen=True)
class Variant:
    """A family, the sizes of its layers beside the blocks of 128, and the files that hold it."""

    family: Family
    hidden: int = 96
    shards: int = 1
    overrides: dict[str, Any] = field(default_factory=dict)


PUBLISHED: dict[str, Any] = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                             "v_head_dim": 128, "moe_intermediate_size": 128, "intermediate_size": 384}  # fmt: skip
VARIANTS = {
    **{family: Variant(family) for family in FAMILIES},  # every block is partial
    # As published: parts in whole blocks but for the last of the compressed KV, rotary rows within their blocks.
    "deepseek_v3 published": Variant(
        "deepseek_v3", 256, 3, PUBLISHED | {"n_shared_experts": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    ),
    "deepseek_v3 rotary rows in two blocks": Variant(
        "deepseek_v3", 320, 2, {"qk_nope_head_dim": 100, "qk_rope_head_dim": 40, "moe_intermediate_size": 148}
    ),
    "deepseek_v2 biases, no query rank": Variant(
        "deepseek_v2", 160, 1, {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True}
    ),
    "llama biased, tied": Variant(
        "llama", 192, 1, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 64}
    ),
}  # fmt: skip


def write(path: Path, variant: Variant) -> Path:
    return write_tiny(
        path, variant.family, seed=5, hidden=variant.hidden, shards=variant.shards, float8=True, overrides=variant.overrides
    )  # fmt: skip


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("packed"), VARIANTS[request.param])


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(write_widened(checkpoint, checkpoint / "widened"))


def test_logits_and_greedy_tokens_equal_transformers(checkpoint: Path, oracle: Oracle) -> None:
    """Prefills absorbed and expanded, chunks and steps of one token, sequences that join others."""
    prompt = random_prompts([LENGTH], 512, seed=1)[0]
    expected = oracle.logits(prompt)
    for prefill in ("absorbed", "expanded"):
        run = PagedRun(load_model(checkpoint, prefill=prefill))  # type: ignore[arg-type]
        for seq, chunk in enumerate((None, 19, 1)):
            run.add(seq, prompt)
            assert float((run.prefill(seq, chunk) - expected).abs().max()) < TOLERANCE, (prefill, chunk)
            run.remove(seq)
    prompts = random_prompts([1, 16, 40], 512, seed=2)
    run = PagedRun(load_model(checkpoint), num_blocks=24)
    assert run.greedy(prompts, NEW_TOKENS, chunk=11) == [oracle.greedy(each, NEW_TOKENS) for each in prompts]


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3"])
def test_logits_equal_those_of_transformers_own_reading(family: Family, tmp_path: Path) -> None:
    """transformers widens the codes itself: what is written is what others take for such a checkpoint. All sizes are whole
    blocks: it divides the rows by the number of blocks."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    sizes = PUBLISHED | {"kv_lora_rank": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    if family == "qwen3":
        sizes = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    path = write_tiny(tmp_path, family, hidden=256, float8=True, overrides=sizes)
    theirs = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager",
        quantization_config=FineGrainedFP8Config(dequantize=True),
    ).eval()  # fmt: skip
    prompt = random_prompts([LENGTH], 512)[0]
    run = PagedRun(load_model(path))
    run.add(0, prompt)
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    assert float((run.prefill(0, 23) - expected).abs().max()) < TOLERANCE


def test_codes_and_scales_stay_as_they_are_and_kv_b_proj_is_widened(checkpoint: Path) -> None:
    stored = read_all(checkpoint)
    model = load_model(checkpoint)
    assert isinstance(model, PagedDecoder)
    seen = set()
    for slot in model.slots():
        seen |= slot.stored().keys()
        tensor = stored[slot.name]
        if slot.form == "widened":
            assert "kv_b_proj" in slot.name
            tensor = widen(tensor, stored[f"{slot.name}_scale_inv"])
        tensor, target = tensor.float(), slot.target.float()
        expected = tensor if slot.rows is None else tensor[slot.rows]
        assert torch.equal(target, expected.expand_as(target)), slot.name
    assert seen == set(stored)
    packed = [name for name in stored if f"{name}_scale_inv" in stored]
    held = sum(p.numel() for p in model.parameters() if p.dtype == torch.float8_e4m3fn)
    assert held == sum(stored[name].numel() for name in packed if "kv_b_proj" not in name)
    assert all(re.search(r"layers\.\d+\.(self_attn|mlp)\..*_proj|q_a|kv_a", name) for name in packed)


def test_published_sizes_are_one_product_a_layer(tmp_path: Path) -> None:
    for name, whole in (("deepseek_v3 published", True), ("deepseek_v3", False)):
        model = load_model(write(tmp_path / name.replace(" ", "_"), VARIANTS[name]))
        assert isinstance(model, PagedDecoder)
        packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
        assert packed
        assert all(len(module.runs) == 1 and module.order is None for module in packed) is whole
        layers = [module for module in model.modules() if isinstance(module, MlaAttention)]
        assert all(layer.kv_up.dtype == torch.float32 for layer in layers)


def test_bfloat16_is_bfloat16_on_the_widened_weights(tmp_path: Path) -> None:
    """Codes widen to what a bfloat16 load of the widened checkpoint holds, so nothing else is rounded."""
    path = write(tmp_path, VARIANTS["deepseek_v3 published"])
    prompt = random_prompts([40], 512)[0]
    found = []
    for each in (path, write_widened(path, tmp_path / "widened")):
        run = PagedRun(load_model(each, dtype=torch.bfloat16))
        run.add(0, prompt)
        found.append(run.prefill(0, 7))
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 1e-6


def test_the_registered_operations_do_the_products(tmp_path: Path) -> None:
    calls: dict[str, int] = {}
    registry = KernelRegistry()

    def counted(kernel: Kernel) -> Kernel:
        def call(*operands: Any, **options: Any) -> Any:
            calls[kernel.operation] = calls.get(kernel.operation, 0) + 1
            return kernel.function(*operands, **options)

        return replace(kernel, function=call)

    for kernel in REGISTRY.kernels():
        registry.add(counted(kernel))
    run = PagedRun(load_model(write(tmp_path, VARIANTS["deepseek_v3 published"]), registry=registry))
    run.add(0, [5, 6, 7])
    run.step([(0, 3)])
    assert calls["fp8_moe"] == 2
    assert "moe" not in calls
    assert calls["fp8_linear"] == 3 * 3 + 2  # attention's three of each layer, and the dense layer's two


def test_workers_with_float8_and_widened_weights_never_pair(tmp_path: Path) -> None:
    path = write(tmp_path, VARIANTS["deepseek_v3"])
    plain = write_widened(path, tmp_path / "widened")
    one, other = (fingerprint(each, dtype=torch.float32, block_tokens=16) for each in (path, plain))
    assert [line.split(":")[0] for line in one.differences(other)] == ["revision"]
    assert str(one) != str(other)


def test_steps_are_captured_only_where_the_float8_products_can_be(tmp_path: Path) -> None:
    """Products of torch read on the host which experts are hit."""
    config = ModelConfig.from_pretrained(write(tmp_path, VARIANTS["deepseek_v3"]))
    for compute, float8, captured in (((9, 0), True, True), ((8, 0), True, False), ((8, 0), False, True)):
        kernels = Kernels.select(REGISTRY, Capability("cuda", compute), torch.bfloat16)
        model = PagedDecoder(replace(config, float8_weights=float8), kernels, device="meta")
        assert model.capturable is captured, (compute, float8)
