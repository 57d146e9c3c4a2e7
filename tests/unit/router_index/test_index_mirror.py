# SPDX-License-Identifier: Apache-2.0
"""One mirror, fault by fault: what it notices, what it asks for, what it says meanwhile."""

import numpy as np
import pytest

from tests.support.cache_world import BLOCK_TOKENS, CHAINS, ROOTS
from tests.support.event_world import add_worker, core_with, decoded
from twinpool._core import RouterCore
from twinpool.config import KvEventsConfig
from twinpool.ids import WorkerKey
from twinpool.kv_events import CacheState, KVEventBatch, decode, wire
from twinpool.router.index import mirror as module
from twinpool.router.index.mirror import Mirror, Need
from twinpool.worker.kv_events.shadow import RawEvent
from twinpool.worker.kv_events.stream import EventStream

KEY = WorkerKey("w", 1)
CHAIN = CHAINS[0][1]
RAW = CHAIN.tobytes()


class Worker:
    """A stream, and batches by number. ``grow`` and ``shrink`` tell of the next and the last block of one chain."""

    def __init__(self, key: WorkerKey = KEY, replay_batches: int = 100) -> None:
        self.now = 0.0
        self.stream = EventStream(
            KvEventsConfig(replay_batches=replay_batches), key, BLOCK_TOKENS, wall_clock=self._tick
        )
        self.length = 0
        self.batches: list[KVEventBatch] = []

    def _tick(self) -> float:
        self.now += 1.0
        return self.now

    def grow(self, blocks: int = 1) -> None:
        for _ in range(blocks):
            at = 16 * self.length
            parent = RAW[at - 16 : at] if at else ROOTS[0]
            self._tell(RawEvent(RAW[at : at + 16], parent, not at))
            self.length += 1

    def shrink(self) -> None:
        self.length -= 1
        self._tell(RawEvent(RAW[16 * self.length :][:16], None, False))

    def _tell(self, event: RawEvent) -> None:
        ((_, payload),) = self.stream.tell([event])
        self.batches.append(decode(payload))

    def give(self, mirror: Mirror, *numbers: int) -> None:
        for number in numbers:
            mirror.event(number, self.batches[number])

    def alive(self, mirror: Mirror) -> None:
        sequence, payload = self.stream.alive()
        mirror.alive(sequence, decode(payload))

    def answer(self, mirror: Mirror) -> None:
        """Answers what the mirror needs."""
        assert mirror.need is not None
        if mirror.need.kind == "snapshot":
            mirror.snapshot(decoded(self.stream.snapshot()))
        else:
            assert mirror.next is not None
            mirror.replayed(decoded(self.stream.replay(mirror.next)))


@pytest.fixture
def core() -> RouterCore:
    return core_with(KEY)


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def mirror(core: RouterCore, worker: Worker) -> Mirror:
    """Live, of an empty worker."""
    made = Mirror(core, KEY)
    worker.answer(made)
    assert made.need is None
    return made


def held(core: RouterCore, name: str = "w") -> int:
    return dict(core.longest_prefix(CHAIN)).get(name, 0)


# --- case 14: unknown parents -----------------------------------------------------------------


def test_a_late_router_gets_what_it_missed(core: RouterCore, worker: Worker) -> None:
    worker.grow(2)
    late = Mirror(core, KEY)
    worker.grow(2)
    worker.give(late, 2, 3)
    assert held(core) == 0
    assert late.need == Need("snapshot", "start")
    worker.answer(late)
    assert held(core) == 4
    assert late.need is None


def test_an_unknown_parent_is_no_root_and_nothing_is_lost(
    core: RouterCore, mirror: Mirror, worker: Worker
) -> None:
    """Numbers without a gap, and yet a block is missing: its descendants wait for a snapshot, and are not matched before."""
    worker.grow(4)
    worker.give(mirror, 0)
    worker.batches[1].events.clear()
    worker.batches[1].blocks, worker.batches[1].digest = mirror.blocks, mirror.digest
    worker.give(mirror, 1)
    assert mirror.need is None
    worker.give(mirror, 2, 3)
    assert mirror.need == Need("snapshot", "unknown_parent")
    assert held(core) == 1
    worker.answer(mirror)
    assert held(core) == 4
    assert mirror.need is None


