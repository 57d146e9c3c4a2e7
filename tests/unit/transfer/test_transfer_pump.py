# SPDX-License-Identifier: Apache-2.0
"""The pump, ticked by hand, over the loopback agent and the shim."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.transfer_shim import ShimAgent
from twinpool.ids import WorkerKey
from twinpool.transfer.base import (
    AgentBusy,
    Blocks,
    Fault,
    PeerDescriptor,
    PoolMemory,
    ReadHandle,
    ReadState,
    ReadStatus,
    TransferError,
    failed,
)
from twinpool.transfer.loopback import Fabric, LoopbackAgent
from twinpool.transfer.pull import Pull, PullOutcome
from twinpool.transfer.pump import Pace, TransferPump

BLOCK = 64
OWNER, READER = WorkerKey("owner", 1), WorkerKey("reader", 2)


class Observed:
    def __init__(self) -> None:
        self.pulls: list[tuple[int, int, int]] = []
        self.faults: list[Fault] = []

    def pulled(
        self, *, blocks: int, descriptors: int, size_bytes: int, seconds: float, post_seconds: float
    ) -> None:
        assert seconds >= post_seconds >= 0
        self.pulls.append((blocks, descriptors, size_bytes))

    def pull_failed(self, fault: Fault) -> None:
        self.faults.append(fault)

    def fence_failed(self, reason: str) -> None: ...

    def leases_expired(self, count: int) -> None: ...

    def unknown_transfer(self, kind: str) -> None: ...

    def release_unanswered(self) -> None: ...


class Pair:
    """An owner and a reader on one fabric; the reader's pump is ticked by hand."""

    def __init__(self, max_post_blocks: int = 2) -> None:
        self.now = 0.0
        self.fabric = Fabric()
        self.owner_pool = np.arange(16 * BLOCK, dtype=np.uint64).astype(np.uint8).reshape(16, BLOCK)
        self.pool = np.zeros((16, BLOCK), dtype=np.uint8)
        self.owner = self.agent(OWNER, self.owner_pool)
        self.shim = ShimAgent(self.agent(READER, self.pool), lambda: self.now)
        self.observed = Observed()
        self.wakes = 0
        self.pump = TransferPump(
            self.shim, observer=self.observed, wake=self.wake, max_post_bytes=max_post_blocks * BLOCK
        )
        self.log: list[object] = []
        self.pump.connect(self.owner.descriptor, self.log.append)
        self.tick()
        self.owner.progress()
        self.tick()
        assert self.log == [None]
        self.log.clear()

    def wake(self) -> None:
        self.wakes += 1

    def agent(self, key: WorkerKey, pool: np.ndarray) -> LoopbackAgent:
        table = np.arange(len(pool), dtype=np.uint64) + 100
        return LoopbackAgent(key, "f", PoolMemory.of_array(pool), table, fabric=self.fabric)

    def pull(self, *remote: int, deadline_seconds: float = 5.0) -> Pull:
        theirs = np.array(remote, dtype=np.int32)
        ours = (15 - np.arange(len(remote))).astype(np.int32)
        return self.pump.pull(
            OWNER,
            theirs,
            ours,
            deadline_seconds=deadline_seconds,
            on_done=self.log.append,
            on_fenced=lambda: self.log.append("fenced"),
        )

    def tick(self, seconds: float = 0.0) -> Pace:
        self.now += seconds
        return self.pump.tick(self.now)

    def settle(self) -> None:
        for _ in range(20):
            self.tick()
            self.owner.progress()

    @property
    def outcome(self) -> PullOutcome:
        assert len(self.log) == 2, self.log
        outcome, fenced = self.log
        assert isinstance(outcome, PullOutcome)
        assert fenced == "fenced"
        return outcome


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_a_pull_moves_blocks_in_pieces_and_then_reads_generations(pair: Pair) -> None:
    before = pair.shim.generation_reads
    pair.pull(3, 1, 4, 9, 2)
    assert pair.tick() is Pace.NOW
    assert pair.shim.data_reads == 1
    pair.settle()
    assert pair.shim.data_reads == 3
    assert pair.shim.generation_reads == before + 1
    assert pair.outcome.fault is None
    assert pair.outcome.generations is not None
    assert pair.outcome.generations.tolist() == [103, 101, 104, 109, 102]
    assert np.array_equal(pair.pool[[15, 14, 13, 12, 11]], pair.owner_pool[[3, 1, 4, 9, 2]])
    assert not pair.pool[:11].any()
    assert pair.observed.pulls == [(5, 5, 5 * BLOCK)]
    assert pair.tick() is Pace.IDLE


