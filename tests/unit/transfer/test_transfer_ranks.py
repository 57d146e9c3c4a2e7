# SPDX-License-Identifier: Apache-2.0
"""Pulls between workers of unequal degree: several pools, over loopback and over real NIXL, bytes and fence."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from tests.support.transfer_shim import ShimAgent
from tests.support.watching import wait_until
from twinpool.ids import WorkerKey, new_incarnation
from twinpool.transfer.base import Blocks, Fault, PoolMemory, TransferAgent, TransferError
from twinpool.transfer.fence import HandoffFault, check_generations
from twinpool.transfer.loopback import Fabric, LoopbackAgent
from twinpool.transfer.nixl import NixlAgent
from twinpool.transfer.pull import PullOutcome
from twinpool.transfer.ranks import RankedPort
from twinpool.transfer.shard import KvShard, sources
from twinpool.transfer.thread import TransferThread

NUM_BLOCKS = 12
LAYERS, TOKENS, HEADS, HEAD_DIM, WIDTH = 2, 4, 8, 16, 40
OWNER = WorkerKey("owner", 1)
GQA = KvShard(1, 0, HEADS, (2 * HEAD_DIM, 2 * HEAD_DIM), LAYERS * TOKENS)
MLA = KvShard(1, 0, 0, (2 * WIDTH,), LAYERS * TOKENS)
REMOTE, LOCAL = np.array([3, 4, 9, 0], np.int32), np.array([7, 1, 2, 11], np.int32)


def cache(shard: KvShard, seed: int) -> np.ndarray:
    """A whole model's pool ``uint16[blocks, layers, tokens, ...]``, rows as the engine lays them out: all values, then keys."""
    shape = (WIDTH,) if shard.replicated else (2, HEADS, HEAD_DIM)
    random = np.random.default_rng(seed)
    return random.integers(0, 1 << 16, (NUM_BLOCKS, LAYERS, TOKENS, *shape), dtype=np.uint16)


def part_of(whole: np.ndarray, shard: KvShard) -> np.ndarray:
    """What a rank's pool holds of it."""
    if not shard.replicated:
        each = HEADS // shard.degree
        whole = whole[..., shard.rank * each : (shard.rank + 1) * each, :]
    return np.ascontiguousarray(whole).reshape(NUM_BLOCKS, -1)


class Rank:
    """One rank of a worker: a pool, a table, a transfer thread; callbacks are run by the test."""

    def __init__(
        self, make: Callable[..., TransferAgent], name: str, shard: KvShard, pool: np.ndarray
    ) -> None:
        self.shard, self.pool = shard, pool
        self.generations = np.arange(NUM_BLOCKS, dtype=np.uint64) + 5
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.shims: list[ShimAgent] = []
        key = WorkerKey(name, new_incarnation())

        def agent() -> ShimAgent:
            memory = PoolMemory.of_array(self.pool)
            self.shims.append(ShimAgent(make(key, memory, self.generations, shard), time.monotonic))
            return self.shims[0]

        self.thread = TransferThread(agent, dispatch=self.calls.put)
        self.descriptor = self.thread.start()
        self.port = RankedPort(self.thread)

    def run(self, until: Callable[[], bool]) -> None:
        def turn() -> bool:
            while not self.calls.empty():
                self.calls.get()()
            return until()

        wait_until(turn)

    def connect(self, peer: Rank) -> TransferError | None:
        found: list[TransferError | None] = []
        self.thread.connect(peer.descriptor, found.append)
        self.run(lambda: bool(found))
        return found[0]

    def pull(self, remote: Blocks = REMOTE, local: Blocks = LOCAL) -> list[PullOutcome]:
        """Pulls ``remote`` into ``local`` and waits for the fence."""
        done: list[PullOutcome] = []
        fenced: list[bool] = []
        self.port.pull(
            OWNER,
            remote,
            local,
            deadline_seconds=60,
            on_done=done.append,
            on_fenced=lambda: fenced.append(bool(done)),
        )
        self.run(lambda: bool(fenced))
        assert fenced == [True]
        return done


