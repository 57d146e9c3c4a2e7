# SPDX-License-Identifier: Apache-2.0
"""The step thread over fakes: order, sleep and wake, failures, hand-over in batches, end."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np
import pytest

from tests.support.watching import wait_until
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker import step_loop as module
from twinpool.worker.load import LoadReporter
from twinpool.worker.outbox import Outbox
from twinpool.worker.step_loop import FAILED_TURNS_MAX, StepLoop


class FakePlan:
    def __init__(self, count: int) -> None:
        self.seq = np.arange(count)
        self.empty = count == 0
        self.preempted = np.zeros(0)


class FakeCore:
    """Scheduler, block manager, runner and pool in one; ``plans`` are the sizes of the next plans."""

    def __init__(self) -> None:
        self.plans: list[int] = []
        self.calls: list[str] = []
        self.freed: list[int] = []
        self.poisoned: list[int] = []
        self.plan_error: Exception | None = None
        self.step_error: Exception | None = None
        self.running = self.waiting = self.reserved = self.waiting_tokens = 0
        self.available_blocks = self.num_blocks = 8
        self.cached_blocks = 0
        self.prefix_pinned_blocks = 0

    def plan(self, now: float) -> FakePlan:
        if self.plan_error is not None:
            raise self.plan_error
        return FakePlan(self.plans.pop(0) if self.plans else 0)

    def advance(self, plan: FakePlan, tokens: object) -> None:
        self.calls.append("advance")

    def abort_plan(self, plan: FakePlan) -> None:
        if not plan.empty:
            self.calls.append("abort")

    def swap(self, plan: FakePlan) -> None:
        self.swapped_before_poison = self.freed[:]

    def step(self, plan: FakePlan, draws: object) -> Any:
        self.calls.append("step")
        if self.step_error is not None:
            raise self.step_error
        return type("Result", (), {"tokens": np.zeros(len(plan.seq), np.int32)})

    def drain_freed(self) -> Any:
        freed, self.freed = self.freed, []
        return np.array(freed, np.int32)

    def poison(self, blocks: Any) -> None:
        self.poisoned += blocks.tolist()


class FakeRole:
    def __init__(self) -> None:
        self.role = pb.ROLE_DECODE
        self.clocks: list[float] = []
        self.failed: list[str] = []
        self.steps = 0
        self.requests = 0
        self.wake: float | None = None

    def on_clock(self, now: float) -> None:
        self.clocks.append(now)

    def next_wake(self, now: float) -> float | None:
        return self.wake

    def draws(self, plan: FakePlan) -> list[object]:
        return [None] * len(plan.seq)

    def on_step(self, plan: FakePlan, result: object) -> None:
        self.steps += 1

    def on_step_failed(self, plan: FakePlan, detail: str) -> None:
        self.failed.append(detail)

    def fail_all(self, reason: int, detail: str) -> None:
        self.failed.append(detail)


class NoMeters:
    def tick(self, now: float, role: object) -> None:
        pass

    def step(self, plan: object, planned: float, seconds: float, *, ahead: bool) -> None:
        pass

    def step_failed(self) -> None:
        pass


class Receiver:
    def __init__(self) -> None:
        self.got: list[tuple[int, pb.SessionResponse]] = []

    def to_session(self, session: int, message: pb.SessionResponse) -> None:
        self.got.append((session, message))


class World:
    def __init__(self, poison: bool = False) -> None:
        self.core, self.role, self.receiver = FakeCore(), FakeRole(), Receiver()
        self.handovers = 0
        self.fatal: Future[str] = Future()
        self.outbox = Outbox(self.receiver, self._post)  # type: ignore[arg-type]
        core: Any = self.core
        self.load = LoadReporter(core, core, self.outbox.session, 0.05)
        self.loop = StepLoop(
            scheduler=core,
            blocks=core,
            runner=core,
            pool=core,
            role=self.role,  # type: ignore[arg-type]
            outbox=self.outbox,
            load=self.load,
            meters=NoMeters(),  # type: ignore[arg-type]
            poison_freed=poison,
            on_fatal=self.fatal.set_result,
        )

    def _post(self, deliver: Callable[[], None]) -> None:
        self.handovers += 1
        deliver()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    made.loop.start()
    yield made
    assert made.loop.stop(60)


def test_calls_run_in_order_on_the_thread(world: World) -> None:
    seen: list[int] = []
    for number in range(50):
        world.loop.post(lambda n=number: seen.append(n))  # type: ignore[misc]
    assert world.loop.call(threading.current_thread).result(60).name == "twinpool-step"
    assert seen == list(range(50))


def test_an_exception_goes_to_its_caller_and_ends_nothing(world: World) -> None:
    world.loop.post(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        world.loop.call(lambda: 1 / 0).result(60)
    assert world.loop.call(lambda: 7).result(60) == 7


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A loop that sleeps for good when there is nothing to do: what happens was woken for."""
    monkeypatch.setattr(module, "IDLE_SECONDS_MAX", 3600.0)
    made = World()
    made.loop.start()
    yield made
    assert made.loop.stop(60)


