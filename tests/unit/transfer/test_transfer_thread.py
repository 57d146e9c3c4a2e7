# SPDX-License-Identifier: Apache-2.0
"""The transfer thread over the loopback agent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.support.nixl_peer import Called
from tests.support.watching import wait_until
from twinpool.ids import WorkerKey
from twinpool.transfer.base import PENDING, Fault, PoolMemory, ReadHandle, ReadState, TransferError
from twinpool.transfer.loopback import Fabric, LoopbackAgent
from twinpool.transfer.thread import IDLE_SECONDS, TransferThread

BLOCK = 64
OWNER, READER = WorkerKey("owner", 1), WorkerKey("reader", 2)


@pytest.fixture
def threads() -> Iterator[tuple[TransferThread, TransferThread, Fabric]]:
    fabric = Fabric()

    def make(key: WorkerKey, fill: int) -> Callable[[], LoopbackAgent]:
        pool = np.full((16, BLOCK), fill, dtype=np.uint8)
        table = np.arange(16, dtype=np.uint64)
        return lambda: LoopbackAgent(key, "f", PoolMemory.of_array(pool), table, fabric=fabric)

    owner, reader = TransferThread(make(OWNER, 1)), TransferThread(make(READER, 0))
    owner.start()
    reader.start()
    yield owner, reader, fabric
    reader.stop()
    owner.stop()


def test_the_thread_pulls_and_stops(threads: tuple[TransferThread, TransferThread, Fabric]) -> None:
    owner, reader, _ = threads
    connected = Called()
    reader.connect(owner.descriptor, connected)
    assert connected.wait() is None
    owner.set_offers(1)
    done = Called()
    fenced = Called()
    one = np.array([3], dtype=np.int32)
    reader.pull(OWNER, one, one, deadline_seconds=60, on_done=done, on_fenced=fenced)
    assert done.wait().fault is None
    fenced.wait()
    reader.stop()
    reader.stop()
    done = Called()
    reader.pull(OWNER, one, one, deadline_seconds=60, on_done=done, on_fenced=lambda: None)
    assert done.wait().fault is Fault.CLOSED


def test_an_idle_thread_is_woken_by_a_command() -> None:
    fabric = Fabric()
    pool = PoolMemory.of_array(np.zeros((4, BLOCK), dtype=np.uint8))
    thread = TransferThread(
        lambda: LoopbackAgent(READER, "f", pool, np.zeros(4, dtype=np.uint64), fabric=fabric),
        idle_seconds=3600.0,
    )
    thread.start()
    done = Called()
    none = np.zeros(1, dtype=np.int32)
    thread.pull(OWNER, none, none, deadline_seconds=60, on_done=done, on_fenced=lambda: None)
    assert done.wait().fault is Fault.PEER_UNKNOWN
    thread.stop()


class SlowAgent(LoopbackAgent):
    """Its reads are pending for some polls."""

    polls_left = 3

    def poll(self, handle: ReadHandle) -> ReadState:
        self.polls_left -= 1
        return PENDING if self.polls_left >= 0 else super().poll(handle)


def test_a_read_is_polled_soon_after_its_post() -> None:
    fabric = Fabric()
    pool = PoolMemory.of_array(np.zeros((4, BLOCK), dtype=np.uint8))
    thread = TransferThread(
        lambda: SlowAgent(READER, "f", pool, np.zeros(4, dtype=np.uint64), fabric=fabric),
        poll_seconds=3600.0,
        idle_seconds=3600.0,
    )
    thread.start()
    told = Called()
    thread.probe(told)
    assert told.wait() is None
    thread.stop()


def test_an_idle_thread_uses_little_of_a_core(
    threads: tuple[TransferThread, TransferThread, Fabric],
) -> None:
    """It sleeps between its rounds; one that spins takes no time for many of them."""
    thread, _, _ = threads
    began, before = time.monotonic(), thread.ticks
    wait_until(lambda: thread.ticks >= before + 50)
    assert time.monotonic() - began >= 48 * IDLE_SECONDS


def test_callbacks_come_through_the_dispatch() -> None:
    fabric = Fabric()
    pool = PoolMemory.of_array(np.zeros((4, BLOCK), dtype=np.uint8))
    calls: list[str] = []

    def dispatch(callback: Callable[[], None]) -> None:
        calls.append(threading.current_thread().name)
        callback()

    thread = TransferThread(
        lambda: LoopbackAgent(READER, "f", pool, np.zeros(4, dtype=np.uint64), fabric=fabric),
        dispatch=dispatch,
        name="transfer-test",
    )
    thread.start()
    fenced = Called()
    none = np.zeros(1, dtype=np.int32)
    thread.pull(OWNER, none, none, deadline_seconds=60, on_done=lambda _outcome: None, on_fenced=fenced)
    fenced.wait()
    thread.stop()
    assert calls == ["transfer-test"]  # its end and its fence in one


def test_an_agent_that_cannot_be_made_is_the_callers_error() -> None:
    def make() -> LoopbackAgent:
        raise TransferError(Fault.BACKEND, "no device")

    thread = TransferThread(make)
    with pytest.raises(TransferError, match="no device"):
        thread.start()
    with pytest.raises(RuntimeError, match="not running"):
        _ = thread.descriptor
    thread.stop()