def test_generations_are_never_read_before_the_last_piece_is_done(pair: Pair) -> None:
    before = pair.shim.generation_reads
    pair.shim.data.delay_seconds[1] = 1.0
    pair.pull(1, 2, 3)
    for _ in range(5):
        pair.settle()
    assert pair.shim.data_reads == 2
    assert pair.shim.generation_reads == before
    pair.tick(1.0)
    pair.settle()
    assert pair.outcome.fault is None


def test_the_deadline_fails_first_and_fences_later(pair: Pair) -> None:
    pair.fabric.stop(OWNER)
    pair.pull(1, deadline_seconds=2.0)
    assert pair.tick() is Pace.BUSY
    pair.tick(1.9)
    assert pair.log == []
    pair.tick(0.2)
    assert [type(entry) for entry in pair.log] == [PullOutcome]
    assert pair.observed.faults == [Fault.DEADLINE]
    assert pair.pump.in_flight == 1
    assert pair.tick(100.0) is Pace.IDLE  # a hung peer costs no busy polling
    assert len(pair.log) == 1
    pair.fabric.resume(OWNER)
    pair.settle()
    assert pair.outcome.fault is Fault.DEADLINE
    assert pair.pump.in_flight == 0


def test_a_failed_piece_ends_the_pull_while_others_are_in_flight(pair: Pair) -> None:
    pair.shim.data.delay_seconds[1] = 1.0
    pair.shim.data.report[2] = failed(Fault.BACKEND, "injected")
    pair.pull(1, 2, 3, 4, 5, 6)
    pair.settle()
    assert [type(entry) for entry in pair.log] == [PullOutcome]
    assert pair.shim.data_reads == 2  # the third piece was never posted
    pair.tick(1.0)
    pair.settle()
    assert pair.outcome.fault is Fault.BACKEND


def test_cancel_stops_posting_and_fences_what_was_posted(pair: Pair) -> None:
    pair.shim.data.delay_seconds[1] = 1.0
    pull = pair.pull(1, 2, 3)
    pair.tick()
    pair.pump.cancel(pull)
    pair.pump.cancel(pull)
    pair.settle()
    assert len(pair.log) == 1
    pair.tick(1.0)
    pair.settle()
    assert pair.outcome.fault is Fault.ABORTED
    pair.pump.cancel(pull)
    pair.settle()
    assert len(pair.log) == 2


def test_a_failure_that_does_not_fence_waits_for_the_end_of_the_agent(pair: Pair) -> None:
    pair.shim.data.report[1] = failed(Fault.BACKEND, "a post that failed midway", fenced=False)
    pair.pull(1)
    pair.settle()
    pair.tick(1000.0)
    assert len(pair.log) == 1
    pair.pump.close()
    assert pair.outcome.fault is Fault.BACKEND


def test_close_ends_everything_and_fences_after_the_agent(pair: Pair) -> None:
    pair.fabric.stop(OWNER)
    pair.pull(1)
    pair.tick()
    closed_before_fenced: list[bool] = []
    pair.shim.real.close = lambda: closed_before_fenced.append("fenced" not in pair.log)  # type: ignore[method-assign]
    pair.pump.close()
    assert closed_before_fenced == [True]
    assert pair.outcome.fault is Fault.CLOSED
    pair.log.clear()
    pair.pull(2)
    assert pair.outcome.fault is Fault.CLOSED
    results: list[TransferError | None] = []
    pair.pump.connect(pair.owner.descriptor, results.append)
    assert results[0] is not None
    assert results[0].fault is Fault.CLOSED


