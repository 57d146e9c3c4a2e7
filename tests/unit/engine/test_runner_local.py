# SPDX-License-Identifier: Apache-2.0
"""Scheduler, runner, model and sampler together: the tokens are those of transformers, whatever shares the batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.oracle import Oracle
from twinpool._core import SchedulerConfig
from twinpool.config import load_config
from twinpool.engine.loader import load_model
from twinpool.engine.local import LocalEngine, PromptError
from twinpool.engine.sampling import DrawParams, DrawParamsError, Finish
from twinpool.engine.tiny import write_tiny

BLOCK = 16
GREEDY = DrawParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module", params=["llama", "deepseek_v3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny(tmp_path_factory.mktemp("tiny") / request.param, request.param)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Oracle:
    oracle = Oracle(checkpoint)
    torch.set_num_threads(1)
    return oracle


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


def prompts_of(seed: int, lengths: list[int]) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(5, 500, length).tolist() for length in lengths]


def idle(local: LocalEngine) -> bool:
    """Nothing is held: every block is free or cached."""
    local.blocks.check()
    blocks = local.blocks
    return blocks.free_blocks + blocks.cached_blocks == blocks.num_blocks and not local.scheduler.running


def test_continuous_batching_with_chunks_equals_transformers(model: Any, reference: Oracle) -> None:
    prompts = prompts_of(1, [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK, 50, 7, 90, 33])
    local = engine(model)
    got = local.generate(prompts, GREEDY)
    for prompt, [choice] in zip(prompts, got, strict=True):
        expected = reference.greedy(prompt, GREEDY.max_tokens, ignore_eos=True)
        assert choice.tokens == expected, f"prompt of {len(prompt)}"
        assert choice.finish is Finish.LENGTH
        assert len(choice.times) == len(choice.tokens)
    assert idle(local)


def test_a_cached_prefix_gives_the_same_tokens(model: Any, reference: Oracle) -> None:
    local = engine(model)
    [first] = prompts_of(2, [4 * BLOCK + 3])
    [[cold]] = local.generate([first], GREEDY)
    [[warm]] = local.generate([first], GREEDY)
    whole = first[: 4 * BLOCK]
    [[aligned]] = local.generate([whole], GREEDY)
    turn = first + cold.tokens + [9, 8, 7]
    [[second]] = local.generate([turn], GREEDY)
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == 4 * BLOCK
    assert 0 < aligned.cached_tokens < len(whole)  # the last prompt token is computed for its logits
    assert second.cached_tokens >= 4 * BLOCK
    assert warm.tokens == cold.tokens
    assert cold.tokens == reference.greedy(first, 12, ignore_eos=True)
    assert aligned.tokens == reference.greedy(whole, 12, ignore_eos=True)
    assert second.tokens == reference.greedy(turn, 12, ignore_eos=True)
    assert idle(local)


def test_preemption_gives_the_same_tokens(model: Any, reference: Oracle) -> None:
    prompts = prompts_of(3, [40, 44, 38, 47, 41])
    params = DrawParams(temperature=0.0, max_tokens=40)
    local = engine(model, num_blocks=13)
    got = [choice for [choice] in local.generate(prompts, params)]
    assert sum(choice.preemptions for choice in got) > 0, "the pool was meant to be too small"
    for prompt, choice in zip(prompts, got, strict=True):
        assert choice.tokens == reference.greedy(prompt, 40, ignore_eos=True)
    assert idle(local)


@pytest.mark.parametrize("host_blocks", [2, 40])
def test_a_swap_to_host_memory_gives_the_same_tokens(model: Any, reference: Oracle, host_blocks: int) -> None:
    """Freed blocks are poisoned: KV that was not saved before, or not brought back, would show."""
    prompts = prompts_of(3, [40, 44, 38, 47, 41])
    local = engine(model, num_blocks=13, host_blocks=host_blocks)
    generations = [local.submit(prompt, DrawParams(temperature=0.0, max_tokens=40)) for prompt in prompts]
    swapped = 0
    while local.busy:
        assert local.step()
        swapped = max(swapped, local.scheduler.host_blocks_used)
        local.blocks.reset_cache()  # what the cache still has is not brought back
    assert sum(generation.preemptions for generation in generations) > 0, "the pool was meant to be too small"
    assert (swapped > 0) == (host_blocks == 40), "two blocks hold none of these prompts"
    for prompt, generation in zip(prompts, generations, strict=True):
        assert generation.tokens == reference.greedy(prompt, 40, ignore_eos=True)
    assert local.scheduler.host_blocks_used == 0
    assert idle(local)


def test_sampled_streams_survive_preemption_and_company(model: Any) -> None:
    prompts = prompts_of(4, [30, 36, 41])
    params = [
        DrawParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=30, repetition_penalty=1.2),
        DrawParams(temperature=1.3, top_k=40, seed=12, max_tokens=30, frequency_penalty=0.5),
        DrawParams(temperature=0.0, max_tokens=30),
    ]
    roomy = engine(model)
    alone = [roomy.generate([p], d)[0][0].tokens for p, d in zip(prompts, params, strict=True)]
    tight = engine(model, num_blocks=9)
    got = [choice for [choice] in tight.generate(prompts, params)]
    assert sum(choice.preemptions for choice in got) > 0, "the pool was meant to be too small"
    assert [choice.tokens for choice in got] == alone


def test_choices_differ_and_each_is_reproducible(model: Any) -> None:
    [prompt] = prompts_of(5, [37])
    params = DrawParams(temperature=1.5, seed=2**64 - 3, max_tokens=10)
    local = engine(model)
    [three] = local.generate([prompt], params, n=3)
    assert len({tuple(choice.tokens) for choice in three}) == 3
    again = local.submit(prompt, params, choice=1)
    local.run()
    assert again.tokens == three[1].tokens


def test_stop_ids_min_tokens_and_logprobs(model: Any, reference: Oracle) -> None:
    [prompt] = prompts_of(6, [25])
    expected = reference.greedy(prompt, 12, ignore_eos=True)
    stop = expected[4]
    at = expected.index(stop)
    local = engine(model)
    params = DrawParams(temperature=0.0, max_tokens=12, stop_token_ids=frozenset({stop}), logprobs=3)
    [[stopped]] = local.generate([prompt], params)
    assert stopped.tokens == expected[: at + 1]
    assert stopped.finish is Finish.STOP
    assert [entry.token_id for entry in stopped.logprobs] == stopped.tokens
    assert all(entry.top_ids[0] == entry.token_id for entry in stopped.logprobs)
    assert all(abs(entry.logprob - float(entry.top_logprobs[0])) < 1e-5 for entry in stopped.logprobs)
    later = DrawParams(temperature=0.0, max_tokens=12, min_tokens=at + 3, stop_token_ids=frozenset({stop}))
    [[held]] = local.generate([prompt], later)
    assert held.tokens[:at] == expected[:at]
    assert stop not in held.tokens[: at + 2]
    assert len(held.tokens) >= at + 3
    [[one]] = local.generate([prompt], DrawParams(temperature=0.0, max_tokens=1))
    assert one.tokens == expected[:1]
    assert idle(local)


def test_warmup_changes_nothing(model: Any) -> None:
    local = engine(model)
    [prompt] = prompts_of(7, [40])
    [[before]] = local.generate([prompt], GREEDY)
    content = local.pool.tensor.clone().view(torch.uint8)
    generations = local.pool.generations.copy()
    assert local.runner.warmup(max_batched_tokens=64, max_num_seqs=100) > 0
    assert torch.equal(local.pool.tensor.view(torch.uint8), content)
    assert (local.pool.generations == generations).all()
    [[after]] = local.generate([prompt], GREEDY)
    assert after.tokens == before.tokens
    assert after.cached_tokens == 2 * BLOCK


def test_prompts_that_cannot_run_are_refused(model: Any) -> None:
    local = engine(model, num_blocks=4)
    for prompt, message in [([], "empty"), ([1, 512], "vocabulary of 512"), ([1] * 60, "4 blocks")]:
        with pytest.raises(PromptError, match=message):
            local.submit(prompt, GREEDY)
    with pytest.raises(PromptError, match="exceed 4096"):
        local.submit([1] * 4090, GREEDY)
    with pytest.raises(DrawParamsError, match="stop_token_ids 512"):
        local.submit([1], DrawParams(stop_token_ids=frozenset({512})))
    assert not local.busy
    local.submit([1, 2, 3], GREEDY)
    local.step()
    local.cancel_all()
    assert not local.busy
    assert idle(local)


def test_from_config(checkpoint: Path, reference: Oracle) -> None:
    overrides = {"model": {"path": str(checkpoint)}, "kv": {"num_blocks": 32, "block_tokens": 16}}
    local = LocalEngine.from_config(load_config(overrides=overrides))
    [prompt] = prompts_of(8, [20])
    assert local.generate([prompt], GREEDY)[0][0].tokens == reference.greedy(prompt, 12, ignore_eos=True)