class Workers:
    """An owner and a reader of some degrees, every rank of the reader connected to its sources."""

    def __init__(self, make: Callable[..., TransferAgent], shard: KvShard, theirs: int, mine: int) -> None:
        self.whole = cache(shard, seed=1)
        self.owners = [
            Rank(make, f"owner-{r}", held, part_of(self.whole, held))
            for r in range(theirs)
            for held in [shard.of_degree(theirs, r)]
        ]
        self.readers = [
            Rank(make, f"reader-{r}", held, np.zeros_like(part_of(self.whole, held)))
            for r in range(mine)
            for held in [shard.of_degree(mine, r)]
        ]
        for owner in self.owners:
            owner.thread.set_offers(1)
        for reader in self.readers:
            ranks = self.sources(reader)
            assert [reader.connect(rank) for rank in ranks] == [None] * len(ranks)
            reader.port.join(OWNER, [rank.descriptor.worker for rank in ranks])

    def sources(self, reader: Rank) -> list[Rank]:
        return [self.owners[rank] for rank in sources(reader.shard, len(self.owners))]

    def stop(self) -> None:
        for rank in (*self.readers, *self.owners):
            rank.thread.stop()


def over_nixl(key: WorkerKey, memory: PoolMemory, table: np.ndarray, shard: KvShard) -> TransferAgent:
    return NixlAgent(key, "f", memory, table, ucx_tls="tcp,sm,self", shard=shard)


@contextmanager
def workers(kind: str, shard: KvShard, theirs: int, mine: int) -> Iterator[Workers]:
    fabric = Fabric()

    def over_loopback(key: WorkerKey, memory: PoolMemory, table: np.ndarray, held: KvShard) -> TransferAgent:
        return LoopbackAgent(key, "f", memory, table, fabric=fabric, shard=held)

    made = Workers(over_nixl if kind == "nixl" else over_loopback, shard, theirs, mine)
    try:
        yield made
    finally:
        made.stop()