def test_a_full_index_explains_an_unknown_parent(worker: Worker) -> None:
    core = core_with(KEY, index_max_bytes=1 << 20)
    filler = WorkerKey("filler", 1)
    add_worker(core, filler)
    full = Mirror(core, KEY)
    worker.answer(full)
    worker.grow(2)
    worker.give(full, 0)
    source = np.random.default_rng(1)
    for _ in range(100):
        # Not asked by a lookup, which would keep the block warm.
        if next(row for row in core.workers() if row["name"] == "w")["indexed_blocks"] == 0:
            break
        more = source.integers(0, 256, (4096, 16)).astype(np.uint8)
        core.index_stored(filler.name, filler.incarnation, more)
    assert core.stats()["index_evicted"] > 0
    assert held(core) == 0
    worker.give(full, 1)
    assert full.need is None


# --- case 15: gaps ----------------------------------------------------------------------------


def test_a_lost_batch_is_replayed(core: RouterCore, mirror: Mirror, worker: Worker) -> None:
    worker.grow(5)
    worker.give(mirror, 0, 2, 3)
    assert mirror.need == Need("replay", "gap")
    assert held(core) == 1
    worker.answer(mirror)
    assert held(core) == 5
    assert mirror.need is None
    # What comes again, from the replay's overlap or from the network, changes nothing.
    worker.give(mirror, 4, 2, 1)
    assert held(core) == 5
    assert mirror.duplicates == 3
    worker.shrink()
    worker.give(mirror, 5)
    assert held(core) == 4


def test_the_first_number_seen_above_zero_is_a_gap(core: RouterCore, worker: Worker) -> None:
    worker.grow(4)
    late = Mirror(core, KEY)
    late.adopt(CacheState(b"", 0))
    worker.answer(late)
    assert held(core) == 4


def test_the_loss_of_the_last_batch_is_noticed(core: RouterCore, mirror: Mirror, worker: Worker) -> None:
    worker.grow(3)
    worker.give(mirror, 0, 1)
    assert mirror.need is None
    worker.alive(mirror)
    assert mirror.need == Need("replay", "gap")
    worker.answer(mirror)
    assert held(core) == 3


def test_what_is_not_kept_any_more_comes_as_a_snapshot(core: RouterCore) -> None:
    worker = Worker(replay_batches=2)
    mirror = Mirror(core, KEY)
    worker.answer(mirror)
    worker.grow(5)
    worker.give(mirror, 0, 4)
    worker.answer(mirror)
    assert mirror.need == Need("snapshot", "too_old")
    worker.answer(mirror)
    assert held(core) == 5
    assert mirror.need is None


def test_a_replay_of_nothing_does_not_end_a_gap(core: RouterCore, mirror: Mirror, worker: Worker) -> None:
    worker.grow(3)
    worker.give(mirror, 0)
    worker.alive(mirror)
    mirror.replayed([])
    assert mirror.need == Need("snapshot", "too_old")
    worker.answer(mirror)
    assert held(core) == 3


def test_an_overtaken_batch_waits_for_the_one_before(
    core: RouterCore, mirror: Mirror, worker: Worker
) -> None:
    worker.grow(3)
    worker.give(mirror, 1, 2, 0)
    worker.answer(mirror)
    assert held(core) == 3
    assert mirror.need is None
    assert mirror.parked == 0


def test_numbers_that_go_back_are_a_new_beginning(core: RouterCore, mirror: Mirror, worker: Worker) -> None:
    worker.grow(4)
    worker.give(mirror, 0, 1, 2, 3)
    again = Worker()
    again.now = worker.now
    again.grow(1)
    again.give(mirror, 0)
    assert mirror.need == Need("snapshot", "sequence_back")
    again.answer(mirror)
    assert held(core) == 1
    assert mirror.need is None
    again.grow(1)
    again.give(mirror, 1)
    assert held(core) == 2


