# SPDX-License-Identifier: Apache-2.0
"""The cluster's greedy tokens are those of ``transformers``, whatever the prompt's length and the cache hold."""

import asyncio
import random

import pytest

from tests.support.cluster import Cluster
from tests.support.oracle import oracle
from twinpool.client import request
from twinpool.v1 import inference_pb2 as pb

pytestmark = pytest.mark.integration

BLOCK = 16
EDGE_LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 1, 4 * BLOCK, 7 * BLOCK + 5]


def random_prompt(seed: int, length: int, vocab: int) -> list[int]:
    """Token ids that no other seed gives; special tokens (low ids) are left out."""
    draw = random.Random(seed)
    return [draw.randrange(10, vocab) for _ in range(length)]


async def vocabulary(cluster: Cluster) -> int:
    async with cluster.client() as client:
        return (await client.models())[0].vocab_size


async def check(
    cluster: Cluster, prompt: list[int], max_tokens: int, **options: object
) -> pb.GenerateFinished:
    """One request against the oracle; returns its last event."""
    ignore_eos = bool(options.get("ignore_eos", False))
    stop = list(options.get("stop_token_ids", ()))  # type: ignore[call-overload]
    expected = oracle(cluster.model).greedy(prompt, max_tokens, stop=stop, ignore_eos=ignore_eos)
    async with cluster.client() as client:
        answer = await client.complete(
            request(prompt, max_tokens=max_tokens, temperature=0.0, **options),  # type: ignore[arg-type]
            timeout=60,
        )
    n = int(options.get("n", 1))  # type: ignore[call-overload]
    assert answer.token_ids == [expected] * n, f"prompt of {len(prompt)} tokens, max_tokens {max_tokens}"
    ends = set(stop) | (set() if ignore_eos else oracle(cluster.model).eos)
    reason = pb.FINISH_REASON_STOP if expected[-1] in ends else pb.FINISH_REASON_LENGTH
    assert [choice.reason for choice in answer.finished.choices] == [reason] * n
    assert answer.finished.usage.prompt_tokens == len(prompt)
    assert answer.finished.usage.completion_tokens == len(expected) * n
    return answer.finished


