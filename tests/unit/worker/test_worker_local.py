# SPDX-License-Identifier: Apache-2.0
"""A decode worker that computes a prompt itself: the same tokens, the same messages, and no other worker."""

from collections.abc import Callable

import pytest
import torch
from worker_pair import (
    BLOCK,
    LENGTH,
    STOP,
    Answer,
    Pair,
    cancel_command,
    decode_command,
    prefix_source,
    random_prompt,
    reference,
)

from twinpool.v1 import worker_pb2 as pb

EDGES = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 5, 5 * BLOCK]


def start(pair: Pair, prompt: list[int], name: str = "r", **spec: object) -> None:
    pair.decode.do(decode_command(pair, prompt, name, local=True, **spec))  # type: ignore[arg-type]


def generate(pair: Pair, prompt: list[int], name: str = "r", **spec: object) -> list[list[int]]:
    start(pair, prompt, name, **spec)
    answer = Answer(int(spec.get("n", 1)))  # type: ignore[call-overload]
    pair.run(lambda: answer.take(pair))
    assert answer.handed_off
    return answer.tokens


@pytest.mark.parametrize("length", EDGES)
def test_tokens_are_those_of_one_engine(length: int) -> None:
    pair = Pair()
    prompt = random_prompt(length)
    assert generate(pair, prompt, max_tokens=20) == [reference(prompt, 20)]
    assert pair.links == [], "nobody else was asked"
    assert generate(pair, prompt, "again", max_tokens=20) == [reference(prompt, 20)]
    pair.assert_quiet()


def test_a_router_hears_what_it_hears_of_a_hand_off() -> None:
    pair = Pair()
    start(pair, random_prompt(3 * BLOCK + 2), max_tokens=4)
    pair.run(lambda: len(pair._kinds(pair.decode, "step")) == 3)
    kinds = [message.WhichOneof("message") for _, message in pair.decode.sent]
    assert kinds == ["reserved", "prefill_done", "handoff_done", "step", "step", "step"]
    (done,) = pair.decode.take("prefill_done")
    assert done.prefill_done.cached_tokens == 0
    assert done.prefill_done.compute_time.ToNanoseconds() > 0
    (moved,) = pair.decode.take("handoff_done")
    assert (moved.handoff_done.stats.bytes, moved.handoff_done.stats.blocks) == (0, 0)
    assert [m.step.tokens[0].offset for m in pair.decode.take("step")] == [1, 2, 3]


def test_the_next_turn_computes_its_new_tokens_alone() -> None:
    pair = Pair()
    prompt = random_prompt(2 * BLOCK + 7)
    (tokens,) = pair.generate(prompt, "first", max_tokens=30)
    prompt = prompt + tokens + random_prompt(9, seed=1)
    start(pair, prompt, max_tokens=6)
    pair.run(lambda: bool(pair._kinds(pair.decode, "prefill_done")))
    assert pair.decode.take("reserved")[0].reserved.cached_blocks == 4
    assert pair._kinds(pair.decode, "prefill_done")[0].prefill_done.cached_tokens == 4 * BLOCK
    answer = Answer(1)
    pair.run(lambda: answer.take(pair))
    assert answer.tokens == [reference(prompt, 6)]
    pair.assert_quiet()


def test_a_prefix_that_another_decode_worker_has_is_pulled_first() -> None:
    pair = Pair()
    prompt = random_prompt(4 * BLOCK)
    pair.generate(prompt, "first", max_tokens=4)
    old, pair.decode = pair.decode, pair.add("decode", "decode-1")
    assert generate(pair, prompt, prefix=prefix_source(old, 4), max_tokens=6) == [reference(prompt, 6)]
    assert pair.decode.observer.bytes_read == 3 * old.stack.pool.block_bytes
    old.stack.blocks.reset_cache()
    pair.decode.stack.blocks.reset_cache()
    assert generate(pair, prompt, "b", prefix=prefix_source(old, 4), max_tokens=6) == [reference(prompt, 6)]
    assert pair.decode.observer.bytes_read == 3 * old.stack.pool.block_bytes, "computed, since it is gone"
    pair.assert_quiet()


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_few_tokens(max_tokens: int) -> None:
    pair = Pair()
    prompt = random_prompt(2 * BLOCK + 3)
    start(pair, prompt, max_tokens=max_tokens)
    answer = Answer(1)
    pair.run(lambda: answer.take(pair))
    assert (answer.tokens, answer.finish) == ([reference(prompt, max_tokens)], [LENGTH])
    pair.assert_quiet()
    assert pair.decode.stack.blocks.cached_blocks == 2


