# SPDX-License-Identifier: Apache-2.0
"""Both roles against each other: right tokens at every edge length, and nothing held afterwards."""

import pytest
from worker_pair import (
    BLOCK,
    LENGTH,
    STOP,
    Answer,
    Pair,
    cancel_command,
    decode_command,
    prefill_command,
    random_prompt,
    reference,
)

from twinpool.transfer.base import AttemptKey
from twinpool.v1 import worker_pb2 as pb

EDGES = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 5, 5 * BLOCK]


@pytest.mark.parametrize("length", EDGES)
def test_tokens_are_those_of_one_engine(length: int) -> None:
    pair = Pair()
    prompt = random_prompt(length)
    assert pair.generate(prompt, max_tokens=20) == [reference(prompt, 20)]
    pair.assert_quiet()
    assert pair.decode.observer.bytes_read == -(-length // BLOCK) * pair.decode.stack.pool.block_bytes


@pytest.mark.parametrize("length", EDGES)
def test_a_prompt_that_both_sides_have_cached(length: int) -> None:
    pair = Pair()
    prompt = random_prompt(length)
    expected = [reference(prompt, 4)]
    assert pair.generate(prompt, "first", max_tokens=4) == expected
    before = pair.decode.observer.bytes_read
    assert pair.generate(prompt, "second", max_tokens=4) == expected
    # Only the partial last block moves again, and nothing at all if there is none.
    moved = pair.decode.observer.bytes_read - before
    assert moved == (pair.decode.stack.pool.block_bytes if length % BLOCK else 0)
    pair.assert_quiet()


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_few_tokens(max_tokens: int) -> None:
    pair = Pair()
    prompt = random_prompt(2 * BLOCK + 3)
    assert pair.generate(prompt, max_tokens=max_tokens) == [reference(prompt, max_tokens)]
    pair.assert_quiet()
    assert pair.decode.stack.blocks.cached_blocks == 2, (
        "the prompt is worth keeping even if nothing was decoded"
    )


def test_the_first_token_is_a_stop_token() -> None:
    pair = Pair()
    prompt = random_prompt(BLOCK + 4)
    first = reference(prompt, 1)[0]
    pair.start(prompt, max_tokens=9, stop=[first])
    answer = Answer(1)
    pair.run(lambda: answer.take(pair))
    assert (answer.tokens, answer.finish) == ([[first]], [STOP])
    pair.assert_quiet()
    assert not pair.decode.take("step")


def test_a_later_stop_token_and_min_tokens() -> None:
    prompt = random_prompt(BLOCK)
    plain = reference(prompt, 8)
    # A token that comes for the first time in the middle.
    at = next(i for i in range(1, 8) if plain[i] not in plain[:i])
    pair = Pair()
    pair.start(prompt, max_tokens=8, stop=[plain[at]])
    answer = Answer(1)
    pair.run(lambda: answer.take(pair))
    assert (answer.tokens, answer.finish) == ([plain[: at + 1]], [STOP])
    pair.start(prompt, "with-min", max_tokens=8, stop=[plain[at]], min_tokens=8)
    other = Answer(1)
    pair.run(lambda: other.take(pair))
    assert len(other.tokens[0]) == 8
    assert plain[at] not in other.tokens[0][:7]
    pair.assert_quiet()


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, 2 * BLOCK + 7])
def test_choices_share_one_prefill(length: int) -> None:
    pair = Pair()
    prompt = random_prompt(length)
    got = pair.generate(prompt, n=3, max_tokens=10, temperature=1.0)
    assert got == [reference(prompt, 10, choice=choice, temperature=1.0) for choice in range(3)]
    assert len({tuple(tokens) for tokens in got}) == 3
    pair.assert_quiet()


def test_choices_that_end_at_once_beside_choices_that_go_on() -> None:
    for seed in range(20):
        prompt = random_prompt(BLOCK + 2, seed)
        first = [reference(prompt, 1, choice=choice, temperature=1.5)[0] for choice in range(4)]
        ends = [token == first[0] for token in first]
        if not all(ends):
            break
    assert not all(ends)
    stop = first[0]
    pair = Pair()
    pair.start(prompt, n=4, max_tokens=5, temperature=1.5, stop=[stop])
    answer = Answer(4)
    pair.run(lambda: answer.take(pair))
    for index, ended in enumerate(ends):
        if ended:
            assert answer.tokens[index] == [stop]
    pair.assert_quiet()


def test_many_at_once_in_a_small_pool() -> None:
    """Blocks are reused within the test; a wrong one would show as a wrong token (freed blocks are poisoned)."""
    pair = Pair(prefill_blocks=14, decode_blocks=14, max_num_seqs=4)
    prompts = {f"r{number}": random_prompt(11 + 7 * number, seed=number) for number in range(8)}
    waiting, answers = dict(prompts), {name: Answer(1) for name in prompts}
    started: set[str] = set()
    done: set[str] = set()
    for _ in range(3000):
        if len(done) == len(prompts):
            break
        for name, prompt in list(waiting.items()):
            pair.decode.do(decode_command(pair, prompt, name, max_tokens=12))
            del waiting[name]
        pair.turn()
        for failed in pair.decode.take("failed"):
            assert failed.failed.reason == pb.FAILURE_REASON_NO_CAPACITY
            waiting[failed.failed.id.request_id] = prompts[failed.failed.id.request_id]
        for message in pair.decode.take("reserved"):
            name, cached = message.reserved.id.request_id, message.reserved.cached_blocks
            pair.prefill.do(prefill_command(pair, prompts[name], name, cached, max_tokens=12))
            started.add(name)
        _sort_out(pair, answers, done)
    assert done == set(prompts)
    for name, prompt in prompts.items():
        assert answers[name].tokens == [reference(prompt, 12)], name
    pair.assert_quiet()


