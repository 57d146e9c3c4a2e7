# SPDX-License-Identifier: Apache-2.0
"""Every way to an end, in every phase: both workers hold nothing afterwards, and routers are told once."""

from collections.abc import Callable

import pytest
import torch
from worker_pair import (
    BLOCK,
    Answer,
    Pair,
    cancel_command,
    decode_command,
    prefill_command,
    random_prompt,
    reference,
)

from twinpool.v1 import worker_pb2 as pb

PROMPT = random_prompt(12 * BLOCK + 3)


def _reserved(pair: Pair) -> None:
    """The decode worker has reserved; prefill has not been asked yet."""
    pair.decode.do(decode_command(pair, PROMPT, max_tokens=40))
    pair.run(lambda: bool(pair.decode.take("reserved")))


def _waiting(pair: Pair) -> None:
    """The prompt waits for its first step."""
    _reserved(pair)
    pair.prefill.do(prefill_command(pair, PROMPT, max_tokens=40))


def _pulling(pair: Pair) -> None:
    """Some chunks are here, others are computed."""
    _waiting(pair)
    pair.run(lambda: pair.decode.observer.bytes_read > 0)


def _stalled(pair: Pair) -> None:
    """Reads are posted and do not complete."""
    _waiting(pair)
    pair.turn()
    pair.fabric.stop(pair.prefill.key)
    pair.run(lambda: len(pair.decode.assembly.loop.role._attempts.get(_key(pair)).pull.writable_blocks) > 0)  # type: ignore[attr-defined]


def _offered(pair: Pair) -> None:
    """Prefill is done; the last blocks are not read."""
    _waiting(pair)
    pair.stalled = True
    pair.run(lambda: bool(pair._kinds(pair.prefill, "prefill_done")))


def _decoding(pair: Pair) -> None:
    """Tokens are generated."""
    _waiting(pair)
    pair.run(lambda: len(pair._kinds(pair.decode, "step")) > 2)


def _key(pair: Pair):  # type: ignore[no-untyped-def]
    (attempt,) = pair.decode.assembly.loop.role._attempts  # type: ignore[attr-defined]
    return attempt.key


Phase = Callable[[Pair], None]
PHASES: list[Phase] = [_reserved, _waiting, _pulling, _stalled, _offered, _decoding]


def _resume(pair: Pair) -> None:
    pair.stalled = False
    pair.fabric.resume(pair.prefill.key)
    pair.settle(20)


@pytest.mark.parametrize("phase", PHASES)
def test_cancel_of_both_legs(phase: Phase) -> None:
    pair = Pair()
    phase(pair)
    pair.decode.do(cancel_command())
    pair.prefill.do(cancel_command())
    pair.turn()
    # The answer comes at once, whatever the reads in flight do.
    assert len(pair.decode.take("cancelled")) == 1
    assert len(pair.prefill.take("cancelled")) == 1
    assert pair.decode.assembly.loop.role.requests == 0
    assert pair.prefill.assembly.loop.role.requests == 0
    _resume(pair)
    assert not pair.decode.take("failed")
    assert not pair.prefill.take("failed")
    pair.assert_quiet()


@pytest.mark.parametrize("phase", PHASES)
def test_the_routers_of_both_legs_die(phase: Phase) -> None:
    pair = Pair()
    phase(pair)
    for worker in (pair.decode, pair.prefill):
        worker.assembly.loop.post(lambda w=worker: w.assembly.loop.role.on_session_closed(1))  # type: ignore[misc]
    pair.turn()
    pair.decode.sent.clear()
    pair.prefill.sent.clear()
    _resume(pair)
    assert pair.decode.sent == []
    assert pair.prefill.sent == []
    pair.assert_quiet()


@pytest.mark.parametrize("phase", [_waiting, _pulling, _offered])
def test_cancel_of_decode_alone_ends_prefill_too(phase: Phase) -> None:
    pair = Pair()
    phase(pair)
    pair.decode.do(cancel_command())
    _resume(pair)
    assert len(pair.decode.take("cancelled")) == 1
    failed = pair.prefill.take("failed")
    assert [message.failed.reason for message in failed] in ([], [pb.FAILURE_REASON_PEER_LOST])
    pair.assert_quiet()


