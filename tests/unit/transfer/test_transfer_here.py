# SPDX-License-Identifier: Apache-2.0
"""Small pulls that are stepped by the thread that asks for them: by hand over loopback, and over real NIXL."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from tests.support.nixl_peer import Called, PeerProcess, Worker, pattern
from tests.support.transfer_shim import ShimAgent
from twinpool.ids import WorkerKey, new_incarnation
from twinpool.transfer.base import Blocks, Fault, PoolMemory, ReadHandle
from twinpool.transfer.fence import HandoffFault, check_generations
from twinpool.transfer.loopback import Fabric, LoopbackAgent
from twinpool.transfer.pull import Pull, PullOutcome
from twinpool.transfer.pump import HERE_BYTES, TransferPump

BLOCK = 64
OWNER, READER = WorkerKey("owner", 1), WorkerKey("reader", 2)
NUM_BLOCKS, BLOCK_BYTES = 48, 73_728


class PromptAgent(LoopbackAgent):
    """As over shared memory: a read is over when its post returns, if ``owner`` is there to serve it."""

    owner: LoopbackAgent | None = None
    entered: Callable[[], None] = staticmethod(lambda: None)

    def _post(self, read: ReadHandle) -> ReadHandle:  # type: ignore[override]
        super()._post(read)  # type: ignore[arg-type]
        if self.owner is not None:
            self.owner.progress()
        return read

    def progress(self) -> None:
        self.entered()
        super().progress()


class Pair:
    """A reader's pump with a clock, and its owner."""

    def __init__(self, block_bytes: int = BLOCK) -> None:
        self.fabric, self.wakes = Fabric(), 0
        self.owner_pool = np.arange(16 * block_bytes, dtype=np.uint64).astype(np.uint8).reshape(16, -1)
        self.pool = np.zeros_like(self.owner_pool)
        self.table = np.arange(16, dtype=np.uint64) + 100
        self.owner = LoopbackAgent(
            OWNER, "f", PoolMemory.of_array(self.owner_pool), self.table, fabric=self.fabric
        )
        self.agent = PromptAgent(
            READER, "f", PoolMemory.of_array(self.pool), self.table.copy(), fabric=self.fabric
        )
        self.agent.owner = self.owner
        self.shim = ShimAgent(self.agent, lambda: 0.0)
        self.dispatched: list[Callable[[], None]] = []
        self.pump = TransferPump(
            self.shim, dispatch=self.dispatched.append, wake=self.wake, clock=lambda: 0.0
        )
        self.pump.connect(self.owner.descriptor, lambda error: self.log.append(error))
        self.log: list[object] = []
        self.pump.tick(0.0)
        self.deliver()
        assert self.log == [None]
        self.log.clear()
        self.wakes = 0

    def wake(self) -> None:
        self.wakes += 1

    def deliver(self) -> None:
        while self.dispatched:
            self.dispatched.pop(0)()

    def pull(self, *remote: int) -> Pull:
        theirs = np.array(remote, np.int32)
        return self.pump.pull(
            OWNER,
            theirs,
            15 - theirs,
            deadline_seconds=5.0,
            on_done=self.log.append,
            on_fenced=lambda: self.log.append("fenced"),
        )

    @property
    def outcome(self) -> PullOutcome:
        outcome, fenced = self.log
        assert isinstance(outcome, PullOutcome)
        assert fenced == "fenced"
        return outcome


def test_a_small_pull_is_over_before_it_returns() -> None:
    pair = Pair()
    pair.pull(3, 4)
    assert pair.outcome.fault is None
    assert pair.outcome.generations is not None
    assert pair.outcome.generations.tolist() == [103, 104]
    assert np.array_equal(pair.pool[[12, 11]], pair.owner_pool[[3, 4]])
    assert (pair.dispatched, pair.wakes, pair.pump.in_flight) == ([], 0, 0)


def test_generations_are_read_after_the_data_here_too() -> None:
    pair = Pair()
    pair.shim.data.after = {1: lambda: pair.table.__setitem__(4, 999)}
    pair.pull(3, 4)
    assert pair.outcome.generations is not None
    failure = check_generations([103, 104], pair.outcome.generations)
    assert failure is not None
    assert failure.fault is HandoffFault.STALE_GENERATION


def test_what_is_not_over_at_once_goes_on_in_the_driving_thread() -> None:
    pair = Pair()
    pair.agent.owner = None
    pair.pull(3)
    assert (pair.log, pair.wakes, pair.shim.data_reads) == ([], 1, 1)
    for _ in range(4):
        pair.owner.progress()
        pair.pump.tick(0.0)
    pair.deliver()
    assert pair.outcome.fault is None


