# SPDX-License-Identifier: Apache-2.0
"""The fetch of cached blocks in virtual time: the same pull and the same fence as a hand-off, with another question."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.handoff_world import (
    BLOCK_TOKENS,
    LEASE_SECONDS,
    READER_POISON,
    Listener,
    Owner,
    Reader,
    World,
    content,
)
from twinpool._core import hash_blocks, root_hash
from twinpool.ids import WorkerKey
from twinpool.transfer import owner as owner_module
from twinpool.transfer.base import AttemptKey
from twinpool.transfer.fence import HandoffFault
from twinpool.transfer.ticket import PromptShape
from twinpool.v1 import handoff_pb2
from twinpool.v1.worker_pb2 import FailureReason

ATTEMPT = AttemptKey("request", 1)
ROOT = root_hash(b"world", b"", b"")
TOKENS = np.arange(8 * BLOCK_TOKENS, dtype=np.int32)
HASHES = hash_blocks(ROOT, TOKENS, BLOCK_TOKENS)
DEADLINE_SECONDS = 1.0


@pytest.fixture
def world() -> World:
    return World()


def pair(world: World, **owner: object) -> tuple[Owner, Reader]:
    made = world.owner(**owner)  # type: ignore[arg-type]
    reader = world.reader()
    world.link(reader, made)
    return made, reader


def cache(owner: Owner, count: int) -> None:
    """The owner has computed ``count`` blocks of the prompt for somebody, and nobody needs them now."""
    blocks = owner.take(count)
    for index, block in enumerate(blocks.tolist()):
        owner.pool[block] = content(ATTEMPT, index)
    owner.blocks.commit(blocks, HASHES[:count], ROOT)
    owner.give(blocks)
    assert owner.blocks.cached_blocks == count


def evict(owner: Owner) -> None:
    owner.blocks.reset_cache()
    owner.poison_freed()


def ask(reader: Reader, owner: Owner, low: int, high: int) -> Listener:
    """Fetches blocks ``low`` to ``high`` of the prompt."""
    shape = PromptShape(high * BLOCK_TOKENS, BLOCK_TOKENS, low)
    listener = Listener(reader, reader.take(high - low))
    reader.pulls.fetch(
        reader.world.now,
        ATTEMPT.fetch_by(reader.key),
        owner.key,
        HASHES[low:high],
        shape,
        listener.local,
        listener,
        deadline_seconds=DEADLINE_SECONDS,
    )
    return listener


def blocks_of_prompt(low: int, high: int) -> NDArray[np.uint8]:
    return np.array([content(ATTEMPT, index) for index in range(low, high)])


@pytest.mark.parametrize("digests", ["off", "always"])
@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 8), (3, 8), (7, 8)])
def test_cached_blocks_arrive_and_nothing_is_held(world: World, low: int, high: int, digests: str) -> None:
    owner, reader = pair(world, digests=digests)
    cache(owner, 8)
    listener = ask(reader, owner, low, high)
    world.run(0.1)
    assert listener.events == ["ready"]
    assert np.array_equal(listener.bytes_when_ready, blocks_of_prompt(low, high))
    assert owner.ends == {}, "no attempt of the owner's stands behind a fetch"
    assert owner.blocks.cached_blocks == 8, "they stay where they are"
    evict(owner)
    world.assert_at_rest()


def test_an_owner_that_holds_less_gives_what_it_has(world: World) -> None:
    owner, reader = pair(world, digests="always")
    cache(owner, 5)
    listener = ask(reader, owner, 2, 8)
    (session,) = reader.pulls._sessions.values()
    world.run(0.1)
    assert listener.events == ["ready"]
    assert session.announced_blocks == 3
    assert listener.bytes_when_ready is not None
    assert np.array_equal(listener.bytes_when_ready[:3], blocks_of_prompt(2, 5))
    assert (listener.bytes_when_ready[3:] == READER_POISON).all()
    assert session.stats.blocks == 3
    evict(owner)
    world.assert_at_rest()


@pytest.mark.parametrize("held", [0, 2])
def test_what_is_no_longer_cached_is_refused(world: World, held: int) -> None:
    owner, reader = pair(world)
    if held:
        cache(owner, held)
    listener = ask(reader, owner, 2, 8)
    world.run(0.05)
    assert listener.events == ["failed", "drained"]
    assert listener.failure is not None
    assert listener.failure.reason == FailureReason.FAILURE_REASON_NOT_CACHED
    assert not listener.failure.fenced
    evict(owner)
    world.assert_at_rest()


def test_blocks_that_are_read_are_not_evicted(world: World) -> None:
    owner, reader = pair(world, num_blocks=8)
    cache(owner, 8)
    reader.agent.data.delay_seconds = {1: 0.3}
    listener = ask(reader, owner, 0, 4)
    world.run(0.1)
    assert owner.blocks.pinned_blocks == 4
    assert owner.blocks.reset_cache() == 4
    assert owner.blocks.allocate(5) is None
    world.run(0.4)
    assert listener.events == ["ready"]
    assert owner.blocks.pinned_blocks == 0
    evict(owner)
    world.assert_at_rest()


def test_a_block_that_was_reused_after_the_lease_is_found_by_its_generation(world: World) -> None:
    owner, reader = pair(world)
    cache(owner, 4)
    # The owner hears no renewal, so it gives the blocks away while they are read.
    reader.to_owner[owner.key].drop = lambda _number, m: m.WhichOneof("message") == "renew"
    reader.from_owner[owner.key].drop = lambda _number, m: m.WhichOneof("message") == "lease_lost"
    reader.agent.data.delay_seconds = {1: LEASE_SECONDS + 0.5}
    shape = PromptShape(4 * BLOCK_TOKENS, BLOCK_TOKENS, 0)
    listener = Listener(reader, reader.take(4))
    key = ATTEMPT.fetch_by(reader.key)
    reader.pulls.fetch(
        world.now, key, owner.key, HASHES[:4], shape, listener.local, listener, deadline_seconds=60.0
    )
    world.run(LEASE_SECONDS + 0.1)
    assert owner.blocks.pinned_blocks == 0
    evict(owner)
    world.run(1.0)
    assert listener.failure is not None
    assert listener.failure.fault is HandoffFault.STALE_GENERATION
    assert listener.events == ["failed", "drained"]
    world.assert_at_rest()


def test_an_owner_that_does_not_answer_is_given_up_and_answers_in_vain(world: World) -> None:
    owner, reader = pair(world)
    cache(owner, 4)
    stalled: list[handoff_pb2.ExchangeRequest] = []
    deliver = reader.to_owner[owner.key]
    reader.to_owner[owner.key] = stalled.append  # type: ignore[assignment]
    listener = ask(reader, owner, 0, 4)
    assert reader.pulls.next_wake() == world.now + DEADLINE_SECONDS
    world.run(DEADLINE_SECONDS + 0.05)
    assert listener.events == ["failed", "drained"]
    assert listener.failure is not None
    assert listener.failure.fault is HandoffFault.DEADLINE
    reader.to_owner[owner.key] = deliver
    for message in stalled:
        deliver(message)
    world.run(0.2)
    assert reader.agent.data_reads == 0
    evict(owner)
    world.assert_at_rest()


def test_a_read_that_hangs_keeps_its_blocks_until_it_is_over(world: World) -> None:
    owner, reader = pair(world)
    cache(owner, 4)
    reader.agent.data.delay_seconds = {1: DEADLINE_SECONDS + 0.5, 2: DEADLINE_SECONDS + 0.5}
    listener = ask(reader, owner, 0, 4)
    world.run(DEADLINE_SECONDS + 0.1)
    assert listener.events == ["failed"]
    # Pulls go out in pieces: what was never posted can't be written to, but is only known with the rest.
    assert reader.pulls.quarantined_blocks == 4
    world.run(1.0)
    assert listener.events == ["failed", "drained"]
    evict(owner)
    world.assert_at_rest()


def test_a_fetch_that_is_aborted_is_released(world: World) -> None:
    owner, reader = pair(world)
    cache(owner, 4)
    reader.agent.data.delay_seconds = {1: 0.3}
    listener = ask(reader, owner, 0, 4)
    world.run(0.1)
    assert reader.pulls.abort(world.now, ATTEMPT.fetch_by(reader.key))
    world.run(0.05)
    assert owner.blocks.pinned_blocks == 0
    world.run(0.5)
    assert listener.events == ["drained"]
    evict(owner)
    world.assert_at_rest()


def test_the_death_of_the_reader_frees_what_it_fetched(world: World) -> None:
    owner, reader = pair(world)
    cache(owner, 4)
    reader.agent.data.delay_seconds = {1: 0.3}
    listener = ask(reader, owner, 0, 4)
    world.run(0.1)
    assert owner.blocks.pinned_blocks == 4
    world.cut(reader, owner)
    assert owner.blocks.pinned_blocks == 0
    world.run(0.5)
    assert listener.events == ["failed", "drained"]
    evict(owner)
    world.assert_at_rest()


def test_a_hand_off_and_a_fetch_of_one_attempt_between_the_same_two(world: World) -> None:
    owner, reader = pair(world)
    cache(owner, 4)
    fetched = ask(reader, owner, 0, 4)
    other = AttemptKey("request", 1)
    handed = reader.expect(other, owner, PromptShape(40, BLOCK_TOKENS, 0))
    owner.prefill(other, [reader], PromptShape(40, BLOCK_TOKENS, 0)).complete()
    world.run(0.2)
    assert fetched.events == handed.events == ["ready"]
    evict(owner)
    world.assert_at_rest()


# --- the owner's books


class Book:
    """An owner whose answers are kept."""

    def __init__(self, world: World) -> None:
        self.owner = world.owner()
        self.sent: list[handoff_pb2.ExchangeResponse] = []
        self.owner.streams[1] = self  # type: ignore[assignment]
        self.owner.book.reader_opened(1, WorkerKey("one", 1))

    def inbox_of(self, _owner: Owner):  # type: ignore[no-untyped-def]
        return self.sent.append

    def fetch(self, hashes: bytes, name: str = "f") -> handoff_pb2.ExchangeResponse:
        fetch = handoff_pb2.Fetch(id=AttemptKey(name, 1).message(), block_hashes=hashes)
        self.owner.book.on_message(0.0, 1, handoff_pb2.ExchangeRequest(fetch=fetch))
        return self.sent[-1]


@pytest.mark.parametrize("raw", [b"", b"x" * 15, b"x" * 17])
def test_hashes_of_a_wrong_length_are_refused(world: World, raw: bytes) -> None:
    book = Book(world)
    assert book.fetch(raw).failed.reason == FailureReason.FAILURE_REASON_INVALID
    world.assert_at_rest()


def test_a_second_fetch_of_one_name_is_refused_and_the_first_stays(world: World) -> None:
    book = Book(world)
    cache(book.owner, 2)
    assert book.fetch(HASHES[:2].tobytes()).WhichOneof("message") == "chunk_ready"
    assert book.fetch(HASHES[:2].tobytes()).failed.reason == FailureReason.FAILURE_REASON_DUPLICATE
    assert (book.owner.book.open, book.owner.book.fetches) == (1, 1)
    assert book.owner.blocks.pinned_blocks == 2


def test_so_many_are_held_and_no_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_module, "FETCHES_MAX", 1)
    book = Book(world)
    cache(book.owner, 2)
    book.fetch(HASHES[:2].tobytes(), "a")
    assert book.fetch(HASHES[:2].tobytes(), "b").failed.reason == FailureReason.FAILURE_REASON_NO_CAPACITY
    book.owner.book.tick(LEASE_SECONDS)
    assert book.owner.book.fetches == 0
    assert book.fetch(HASHES[:2].tobytes(), "b").WhichOneof("message") == "chunk_ready"


def test_a_name_that_was_fetched_may_be_fetched_again(world: World) -> None:
    book = Book(world)
    cache(book.owner, 2)
    ticket = book.fetch(HASHES[:2].tobytes()).chunk_ready
    release = handoff_pb2.Release(id=ticket.id, transfer_id=ticket.transfer_id, success=True)
    book.owner.book.on_message(0.0, 1, handoff_pb2.ExchangeRequest(release=release))
    assert book.sent[-1].released.known
    assert book.fetch(HASHES[:2].tobytes()).chunk_ready.blocks == ticket.blocks