@pytest.mark.parametrize("shard", [GQA, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize(("theirs", "mine"), [(1, 2), (2, 1), (2, 4), (4, 2), (2, 2)])
@pytest.mark.parametrize("kind", ["nixl", "loopback"])
def test_every_rank_gets_its_part_of_every_block(kind: str, theirs: int, mine: int, shard: KvShard) -> None:
    with workers(kind, shard, theirs, mine) as made:
        for reader in made.readers:
            (outcome,) = reader.pull()
            assert outcome.fault is None, outcome.detail
            assert outcome.generations is not None
            assert outcome.generations.shape == (len(made.sources(reader)), len(REMOTE))
            assert check_generations((REMOTE + 5).tolist(), outcome.generations) is None
            wanted = part_of(made.whole, reader.shard)
            assert np.array_equal(reader.pool[LOCAL], wanted[REMOTE])
            untouched = np.setdiff1d(np.arange(NUM_BLOCKS), LOCAL)
            assert not reader.pool[untouched].any()


@pytest.mark.parametrize("shard", [GQA, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize(("theirs", "mine"), [(2, 1), (4, 2), (2, 4)])
@pytest.mark.parametrize("kind", ["nixl", "loopback"])
def test_one_rank_that_reuses_a_block_in_the_middle_fails_the_pull(
    kind: str, theirs: int, mine: int, shard: KvShard
) -> None:
    with workers(kind, shard, theirs, mine) as made:
        for reader in made.readers:
            for number, rank in enumerate(made.sources(reader), start=1):
                before = [owner.generations.copy() for owner in made.owners]
                shim = reader.shims[0]
                # After the data of this rank and before its generations: data reads are posted in the order of the ranks.
                reused = lambda rank=rank: rank.generations.__setitem__(9, 1000)  # noqa: E731
                shim.data.after = {shim.data_reads + number: reused}
                (outcome,) = reader.pull()
                assert outcome.generations is not None
                failure = check_generations((REMOTE + 5).tolist(), outcome.generations)
                assert failure is not None
                assert failure.fault is HandoffFault.STALE_GENERATION
                assert "block 2 of the ticket has generation 1000" in failure.detail
                for owner, table in zip(made.owners, before, strict=True):
                    owner.generations[:] = table


def test_a_rank_whose_read_fails_ends_the_pull_and_the_others_are_fenced_first() -> None:
    with workers("loopback", GQA, 4, 1) as made:
        (reader,) = made.readers
        shim = reader.shims[0]
        shim.data.hold = {shim.data_reads + 1, shim.data_reads + 4}
        shim.data.refuse = {shim.data_reads + 2: Fault.BACKEND}
        done: list[object] = []
        reader.port.pull(
            OWNER,
            REMOTE,
            LOCAL,
            deadline_seconds=60,
            on_done=done.append,
            on_fenced=lambda: done.append("fenced"),
        )
        reader.run(lambda: bool(done))
        assert isinstance(done[0], PullOutcome)
        assert done[0].fault is Fault.BACKEND
        wait_until(lambda: reader.thread.in_flight == 2)  # those that are held may still land
        reader.run(lambda: True)
        assert done[1:] == []
        before = shim.generation_reads
        shim.data.hold = set()
        reader.run(lambda: len(done) == 2)
        assert done[1] == "fenced"
        assert shim.generation_reads == before  # they were cancelled: nobody reads what would prove them


@pytest.mark.parametrize("kind", ["nixl", "loopback"])
def test_parts_of_blocks_outside_a_pool_are_refused(kind: str) -> None:
    with workers(kind, GQA, 2, 1) as made:
        (reader,) = made.readers
        inside = np.array([0], np.int32)
        for number in (-1, NUM_BLOCKS):
            outside = np.array([number], np.int32)
            for remote, local in ((outside, inside), (inside, outside)):
                (outcome,) = reader.pull(remote, local)
                assert outcome.fault is Fault.INVALID
        assert not reader.pool.any()


def test_a_cancelled_pull_ends_at_every_rank() -> None:
    with workers("loopback", GQA, 2, 1) as made:
        (reader,) = made.readers
        reader.shims[0].data.hold = {reader.shims[0].data_reads + 1, reader.shims[0].data_reads + 2}
        done: list[object] = []
        pull = reader.port.pull(
            OWNER,
            REMOTE,
            LOCAL,
            deadline_seconds=60,
            on_done=done.append,
            on_fenced=lambda: done.append("fenced"),
        )
        reader.port.cancel(pull)
        reader.run(lambda: bool(done))
        assert isinstance(done[0], PullOutcome)
        assert done[0].fault is Fault.ABORTED
        reader.shims[0].data.hold = set()
        reader.run(lambda: len(done) == 2)


def test_ranks_without_a_common_head_do_not_connect() -> None:
    for kind in ("loopback", "nixl"):
        with workers(kind, GQA, 2, 2) as made:
            error = made.readers[0].connect(made.owners[1])
            assert error is not None
            assert error.fault is Fault.PEER_REFUSED
            assert "none of this rank's heads" in error.detail


def test_the_smallest_pool_bounds_block_numbers_and_a_lost_rank_is_missed() -> None:
    with workers("loopback", GQA, 2, 1) as made:
        (reader,) = made.readers
        assert reader.port.pool_blocks(OWNER) == NUM_BLOCKS
        reader.thread.disconnect(made.owners[1].descriptor.worker)
        reader.run(lambda: reader.port.pool_blocks(OWNER) is None)
        reader.port.leave(OWNER)
        assert reader.port.pool_blocks(made.owners[0].descriptor.worker) == NUM_BLOCKS


def test_an_owner_has_at_least_one_rank_and_each_once() -> None:
    with workers("loopback", GQA, 1, 1) as made:
        port = made.readers[0].port
        for ranks in ([], [OWNER, OWNER]):
            with pytest.raises(ValueError, match="distinct"):
                port.join(OWNER, ranks)


def test_a_table_of_no_rank_proves_nothing() -> None:
    failure = check_generations([1, 2], np.empty((0, 2), np.uint64))
    assert failure is not None
    assert failure.fault is HandoffFault.STALE_GENERATION
