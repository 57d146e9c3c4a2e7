# SPDX-License-Identifier: Apache-2.0
"""Every family over the paged cache against transformers on the same checkpoint: logits and greedy tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_oracle import Oracle, PagedRun, random_prompts
from torch import Tensor

from twinpool.engine.config import Family
from twinpool.engine.loader import load_model
from twinpool.engine.models.base import DecoderModel
from twinpool.engine.tiny import write_tiny

BLOCK = 16
LENGTH = 83  # no multiple of block or chunk
NEW_TOKENS = 12
TOLERANCE = 1e-4  # logits have a standard deviation of 4


@dataclass(frozen=True)
class Variant:
    """A family with one of its mechanisms switched."""

    family: Family
    overrides: dict[str, Any] = field(default_factory=dict)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
VARIANTS = {
    "llama": Variant("llama"),
    "llama biased, tied": Variant(
        "llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "llama linear": Variant("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama one KV head": Variant("llama", {"num_key_value_heads": 1, "rope_scaling": None}),
    "qwen2": Variant("qwen2"),
    "qwen2 yarn": Variant("qwen2", {"rope_scaling": YARN, "max_position_embeddings": 1024}),
    "qwen3": Variant("qwen3"),
    "qwen3 biased, no groups": Variant("qwen3", {"attention_bias": True, "num_key_value_heads": 6}),
    "deepseek_v2": Variant("deepseek_v2"),
    "deepseek_v2 greedy, no query rank": Variant("deepseek_v2", {"topk_method": "greedy", "q_lora_rank": None}),
    "deepseek_v2 plain rope, dense first": Variant(
        "deepseek_v2", {"rope_scaling": None, "first_k_dense_replace": 2, "attention_bias": True}
    ),
    "deepseek_v3": Variant("deepseek_v3"),
    "deepseek_v3 unequal mscale": Variant(
        "deepseek_v3",
        {"rope_scaling": {"type": "yarn", "factor": 8, "original_max_position_embeddings": 512, "beta_fast": 16,
                          "beta_slow": 2, "mscale": 1.3, "mscale_all_dim": 0.6}},
    ),
    "deepseek_v3 half pairs, no query rank": Variant(
        "deepseek_v3", {"rope_interleave": False, "q_lora_rank": None, "norm_topk_prob": False}
    ),
    "deepseek_v3 all experts MoE, two shared": Variant(
        "deepseek_v3", {"first_k_dense_replace": 0, "n_shared_experts": 2, "n_group": 2, "topk_group": 1}
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    variant = VARIANTS[request.param]
    path = tmp_path_factory.mktemp("model")
    return write_tiny(path, variant.family, overrides=variant.overrides, seed=3)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    found = Oracle(checkpoint)
    assert not any(found.loading.values()), found.loading
    return found


PATHS: list[dict[str, Any]] = [
    {"attention": "latent", "prefill": "absorbed"},
    {"attention": "latent", "prefill": "expanded"},
    {"attention": "gqa"},
]


def close(found: Tensor, expected: Tensor) -> None:
    assert torch.isfinite(found).all()
    assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("paths", PATHS, ids=lambda paths: "-".join(paths.values()))
def test_logits_equal_transformers_however_the_prompt_is_cut(
    checkpoint: Path, oracle: Oracle, paths: dict[str, Any]
) -> None:
    model = load_model(checkpoint, **paths)
    prompt = random_prompts([LENGTH], 512, seed=1)[0]
    expected = oracle.logits(prompt)
    run = PagedRun(model, block_tokens=BLOCK)
    cuts: list[tuple[str, Callable[[int], Tensor]]] = [
        ("whole", lambda seq: run.prefill(seq)),
        ("chunks", lambda seq: run.prefill(seq, 19)),
        ("token by token", lambda seq: run.prefill(seq, 1)),
    ]
    for seq, (_, cut) in enumerate(cuts):
        run.add(seq, prompt)
        close(cut(seq), expected)
        run.remove(seq)


def test_greedy_tokens_equal_transformers(checkpoint: Path, oracle: Oracle) -> None:
    """Prompts around a block's length, prefilled in chunks while others decode, over a small scattered pool."""
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 70]
    prompts = random_prompts(lengths, 512, seed=2)
    expected = [oracle.greedy(prompt, NEW_TOKENS) for prompt in prompts]
    for attention in ("latent", "gqa"):
        model = load_model(checkpoint, attention=attention)
        run = PagedRun(model, block_tokens=BLOCK, num_blocks=24)
        assert run.greedy(prompts, NEW_TOKENS, chunk=11) == expected, attention


def prefilled(model: DecoderModel, prompt: list[int]) -> PagedRun:
    run = PagedRun(model, block_tokens=BLOCK)
    run.add(0, prompt)
    run.step([(0, len(prompt))])
    return run


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_cache_of_one_path_serves_the_other(family: Family, tmp_path: Path) -> None:
    """The bytes are the same, so a prefill through GQA can be decoded through the latent path."""
    path = write_tiny(tmp_path, family)
    latent, plain = load_model(path), load_model(path, attention="gqa")
    prompt = random_prompts([40], 512)[0]
    run = prefilled(plain, prompt)
    other = prefilled(latent, prompt)
    torch.testing.assert_close(run.pool.tensor, other.pool.tensor, rtol=1e-4, atol=1e-4, equal_nan=True)
    run.model = latent
    for each in (run, other):
        each.tokens[0].append(17)
    torch.testing.assert_close(run.step([(0, 1)]), other.step([(0, 1)]), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_every_cached_block_matters(family: Family, tmp_path: Path) -> None:
    """Weights are scaled so that a wrong block changes logits by far more than rounding: else no oracle would see."""
    model = load_model(write_tiny(tmp_path, family))
    prompt = random_prompts([64], 512)[0]
    clean = prefilled(model, prompt)
    clean.tokens[0].append(9)
    expected = clean.step([(0, 1)])
    for block in range(4):
        run = prefilled(model, prompt)
        run.tokens[0].append(9)
        pages = run.pool.tensor[run.blocks[0][block]]
        pages.neg_()  # another order of a block's tokens would change nothing: positions are in the keys
        assert (run.step([(0, 1)]) - expected).abs().max() > 100 * TOLERANCE, block


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_only_wanted_rows_come_back(family: Family, tmp_path: Path) -> None:
    model = load_model(write_tiny(tmp_path, family))
    prompt = random_prompts([30], 512)[0]
    run = PagedRun(model, block_tokens=BLOCK)
    run.add(0, prompt)
    every = run.step([(0, 30)], all_rows=True)
    run.add(1, prompt)
    torch.testing.assert_close(run.step([(1, 30)]), every[-1:], rtol=0, atol=TOLERANCE)
    run.add(2, prompt)
    nothing = run.step([(2, 30)], rows=[])
    assert nothing.shape == (0, 512)
    torch.testing.assert_close(run.written(2), run.written(0), rtol=0, atol=0)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v2"])
def test_bfloat16_stays_near_float32(family: Family, tmp_path: Path) -> None:
    path = write_tiny(tmp_path, family, layers=2)
    prompt = random_prompts([40], 512)[0]
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        run = PagedRun(load_model(path, dtype=dtype), block_tokens=BLOCK)
        assert run.pool.dtype == dtype
        run.add(0, prompt)
        logits.append(run.prefill(0, 7))
        assert logits[-1].dtype == torch.float32
    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert 1e-4 < error < 0.1