async def test_edge_lengths(cluster: Cluster) -> None:
    vocab = await vocabulary(cluster)
    for seed, length in enumerate(EDGE_LENGTHS):
        done = await check(cluster, random_prompt(seed, length, vocab), 6, ignore_eos=True)
        assert done.usage.cached_tokens == 0
        assert done.handoff.blocks == -(-length // BLOCK), "every block of a new prompt crosses"
    await cluster.assert_quiescent()


async def test_cached_prompts(cluster: Cluster) -> None:
    """The same prompt again: blocks that the decode worker holds do not cross, and the tokens stay the same."""
    vocab = await vocabulary(cluster)
    for seed, length in enumerate([BLOCK, 2 * BLOCK, 4 * BLOCK, 4 * BLOCK + 3, 5]):
        prompt = random_prompt(100 + seed, length, vocab)
        await check(cluster, prompt, 5, ignore_eos=True)
        again = await check(cluster, prompt, 5, ignore_eos=True)
        full = length // BLOCK
        assert again.usage.decode_cached_tokens == full * BLOCK
        assert again.handoff.blocks == (1 if length % BLOCK else 0), "only a partial last block crosses again"
        assert again.usage.cached_tokens == max(0, (length - 1) // BLOCK * BLOCK), (
            "the last token is computed anew"
        )
    await cluster.assert_quiescent()


async def test_next_turn_hits_the_cache(cluster: Cluster) -> None:
    vocab = await vocabulary(cluster)
    prompt = random_prompt(200, 3 * BLOCK + 7, vocab)
    for turn in range(3):
        done = await check(cluster, prompt, 8, ignore_eos=True)
        if turn:
            assert done.usage.cached_tokens >= 3 * BLOCK
        prompt = (
            prompt
            + oracle(cluster.model).greedy(prompt, 8, ignore_eos=True)
            + random_prompt(300 + turn, 5, vocab)
        )
    await cluster.assert_quiescent()


async def test_max_tokens_one_and_two(cluster: Cluster) -> None:
    vocab = await vocabulary(cluster)
    for seed, length in enumerate([1, BLOCK, 2 * BLOCK + 3]):
        for max_tokens in (1, 2):
            await check(cluster, random_prompt(400 + seed, length, vocab), max_tokens, ignore_eos=True)
    await cluster.assert_quiescent()


async def test_first_token_stops(cluster: Cluster) -> None:
    """The prefill worker's own token ends the answer: no decode step, both sides free."""
    vocab = await vocabulary(cluster)
    prompt = random_prompt(500, 2 * BLOCK + 1, vocab)
    first = oracle(cluster.model).greedy(prompt, 1, ignore_eos=True)[0]
    done = await check(cluster, prompt, 8, stop_token_ids=[first], ignore_eos=True)
    assert done.usage.completion_tokens == 1
    await cluster.assert_quiescent()


async def test_eos_stops(cluster: Cluster) -> None:
    """Long enough answers meet the model's own end token or the limit; both are as the oracle says."""
    vocab = await vocabulary(cluster)
    for seed in range(4):
        await check(cluster, random_prompt(600 + seed, 20 + seed, vocab), 24)
    await cluster.assert_quiescent()


async def test_prompts_are_scored(cluster: Cluster) -> None:
    """Whole or in chunks, cached or not; and what is drawn stays the same."""
    vocab = await vocabulary(cluster)
    for seed, length in enumerate([1, 2, BLOCK + 1, 7 * BLOCK + 5]):
        prompt = random_prompt(650 + seed, length, vocab)
        expected = oracle(cluster.model).logprobs(prompt)
        for turn in range(2):
            async with cluster.client() as client:
                asked = request(prompt, max_tokens=4, temperature=0.0, ignore_eos=True, prompt_logprobs=3)
                answer = await client.complete(asked, timeout=60)
            assert answer.token_ids == [oracle(cluster.model).greedy(prompt, 4, ignore_eos=True)]
            assert [one.chosen.token_id for one in answer.prompt_logprobs] == prompt[1:]
            for row, position in zip(expected, answer.prompt_logprobs, strict=False):
                assert position.chosen.logprob == pytest.approx(
                    float(row[position.chosen.token_id]), abs=1e-3
                )
                best = row.topk(3).values.tolist()
                assert [token.logprob for token in position.top] == pytest.approx(best, abs=1e-3)
                own = [float(row[token.token_id]) for token in position.top]
                assert own == pytest.approx(best, abs=1e-3)
            assert answer.finished.usage.cached_tokens == 0, "a cache holds no logits"
            full = length // BLOCK * BLOCK
            assert answer.finished.usage.decode_cached_tokens == (full if turn else 0), "it holds the KV"
        await check(cluster, prompt, 4, ignore_eos=True)
    await cluster.assert_quiescent()


async def test_two_choices(cluster: Cluster) -> None:
    vocab = await vocabulary(cluster)
    for seed, length in enumerate([5, 2 * BLOCK, 2 * BLOCK + 9]):
        await check(cluster, random_prompt(700 + seed, length, vocab), 20, n=2, ignore_eos=True)
    await cluster.assert_quiescent()


async def test_sixteen_at_once(cluster: Cluster) -> None:
    """More than the pools hold at once: some wait, none is wrong."""
    vocab = await vocabulary(cluster)
    shared = random_prompt(800, 2 * BLOCK, vocab)
    prompts = [
        (shared if seed % 2 else []) + random_prompt(801 + seed, 3 + 5 * seed, vocab) for seed in range(16)
    ]
    await asyncio.gather(*(check(cluster, prompt, 12, ignore_eos=True) for prompt in prompts))
    await cluster.assert_quiescent()
