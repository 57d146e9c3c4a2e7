# SPDX-License-Identifier: Apache-2.0
"""Owners and readers of KV blocks in one process, in virtual time: real block managers, offers, pull sessions and
pumps over the loopback agent, with a shim around every agent and every direction of messages.

Nothing happens by itself: ``World.step`` delivers what is queued and ticks every pump once; ``World.run`` does so
while time passes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tests.support.transfer_shim import NoteShim, ShimAgent
from twinpool._core import BlockManager
from twinpool.ids import WorkerKey
from twinpool.transfer.base import AttemptKey, Blocks, PoolMemory
from twinpool.transfer.digest import DigestPolicy, pool_digest
from twinpool.transfer.fence import HandoffFailure, HandoffFault
from twinpool.transfer.loopback import Fabric, LoopbackAgent
from twinpool.transfer.offer import OfferEnd
from twinpool.transfer.owner import OfferBook
from twinpool.transfer.pump import TransferPump
from twinpool.transfer.reader import PullManager
from twinpool.transfer.session import PullSession
from twinpool.transfer.ticket import PromptShape
from twinpool.v1 import handoff_pb2, worker_pb2

BLOCK_TOKENS = 16
BLOCK_BYTES = 256
OWNER_POISON, READER_POISON = 0xEE, 0xDD
"""What freed blocks are overwritten with: different, so that an owner's poison shows in a reader's pool."""

TICK_SECONDS = 0.01
LEASE_SECONDS = 3.0
READ_DEADLINE_SECONDS = 2.0

FIRST_TOKEN = worker_pb2.FirstToken(index=0, token_id=7)


def content(attempt: AttemptKey, block: int) -> NDArray[np.uint8]:
    """The KV of one prompt block: bytes that no other prompt or block has."""
    seed = [*attempt.request_id.encode(), attempt.attempt, block]
    return np.random.default_rng(seed).integers(0, 200, BLOCK_BYTES, dtype=np.uint8)


@dataclass
class Listener:
    """Records how a hand-off ended and gives its blocks back when it may."""

    reader: Reader
    local: Blocks
    events: list[str] = field(default_factory=list)
    failure: HandoffFailure | None = None
    first_tokens: Sequence[worker_pb2.FirstToken] = ()
    bytes_when_ready: NDArray[np.uint8] | None = None
    keep: bool = False  # hold the blocks after ``ready``, as a running decode does

    def on_ready(self, session: PullSession, first_tokens: Sequence[worker_pb2.FirstToken]) -> None:
        self.events.append("ready")
        self.first_tokens = first_tokens
        self.bytes_when_ready = self.reader.pool[self.local].copy()
        if not self.keep:
            self.reader.give(self.local)

    def finish(self) -> None:
        """Gives back blocks that were kept, after a look whether anything was written into them meanwhile."""
        assert np.array_equal(self.reader.pool[self.local], self.bytes_when_ready)
        self.keep = False
        self.reader.give(self.local)

    def on_failed(self, session: PullSession, failure: HandoffFailure) -> None:
        self.events.append("failed")
        self.failure = failure

    def on_drained(self, session: PullSession) -> None:
        self.events.append("drained")
        self.reader.give(self.local)


class Party:
    """A worker: pool, block manager, agent and pump."""

    def __init__(self, world: World, name: str, incarnation: int, num_blocks: int, poison: int) -> None:
        self.world = world
        self.key = WorkerKey(name, incarnation)
        self.poison = poison
        self.pool = np.full((num_blocks, BLOCK_BYTES), poison, dtype=np.uint8)
        self.generations = np.zeros(num_blocks, dtype=np.uint64)
        self.blocks = BlockManager(num_blocks, BLOCK_TOKENS, self.generations)
        self.memory = PoolMemory.of_array(self.pool)
        real = LoopbackAgent(self.key, "fingerprint", self.memory, self.generations, fabric=world.fabric)
        self.agent = ShimAgent(real, lambda: world.now)
        self.pump = TransferPump(self.agent, max_post_bytes=2 * BLOCK_BYTES)

    def take(self, count: int) -> Blocks:
        """New blocks. They must still hold the poison that they got when they were freed: nothing landed since."""
        self.poison_freed()
        blocks = self.blocks.allocate(count)
        assert blocks is not None, "the pool is full"
        assert (self.pool[blocks] == self.poison).all(), "something was written into a free block"
        return blocks

    def give(self, blocks: Blocks) -> None:
        self.blocks.release(blocks)
        self.poison_freed()

    def poison_freed(self) -> None:
        """Overwrites blocks whose content has ended."""
        self.pool[self.blocks.drain_freed()] = self.poison

    @property
    def at_rest(self) -> bool:
        manager = self.blocks
        manager.check()
        if manager.free_blocks == manager.num_blocks:
            assert (self.pool == self.poison).all(), "something was written into a free block"
        return manager.free_blocks == manager.num_blocks and self.pump.in_flight == 0


class Owner(Party):
    """A prefill worker's half."""

    def __init__(
        self, world: World, name: str, incarnation: int, num_blocks: int, digests: DigestPolicy
    ) -> None:
        super().__init__(world, name, incarnation, num_blocks, OWNER_POISON)
        self.ends: dict[AttemptKey, OfferEnd] = {}
        self.streams: dict[int, Reader] = {}
        self.book = OfferBook(
            self.key,
            self.blocks,
            self.generations,
            lambda stream, message: self.streams[stream].inbox_of(self)(message),
            lease_seconds=LEASE_SECONDS,
            digest=pool_digest(self.memory),
            digest_policy=digests,
            on_end=self.ends.__setitem__,
            on_count=self.pump.set_offers,
        )

    def prefill(self, attempt: AttemptKey, readers: Sequence[Reader], shape: PromptShape) -> Prefill:
        """Starts an offer; the chunks are announced by the caller."""
        self.book.begin(attempt, [reader.key for reader in readers])
        return Prefill(self, attempt, shape, self.take(shape.prompt_blocks))


