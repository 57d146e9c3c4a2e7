# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of prompts: those of transformers, whatever the chunks, the cache and the company."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_oracle import Oracle, random_prompts
from torch import Tensor

from twinpool._core import SchedulerConfig
from twinpool.engine.loader import load_model
from twinpool.engine.local import Generation, LocalEngine
from twinpool.engine.sampling import DrawParams, DrawParamsError, PromptScoring
from twinpool.engine.sampling.scoring import ROWS_AT_ONCE
from twinpool.engine.tiny import write_tiny

BLOCK = 16
SCORED = DrawParams(temperature=0.7, seed=3, repetition_penalty=1.5, max_tokens=4, prompt_logprobs=3)
"""What changes the drawn tokens must not change these."""


@pytest.fixture(scope="module", params=["llama", "deepseek_v3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny(tmp_path_factory.mktemp("tiny") / request.param, request.param)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return load_model(checkpoint)


def engine(model: Any, num_blocks: int = 64, **limits: int) -> LocalEngine:
    config = SchedulerConfig(
        **{"max_num_seqs": 8, "max_batched_tokens": 48, "max_chunk_tokens": 20, **limits}
    )
    return LocalEngine(
        model,
        num_blocks=num_blocks,
        block_tokens=BLOCK,
        scheduler=config,
        threads=1,
        poison_freed=True,
        validate=True,
    )


def check(generation: Generation, prompt: list[int], reference: Oracle, count: int = 3) -> None:
    """Every position but the first, once and in order, with the reference's values."""
    expected = reference.logits(prompt).double().log_softmax(-1)
    parts = generation.prompt_logprobs
    assert [part.first for part in parts] == np.cumsum([1, *(len(p.token_ids) for p in parts)])[:-1].tolist()
    tokens = np.concatenate([part.token_ids for part in parts]) if parts else np.zeros(0)
    assert tokens.tolist() == prompt[1:]
    for part in parts:
        rows = expected[part.first - 1 : part.first - 1 + len(part.token_ids)]
        own = rows.gather(1, torch.tensor(part.token_ids.astype(np.int64))[:, None])[:, 0]
        np.testing.assert_allclose(part.logprobs, own.numpy(), atol=1e-4)
        top = rows.topk(count, dim=-1)
        np.testing.assert_allclose(part.top_logprobs, top.values.numpy(), atol=1e-4)
        assert part.top_ids.shape == (len(rows), count)
        picked = rows.gather(1, torch.tensor(part.top_ids.astype(np.int64)))
        np.testing.assert_allclose(picked.numpy(), top.values.numpy(), atol=1e-4)


def chunks(generation: Generation) -> int:
    return len(generation.prompt_logprobs)


@pytest.mark.parametrize(("chunk", "batched"), [(256, 512), (20, 48), (1, 3)])
def test_prompts_together_in_chunks_and_whole(
    model: Any, reference: Oracle, chunk: int, batched: int
) -> None:
    prompts = random_prompts([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5], 500, seed=1)
    local = engine(model, max_chunk_tokens=chunk, max_batched_tokens=batched, max_num_seqs=3)
    params = [SCORED, SCORED, DrawParams(temperature=0.0, max_tokens=9), SCORED, SCORED, SCORED]
    got = [choice for [choice] in local.generate(prompts, params)]
    for prompt, generation, wanted in zip(prompts, got, params, strict=True):
        if wanted is SCORED:
            check(generation, prompt, reference)
            assert chunks(generation) >= (len(prompt) - 1) // chunk
        else:
            assert generation.prompt_logprobs == []


def test_a_cached_prompt_is_computed_again_and_stays_cached(model: Any, reference: Oracle) -> None:
    [prompt] = random_prompts([3 * BLOCK + 2], 500, seed=2)
    local = engine(model)
    plain = DrawParams(temperature=0.0, max_tokens=4)
    [[cold]] = local.generate([prompt], plain)
    [[scored]] = local.generate([prompt], SCORED)
    check(scored, prompt, reference)
    assert scored.cached_tokens == 0
    local.blocks.reset_cache()
    [[alone]] = local.generate([prompt], DrawParams(temperature=0.0, max_tokens=4, prompt_logprobs=0))
    check(alone, prompt, reference, count=0)
    assert alone.tokens == cold.tokens
    [[warm]] = local.generate([prompt], plain)
    assert warm.cached_tokens == 3 * BLOCK, "its blocks are published for others"


@pytest.mark.parametrize("host_blocks", [0, 40])
def test_a_prompt_that_loses_its_blocks_is_told_once(model: Any, reference: Oracle, host_blocks: int) -> None:
    """A decode takes the blocks of a prompt that is half computed."""
    [first, second] = random_prompts([2 * BLOCK - 3, 4 * BLOCK], 500, seed=3)
    local = engine(
        model, 7, max_num_seqs=2, max_chunk_tokens=2, max_batched_tokens=3, host_blocks=host_blocks
    )
    running = local.submit(first, DrawParams(temperature=0.0, max_tokens=24))
    while not running.tokens:
        local.step()
    scored = local.submit(second, SCORED)
    local.run()
    assert scored.preemptions > 0, "the pool was meant to be too small"
    check(scored, second, reference)


def test_it_uses_the_head_a_few_rows_at_a_time() -> None:
    prompt = np.arange(3 * ROWS_AT_ONCE + 7, dtype=np.int32) % 50
    sizes: list[int] = []

    def logits(hidden: Tensor) -> Tensor:
        sizes.append(len(hidden))
        return hidden

    scoring = PromptScoring(prompt, 2)
    hidden = torch.randn(len(prompt) - 1, 50)
    found = scoring.score(hidden, 0, logits)
    assert max(sizes) <= ROWS_AT_ONCE
    assert sum(sizes) == len(prompt) - 1
    expected = hidden.log_softmax(-1)
    np.testing.assert_allclose(found.logprobs, expected[np.arange(len(hidden)), prompt[1:]], atol=1e-5)
    np.testing.assert_allclose(found.top_logprobs, expected.topk(2, dim=-1).values, atol=1e-5)


@pytest.mark.parametrize(
    ("at", "begin", "end", "due"),
    [
        (1, 0, 4, range(0, 4)),
        (1, 0, 10, range(0, 9)),
        (5, 0, 8, range(4, 8)),
        (5, 0, 4, range(4, 4)),
        (10, 0, 10, range(9, 9)),
    ],
)
def test_which_positions_are_due(at: int, begin: int, end: int, due: Sequence[int]) -> None:
    scoring = PromptScoring(np.zeros(10, np.int32), 0)
    scoring.next = at
    assert scoring.due(begin, end) == due


@pytest.mark.parametrize("count", [-1, 21])
def test_how_many_alternatives_there_may_be(count: int) -> None:
    with pytest.raises(DrawParamsError, match=f"prompt_logprobs {count}"):
        DrawParams(prompt_logprobs=count)
