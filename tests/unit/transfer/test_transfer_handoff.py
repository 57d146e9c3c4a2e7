# SPDX-License-Identifier: Apache-2.0
"""The whole hand-off in virtual time: what arrives, what fails closed, and that nothing is held afterwards."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.handoff_world import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    FIRST_TOKEN,
    LEASE_SECONDS,
    READ_DEADLINE_SECONDS,
    READER_POISON,
    Owner,
    Reader,
    World,
    expected_bytes,
)
from twinpool.transfer.base import AttemptKey, Fault, ReadState, ReadStatus
from twinpool.transfer.fence import HandoffFailure, HandoffFault
from twinpool.transfer.offer import OfferEnd
from twinpool.transfer.ticket import PromptShape
from twinpool.v1.worker_pb2 import FailureReason

ATTEMPT = AttemptKey("request", 1)


@pytest.fixture
def world() -> World:
    return World()


def pair(world: World, **owner: object) -> tuple[Owner, Reader]:
    made = world.owner(**owner)  # type: ignore[arg-type]
    reader = world.reader()
    world.link(reader, made)
    return made, reader


def shape(tokens: int, first_block: int = 0) -> PromptShape:
    return PromptShape(tokens, BLOCK_TOKENS, first_block)


@pytest.mark.parametrize("digests", ["off", "always"])
@pytest.mark.parametrize(
    ("tokens", "first_block"),
    [(1, 0), (15, 0), (16, 0), (17, 0), (64, 0), (65, 0), (64, 2), (65, 4), (64, 4), (100, 7)],
)
def test_every_length_arrives_and_nothing_is_held(
    world: World, tokens: int, first_block: int, digests: str
) -> None:
    owner, reader = pair(world, digests=digests)
    prompt = shape(tokens, first_block)
    listener = reader.expect(ATTEMPT, owner, prompt)
    prefill = owner.prefill(ATTEMPT, [reader], prompt)
    while prefill.done + 2 <= prompt.prompt_blocks:
        assert prefill.chunk(2)
        world.run(0.02)
    assert listener.events == []
    assert prefill.complete()
    world.run(0.1)
    assert listener.events == ["ready"]
    assert list(listener.first_tokens) == [FIRST_TOKEN]
    assert np.array_equal(listener.bytes_when_ready, expected_bytes(ATTEMPT, prompt))
    assert owner.ends == {ATTEMPT: OfferEnd.RELEASED}
    world.assert_at_rest()


def test_chunks_that_came_before_the_reader_expected_them_are_kept(world: World) -> None:
    owner, reader = pair(world)
    prompt = shape(64)
    prefill = owner.prefill(ATTEMPT, [reader], prompt)
    assert prefill.chunk(2)
    assert prefill.complete()
    world.run(0.1)
    listener = reader.expect(ATTEMPT, owner, prompt)
    world.run(0.1)
    assert np.array_equal(listener.bytes_when_ready, expected_bytes(ATTEMPT, prompt))
    world.assert_at_rest()


def test_a_chunk_is_read_while_the_next_is_computed(world: World) -> None:
    owner, reader = pair(world)
    listener = reader.expect(ATTEMPT, owner, shape(64))
    prefill = owner.prefill(ATTEMPT, [reader], shape(64))
    prefill.chunk(2)
    world.run(0.1)
    assert reader.agent.data_reads == 1
    assert (reader.pool[listener.local[:2]] != READER_POISON).all()
    assert (reader.pool[listener.local[2:]] == READER_POISON).all()
    prefill.complete()
    world.run(0.1)
    assert reader.agent.data_reads == 2
    assert listener.events == ["ready"]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_post_that_is_refused_fails_the_hand_off(world: World, number: int) -> None:
    owner, reader = pair(world)
    reader.agent.data.refuse[number] = Fault.BACKEND
    listener = reader.expect(ATTEMPT, owner, shape(80))
    prefill = owner.prefill(ATTEMPT, [reader], shape(80))
    prefill.chunk(2)
    prefill.chunk(2)
    prefill.complete()
    world.run(0.2)
    assert listener.events == ["failed", "drained"]
    assert listener.failure is not None
    assert listener.failure.reason == FailureReason.FAILURE_REASON_TRANSFER
    assert owner.ends == {ATTEMPT: OfferEnd.ABANDONED}
    world.assert_at_rest()


@pytest.mark.parametrize("kind", ["data", "generation"])
@pytest.mark.parametrize("fault", list(Fault))
def test_every_failed_read_fails_the_hand_off(world: World, kind: str, fault: Fault) -> None:
    owner, reader = pair(world)
    generations_before = reader.agent.generation_reads
    reads = reader.agent.data if kind == "data" else reader.agent.generation
    reads.report[1 if kind == "data" else generations_before + 1] = ReadState(
        ReadStatus.FAILED, True, fault, "reported by the shim"
    )
    listener = reader.expect(ATTEMPT, owner, shape(20))
    owner.prefill(ATTEMPT, [reader], shape(20)).complete()
    world.run(0.2)
    assert listener.events == ["failed", "drained"]
    assert listener.failure is not None
    assert listener.failure.detail.startswith(fault)
    lost = fault in (Fault.PEER_LOST, Fault.PEER_UNKNOWN)
    expected = FailureReason.FAILURE_REASON_PEER_LOST if lost else FailureReason.FAILURE_REASON_TRANSFER
    assert listener.failure.reason == expected
    world.assert_at_rest()


def reuse_all(owner: Owner) -> None:
    """The owner forgets its promise and gives every block to new content."""
    owner.book.fail(ATTEMPT, FailureReason.FAILURE_REASON_INTERNAL, "drops the pins")
    again = owner.take(24)
    owner.pool[again] = 0x11
    owner.give(again)


@pytest.mark.parametrize("digests", ["off", "always"])
@pytest.mark.parametrize("when", ["before the data", "between data and generations"])
def test_a_reused_block_trips_the_fence(world: World, when: str, digests: str) -> None:
    owner, reader = pair(world, digests=digests)
    listener = reader.expect(ATTEMPT, owner, shape(32))
    # The owner's own word that it gave up is lost: the generations alone have to show it.
    reader.inbox_of(owner).drop = lambda _number, message: message.WhichOneof("message") == "failed"
    owner.prefill(ATTEMPT, [reader], shape(32)).complete()
    if when == "before the data":
        reader.agent.data.delay_seconds[1] = 0.5
        world.run(0.1)
        reuse_all(owner)
    else:
        reader.agent.data.after[1] = lambda: reuse_all(owner)
    world.run(1.0)
    assert listener.events == ["failed", "drained"]
    assert listener.failure is not None
    assert listener.failure.fault is HandoffFault.STALE_GENERATION
    assert listener.failure.reason == FailureReason.FAILURE_REASON_FENCED
    world.assert_at_rest()


def test_bytes_that_differ_under_an_intact_fence_trip_the_digest(world: World) -> None:
    owner, reader = pair(world, digests="always")
    listener = reader.expect(ATTEMPT, owner, shape(48))
    reader.agent.data.after[1] = lambda: reader.pool[listener.local[1]].__setitem__(5, 0x77)
    owner.prefill(ATTEMPT, [reader], shape(48)).complete()
    world.run(0.1)
    assert listener.failure is not None
    assert listener.failure.fault is HandoffFault.DIGEST_MISMATCH
    world.assert_at_rest()


def test_an_abort_keeps_the_blocks_until_the_late_bytes_have_landed(world: World) -> None:
    owner, reader = pair(world)
    reader.agent.data.delay_seconds[1] = 1.0
    events_at_landing: list[list[str]] = []
    reader.agent.data.after[1] = lambda: events_at_landing.append(list(listener.events))
    listener = reader.expect(ATTEMPT, owner, shape(32))
    owner.prefill(ATTEMPT, [reader], shape(32)).complete()
    world.run(0.2)
    assert reader.pulls.abort(world.now, ATTEMPT)
    world.run(0.2)
    assert owner.ends == {ATTEMPT: OfferEnd.ABANDONED}  # the owner is free at once
    assert owner.at_rest
    assert listener.events == []
    assert reader.pulls.quarantined_blocks == 2
    held = set(listener.local.tolist())
    other = reader.take(reader.blocks.free_blocks)
    assert held.isdisjoint(other.tolist())
    world.run(1.0)
    assert events_at_landing == [[]]  # they did land, and nobody had been told before
    assert listener.events == ["drained"]
    assert (reader.pool[other] == READER_POISON).all()
    reader.give(other)
    world.assert_at_rest()


def test_an_abort_stops_what_is_not_posted(world: World) -> None:
    owner, reader = pair(world)
    listener = reader.expect(ATTEMPT, owner, shape(20 * BLOCK_TOKENS))
    owner.prefill(ATTEMPT, [reader], shape(20 * BLOCK_TOKENS)).complete()
    world.step()
    assert 0 < reader.agent.data_reads < 10
    reader.pulls.abort(world.now, ATTEMPT)
    posted = reader.agent.data_reads
    world.run(0.1)
    assert reader.agent.data_reads == posted
    assert listener.events == ["drained"]
    world.assert_at_rest()


def test_an_abort_before_the_first_ticket_frees_the_owner(world: World) -> None:
    owner, reader = pair(world)
    listener = reader.expect(ATTEMPT, owner, shape(32))
    prefill = owner.prefill(ATTEMPT, [reader], shape(32))
    world.run(0.1)
    assert reader.pulls.abort(world.now, ATTEMPT)
    assert not reader.pulls.abort(world.now, ATTEMPT)
    assert listener.events == ["drained"]
    world.run(0.1)
    assert owner.ends == {ATTEMPT: OfferEnd.ABANDONED}
    assert prefill.chunk(1) is False
    assert prefill.complete() is False
    world.assert_at_rest()


def test_an_abort_beats_a_success_that_is_on_its_way(world: World) -> None:
    owner, reader = pair(world)
    listener = reader.expect(ATTEMPT, owner, shape(32))
    reader.agent.data.after[1] = lambda: reader.pulls.abort(world.now, ATTEMPT) and None
    owner.prefill(ATTEMPT, [reader], shape(32)).complete()
    world.run(0.2)
    assert listener.events == ["drained"]
    world.assert_at_rest()


@pytest.mark.parametrize(("blocks", "end"), [(4, "ready"), (1, "failed")])
def test_a_read_may_take_longer_the_more_it_moves(world: World, blocks: int, end: str) -> None:
    """Both take 1.5 deadlines; at the floor rate four blocks take two deadlines more, one takes half of one."""
    owner, reader = world.owner(), world.reader(floor=2 * BLOCK_BYTES / READ_DEADLINE_SECONDS)
    world.link(reader, owner)
    prompt = shape(blocks * BLOCK_TOKENS)
    reader.agent.data.delay_seconds = dict.fromkeys(range(1, 9), 1.6 * READ_DEADLINE_SECONDS)
    listener = reader.expect(ATTEMPT, owner, prompt)
    assert owner.prefill(ATTEMPT, [reader], prompt).complete()
    world.run(1.55 * READ_DEADLINE_SECONDS)
    assert listener.events == ([] if end == "ready" else ["failed"])
    world.run(READ_DEADLINE_SECONDS)
    assert listener.events == (["ready"] if end == "ready" else ["failed", "drained"])
    world.assert_at_rest()


def test_a_read_past_its_deadline_fails_at_once_and_drains_later(world: World) -> None:
    owner, reader = pair(world)
    listener = reader.expect(ATTEMPT, owner, shape(32))
    prefill = owner.prefill(ATTEMPT, [reader], shape(32))
    world.run(0.1)
    world.fabric.stop(owner.key)  # a hung transport: the streams still work
    prefill.complete()
    world.run(READ_DEADLINE_SECONDS + 0.1)
    assert listener.events == ["failed"]
    assert listener.failure is not None
    assert listener.failure.fault is HandoffFault.DEADLINE
    world.run(10.0)
    assert listener.events == ["failed"]
    assert reader.pulls.quarantined_blocks == 2
    world.fabric.resume(owner.key)
    world.run(0.1)
    assert listener.events == ["failed", "drained"]
    world.assert_at_rest()


def test_a_dead_owner_fails_all_that_waits_for_it(world: World) -> None:
    owner, reader = pair(world)
    other = world.owner("other")
    world.link(reader, other)
    attempts = [AttemptKey("r", number) for number in range(1, 4)]
    listeners = [reader.expect(attempt, owner, shape(16)) for attempt in attempts]
    unrelated = reader.expect(ATTEMPT, other, shape(16))
    owner.prefill(attempts[0], [reader], shape(16))
    world.run(0.1)
    world.cut(reader, owner)
    assert [listener.events for listener in listeners] == [["failed", "drained"]] * 3
    assert {listener.failure.reason for listener in listeners if listener.failure} == {
        FailureReason.FAILURE_REASON_PEER_LOST
    }
    assert owner.ends == {attempts[0]: OfferEnd.ABANDONED}
    assert unrelated.events == []
    other.prefill(ATTEMPT, [reader], shape(16)).complete()
    world.run(0.1)
    assert unrelated.events == ["ready"]


def test_a_link_that_could_not_be_made_fails_its_attempts_with_its_reason(world: World) -> None:
    owner, reader = pair(world)
    first = reader.expect(AttemptKey("r", 1), owner, shape(16))
    second = reader.expect(AttemptKey("r", 2), owner, shape(16))
    failure = HandoffFailure.of_link(FailureReason.FAILURE_REASON_FENCED, "fingerprints differ")
    reader.pulls.owner_lost(world.now, owner.key, failure, [AttemptKey("r", 1)])
    assert first.failure is not None
    assert first.failure.reason == FailureReason.FAILURE_REASON_FENCED
    assert second.events == []


def test_the_owners_failure_reaches_the_reader_with_its_reason(world: World) -> None:
    owner, reader = pair(world)
    listener = reader.expect(ATTEMPT, owner, shape(64))
    prefill = owner.prefill(ATTEMPT, [reader], shape(64))
    prefill.chunk(2)
    world.run(0.1)
    assert owner.book.fail(ATTEMPT, FailureReason.FAILURE_REASON_DEADLINE, "too late")
    assert not owner.book.fail(ATTEMPT, FailureReason.FAILURE_REASON_DEADLINE, "too late")
    prefill.drop()
    world.run(0.1)
    assert listener.events == ["failed", "drained"]
    assert listener.failure is not None
    assert listener.failure.reason == FailureReason.FAILURE_REASON_DEADLINE
    assert owner.ends == {}  # the caller ended it itself
    world.assert_at_rest()


def test_a_failure_before_the_reader_expected_it_reaches_it_when_it_does(world: World) -> None:
    owner, reader = pair(world)
    prefill = owner.prefill(ATTEMPT, [reader], shape(16))
    owner.book.fail(ATTEMPT, FailureReason.FAILURE_REASON_INTERNAL, "the step raised")
    prefill.drop()
    listener = reader.expect(ATTEMPT, owner, shape(16))
    world.run(0.1)
    assert listener.failure is not None
    assert listener.failure.reason == FailureReason.FAILURE_REASON_INTERNAL
    world.assert_at_rest()


def test_a_reader_renews_while_it_waits(world: World) -> None:
    owner, reader = pair(world)
    listener = reader.expect(ATTEMPT, owner, shape(64))
    prefill = owner.prefill(ATTEMPT, [reader], shape(64))
    prefill.chunk(2)
    world.run(LEASE_SECONDS * 4)
    prefill.complete()
    world.run(0.1)
    assert listener.events == ["ready"]
    world.assert_at_rest()


def test_a_lease_that_nobody_renews_ends_with_no_new_work(world: World) -> None:
    owner, reader = pair(world)
    listener = reader.expect(ATTEMPT, owner, shape(64))
    reader.to_owner[owner.key].drop = lambda _number, message: message.WhichOneof("message") != "expect"
    prefill = owner.prefill(ATTEMPT, [reader], shape(64))
    prefill.chunk(2)
    prefill.drop()
    world.run(LEASE_SECONDS + 0.1)
    assert owner.ends == {ATTEMPT: OfferEnd.EXPIRED}
    assert owner.at_rest
    assert listener.events == ["failed", "drained"]
    assert listener.failure is not None
    assert listener.failure.fault is HandoffFault.LEASE_LOST


def test_a_renewal_that_comes_too_late_fails_the_hand_off(world: World) -> None:
    owner, reader = pair(world)
    listener = reader.expect(ATTEMPT, owner, shape(64))
    prefill = owner.prefill(ATTEMPT, [reader], shape(64))
    prefill.chunk(2)
    world.run(0.1)
    # Neither the renewals in time nor the notice of the lease's end get through.
    blocked_until = world.now + LEASE_SECONDS + 0.5
    reader.to_owner[owner.key].drop = lambda _number, _message: world.now < blocked_until
    reader.inbox_of(owner).drop = lambda _number, _message: world.now < blocked_until
    world.run(LEASE_SECONDS + 2.0)
    prefill.drop()
    assert listener.failure is not None
    assert listener.failure.fault is HandoffFault.LEASE_LOST
    world.run(6.0)
    world.assert_at_rest()