class Prefill:
    """A prompt in computation at its owner."""

    def __init__(self, owner: Owner, attempt: AttemptKey, shape: PromptShape, blocks: Blocks) -> None:
        self.owner = owner
        self.attempt = attempt
        self.shape = shape
        self.blocks = blocks
        self.done = shape.first_block

    def chunk(self, count: int) -> bool:
        """Computes and announces ``count`` more blocks."""
        low, high = self._compute(count)
        length = self.shape.tokens_at(high)
        return self.owner.book.announce(
            self.owner.world.now, self.attempt, low, self.blocks[low:high], length
        )

    def complete(self) -> bool:
        """Computes and announces the rest, then drops the sequence: only pins hold its blocks from here on."""
        low, high = self._compute(self.shape.prompt_blocks - self.done)
        told = self.owner.book.complete(
            self.owner.world.now,
            self.attempt,
            low,
            self.blocks[low:high],
            self.shape.prompt_tokens,
            [FIRST_TOKEN],
        )
        self.drop()
        return told

    def drop(self) -> None:
        """The sequence ends; what is pinned stays."""
        self.owner.give(self.blocks)

    def _compute(self, count: int) -> tuple[int, int]:
        low, high = self.done, min(self.done + count, self.shape.prompt_blocks)
        for index in range(low, high):
            self.owner.pool[self.blocks[index]] = content(self.attempt, index)
        self.done = high
        return low, high


class Reader(Party):
    """A decode worker's half."""

    def __init__(self, world: World, name: str, incarnation: int, num_blocks: int, floor: float) -> None:
        super().__init__(world, name, incarnation, num_blocks, READER_POISON)
        self.to_owner: dict[WorkerKey, NoteShim[handoff_pb2.ExchangeRequest]] = {}
        self.from_owner: dict[WorkerKey, NoteShim[handoff_pb2.ExchangeResponse]] = {}
        self.pulls = PullManager(
            self.pump,
            lambda owner, message: self.to_owner[owner](message),
            block_bytes=BLOCK_BYTES,
            read_deadline_seconds=READ_DEADLINE_SECONDS,
            floor_bytes_per_second=floor,
            digest=pool_digest(self.memory),
        )

    def inbox_of(self, owner: Owner) -> NoteShim[handoff_pb2.ExchangeResponse]:
        return self.from_owner[owner.key]

    def expect(self, attempt: AttemptKey, owner: Owner, shape: PromptShape) -> Listener:
        """Reserves blocks and waits for the prompt."""
        local = self.take(shape.wanted_blocks)
        listener = Listener(self, local)
        self.pulls.expect(self.world.now, attempt, owner.key, shape, local, listener)
        return listener


