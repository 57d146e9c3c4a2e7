# SPDX-License-Identifier: Apache-2.0
"""A cached prefix is pulled from whoever has it; where that fails it is computed, and the answer is the same."""

from collections.abc import Callable

import pytest
from worker_pair import (
    BLOCK,
    Answer,
    Pair,
    Worker,
    cancel_command,
    decode_command,
    prefill_command,
    prefix_source,
    random_prompt,
    reference,
)

from twinpool.v1 import worker_pb2 as pb

PROMPT = random_prompt(3 * BLOCK + 7)
TOKENS = 30
"""Generated in the first turn: with the prompt, five full blocks and a part."""


def first_turn(pair: Pair) -> list[int]:
    """One request to its end. Returns the next turn's prompt, whose first five blocks lie on the decode worker, of
    which the prefill worker has three."""
    (tokens,) = pair.generate(PROMPT, "first", max_tokens=TOKENS)
    assert tokens == reference(PROMPT, TOKENS)
    pair.assert_quiet()
    return PROMPT + tokens + random_prompt(9, seed=8)


def answer(pair: Pair, prompt: list[int], name: str = "next", **spec: object) -> pb.PrefillDone:
    """A request to its end, checked against one engine alone; what its prefill said."""
    pair.start(prompt, name, max_tokens=6, **spec)  # type: ignore[arg-type]
    pair.run(lambda: bool(pair._kinds(pair.prefill, "prefill_done")))
    done = pair._kinds(pair.prefill, "prefill_done")[0].prefill_done
    got = Answer(int(spec.get("n", 1)))  # type: ignore[call-overload]
    pair.run(lambda: got.take(pair))
    assert got.tokens == [reference(prompt, 6)] * len(got.tokens)
    pair.assert_quiet()
    return done


def test_the_next_turn_is_pulled_from_the_decode_worker() -> None:
    pair = Pair()
    prompt = first_turn(pair)
    before = pair.decode.observer.bytes_read
    done = answer(pair, prompt, prefix=prefix_source(pair.decode, 5))
    assert done.cached_tokens == 5 * BLOCK, "prompt and answer of the turn before"
    assert done.fetched.owner_blocks == 5
    assert done.fetched.failure == pb.FAILURE_REASON_UNSPECIFIED
    size = pair.decode.stack.pool.block_bytes
    assert pair.prefill.observer.bytes_read == done.fetched.stats.bytes == 2 * size, "what it did not have"
    assert pair.decode.observer.bytes_read - before == size, "and the decode worker gets the new block alone"


def test_a_prefill_worker_pulls_from_another() -> None:
    pair = Pair()
    prompt = first_turn(pair)
    old, pair.prefill = pair.prefill, pair.add("prefill", "prefill-1")
    done = answer(pair, prompt, prefix=prefix_source(old, 3))
    assert done.cached_tokens == 3 * BLOCK
    assert pair.prefill.observer.bytes_read == 3 * old.stack.pool.block_bytes
    assert old.stack.blocks.cached_blocks == 3, "the owner keeps it"


def test_a_decode_worker_pulls_from_another_before_it_reserves() -> None:
    pair = Pair()
    prompt = first_turn(pair)
    old, pair.decode = pair.decode, pair.add("decode", "decode-1")
    pair.decode.do(decode_command(pair, prompt, prefix=prefix_source(old, 5), max_tokens=6))
    pair.run(lambda: bool(pair._kinds(pair.decode, "reserved")))
    (reserved,) = pair.decode.take("reserved")
    assert reserved.reserved.cached_blocks == 5
    pair.prefill.do(prefill_command(pair, prompt, "r", 5, max_tokens=6))
    got = Answer(1)
    pair.run(lambda: got.take(pair))
    assert got.tokens == [reference(prompt, 6)]
    assert pair.decode.observer.bytes_read == 6 * old.stack.pool.block_bytes
    pair.assert_quiet()


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_a_prompt_of_full_blocks_leaves_its_last_one_to_be_computed(blocks: int) -> None:
    pair = Pair()
    prompt = random_prompt(blocks * BLOCK, seed=3)
    pair.generate(prompt, "first", max_tokens=4)
    old, pair.prefill = pair.prefill, pair.add("prefill", "prefill-1")
    done = answer(pair, prompt, prefix=prefix_source(old, blocks))
    assert done.cached_tokens == (blocks - 1) * BLOCK
    assert done.HasField("fetched") == (blocks > 1)


def test_choices_after_a_fetch() -> None:
    pair = Pair()
    prompt = first_turn(pair)
    assert answer(pair, prompt, prefix=prefix_source(pair.decode, 5), n=3).cached_tokens == 5 * BLOCK