def test_an_unknown_peer_and_a_dead_one(pair: Pair) -> None:
    pair.pump.disconnect(OWNER)
    pair.pull(1)
    pair.settle()
    assert pair.outcome.fault is Fault.PEER_UNKNOWN
    pair.log.clear()
    pair.owner.close()
    pair.pump.connect(pair.owner.descriptor, pair.log.append)
    pair.settle()
    (result,) = pair.log
    assert isinstance(result, TransferError)
    assert result.fault is Fault.PEER_LOST


def test_a_peer_that_hangs_while_connecting_is_given_up(pair: Pair) -> None:
    other = pair.agent(WorkerKey("other", 3), np.zeros((4, BLOCK), dtype=np.uint8))
    pair.fabric.stop(other.descriptor.worker)
    pair.pump.connect(other.descriptor, pair.log.append, deadline_seconds=1.0)
    pair.settle()
    assert pair.log == []
    assert pair.pump.pool_blocks(other.descriptor.worker) is None
    pair.tick(1.1)
    pair.tick()
    (result,) = pair.log
    assert isinstance(result, TransferError)
    assert result.fault is Fault.DEADLINE
    assert not pair.shim.connected(other.descriptor.worker)


def test_a_bug_while_connecting_is_a_failure(pair: Pair) -> None:
    def explode(peer: PeerDescriptor) -> None:
        raise ZeroDivisionError("a bug in connect")

    pair.shim.real.connect = explode  # type: ignore[method-assign]
    pair.pump.connect(pair.owner.descriptor, pair.log.append)
    pair.tick()
    (result,) = pair.log
    assert isinstance(result, TransferError)
    assert result.fault is Fault.UNKNOWN


def test_a_bug_in_the_agent_is_a_failure_and_stops_nobody_else(pair: Pair) -> None:
    def explode(handle: ReadHandle) -> ReadState:
        raise ZeroDivisionError("a bug in poll")

    good_poll = pair.shim.real.poll
    pair.shim.real.poll = explode  # type: ignore[method-assign]
    pair.pull(1)
    pair.tick()
    assert isinstance(pair.log[0], PullOutcome)
    assert pair.log[0].fault is Fault.UNKNOWN
    assert len(pair.log) == 1  # nothing is known about its bytes
    pair.shim.real.poll = good_poll  # type: ignore[method-assign]
    pair.log.clear()
    pair.pull(2)
    pair.settle()
    assert any(isinstance(entry, PullOutcome) and entry.fault is None for entry in pair.log)


def test_a_bug_in_a_callback_stops_nobody_else(pair: Pair) -> None:
    def explode(_outcome: PullOutcome) -> None:
        raise ZeroDivisionError("a bug in the caller")

    one = np.zeros(1, dtype=np.int32)
    pair.pump.pull(OWNER, one, one, deadline_seconds=1, on_done=explode, on_fenced=lambda: None)
    pair.pull(2)
    pair.settle()
    assert pair.outcome.fault is None


def test_a_busy_agent_is_asked_again(pair: Pair) -> None:
    calls = iter([AgentBusy(), AgentBusy()])
    real = pair.shim.real.read_generations

    def sometimes(peer: WorkerKey, remote: Blocks) -> ReadHandle:
        error = next(calls, None)
        if error is not None:
            raise error
        return real(peer, remote)

    pair.shim.real.read_generations = sometimes  # type: ignore[method-assign]
    pair.pull(1)
    pair.settle()
    assert pair.outcome.fault is None
    assert next(calls, None) is None


def test_offers_keep_the_pace_and_commands_wake(pair: Pair) -> None:
    woken = pair.wakes
    pair.pump.set_offers(1)
    assert pair.tick() is Pace.BUSY
    pair.pump.set_offers(0)
    assert pair.tick() is Pace.IDLE
    pair.pull(1)
    assert pair.wakes == woken + 3


def test_states_are_what_they_say() -> None:
    assert failed(Fault.BACKEND, "x").fenced
    assert failed(Fault.BACKEND, "x").status is ReadStatus.FAILED
