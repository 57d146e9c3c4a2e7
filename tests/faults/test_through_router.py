# SPDX-License-Identifier: Apache-2.0
"""Faults of the hand-off as a client of a router sees them: retried unseen, or told by their own name."""

import asyncio
import zlib

import pytest

from tests.support.asking import Outcome, ask, ask_again
from tests.support.fleet import BLOCK, Fleet
from tests.support.steps import prompt
from tests.support.waiting import until
from twinpool.transfer.base import Fault
from twinpool.v1 import inference_pb2 as pb

pytestmark = [pytest.mark.integration, pytest.mark.faults]

DECODERS = ("decode-0", "decode-1")


async def test_a_prompt_that_is_wholly_cached_moves_nothing(routed: Fleet) -> None:
    """Both workers hash with another seed of the language's own hash, and still find what the other named."""
    async with routed.client() as client:
        for length in (4 * BLOCK, 5, 4 * BLOCK + 1):
            _, again = await ask_again(client, routed.oracle, prompt(length, 41), 4)
            assert again.done.usage.decode_cached_tokens == length // BLOCK * BLOCK
            assert again.done.handoff.blocks == (1 if length % BLOCK else 0)
            assert again.done.usage.cached_tokens == (length - 1) // BLOCK * BLOCK
    # Every read that moved something stands beside what it was expected to take.
    counted = routed.router_metric("twinpool_router_transfer_time_seconds_count")
    assert counted > 0
    assert routed.router_metric("twinpool_router_predicted_transfer_time_seconds_count") == counted
    assert routed.router_metric("twinpool_router_transfer_prediction_error_seconds_count") == counted


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_the_answer_may_end_with_the_first_token(routed: Fleet, max_tokens: int) -> None:
    async with routed.client() as client:
        done = (await ask(client, routed.oracle, prompt(BLOCK + 3, 42), max_tokens)).done
        assert done.usage.completion_tokens == max_tokens
        assert done.choices[0].reason == pb.FINISH_REASON_LENGTH


async def test_a_stop_string_equal_to_the_first_token(routed: Fleet) -> None:
    """Nothing of it is returned, the token counts once, and neither side decodes on."""
    async with routed.client() as client:
        seed = 43
        while not (first := await ask(client, routed.oracle, prompt(BLOCK + 5, seed), 1)).text:
            seed += 1  # a token that alone is no text
        outcome = await ask(client, routed.oracle, prompt(BLOCK + 5, seed), 30, stop=[first.text])
        assert outcome.text == ""
        assert outcome.done.choices[0].reason == pb.FINISH_REASON_STOP
        assert outcome.done.choices[0].stop_string == first.text
        assert outcome.done.usage.completion_tokens == 1


@pytest.mark.parametrize("how", ["refuse", "report"])
async def test_a_failed_read_costs_an_attempt_and_no_answer(routed: Fleet, how: str) -> None:
    """Tried anew while the client has no token; after that the answer goes on behind those that it has."""

    def repeated() -> float:
        return sum(routed.router_metric(f"twinpool_router_{name}_total") for name in ("retries", "resumes"))

    before = repeated()
    armed = {name: routed.faults(name).read(how, value=Fault.BACKEND) for name in DECODERS}
    async with routed.client() as client:
        outcomes = [
            await ask(client, routed.oracle, prompt(5 * BLOCK, zlib.crc32(how.encode()) + number), 5)
            for number in range(3)
        ]
    assert [outcome.error for outcome in outcomes] == [None] * 3
    met = sum(routed.faults(name).count("data") >= number for name, number in armed.items())
    assert met >= 1
    assert repeated() - before == met
    assert sum(outcome.done.attempts - 1 for outcome in outcomes) == met


async def test_when_reads_keep_failing_the_client_hears_it(routed: Fleet) -> None:
    """By its own name once a token has gone out, else as the cause that exhausted the attempts."""
    for name in DECODERS:
        for skip in range(64):
            routed.faults(name).read("refuse", value=Fault.BACKEND, skip=skip)
    async with routed.client() as client:
        # More tokens than there are attempts, each of which may bring one before its hand-off fails.
        outcome = await ask(client, routed.oracle, prompt(20 * BLOCK, 47), 40)
        assert outcome.reason == ("TRANSFER_FAILED" if outcome.tokens else "ATTEMPTS_EXHAUSTED")
        if not outcome.tokens:
            assert outcome.error is not None
            assert outcome.error.metadata["cause"] == "TRANSFER_FAILED"
            assert outcome.error.metadata["attempts"] == "3"
        routed.clear_faults()
        (await ask(client, routed.oracle, prompt(20 * BLOCK, 47), 40)).done  # noqa: B018 - fails unless it ended well