def test_the_first_token_is_a_stop_token() -> None:
    pair = Pair()
    prompt = random_prompt(BLOCK + 4)
    first = reference(prompt, 1)[0]
    start(pair, prompt, max_tokens=9, stop=[first])
    answer = Answer(1)
    pair.run(lambda: answer.take(pair))
    assert (answer.tokens, answer.finish) == ([[first]], [STOP])
    pair.assert_quiet()
    assert not pair.decode.take("step")


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, 2 * BLOCK + 7])
def test_choices_share_one_prompt(length: int) -> None:
    pair = Pair()
    prompt = random_prompt(length)
    got = generate(pair, prompt, n=3, max_tokens=10, temperature=1.0)
    assert got == [reference(prompt, 10, choice=choice, temperature=1.0) for choice in range(3)]
    pair.assert_quiet()


def test_choices_that_all_end_at_once() -> None:
    pair = Pair()
    prompt = random_prompt(BLOCK + 1)
    assert generate(pair, prompt, n=3, max_tokens=1) == [reference(prompt, 1)] * 3
    pair.assert_quiet()


def test_choices_wait_for_room_and_then_start() -> None:
    pair = Pair(decode_blocks=12, max_num_seqs=5)
    long, many = random_prompt(3 * BLOCK + 1, seed=1), random_prompt(BLOCK + 3, seed=2)
    start(pair, long, "long", max_tokens=40)
    pair.run(lambda: pair.decode.stack.scheduler.running == 1)
    start(pair, many, "many", n=4, max_tokens=6, temperature=1.0)
    answers = {"long": Answer(1), "many": Answer(4)}
    pair.run(lambda: _sort_out(pair, answers))
    assert answers["long"].tokens == [reference(long, 40)]
    assert answers["many"].tokens == [reference(many, 6, choice=c, temperature=1.0) for c in range(4)]
    pair.assert_quiet()


def test_choices_that_no_idle_pool_holds_together_fail_instead_of_waiting() -> None:
    pair = Pair(decode_blocks=7, max_num_seqs=8)
    start(pair, random_prompt(4 * BLOCK + 3), n=4, max_tokens=8)
    pair.run(lambda: bool(pair._kinds(pair.decode, "failed")))
    (failed,) = pair.decode.take("failed")
    assert failed.failed.reason == pb.FAILURE_REASON_NO_CAPACITY
    pair.assert_quiet()


def _sort_out(pair: Pair, answers: dict[str, Answer]) -> bool:
    for message in pair.decode.take("prefill_done"):
        for first in message.prefill_done.first_tokens:
            answers[message.prefill_done.id.request_id]._add(first.index, 0, first.token_id, first.finish)
    for message in pair.decode.take("step"):
        for token in message.step.tokens:
            name = message.step.ids[token.slot].request_id
            answers[name]._add(token.index, token.offset, token.token_id, token.finish)
    return all(answer.finished for answer in answers.values())


# --- beside others


def test_streams_that_run_get_a_token_in_every_step_meanwhile() -> None:
    pair = Pair()
    start(pair, random_prompt(5, seed=1), "stream", max_tokens=60)
    pair.run(lambda: len(pair._kinds(pair.decode, "step")) > 3)
    pair.decode.sent.clear()
    start(pair, random_prompt(12 * BLOCK, seed=2), "long", max_tokens=3)
    turns = 0
    while not pair._kinds(pair.decode, "prefill_done"):
        pair.turn()
        turns += 1
    assert turns >= 6, "chunks of 32 tokens"
    steps = pair._kinds(pair.decode, "step")
    assert len(steps) >= turns - 1
    assert all([key.request_id for key in message.step.ids] == ["stream"] for message in steps)
    pair.run(lambda: not pair.decode.assembly.loop.role.requests)
    pair.assert_quiet()


def test_no_room_is_a_refusal_that_holds_nothing() -> None:
    pair = Pair(decode_blocks=14)
    start(pair, random_prompt(12 * BLOCK + 3), "big", max_tokens=5)
    pair.turn()
    start(pair, random_prompt(40, seed=3), "late", max_tokens=5)
    pair.turn()
    (failed,) = pair.decode.take("failed")
    assert (failed.failed.id.request_id, failed.failed.reason) == ("late", pb.FAILURE_REASON_NO_CAPACITY)
    pair.run(lambda: not pair.decode.assembly.loop.role.requests)
    pair.assert_quiet()


@pytest.mark.parametrize("second_local", [True, False])
def test_what_the_first_of_one_turn_will_need_is_not_given_to_the_second(second_local: bool) -> None:
    pair = Pair(decode_blocks=14)
    start(pair, random_prompt(7 * BLOCK), "first", max_tokens=5)
    second = random_prompt(7 * BLOCK, seed=3)
    pair.decode.do(decode_command(pair, second, "second", local=second_local, max_tokens=5))
    pair.turn()
    (failed,) = pair.decode.take("failed")
    assert (failed.failed.id.request_id, failed.failed.reason) == ("second", pb.FAILURE_REASON_NO_CAPACITY)
    pair.run(lambda: not pair.decode.assembly.loop.role.requests)
    pair.assert_quiet()


def test_seats_are_counted() -> None:
    pair = Pair(max_num_seqs=2)
    for number in range(3):
        start(pair, random_prompt(20, seed=number), f"r{number}", max_tokens=5)
    pair.turn()
    (failed,) = pair.decode.take("failed")
    assert failed.failed.id.request_id == "r2"
    pair.run(lambda: not pair.decode.assembly.loop.role.requests)
    pair.assert_quiet()