def test_an_idle_loop_wakes_for_a_call(sleeper: World) -> None:
    for _ in range(50):
        sleeper.loop.call(lambda: None).result(60)


def test_an_idle_loop_wakes_for_the_next_deadline(sleeper: World) -> None:
    world, wanted = sleeper, time.monotonic() + 0.15

    def arm() -> None:
        world.role.wake = wanted

    world.loop.call(arm).result(60)
    wait_until(lambda: any(now >= wanted for now in world.role.clocks))


def test_steps_follow_one_another_and_cross_once_each(world: World) -> None:
    def answer(plan: FakePlan, result: object) -> None:
        for session in range(3):
            world.outbox.session(session, pb.SessionResponse())

    world.role.on_step = answer  # type: ignore[method-assign]
    world.loop.call(lambda: world.core.plans.extend([1, 1, 1, 1])).result(60)
    wait_until(lambda: len(world.receiver.got) >= 12)
    assert world.handovers == 4
    assert world.core.calls == ["step", "advance"] * 4


def test_a_step_that_raises_is_aborted_and_the_loop_goes_on(world: World) -> None:
    world.core.step_error = RuntimeError("text that must not leave")
    world.loop.call(lambda: world.core.plans.append(2)).result(60)
    world.loop.call(lambda: None).result(60)
    assert world.core.calls[:2] == ["step", "abort"]
    assert world.role.failed == ["RuntimeError in a step"]
    assert world.loop.alive


def test_a_core_that_keeps_failing_ends_the_loop_instead_of_spinning() -> None:
    world = World()
    world.core.plan_error = RuntimeError("broken")
    world.loop.start()
    assert "RuntimeError" in world.fatal.result(10)
    assert len(world.role.failed) == FAILED_TURNS_MAX - 1
    assert world.loop.stop(60)
    with pytest.raises(CancelledError):
        world.loop.call(lambda: None).result(1)


def test_after_the_stop_calls_are_cancelled_and_posts_dropped() -> None:
    world = World()
    world.loop.start()
    last = world.loop.call(lambda: "ran")
    assert world.loop.stop(60)
    assert last.result(1) == "ran", "what was asked before the stop still runs"
    assert world.loop.call(lambda: None).cancelled()
    world.loop.post(lambda: pytest.fail("it must not run"))
    assert world.loop.when_quiet().cancelled()


def test_stop_without_start() -> None:
    assert World().loop.stop(1)


def test_quiet_is_when_the_role_holds_nothing(world: World) -> None:
    world.role.requests = 1
    quiet = world.loop.when_quiet()
    world.loop.call(lambda: None).result(60)
    assert not quiet.done()

    def end() -> None:
        world.role.requests = 0

    world.loop.post(end)
    assert quiet.result(60) is None


def test_freed_blocks_are_poisoned_before_the_next_command_sees_them() -> None:
    world = World(poison=True)
    seen: list[list[int]] = []
    world.loop.post(lambda: world.core.freed.extend([3, 4]))
    world.loop.post(lambda: seen.append(list(world.core.poisoned)))
    world.loop.turn()
    assert seen == [[3, 4]]


def test_reports_follow_changes_at_a_limited_rate() -> None:
    sent: list[tuple[int, pb.LoadReport]] = []
    core: Any = FakeCore()
    load = LoadReporter(core, core, lambda session, m: sent.append((session, m.load)), 0.2)
    load.tick(0.0)
    assert sent == []
    load.open(1)
    load.tick(1.0)
    assert [session for session, _ in sent] == [1]
    core.running = 3
    load.tick(1.1)
    assert len(sent) == 1, "too soon after the last"
    assert load.next_wake() == pytest.approx(1.2)
    load.step_took(0.004)
    load.tick(1.2)
    assert (sent[-1][1].running_requests, sent[-1][1].step_time.nanos) == (3, 4_000_000)
    assert load.next_wake() is None
    load.tick(9.0)
    assert len(sent) == 2, "nothing has changed"
    load.close(1)
    core.running = 0
    load.tick(10.0)
    assert len(sent) == 2
