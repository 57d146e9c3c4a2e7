# SPDX-License-Identifier: Apache-2.0
"""The transfer thread over the loopback agent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.support.nixl_peer import waiter
from twinpool.ids import WorkerKey
from twinpool.transfer.base import Fault, PoolMemory, TransferError
from twinpool.transfer.loopback import Fabric, LoopbackAgent
from twinpool.transfer.thread import TransferThread

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
    callback, wait = waiter()
    reader.connect(owner.descriptor, callback)
    assert wait(5.0) is None
    owner.set_offers(1)
    on_done, done = waiter()
    on_fenced, fenced = waiter()
    one = np.array([3], dtype=np.int32)
    reader.pull(OWNER, one, one, deadline_seconds=5, on_done=on_done, on_fenced=on_fenced)
    assert done(5.0).fault is None
    fenced(5.0)
    reader.stop()
    reader.stop()
    on_done, done = waiter()
    reader.pull(OWNER, one, one, deadline_seconds=5, on_done=on_done, on_fenced=lambda: None)
    assert done(1.0).fault is Fault.CLOSED


def test_an_idle_thread_is_woken_by_a_command() -> None:
    fabric = Fabric()
    pool = PoolMemory.of_array(np.zeros((4, BLOCK), dtype=np.uint8))
    thread = TransferThread(
        lambda: LoopbackAgent(READER, "f", pool, np.zeros(4, dtype=np.uint64), fabric=fabric),
        idle_seconds=30.0,
    )
    thread.start()
    on_done, done = waiter()
    none = np.zeros(1, dtype=np.int32)
    began = time.monotonic()
    thread.pull(OWNER, none, none, deadline_seconds=60, on_done=on_done, on_fenced=lambda: None)
    assert done(5.0).fault is Fault.PEER_UNKNOWN
    thread.stop()
    assert time.monotonic() - began < 5.0


def test_an_idle_thread_uses_little_of_a_core(
    threads: tuple[TransferThread, TransferThread, Fabric],
) -> None:
    began, cpu = time.monotonic(), time.process_time()
    threading.Event().wait(0.5)
    share = (time.process_time() - cpu) / (time.monotonic() - began)
    assert share < 0.4, "two idle transfer threads"  # a spinning thread takes all of a core


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
    on_fenced, fenced = waiter()
    none = np.zeros(1, dtype=np.int32)
    thread.pull(OWNER, none, none, deadline_seconds=60, on_done=lambda _outcome: None, on_fenced=on_fenced)
    fenced(5.0)
    thread.stop()
    assert calls == ["transfer-test", "transfer-test"]


def test_an_agent_that_cannot_be_made_is_the_callers_error() -> None:
    def make() -> LoopbackAgent:
        raise TransferError(Fault.BACKEND, "no device")

    thread = TransferThread(make)
    with pytest.raises(TransferError, match="no device"):
        thread.start()
    with pytest.raises(RuntimeError, match="not running"):
        _ = thread.descriptor
    thread.stop()
