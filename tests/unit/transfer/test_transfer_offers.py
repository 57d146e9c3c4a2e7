# SPDX-License-Identifier: Apache-2.0
"""The owner's books: who may free a block, and who is told."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.handoff_world import LEASE_SECONDS, Owner, Reader, World
from twinpool.ids import WorkerKey
from twinpool.transfer.base import AttemptKey
from twinpool.transfer.early import EARLY_MAX
from twinpool.transfer.offer import OfferEnd
from twinpool.transfer.owner import OfferBook
from twinpool.transfer.reader import RELEASE_RETRY_SECONDS, RELEASE_TRIES
from twinpool.transfer.ticket import PromptShape
from twinpool.v1 import handoff_pb2, worker_pb2
from twinpool.v1.worker_pb2 import FailureReason

ATTEMPT = AttemptKey("request", 1)
SHAPE = PromptShape(64, 16, 0)


@pytest.fixture
def world() -> World:
    return World()


def trio(world: World) -> tuple[Owner, Reader, Reader]:
    """One owner, two readers that read the same prompt."""
    owner, one, two = world.owner(), world.reader("one"), world.reader("two")
    world.link(one, owner)
    world.link(two, owner)
    return owner, one, two


def release(attempt: AttemptKey, transfer_id: int, success: bool = True) -> handoff_pb2.ExchangeRequest:
    message = handoff_pb2.Release(id=attempt.message(), transfer_id=transfer_id, success=success)
    return handoff_pb2.ExchangeRequest(release=message)


class Recorder:
    """An offer book whose messages are kept, with one reader's stream 1 and another's stream 2."""

    def __init__(self, world: World) -> None:
        self.owner = world.owner()
        self.sent: list[tuple[int, handoff_pb2.ExchangeResponse]] = []
        self.ends: dict[AttemptKey, OfferEnd] = {}
        self.counts: list[int] = []
        self.book = OfferBook(
            self.owner.key,
            self.owner.blocks,
            self.owner.generations,
            lambda stream, message: self.sent.append((stream, message)),
            lease_seconds=LEASE_SECONDS,
            on_end=self.ends.__setitem__,
            on_count=self.counts.append,
        )
        self.one, self.two = WorkerKey("one", 1), WorkerKey("two", 2)
        self.book.reader_opened(1, self.one)
        self.book.reader_opened(2, self.two)

    def say(self, stream: int, message: handoff_pb2.ExchangeRequest, now: float = 0.0) -> None:
        self.book.on_message(now, stream, message)

    def expect(self, stream: int, attempt: AttemptKey = ATTEMPT, now: float = 0.0) -> None:
        expect = handoff_pb2.Expect(id=attempt.message())
        self.say(stream, handoff_pb2.ExchangeRequest(expect=expect), now)

    def kinds(self, stream: int) -> list[str | None]:
        return [message.WhichOneof("message") for to, message in self.sent if to == stream]

    def last(self, kind: str) -> handoff_pb2.ExchangeResponse:
        return [message for _, message in self.sent if message.WhichOneof("message") == kind][-1]


@pytest.fixture
def book(world: World) -> Recorder:
    return Recorder(world)


def test_blocks_are_held_until_the_last_of_several_readers(world: World) -> None:
    owner, one, two = trio(world)
    first = one.expect(ATTEMPT, owner, SHAPE)
    second = two.expect(ATTEMPT, owner, SHAPE)
    two.agent.data.delay_seconds = {1: 1.0, 2: 1.0}
    # The first reader's release comes twice: a duplicate must not count as the second reader.
    one.to_owner[owner.key].duplicate = lambda _number, m: m.WhichOneof("message") == "release"
    owner.prefill(ATTEMPT, [one, two], SHAPE).complete()
    world.run(0.5)
    assert first.events == ["ready"]
    assert second.events == []
    assert owner.blocks.pinned_blocks == 4
    world.run(1.5)
    assert second.events == ["ready"]
    assert owner.ends == {ATTEMPT: OfferEnd.RELEASED}
    world.assert_at_rest()


def test_the_death_of_one_reader_frees_its_part_alone(world: World) -> None:
    owner, one, two = trio(world)
    one.expect(ATTEMPT, owner, SHAPE)
    second = two.expect(ATTEMPT, owner, SHAPE)
    two.agent.data.delay_seconds = {1: 0.5, 2: 0.5}
    owner.prefill(ATTEMPT, [one, two], SHAPE).complete()
    world.step()
    one.agent.data.delay_seconds = {}
    world.cut(one, owner)
    world.run(0.2)
    assert owner.blocks.pinned_blocks == 4
    world.run(1.0)
    assert second.events == ["ready"]
    assert owner.ends == {ATTEMPT: OfferEnd.ABANDONED}
    world.assert_at_rest()


def test_both_readers_abort_and_all_is_free_when_their_reads_have_drained(world: World) -> None:
    owner, one, two = trio(world)
    for reader in (one, two):
        reader.expect(ATTEMPT, owner, SHAPE)
        reader.agent.data.delay_seconds = {1: 0.5, 2: 0.5}
    owner.prefill(ATTEMPT, [one, two], SHAPE).complete()
    world.run(0.1)
    assert one.pulls.abort(world.now, ATTEMPT)
    assert two.pulls.abort(world.now, ATTEMPT)
    world.run(0.05)
    assert owner.at_rest
    world.run(0.45)
    world.assert_at_rest()


def test_a_reader_that_left_before_the_first_chunk_does_not_hold_later_ones(book: Recorder) -> None:
    transfer = book.book.begin(ATTEMPT, [book.one, book.two])
    book.expect(1)
    book.expect(2)
    book.say(1, release(ATTEMPT, 0, success=False))
    blocks = book.owner.take(2)
    assert book.book.announce(0.0, ATTEMPT, 0, blocks, 32)
    assert book.kinds(1) == ["released"]
    assert book.kinds(2) == ["chunk_ready"]
    book.say(2, release(ATTEMPT, transfer, success=False))
    assert book.ends == {ATTEMPT: OfferEnd.ABANDONED}
    assert book.owner.blocks.pinned_transfers() == 0
    book.owner.give(blocks)


def test_releases_are_answered_known_or_not(book: Recorder) -> None:
    transfer = book.book.begin(ATTEMPT, [book.one])
    book.expect(1)
    blocks = book.owner.take(1)
    book.book.complete(0.0, ATTEMPT, 0, blocks, 16, [worker_pb2.FirstToken()])
    for stream, attempt, number, known in (
        (1, AttemptKey("stranger", 1), 0, False),
        (1, AttemptKey("stranger", 1), 99, False),
        (1, ATTEMPT, transfer ^ 1, False),  # another transfer of the attempt: not this one
        (2, ATTEMPT, transfer, False),  # another reader
        (1, ATTEMPT, transfer, True),
        (1, ATTEMPT, transfer, False),  # a duplicate
    ):
        assert (book.owner.blocks.pinned_transfers() == 1) == (ATTEMPT not in book.ends)
        book.say(stream, release(attempt, number))
        answer = book.last("released").released
        assert (AttemptKey.of(answer.id), answer.transfer_id, answer.known) == (attempt, number, known)
    assert book.ends == {ATTEMPT: OfferEnd.RELEASED}
    book.owner.give(blocks)


def test_nothing_to_transfer_is_released_and_expires_like_the_rest(book: Recorder) -> None:
    none = np.empty(0, np.int32)
    for number, end in ((1, OfferEnd.RELEASED), (2, OfferEnd.EXPIRED)):
        attempt = AttemptKey("request", number)
        transfer = book.book.begin(attempt, [book.one])
        book.expect(1, attempt)
        assert book.book.complete(0.0, attempt, 4, none, 64, [worker_pb2.FirstToken()])
        if end is OfferEnd.RELEASED:
            book.say(1, release(attempt, transfer))
        book.book.tick(LEASE_SECONDS)
        assert book.ends[attempt] is end
    assert book.book.open == 0


def test_a_release_before_complete_is_no_success(book: Recorder) -> None:
    transfer = book.book.begin(ATTEMPT, [book.one])
    book.expect(1)
    blocks = book.owner.take(1)
    book.book.announce(0.0, ATTEMPT, 0, blocks, 16)
    book.say(1, release(ATTEMPT, transfer, success=True))
    assert book.ends == {ATTEMPT: OfferEnd.ABANDONED}
    book.owner.give(blocks)


def test_renewing_what_is_not_held_is_answered_with_its_loss(book: Recorder) -> None:
    held = book.book.begin(ATTEMPT, [book.one])
    book.expect(1)
    blocks = book.owner.take(1)
    book.book.announce(0.0, ATTEMPT, 0, blocks, 16)
    not_announced = book.book.begin(AttemptKey("r", 2), [book.one])
    renew = handoff_pb2.Renew(transfer_ids=[held, 77, not_announced])
    book.say(1, handoff_pb2.ExchangeRequest(renew=renew), now=1.0)
    assert list(book.last("lease_lost").lease_lost.transfer_ids) == [77, not_announced]
    book.say(2, handoff_pb2.ExchangeRequest(renew=handoff_pb2.Renew(transfer_ids=[held])), now=2.0)
    assert list(book.last("lease_lost").lease_lost.transfer_ids) == [held]  # another's transfer
    book.book.tick(LEASE_SECONDS + 0.5)
    assert book.ends == {}  # the first renewal counted
    book.book.tick(LEASE_SECONDS + 1.0)
    assert book.ends == {ATTEMPT: OfferEnd.EXPIRED}
    book.owner.give(blocks)
    assert book.owner.at_rest


def test_every_ticket_states_a_full_lease_for_all_blocks(book: Recorder) -> None:
    book.book.begin(ATTEMPT, [book.one])
    book.expect(1)
    blocks = book.owner.take(1)
    book.book.announce(0.0, ATTEMPT, 0, blocks, 16)
    book.book.announce(LEASE_SECONDS - 1, ATTEMPT, 1, np.empty(0, np.int32), 16)
    book.book.tick(LEASE_SECONDS + 1)
    assert book.ends == {}
    assert book.owner.blocks.pinned_blocks == 1
    book.book.tick(2 * LEASE_SECONDS - 1)
    assert book.ends == {ATTEMPT: OfferEnd.EXPIRED}
    book.owner.give(blocks)


def test_an_expectation_without_a_prefill_ends_by_the_clock(book: Recorder) -> None:
    book.expect(1, now=0.0)
    assert book.book.next_wake() == LEASE_SECONDS
    book.book.tick(LEASE_SECONDS - 0.1)
    assert book.sent == []
    book.book.tick(LEASE_SECONDS)
    assert book.last("failed").failed.reason == FailureReason.FAILURE_REASON_TRANSFER
    assert book.book.next_wake() is None


def test_an_expectation_can_be_taken_back(book: Recorder) -> None:
    book.expect(1)
    book.say(1, release(ATTEMPT, 0, success=False))
    assert book.last("released").released.known
    assert book.book.next_wake() is None
    book.expect(2)
    book.book.reader_closed(2)
    assert book.book.next_wake() is None


def test_expectations_are_limited(book: Recorder) -> None:
    for number in range(EARLY_MAX):
        book.expect(1, AttemptKey("r", number))
    assert book.sent == []
    book.expect(1, AttemptKey("one too many", 1))
    assert book.last("failed").failed.reason == FailureReason.FAILURE_REASON_NO_CAPACITY


def test_strangers_and_late_comers_are_refused(book: Recorder) -> None:
    transfer = book.book.begin(ATTEMPT, [book.one])
    book.expect(2)
    assert book.last("failed").failed.reason == FailureReason.FAILURE_REASON_INVALID
    book.expect(1)
    book.book.reader_opened(3, book.one)
    book.expect(3)
    assert book.last("failed").failed.reason == FailureReason.FAILURE_REASON_DUPLICATE
    book.say(1, release(ATTEMPT, transfer, success=False))
    book.expect(1)  # of an attempt that has ended
    assert book.kinds(1)[-1] == "failed"
    with pytest.raises(ValueError, match="offered already"):
        book.book.begin(ATTEMPT, [book.one])


def test_a_message_of_a_stream_that_has_ended_is_dropped(book: Recorder) -> None:
    book.book.reader_closed(1)
    book.expect(1)
    book.say(1, release(ATTEMPT, 0))
    assert book.sent == []


def test_a_reader_that_ends_in_the_middle_frees_all_pins(book: Recorder) -> None:
    book.book.begin(ATTEMPT, [book.one])
    book.expect(1)
    blocks = book.owner.take(2)
    book.book.announce(0.0, ATTEMPT, 0, blocks, 32)
    book.owner.give(blocks)
    assert book.owner.blocks.pinned_blocks == 2
    book.book.reader_closed(1)
    assert book.ends == {ATTEMPT: OfferEnd.ABANDONED}
    assert book.owner.at_rest
    assert book.counts == [1, 0]


def test_transfer_ids_are_the_owners_and_differ(book: Recorder) -> None:
    ids = {book.book.begin(AttemptKey("r", number), [book.one]) for number in range(50)}
    assert len(ids) == 50
    assert 0 not in ids


@pytest.mark.parametrize("readers", [[], [WorkerKey("one", 1), WorkerKey("one", 1)]])
def test_readers_are_named_once(book: Recorder, readers: list[WorkerKey]) -> None:
    with pytest.raises(ValueError, match="readers"):
        book.book.begin(ATTEMPT, readers)


def test_nothing_is_announced_after_complete(book: Recorder) -> None:
    book.book.begin(ATTEMPT, [book.one])
    none = np.empty(0, np.int32)
    book.book.complete(0.0, ATTEMPT, 0, none, 16, [worker_pb2.FirstToken()])
    with pytest.raises(ValueError, match="complete already"):
        book.book.announce(0.0, ATTEMPT, 0, none, 16)


def test_a_lost_release_is_repeated_and_a_lost_answer_too(world: World) -> None:
    owner, reader = world.owner(), world.reader()
    world.link(reader, owner)
    drops = iter([True, False, False])
    reader.to_owner[owner.key].drop = lambda _n, m: (
        m.WhichOneof("message") == "release" and next(drops, False)
    )
    answers = iter([True, False])
    reader.inbox_of(owner).drop = lambda _n, m: m.WhichOneof("message") == "released" and next(answers, False)
    listener = reader.expect(ATTEMPT, owner, SHAPE)
    owner.prefill(ATTEMPT, [reader], SHAPE).complete()
    world.run(0.1)
    assert listener.events == ["ready"]
    assert owner.blocks.pinned_blocks == 4
    world.run(RELEASE_RETRY_SECONDS)
    assert owner.ends == {ATTEMPT: OfferEnd.RELEASED}
    assert reader.pulls.unreleased == 1
    world.run(RELEASE_RETRY_SECONDS)
    world.assert_at_rest()


def test_releases_that_never_arrive_are_given_up_and_the_lease_frees(world: World) -> None:
    owner, reader = world.owner(), world.reader()
    world.link(reader, owner)
    reader.to_owner[owner.key].drop = lambda _n, m: m.WhichOneof("message") == "release"
    reader.expect(ATTEMPT, owner, SHAPE)
    owner.prefill(ATTEMPT, [reader], SHAPE).complete()
    world.run(LEASE_SECONDS + 0.1)
    assert owner.ends == {ATTEMPT: OfferEnd.EXPIRED}
    world.run(RELEASE_TRIES * RELEASE_RETRY_SECONDS)
    world.assert_at_rest()


def test_three_hundred_abandoned_prompts_four_times_leave_the_pool_whole(world: World) -> None:
    owner, reader = world.owner(num_blocks=600), world.reader()
    world.link(reader, owner)
    reader.to_owner[owner.key].drop = lambda _n, m: m.WhichOneof("message") != "expect"
    for turn in range(4):
        for number in range(300):
            attempt = AttemptKey(f"r{turn}", number + 1)
            prefill = owner.prefill(attempt, [reader], PromptShape(20, 16, 0))
            prefill.complete()
        assert owner.blocks.free_blocks == 0
        world.run(LEASE_SECONDS + 1.0)  # nothing but the clock
        assert owner.at_rest