def test_nothing_is_asked_for_what_is_here_already() -> None:
    pair = Pair()
    first_turn(pair)
    done = answer(pair, PROMPT, prefix=prefix_source(pair.decode, 3))
    assert not done.HasField("fetched")
    assert done.cached_tokens == 3 * BLOCK
    assert pair.prefill.observer.bytes_read == 0


def test_an_owner_that_holds_less_than_was_believed() -> None:
    pair = Pair()
    prompt = first_turn(pair)
    old, pair.prefill = pair.prefill, pair.add("prefill", "prefill-1")
    done = answer(pair, prompt, prefix=prefix_source(old, 5))
    assert (done.fetched.owner_blocks, done.cached_tokens) == (3, 3 * BLOCK)


def test_two_at_once_fetch_the_same_prefix() -> None:
    """Both commit the same hashes: one block of each stays, the other is given back."""
    pair = Pair()
    prompt = first_turn(pair)
    for name in ("a", "b"):
        pair.decode.do(decode_command(pair, prompt, name, max_tokens=5))
    pair.run(lambda: len(pair._kinds(pair.decode, "reserved")) == 2)
    for name in ("a", "b"):
        pair.prefill.do(
            prefill_command(pair, prompt, name, 5, prefix=prefix_source(pair.decode, 5), max_tokens=5)
        )
    pair.run(lambda: len(pair._kinds(pair.prefill, "prefill_done")) == 2)
    for message in pair.prefill.take("prefill_done"):
        assert message.prefill_done.cached_tokens == 5 * BLOCK
        assert message.prefill_done.first_tokens[0].token_id == reference(prompt, 1)[0]
    pair.assert_quiet()


# --- the owner is no help


def test_an_owner_that_has_evicted_the_prefix() -> None:
    pair = Pair()
    prompt = first_turn(pair)
    pair.decode.stack.blocks.reset_cache()
    done = answer(pair, prompt, prefix=prefix_source(pair.decode, 5))
    assert done.fetched.failure == pb.FAILURE_REASON_NOT_CACHED
    assert done.fetched.owner_blocks == 3, "at most: it was asked for the fourth"
    assert done.cached_tokens == 3 * BLOCK, "what the worker has itself"


def test_an_owner_that_cannot_be_reached() -> None:
    pair = Pair()
    prompt = first_turn(pair)
    pair.connectable = False
    done = answer(pair, prompt, prefix=prefix_source(pair.decode, 5))
    assert done.fetched.failure == pb.FAILURE_REASON_PEER_LOST
    assert not done.fetched.HasField("owner_blocks")


def test_a_worker_that_is_told_to_pull_from_itself_computes() -> None:
    pair = Pair()
    prompt = first_turn(pair)
    assert not answer(pair, prompt, prefix=prefix_source(pair.prefill, 5)).HasField("fetched")


def test_no_room_to_pull_into() -> None:
    pair = Pair(prefill_blocks=8)
    prompt = first_turn(pair)
    other = random_prompt(5 * BLOCK, seed=4)
    # Its offer is not read, so its blocks stay pinned: the three that are left hold what the prompt begins with.
    pair.start(other, "other", max_tokens=1)
    pair.stalled = True
    pair.run(lambda: bool(pair.prefill.take("prefill_done")))
    pair.decode.do(decode_command(pair, prompt, "next", max_tokens=6))
    pair.prefill.do(
        prefill_command(pair, prompt, "next", 5, prefix=prefix_source(pair.decode, 5), max_tokens=6)
    )
    pair.settle()
    assert pair.prefill.stack.scheduler.waiting == 1
    pair.stalled = False
    got = Answer(1)
    pair.run(lambda: got.take(pair))
    assert got.tokens == [reference(prompt, 6)]
    assert pair.prefill.observer.bytes_read == 0
    pair.assert_quiet()


def _stalled(pair: Pair) -> list[int]:
    """Reads of the fetch are posted and do not complete."""
    prompt = first_turn(pair)
    pair.open(pair.prefill, pair.decode)
    pair.settle(4)
    pair.fabric.stop(pair.decode.key)
    pair.start(prompt, "next", max_tokens=6, prefix=prefix_source(pair.decode, 5))
    pair.run(lambda: pair.decode.stack.blocks.pinned_blocks > 0)
    pair.settle(4)
    assert pair.prefill.stack.scheduler.waiting == 0, "the prompt waits for its prefix"
    return prompt