@pytest.mark.parametrize("phase", [_waiting, _pulling, _stalled, _offered])
def test_cancel_of_prefill_alone_fails_decode(phase: Phase) -> None:
    pair = Pair()
    phase(pair)
    pair.prefill.do(cancel_command())
    pair.turn()
    assert len(pair.prefill.take("cancelled")) == 1
    _resume(pair)
    assert len(pair.decode.take("failed")) == 1
    pair.assert_quiet()


@pytest.mark.parametrize("phase", [_reserved, _waiting, _pulling, _stalled, _offered])
def test_the_stream_between_the_workers_breaks(phase: Phase) -> None:
    pair = Pair()
    phase(pair)
    pair.cut()
    pair.turn()
    (failed,) = pair.decode.take("failed")
    assert failed.failed.reason == pb.FAILURE_REASON_PEER_LOST
    pair.prefill.do(cancel_command())
    _resume(pair)
    pair.assert_quiet()
    pair.decode.sent.clear()
    pair.prefill.sent.clear()
    # The next attempt makes a new link.
    assert pair.generate(PROMPT, "again", max_tokens=3) == [reference(PROMPT, 3)]
    pair.assert_quiet()


def test_a_broken_stream_does_not_end_what_already_decodes() -> None:
    pair = Pair()
    answer = Answer(1)
    pair.start(PROMPT, max_tokens=12)
    pair.run(lambda: answer.take(pair) or answer.handed_off)
    pair.cut()
    pair.run(lambda: answer.take(pair))
    assert answer.tokens == [reference(PROMPT, 12)]
    pair.assert_quiet()


def test_an_owner_that_cannot_be_reached_fails_before_prefill() -> None:
    pair = Pair()
    pair.connectable = False
    pair.decode.do(decode_command(pair, PROMPT))
    pair.settle()
    assert not pair.decode.take("reserved")
    (failed,) = pair.decode.take("failed")
    assert failed.failed.reason == pb.FAILURE_REASON_PEER_LOST
    pair.assert_quiet()


def test_blocks_of_a_stalled_read_stay_in_quarantine_until_it_is_over() -> None:
    pair = Pair()
    _stalled(pair)
    pair.decode.do(cancel_command())
    pair.turn()
    blocks = pair.decode.stack.blocks
    quarantined = blocks.quarantined_blocks
    assert quarantined > 0
    assert blocks.free_blocks + blocks.cached_blocks == blocks.num_blocks - quarantined
    pair.settle()
    assert blocks.quarantined_blocks == quarantined
    _resume(pair)
    assert blocks.quarantined_blocks == 0
    pair.prefill.do(cancel_command())
    pair.assert_quiet()


def test_a_late_read_does_not_touch_the_next_request() -> None:
    """The classic of hand-offs: abort, give the blocks to another prompt, then the old bytes arrive."""
    pair = Pair(decode_blocks=20)
    _stalled(pair)
    pair.decode.do(cancel_command())
    pair.prefill.do(cancel_command())
    pair.turn()
    other = random_prompt(4 * BLOCK, seed=5)
    pair.fabric.resume(pair.prefill.key)
    assert pair.generate(other, "other", max_tokens=8) == [reference(other, 8)]
    pair.decode.take("cancelled")
    pair.prefill.take("cancelled")
    pair.assert_quiet()


def test_a_hung_owner_fails_by_the_read_deadline() -> None:
    pair = Pair(read_deadline_seconds=5.0)
    _stalled(pair)
    pair.clock.now += 6.0
    pair.settle(3)
    (failed,) = pair.decode.take("failed")
    assert failed.failed.reason == pb.FAILURE_REASON_TRANSFER
    assert pair.decode.stack.blocks.quarantined_blocks > 0
    _resume(pair)
    pair.settle()
    pair.prefill.do(cancel_command())
    pair.assert_quiet()