class World:
    """All of them, their streams and the time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.fabric = Fabric()
        self.owners: list[Owner] = []
        self.readers: list[Reader] = []
        self._queue: deque[Callable[[], None]] = deque()
        self._streams: dict[tuple[WorkerKey, WorkerKey], int] = {}
        self._next_stream = 1

    def owner(self, name: str = "owner", num_blocks: int = 24, digests: DigestPolicy = "off") -> Owner:
        owner = Owner(self, name, len(self.owners) + 1, num_blocks, digests)
        self.owners.append(owner)
        return owner

    def reader(self, name: str = "reader", num_blocks: int = 24, floor: float = math.inf) -> Reader:
        """``floor``: the slowest rate of a healthy pull, in bytes a second."""
        reader = Reader(self, name, len(self.readers) + 1, num_blocks, floor)
        self.readers.append(reader)
        return reader

    def link(self, reader: Reader, owner: Owner) -> int:
        """Connects a pair and opens its stream."""
        result: list[object] = []
        reader.pump.connect(owner.agent.descriptor, result.append)
        while not result:
            self.step()
        assert result == [None]
        stream = self._next_stream
        self._next_stream += 1
        owner.streams[stream] = reader
        owner.book.reader_opened(stream, reader.key)
        self._streams[reader.key, owner.key] = stream
        reader.to_owner[owner.key] = NoteShim(
            lambda message: self._queue.append(lambda: owner.book.on_message(self.now, stream, message))
        )
        reader.from_owner[owner.key] = NoteShim(
            lambda message: self._queue.append(lambda: reader.pulls.on_message(self.now, owner.key, message))
        )
        return stream

    def cut(self, reader: Reader, owner: Owner) -> None:
        """The stream of a pair ends: each side sees the other's death."""
        self._queue.clear()
        owner.book.reader_closed(self._streams.pop((reader.key, owner.key)))
        failure = HandoffFailure.of(HandoffFault.PEER_LOST, "the stream to the owner ended")
        reader.pulls.owner_lost(self.now, owner.key, failure)

    def step(self) -> None:
        """Delivers all messages and ticks all pumps, until nothing is queued."""
        parties = [*self.owners, *self.readers]
        for _ in range(4):
            while self._queue:
                self._queue.popleft()()
            for party in parties:
                party.pump.tick(self.now)
                party.poison_freed()

    def run(self, seconds: float, tick_seconds: float = TICK_SECONDS) -> None:
        """Lets time pass, with every timer of every side."""
        end = self.now + seconds
        while self.now < end:
            self.step()
            self.now += tick_seconds
            for owner in self.owners:
                owner.book.tick(self.now)
            for reader in self.readers:
                reader.pulls.tick(self.now)
        self.step()

    def assert_at_rest(self) -> None:
        """Nothing is held, waited for, in flight or unanswered."""
        for owner in self.owners:
            assert owner.book.open == 0
            assert owner.book.next_wake() is None
            assert owner.blocks.pinned_transfers() == 0
            assert owner.at_rest, f"{owner.key}: {owner.blocks.free_blocks} blocks free"
        for reader in self.readers:
            pulls = reader.pulls
            assert (pulls.waiting, pulls.draining, pulls.unreleased, pulls.quarantined_blocks) == (0, 0, 0, 0)
            assert reader.pulls.next_wake() is None
            assert reader.at_rest, f"{reader.key}: {reader.blocks.free_blocks} blocks free"


def expected_bytes(attempt: AttemptKey, shape: PromptShape) -> NDArray[np.uint8]:
    """What the reader's blocks must hold when it is ready."""
    wanted = [content(attempt, index) for index in range(shape.first_block, shape.prompt_blocks)]
    return np.array(wanted, dtype=np.uint8).reshape(-1, BLOCK_BYTES)