def _finish(pair: Pair, prompt: list[int]) -> pb.PrefillDone:
    pair.run(lambda: bool(pair._kinds(pair.prefill, "prefill_done")))
    done = pair._kinds(pair.prefill, "prefill_done")[0].prefill_done
    got = Answer(1)
    pair.run(lambda: got.take(pair))
    assert got.tokens == [reference(prompt, 6)]
    pair.fabric.resume(pair.decode.key)
    pair.assert_quiet()
    return done


def test_an_owner_that_hangs_is_given_up_and_its_late_bytes_hurt_nobody() -> None:
    pair = Pair(fetch_deadline_seconds=3.0)
    prompt = _stalled(pair)
    pair.clock.now += 3.1
    pair.turn()
    assert pair.prefill.stack.blocks.quarantined_blocks == 2
    assert _finish(pair, prompt).fetched.failure == pb.FAILURE_REASON_TRANSFER


def test_the_stream_to_the_owner_breaks_while_it_is_read() -> None:
    pair = Pair()
    prompt = _stalled(pair)
    pair.cut(pair.prefill, pair.decode)
    assert _finish(pair, prompt).fetched.failure == pb.FAILURE_REASON_PEER_LOST


def test_a_slow_owner_is_waited_for() -> None:
    pair = Pair()
    prompt = _stalled(pair)
    pair.fabric.resume(pair.decode.key)
    done = _finish(pair, prompt)
    assert done.cached_tokens == 5 * BLOCK
    assert done.fetched.wait_time.ToNanoseconds() > 0


# --- the attempt ends while it fetches


def _cancel(pair: Pair) -> None:
    pair.prefill.do(cancel_command("next"))
    pair.decode.do(cancel_command("next"))


def _router_dies(pair: Pair) -> None:
    for worker in (pair.prefill, pair.decode):
        worker.assembly.loop.post(lambda w=worker: w.assembly.loop.role.on_session_closed(1))  # type: ignore[misc]


def _reader_cancels(pair: Pair) -> None:
    pair.decode.do(cancel_command("next"))


def _fail_all(pair: Pair) -> None:
    for worker in (pair.prefill, pair.decode):
        worker.assembly.loop.role.fail_all(pb.FAILURE_REASON_NOT_SERVING, "stops")


@pytest.mark.parametrize("end", [_cancel, _router_dies, _reader_cancels, _fail_all])
def test_an_attempt_that_ends_while_it_fetches_holds_nothing(end: Callable[[Pair], None]) -> None:
    pair = Pair()
    _stalled(pair)
    end(pair)
    pair.settle(6)
    assert pair.prefill.assembly.loop.role.requests == 0
    assert pair.prefill.stack.blocks.quarantined_blocks == 2, "until the read is over"
    assert not pair._kinds(pair.prefill, "prefill_done")
    pair.fabric.resume(pair.decode.key)
    pair.assert_quiet()


def test_the_deadline_ends_an_attempt_that_fetches() -> None:
    pair = Pair(fetch_deadline_seconds=30.0)
    prompt = first_turn(pair)
    pair.open(pair.prefill, pair.decode)
    pair.settle(4)
    pair.fabric.stop(pair.decode.key)
    pair.start(prompt, "next", deadline=5.0, prefix=prefix_source(pair.decode, 5))
    pair.settle()
    pair.clock.now += 5.1
    pair.turn()
    (failed,) = pair.prefill.take("failed")
    assert failed.failed.reason == pb.FAILURE_REASON_DEADLINE
    pair.fabric.resume(pair.decode.key)
    pair.assert_quiet()


def test_an_owner_that_is_read_is_not_quiet() -> None:
    """A worker that stops waits for those who read from it."""
    pair = Pair()
    prompt = _stalled(pair)
    pair.decode.do(cancel_command("next"))
    pair.turn()
    pair.prefill.do(prefill_command(pair, prompt, "other", prefix=prefix_source(pair.decode, 5)))
    pair.settle(4)
    assert pair.decode.assembly.loop.role.requests == 1
    pair.prefill.do(cancel_command("other"))
    pair.settle(4)
    assert pair.decode.assembly.loop.role.requests == 0
    pair.fabric.resume(pair.decode.key)
    pair.assert_quiet()


def test_what_waits_for_its_prefix_does_not_hold_up_others() -> None:
    pair = Pair()
    _stalled(pair)
    old: Worker = pair.decode
    pair.decode = pair.add("decode", "decode-1")
    other = random_prompt(2 * BLOCK, seed=6)
    assert pair.generate(other, "other", max_tokens=4) == [reference(other, 4)]
    pair.fabric.resume(old.key)
    pair.decode = old
    pair.run(lambda: bool(pair.prefill.take("prefill_done")))
    pair.assert_quiet()