def test_a_heartbeat_whose_number_goes_back_is_a_new_beginning(
    core: RouterCore, mirror: Mirror, worker: Worker
) -> None:
    worker.grow(4)
    worker.give(mirror, 0, 1, 2, 3)
    again = Worker()
    again.now = worker.now
    again.alive(mirror)
    assert mirror.need == Need("snapshot", "sequence_back")
    again.answer(mirror)
    assert held(core) == 0


def test_another_incarnation_takes_all_with_it(core: RouterCore, mirror: Mirror, worker: Worker) -> None:
    worker.grow(4)
    worker.give(mirror, 0, 1, 2, 3)
    mirror.replaced()
    assert held(core) == 0
    assert mirror.need == Need("snapshot", "incarnation")
    # Who answers is not the one that is asked for.
    worker.answer(mirror)
    mirror.replaced()
    successor = Worker(WorkerKey("w", 2))
    successor.grow(2)
    successor.answer(mirror)
    assert held(core) == 0
    assert mirror.need == Need("snapshot", "incarnation")


def test_a_set_that_differs_is_noticed(core: RouterCore, mirror: Mirror, worker: Worker) -> None:
    worker.grow(3)
    worker.batches[1].digest ^= 1
    worker.give(mirror, 0, 1)
    assert mirror.need == Need("snapshot", "digest")
    worker.answer(mirror)
    assert held(core) == 3
    assert mirror.need is None


def test_a_snapshot_that_contradicts_itself_is_not_trusted(mirror: Mirror, worker: Worker) -> None:
    worker.grow(3)
    messages = decoded(worker.stream.snapshot())
    messages[0][1].events.pop()
    mirror.snapshot(messages)
    assert mirror.need == Need("snapshot", "digest")
    mirror.snapshot([])
    assert mirror.need is not None


def test_what_waits_is_bounded(
    core: RouterCore, mirror: Mirror, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PARKED_MAX", 2)
    worker.grow(6)
    worker.give(mirror, 1, 2)
    assert mirror.need == Need("replay", "gap")
    worker.give(mirror, 3)
    assert mirror.need == Need("snapshot", "overflow")
    assert mirror.parked == 0
    worker.answer(mirror)
    assert held(core) == 6


def test_silence_is_asked_about_and_ends_with_an_answer(
    core: RouterCore, mirror: Mirror, worker: Worker
) -> None:
    worker.grow(2)
    mirror.silent()
    assert mirror.need == Need("replay", "silence")
    worker.answer(mirror)
    assert held(core) == 2
    assert mirror.need is None
    mirror.silent()
    worker.answer(mirror)
    assert mirror.need is None


# --- case 16: removal ---------------------------------------------------------------------------


def test_one_of_two_workers_evicts_and_the_other_still_holds() -> None:
    other_key = WorkerKey("v", 1)
    core = core_with(KEY, other_key)
    first, second = Worker(), Worker(other_key)
    mirrors = Mirror(core, KEY), Mirror(core, other_key)
    for worker, mirror in zip((first, second), mirrors, strict=True):
        worker.answer(mirror)
        worker.grow(3)
        worker.give(mirror, 0, 1, 2)
    for _ in range(3):
        first.shrink()
    first.give(mirrors[0], 3, 4, 5)
    assert (held(core), held(core, "v")) == (0, 3)
    assert (mirrors[0].blocks, mirrors[1].blocks) == (0, 3)
    # Removed once more by a repeated message: no count goes below zero.
    first.give(mirrors[0], 3, 4, 5)
    assert mirrors[0].blocks == 0
    assert core.stats()["index_blocks"] == 3


def test_cleared_means_all() -> None:
    core = core_with(KEY)
    worker = Worker()
    mirror = Mirror(core, KEY)
    worker.answer(mirror)
    worker.grow(2)
    worker.give(mirror, 0, 1)
    mirror.event(2, KVEventBatch(99.0, [wire.AllBlocksCleared()], incarnation=1))
    assert held(core) == 0
    assert mirror.need is None
