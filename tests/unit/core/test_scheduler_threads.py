# SPDX-License-Identifier: Apache-2.0
"""Plan and advance run without the GIL while other threads use the same block manager and scheduler."""

import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from scheduler_world import BLOCK, ROOT

from twinpool._core import BlockManager, SchedulerConfig, StepScheduler, hash_blocks

STEPS = 15_000


@pytest.fixture
def eager_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Threads:
    """Runs each function again and again until the first one is through; any error is the test's error."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.errors: list[BaseException] = []

    def _run(self, work: Callable[[int], None]) -> None:
        turn = 0
        try:
            while not self.over.is_set():
                work(turn)
                turn += 1
        except BaseException as error:
            self.errors.append(error)
            self.over.set()

    def run(self, *works: Callable[[int], None]) -> None:
        threads = [threading.Thread(target=self._run, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "a thread hangs"
        if self.errors:
            raise self.errors[0]


@pytest.mark.usefixtures("eager_switching")
def test_threads_share_one_core() -> None:
    manager = BlockManager(96, BLOCK, np.zeros(96, np.uint64))
    scheduler = StepScheduler(manager, SchedulerConfig(max_num_seqs=16, max_batched_tokens=64))
    threads = Threads()
    prompts = [np.arange(first, first + 10, dtype=np.int32) for first in range(6)]
    hashes = [hash_blocks(ROOT, prompt, BLOCK) for prompt in prompts]

    def step(turn: int) -> None:
        plan = scheduler.plan(float(turn))
        sampled = np.full(len(plan.seq), turn % 7, np.int32)
        if turn % 5 == 0:
            scheduler.abort_plan(plan)
        else:
            scheduler.advance(plan, sampled)
        if turn == STEPS:
            threads.over.set()

    def remote(turn: int) -> None:
        which = turn % len(prompts)
        seq = scheduler.reserve(prompts[which], hashes[which], ROOT, max_new_tokens=20)
        if seq is None:
            return
        scheduler.start(seq, 1)
        fork = scheduler.fork(seq, 2, max_new_tokens=5)
        scheduler.remove(seq)
        if fork is not None:
            scheduler.remove(fork)

    def local(turn: int) -> None:
        which = turn % len(prompts)
        seq = scheduler.add(prompts[which], hashes[which], ROOT, max_new_tokens=turn % 3)
        scheduler.computed_tokens(seq)
        scheduler.remove(seq)

    def transfer(turn: int) -> None:
        blocks = manager.acquire_prefix(hashes[turn % len(hashes)])
        manager.pin(turn, blocks, 1, float(turn))
        manager.release(blocks)
        manager.renew(turn, float(turn + 1))
        manager.unpin(turn, 0)
        manager.expire(float(turn))
        manager.drain_events()
        manager.drain_freed()

    def check(_: int) -> None:
        manager.check()
        scheduler.check()

    threads.run(step, remote, local, transfer, check)
    assert manager.available_blocks == 96
    assert (scheduler.running, scheduler.waiting, scheduler.reserved) == (0, 0, 0)