@pytest.mark.parametrize("phase", ["started", "first token", "decoding"])
async def test_a_client_that_leaves_is_counted_as_cancelled_and_leaves_nothing(
    routed: Fleet, phase: str
) -> None:
    """While the prompt is computed, while its last chunk is read, while it decodes."""
    before = routed.router_metric("twinpool_router_requests_total", code="CANCELLED")
    holding = phase != "decoding"
    for name in DECODERS if holding else ():
        for skip in range(24):
            routed.faults(name).read("hold", skip=skip)
    wanted = {"started": 0, "first token": 1, "decoding": 4}[phase]

    def step(run: bool) -> None:
        for name in DECODERS if phase == "decoding" else ():
            routed.faults(name)._ask(do="steps", run=run)

    def leave(outcome: Outcome) -> bool:
        if left := len(outcome.tokens) >= wanted:
            # So that the answer does not end before the router hears of it.
            step(False)
        return left

    blocks, count = (4, 300) if phase == "decoding" else (18, 60)
    async with routed.client() as client:
        outcome = await ask(client, routed.oracle, prompt(blocks * BLOCK, 48), count, leave=leave)
        assert outcome.finished is None
    await until(
        lambda: routed.router_metric("twinpool_router_requests_total", code="CANCELLED") == before + 1
    )
    step(True)
    routed.clear_faults()
    await routed.assert_quiet(within=10.0)


async def test_a_prompt_beyond_the_limit_is_refused_by_its_own_name(routed: Fleet) -> None:
    """Refused before any worker hears of it."""
    async with routed.client() as client:
        outcome = await ask(client, None, prompt(4090, 49), 8)
        assert outcome.reason == "CONTEXT_LIMIT_EXCEEDED"
        outcome = await ask(client, None, prompt(25 * BLOCK, 50), 8)
        assert outcome.reason == "REQUEST_EXCEEDS_CAPACITY"


async def test_an_id_in_use_is_refused_and_the_first_request_goes_on(routed: Fleet) -> None:
    async with routed.client() as client:
        first = asyncio.create_task(ask(client, routed.oracle, prompt(10 * BLOCK, 51), 60, request_id="mine"))
        placed = routed.router_metric("twinpool_router_attempts_total")
        await until(lambda: routed.router_metric("twinpool_router_attempts_total") > placed or first.done())
        second = await ask(client, routed.oracle, prompt(BLOCK, 52), 4, request_id="mine")
        assert second.reason == "DUPLICATE_REQUEST"
        (await first).done  # noqa: B018
        (await ask(client, routed.oracle, prompt(BLOCK, 52), 4, request_id="mine")).done  # noqa: B018


async def test_tenants_do_not_share_blocks(routed: Fleet) -> None:
    tokens = prompt(4 * BLOCK, 53)
    async with routed.client() as client:
        for tenant in ("x", "", "y"):
            first, again = await ask_again(client, routed.oracle, tokens, 3, tenant=tenant)
            assert first.done.usage.cached_tokens == 0, f"tenant {tenant!r} found another one's blocks"
            assert first.done.usage.decode_cached_tokens == 0
            assert again.done.usage.cached_tokens == 3 * BLOCK


async def test_only_what_a_prompt_begins_with_is_found(routed: Fleet) -> None:
    """A is cached, B is cached; B + A begins with B, whatever holds A."""
    a, b = prompt(4 * BLOCK, 54), prompt(5 * BLOCK, 55)
    async with routed.client() as client:
        await ask_again(client, routed.oracle, a, 3)
        await ask_again(client, routed.oracle, b, 3)
        found = []
        for tail in (a, a[: BLOCK // 2]):
            outcome = await ask(client, routed.oracle, b + tail, 3)
            found.append(outcome.done.usage.cached_tokens)
        assert set(found) <= {0, 5 * BLOCK}, "neither the blocks of A, nor a partial one"
        assert 5 * BLOCK in found


async def test_many_at_once_in_tiny_pools_neither_wait_for_ever_nor_for_one_another(routed: Fleet) -> None:
    """Prompts and outputs of four times what the pools hold, all at once: running answers outgrow what is free, prefill
    holds KV until decode takes it, and every one of them ends."""
    wanted = [(prompt(3 + 11 * number, 60), 10 + 3 * (number % 12)) for number in range(24)]
    for tokens, count in wanted:
        routed.oracle.greedy(tokens, count, ignore_eos=True)
    async with routed.client() as client:
        outcomes = await asyncio.gather(
            *(ask(client, routed.oracle, tokens, count) for tokens, count in wanted)
        )
    assert [outcome.error for outcome in outcomes] == [None] * len(wanted)