def test_a_failure_here_is_told_here() -> None:
    pair = Pair()
    pair.shim.data.refuse = {1: Fault.BACKEND}
    pair.pull(3)
    assert pair.outcome.fault is Fault.BACKEND


def test_a_large_pull_is_left_to_the_driving_thread() -> None:
    pair = Pair(block_bytes=HERE_BYTES["DRAM"] // 2)
    pair.pull(1, 2, 3)
    assert (pair.shim.data_reads, pair.wakes, pair.log) == (0, 1, [])
    pair.pump.tick(0.0)
    pair.deliver()
    assert pair.outcome.fault is None
    pair.log.clear()
    pair.pull(1, 2)
    assert pair.outcome.fault is None


def test_what_was_asked_for_before_comes_first() -> None:
    pair = Pair()
    pair.pump.disconnect(OWNER)
    pair.pull(3)
    assert pair.log == []
    pair.pump.tick(0.0)
    pair.deliver()
    assert pair.outcome.fault is Fault.PEER_UNKNOWN
    assert pair.shim.data_reads == 1


def test_a_pull_waits_for_nobody_who_drives_the_agent() -> None:
    pair = Pair()
    inside, leave = threading.Event(), threading.Event()

    def entered() -> None:
        inside.set()
        leave.wait(60)

    pair.agent.entered = entered  # type: ignore[method-assign]
    driving = threading.Thread(target=pair.pump.tick, args=(0.0,))
    driving.start()
    assert inside.wait(60)
    pair.pull(3)
    assert (pair.shim.data_reads, pair.log) == (0, [])
    leave.set()
    driving.join(60)
    pair.pump.tick(0.0)
    pair.deliver()
    assert pair.outcome.fault is None


def test_a_closed_pump_refuses_here_as_elsewhere() -> None:
    pair = Pair()
    pair.pump.close()
    pair.pull(3)
    pair.deliver()
    assert pair.outcome.fault is Fault.CLOSED
    assert pair.shim.data_reads == 0


def test_a_callback_here_may_ask_for_the_next_pull() -> None:
    pair = Pair()
    theirs = np.array([5], np.int32)
    pair.pump.pull(
        OWNER,
        theirs,
        theirs,
        deadline_seconds=5.0,
        on_done=lambda _outcome: pair.pull(3),
        on_fenced=lambda: pair.log.append("first fenced"),
    )
    assert [str(entry) for entry in pair.log[1:]] == ["fenced", "first fenced"]


def test_a_callback_that_raises_here_does_not_lose_the_fence() -> None:
    pair = Pair()
    theirs = np.array([5], np.int32)

    def raises(_outcome: PullOutcome) -> None:
        raise RuntimeError("a listener's fault")

    pair.pump.pull(
        OWNER,
        theirs,
        theirs,
        deadline_seconds=5.0,
        on_done=raises,
        on_fenced=lambda: pair.log.append("fenced"),
    )
    assert pair.log == ["fenced"]


@pytest.mark.parametrize("ucx_tls", ["tcp,sm,self", "tcp,self"])
def test_several_threads_pull_through_one_nixl_agent(ucx_tls: str) -> None:
    """Both the threads that ask and the driving one step pulls; every byte and every generation is right."""
    reader = Worker(WorkerKey("reader", new_incarnation()), NUM_BLOCKS, BLOCK_BYTES, ucx_tls, pull_here=True)
    with PeerProcess("owner", NUM_BLOCKS, BLOCK_BYTES, ucx_tls) as peer:
        connected = Called()
        reader.thread.connect(peer.descriptor, connected)
        assert connected.wait() is None
        generations = peer.fill(list(range(NUM_BLOCKS)), salt=1)
        wanted = [pattern(block, 1, BLOCK_BYTES) for block in range(NUM_BLOCKS)]
        wrong: list[object] = []

        def work(number: int) -> None:
            # Each thread has its own part of the reader's pool.
            random = np.random.default_rng(number)
            local = np.arange(number * 16, number * 16 + 4, dtype=np.int32)
            for _ in range(60):
                remote: Blocks = random.permutation(NUM_BLOCKS)[:4].astype(np.int32)
                done, fenced = Called(), Called()
                reader.thread.pull(
                    peer.descriptor.worker,
                    remote,
                    local,
                    deadline_seconds=60,
                    on_done=done,
                    on_fenced=fenced,
                )
                outcome = done.wait()
                fenced.wait()
                same = all(
                    np.array_equal(reader.pool[ours], wanted[theirs])
                    for ours, theirs in zip(local, remote, strict=True)
                )
                if (
                    outcome.fault is not None
                    or not same
                    or outcome.generations.tolist() != [generations[block] for block in remote]
                ):
                    wrong.append(outcome)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
        assert wrong == []
        peer.stop()
    reader.thread.stop()