def test_a_cached_prefix_that_nobody_holds_is_no_room_for_the_rest() -> None:
    """Ten blocks: two of a stream, two free, six cached ones. These are the prompt's own, so it can't evict them."""
    pair = Pair(decode_blocks=10)
    prompt = random_prompt(6 * BLOCK)
    generate(pair, prompt, "first", max_tokens=2)
    start(pair, random_prompt(BLOCK + 3, seed=1), "stream", max_tokens=10)
    pair.run(lambda: len(pair._kinds(pair.decode, "step")) > 2)
    longer = prompt + random_prompt(BLOCK + 5, seed=2)
    start(pair, longer, "longer", max_tokens=2)
    pair.turn()
    (failed,) = pair.decode.take("failed")
    assert failed.failed.id.request_id == "longer"
    pair.run(lambda: not pair.decode.assembly.loop.role.requests)
    pair.decode.sent.clear()
    assert generate(pair, longer, "alone", max_tokens=2) == [reference(longer, 2)]
    pair.assert_quiet()


def test_a_prompt_that_loses_its_blocks_is_computed_again() -> None:
    pair = Pair(decode_blocks=9, max_num_seqs=4)
    prompts = {name: random_prompt(2 * BLOCK + 2, seed) for seed, name in enumerate(("a", "b"))}
    for name, prompt in prompts.items():
        start(pair, prompt, name, max_tokens=45)
    answers = {name: Answer(1) for name in prompts}
    preempted = 0
    for _ in range(400):
        pair.turn()
        preempted += pair.decode.stack.scheduler.waiting
        if _sort_out(pair, answers):
            break
    assert preempted
    for name, prompt in prompts.items():
        assert answers[name].tokens == [reference(prompt, 45)]
    pair.assert_quiet()


# --- ends

PROMPT = random_prompt(12 * BLOCK + 3)


def _computing(pair: Pair) -> None:
    start(pair, PROMPT, max_tokens=40)
    pair.turn()
    pair.turn()
    assert pair.decode.stack.scheduler.waiting_tokens > 0


def _fetching(pair: Pair) -> None:
    prompt = PROMPT[: 6 * BLOCK]
    pair.generate(prompt, "first", max_tokens=2)
    pair.decode = pair.add("decode", "decode-1")
    pair.fabric.stop(pair.prefill.key)
    start(pair, PROMPT, max_tokens=40, prefix=prefix_source(pair.prefill, 6))
    pair.settle(4)
    assert pair.decode.stack.scheduler.waiting == 0


def _decoding(pair: Pair) -> None:
    start(pair, PROMPT, max_tokens=40, n=2)
    pair.run(lambda: len(pair._kinds(pair.decode, "step")) > 2)


PHASES: list[Callable[[Pair], None]] = [_computing, _fetching, _decoding]


@pytest.mark.parametrize("phase", PHASES)
def test_cancel(phase: Callable[[Pair], None]) -> None:
    pair = Pair()
    phase(pair)
    pair.decode.do(cancel_command())
    pair.turn()
    assert len(pair.decode.take("cancelled")) == 1
    assert pair.decode.assembly.loop.role.requests == 0
    pair.fabric.resume(pair.prefill.key)
    pair.assert_quiet()


@pytest.mark.parametrize("phase", PHASES)
def test_the_router_dies(phase: Callable[[Pair], None]) -> None:
    pair = Pair()
    phase(pair)
    role = pair.decode.assembly.loop.role
    pair.decode.assembly.loop.post(lambda: role.on_session_closed(1))
    pair.turn()
    pair.decode.sent.clear()
    pair.fabric.resume(pair.prefill.key)
    pair.assert_quiet()
    assert pair.decode.sent == []


def test_a_step_that_raises_fails_the_prompt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    _computing(pair)

    def broken(plan: object, draws: object) -> object:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(pair.decode.stack.runner, "step", broken)
        pair.run(lambda: bool(pair._kinds(pair.decode, "failed")))
    (failed,) = pair.decode.take("failed")
    assert failed.failed.reason == pb.FAILURE_REASON_INTERNAL
    pair.assert_quiet()
    assert generate(pair, PROMPT, "again", max_tokens=6) == [reference(PROMPT, 6)]


def test_logits_that_are_not_finite_fail_the_prompt() -> None:
    pair = Pair()
    start(pair, PROMPT, max_tokens=30)
    model = pair.decode.stack.runner._model
    head = model.logits
    try:
        model.logits = lambda hidden: torch.full_like(head(hidden), torch.nan)
        pair.run(lambda: bool(pair._kinds(pair.decode, "failed")))
    finally:
        model.logits = head
    assert not pair.decode.take("prefill_done")
    assert pair.decode.stack.blocks.cached_blocks == 0
    pair.decode.sent.clear()
    pair.assert_quiet()