def test_a_reader_that_never_comes_loses_its_lease_with_no_new_work() -> None:
    pair = Pair(lease_seconds=30.0)
    pair.prefill.do(prefill_command(pair, PROMPT))
    pair.run(lambda: bool(pair.prefill.take("prefill_done")))
    assert pair.prefill.stack.blocks.pinned_blocks > 0
    wake = pair.prefill.assembly.loop.role.next_wake(pair.clock.now)
    assert wake is not None
    assert pair.clock.now < wake <= pair.clock.now + 30.0
    pair.clock.now = wake
    pair.turn()
    assert pair.prefill.stack.blocks.pinned_blocks == 0
    pair.assert_quiet()


@pytest.mark.parametrize("phase", [_reserved, _pulling, _stalled, _decoding])
def test_the_deadline_ends_an_attempt_in_every_phase(phase: Phase, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_decode, plain_prefill = decode_command, prefill_command
    module = globals()
    monkeypatch.setitem(module, "decode_command", lambda *a, **k: plain_decode(*a, **k, deadline=9.0))
    monkeypatch.setitem(module, "prefill_command", lambda *a, **k: plain_prefill(*a, **k, deadline=9.0))
    pair = Pair(read_deadline_seconds=25.0)
    phase(pair)
    pair.clock.now += 10.0
    pair.turn()
    (failed,) = pair.decode.take("failed")
    assert failed.failed.reason == pb.FAILURE_REASON_DEADLINE
    _resume(pair)
    pair.assert_quiet()


def test_a_deadline_that_has_passed_on_arrival_is_refused() -> None:
    pair = Pair()
    pair.decode.do(decode_command(pair, PROMPT, deadline=0.0))
    pair.turn()
    (failed,) = pair.decode.take("failed")
    assert failed.failed.reason == pb.FAILURE_REASON_DEADLINE
    pair.assert_quiet()


# --- steps that go wrong


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_a_step_that_raises_fails_its_attempts_and_the_next_one_works(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair()
    worker = getattr(pair, which)
    runner, step = worker.stack.runner, worker.stack.runner.step
    pair.start(PROMPT, max_tokens=6)

    def broken(plan: object, draws: object) -> object:
        raise RuntimeError("planted")

    monkeypatch.setattr(runner, "step", broken)
    pair.run(lambda: bool(pair._kinds(worker, "failed")))
    monkeypatch.setattr(runner, "step", step)
    (failed,) = worker.take("failed")
    assert failed.failed.reason == pb.FAILURE_REASON_INTERNAL
    assert "planted" not in failed.failed.detail, "an exception's text may hold user content"
    pair.settle()
    pair.decode.sent.clear()
    pair.prefill.sent.clear()
    pair.assert_quiet()
    assert pair.generate(PROMPT, "again", max_tokens=6) == [reference(PROMPT, 6)]
    pair.assert_quiet()


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_logits_that_are_not_finite_fail_the_attempt_and_drop_the_cache(which: str) -> None:
    pair = Pair()
    worker = getattr(pair, which)
    pair.start(PROMPT, max_tokens=30)
    pair.run(lambda: worker.stack.scheduler.running > 0)
    model = worker.stack.runner._model
    head = model.logits
    try:
        model.logits = lambda hidden: torch.full_like(head(hidden), torch.nan)
        pair.run(lambda: bool(pair._kinds(worker, "failed")))
    finally:
        model.logits = head
    (failed,) = worker.take("failed")
    assert failed.failed.reason == pb.FAILURE_REASON_INTERNAL
    assert worker.stack.blocks.cached_blocks == 0
    pair.settle()
    pair.assert_quiet()


# --- refusals


def test_no_room_is_a_refusal_that_holds_nothing() -> None:
    pair = Pair(decode_blocks=14)
    pair.start(PROMPT, "big", max_tokens=5)
    pair.decode.do(decode_command(pair, random_prompt(40, seed=3), "late", max_tokens=5))
    pair.turn()
    (failed,) = pair.decode.take("failed")
    assert (failed.failed.id.request_id, failed.failed.reason) == ("late", pb.FAILURE_REASON_NO_CAPACITY)
    answer = Answer(1)
    pair.run(lambda: answer.take(pair))
    pair.assert_quiet()


def test_the_wrong_role_refuses() -> None:
    pair = Pair()
    pair.prefill.do(decode_command(pair, PROMPT))
    pair.decode.do(prefill_command(pair, PROMPT))
    pair.turn()
    for worker in (pair.prefill, pair.decode):
        (failed,) = worker.take("failed")
        assert failed.failed.reason == pb.FAILURE_REASON_NOT_SERVING
    pair.assert_quiet()


def test_a_duplicate_is_refused_and_the_first_goes_on() -> None:
    pair = Pair()
    pair.start(PROMPT, max_tokens=4)
    pair.prefill.do(prefill_command(pair, PROMPT))
    pair.decode.do(decode_command(pair, PROMPT))
    pair.turn()
    for worker in (pair.prefill, pair.decode):
        (failed,) = worker.take("failed")
        assert failed.failed.reason == pb.FAILURE_REASON_DUPLICATE
    answer = Answer(1)
    pair.run(lambda: answer.take(pair))
    assert answer.tokens == [reference(PROMPT, 4)]
    pair.prefill.do(prefill_command(pair, PROMPT))
    pair.settle(2)
    (failed,) = pair.prefill.take("failed")
    assert failed.failed.reason == pb.FAILURE_REASON_DUPLICATE, "an id that has ended is spent"
    pair.assert_quiet()


def test_cancel_of_the_unknown_and_of_another_router_s_attempt() -> None:
    pair = Pair()
    pair.start(PROMPT, max_tokens=4)
    pair.decode.do(cancel_command("nobody"), session=2)
    pair.decode.do(cancel_command("r"), session=2)
    pair.turn()
    assert [session for session, m in pair.decode.sent if m.WhichOneof("message") == "cancelled"] == [2, 2]
    pair.decode.take("cancelled")
    answer = Answer(1)
    pair.run(lambda: answer.take(pair))
    pair.assert_quiet()


def test_choices_that_no_idle_pool_holds_together_fail_instead_of_waiting() -> None:
    """Each choice alone fits, all of them at once never get their first blocks."""
    pair = Pair(decode_blocks=7, max_num_seqs=8)
    prompt = random_prompt(4 * BLOCK + 3)
    pair.start(prompt, n=4, max_tokens=8)
    pair.run(lambda: bool(pair._kinds(pair.decode, "failed")))
    (failed,) = pair.decode.take("failed")
    assert failed.failed.reason == pb.FAILURE_REASON_NO_CAPACITY
    pair.assert_quiet()


def test_choices_wait_for_room_and_then_start() -> None:
    pair = Pair(decode_blocks=12, max_num_seqs=5)
    first, second = random_prompt(3 * BLOCK + 1, seed=1), random_prompt(BLOCK + 3, seed=2)
    pair.start(first, "long", max_tokens=40)
    pair.run(lambda: pair.decode.stack.scheduler.running == 1)
    pair.start(second, "many", n=4, max_tokens=6, temperature=1.0)
    answers = {"long": Answer(1), "many": Answer(4)}
    for _ in range(400):
        pair.turn()
        for message in pair.prefill.take("prefill_done"):
            for token in message.prefill_done.first_tokens:
                answers[message.prefill_done.id.request_id]._add(token.index, 0, token.token_id, token.finish)
        for message in pair.decode.take("step"):
            for entry in message.step.tokens:
                name = message.step.ids[entry.slot].request_id
                answers[name]._add(entry.index, entry.offset, entry.token_id, entry.finish)
        if all(answer.finished for answer in answers.values()):
            break
    assert answers["long"].tokens == [reference(first, 40)]
    assert answers["many"].tokens == [reference(second, 6, choice=c, temperature=1.0) for c in range(4)]
    pair.assert_quiet()