@pytest.mark.parametrize("host_blocks", [0, 8])
def test_a_sequence_that_loses_its_blocks_goes_on_later(host_blocks: int) -> None:
    """Two answers outgrow the pool; the loser is computed again or comes back from host memory, and says nothing twice."""
    pair = Pair(decode_blocks=9, max_num_seqs=4, host_blocks=host_blocks)
    prompts = {name: random_prompt(2 * BLOCK + 2, seed) for seed, name in enumerate(("a", "b"))}
    for name, prompt in prompts.items():
        pair.start(prompt, name, max_tokens=45)
    answers = {name: Answer(1) for name in prompts}
    done: set[str] = set()
    preempted = swapped = 0
    for _ in range(400):
        pair.turn()
        preempted += pair.decode.stack.scheduler.waiting
        swapped += pair.decode.stack.scheduler.host_blocks_used
        _sort_out(pair, answers, done)
        if len(done) == 2:
            break
    assert preempted
    assert bool(swapped) == bool(host_blocks)
    for name, prompt in prompts.items():
        assert answers[name].tokens == [reference(prompt, 45)]
    pair.assert_quiet()


def test_an_answer_that_is_not_preemptible_keeps_its_blocks() -> None:
    """It gets the blocks of its whole answer at once; the other one gives way, although it has more to lose."""
    pair = Pair(decode_blocks=9, max_num_seqs=4)
    prompts = {"long": random_prompt(4 * BLOCK), "kept": random_prompt(BLOCK, seed=1)}
    pair.start(prompts["long"], "long", max_tokens=50)
    pair.start(prompts["kept"], "kept", max_tokens=3 * BLOCK + 1, preemptible=False)
    scheduler = pair.decode.stack.scheduler
    answers = {name: Answer(1) for name in prompts}
    done: set[str] = set()
    finished_first = None
    preempted = 0
    for _ in range(400):
        pair.turn()
        preempted += scheduler.waiting
        _sort_out(pair, answers, done)
        finished_first = finished_first or next(iter(done), None)
        if len(done) == 2:
            break
    assert preempted
    assert finished_first == "kept"
    assert answers["kept"].tokens == [reference(prompts["kept"], 3 * BLOCK + 1)]
    assert answers["long"].tokens == [reference(prompts["long"], 50)]
    pair.assert_quiet()


def _sort_out(pair: Pair, answers: dict[str, Answer], done: set[str]) -> None:
    for message in pair.prefill.take("prefill_done"):
        for first in message.prefill_done.first_tokens:
            answers[message.prefill_done.id.request_id]._add(0, 0, first.token_id, first.finish)
    for message in pair.decode.take("step"):
        for token in message.step.tokens:
            name = message.step.ids[token.slot].request_id
            answers[name]._add(token.index, token.offset, token.token_id, token.finish)
    done |= {name for name, answer in answers.items() if answer.finished}


def test_logprobs_come_from_both_legs() -> None:
    pair = Pair()
    pair.start(random_prompt(20), max_tokens=3, logprobs=2)
    pair.run(lambda: len(Pair._kinds(pair.decode, "step")) == 2)
    first = pair.prefill.take("prefill_done")[0].prefill_done.first_tokens[0]
    later = [message.step.tokens[0] for message in pair.decode.take("step")]
    for token in (first, *later):
        assert token.logprobs.chosen.token_id == token.token_id
        assert len(token.logprobs.top) == 2
        assert token.logprobs.chosen.logprob <= 0
    assert later[-1].finish == LENGTH


def test_one_message_a_step_for_all_requests_of_a_session() -> None:
    pair = Pair()
    for number in range(3):
        pair.start(random_prompt(BLOCK, seed=number), f"r{number}", max_tokens=30)
    pair.run(lambda: pair.decode.stack.scheduler.running == 3)
    pair.decode.take("step")
    pair.turn()
    (message,) = pair.decode.take("step")
    assert {key.request_id for key in message.step.ids} == {"r0", "r1", "r2"}
    for number in range(3):
        pair.decode.do(cancel_command(f"r{number}"))
    pair.settle()
    assert len(pair.decode.take("cancelled")) == 3
    pair.assert_quiet()


def test_chunks_are_offered_before_the_prompt_is_done() -> None:
    pair = Pair()
    prompt = random_prompt(12 * BLOCK)
    pair.start(prompt, max_tokens=2)
    pair.run(lambda: pair.decode.observer.bytes_read > 0)
    assert not Pair._kinds(pair.prefill, "prefill_done")
    answer = Answer(1)
    pair.run(lambda: answer.take(pair))
    assert answer.tokens == [reference(prompt, 2)]
    pair.assert_quiet()


def test_the_owner_is_named_by_the_attempt_alone() -> None:
    """Two attempts of one request are different work."""
    pair = Pair()
    prompt = random_prompt(5)
    assert pair.start(prompt) == AttemptKey("r", 1)
    pair.decode.do(decode_command(pair, prompt))
    pair.settle(2)
    (refused,) = pair.decode.take("failed")
    assert refused.failed.reason == pb.FAILURE_REASON_DUPLICATE
