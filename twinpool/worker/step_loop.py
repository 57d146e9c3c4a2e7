# SPDX-License-Identifier: Apache-2.0
"""The step thread: the one thread that touches scheduler, block manager, offers and the model.

One turn: run what other threads asked for, end what has run out of time, plan a step, run it, tell the
results. With nothing to run the thread sleeps until it is asked or until the next deadline, so leases end
on time with no new work.

With a runner that works ahead, a step of decodes is followed by the next one before its tokens are known: the
device works while the host tells them. All else waits for a step that is not followed; `_at_leisure` says when.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from twinpool._core import BlockManager, StepPlan, StepScheduler
from twinpool.engine.begun import BegunStep
from twinpool.engine.runner import SequenceDraw, StepResult
from twinpool.logs import get_logger
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker.kv_events.tap import CacheTap
from twinpool.worker.load import LoadReporter
from twinpool.worker.meters import Meters
from twinpool.worker.outbox import Outbox
from twinpool.worker.prefix_pins import PrefixPins
from twinpool.worker.role import RoleHandler
from twinpool.worker.step_ahead import FOLLOWED_MAX, AheadRunner, Flight

IDLE_SECONDS_MAX: Final = 1.0
"""Longest sleep: bounds how late a clock jump or a missed wake-up is noticed, and feeds the heartbeat."""

FAILED_TURNS_MAX: Final = 3
"""Turns in a row that may fail outside of a step before the worker gives up instead of spinning."""

FAILED_TURN_SECONDS: Final = 0.1
"""Longest wait after a turn that failed."""

log = get_logger(__name__)
T = TypeVar("T")


class LoopEndedError(Exception):
    """The step loop ended before it ran what it was asked for."""


async def outcome(future: "Future[T]") -> T:
    """The result of ``StepLoop.call`` or ``when_quiet``, for asyncio. Raises LoopEndedError if the loop ended before."""
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise LoopEndedError from None


class Runner(Protocol):
    """What the loop needs of the engine's runner."""

    def swap(self, plan: StepPlan) -> None: ...
    def step(self, plan: StepPlan, draws: list[SequenceDraw]) -> StepResult: ...


class Pool(Protocol):
    """What the loop needs of the KV pool."""

    def poison(self, blocks: NDArray[np.int32]) -> None: ...


class StepLoop:
    """Runs turns on a thread of its own. ``post`` and ``call`` may be used from any thread."""

    def __init__(
        self,
        *,
        scheduler: StepScheduler,
        blocks: BlockManager,
        runner: Runner,
        pool: Pool,
        role: RoleHandler,
        outbox: Outbox,
        load: LoadReporter,
        meters: Meters,
        poison_freed: bool,
        on_fatal: Callable[[str], None],
        pins: PrefixPins | None = None,
        tap: CacheTap | None = None,
        ahead: AheadRunner | None = None,
        enter: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``enter`` is called first on the step thread; ``on_fatal`` is called there, once, with why it gave up. ``tap``
        takes the cache's events; ``ahead``, the same runner, begins steps before the one before them is told."""
        self.role = role
        self.tap = tap
        self.load = load
        self._meters = meters
        self._pins = pins
        self._scheduler = scheduler
        self._blocks = blocks
        self._runner = runner
        self._ahead = ahead
        self._flight: Flight | None = None
        self._pool = pool
        self._outbox = outbox
        self._poison_freed = poison_freed
        self._on_fatal = on_fatal
        self._enter = enter
        self._clock = clock
        # What to run, and what to do instead if the loop ends before.
        self._inbox: deque[tuple[Callable[[], None], Callable[[], object]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._ended = False
        # Who waits for the end of what runs, and whether for readers of cached prefixes, too.
        self._quiet: list[tuple[Future[None], bool]] = []
        self._heartbeat = clock()
        self.progress = 0
        """Steps that ended, and turns that found nothing to run: a number that stands still while there is work at hand."""
        self._thread = threading.Thread(target=self._run, name="twinpool-step", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def seconds_since_turn(self) -> float:
        """Age of the last turn's start; grows beyond a step's length only if the thread is stuck."""
        return self._clock() - self._heartbeat

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Ends the thread after its turn; what was posted before still runs. False if it is still alive after ``timeout``."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def post(self, command: Callable[[], None]) -> None:
        """Runs ``command`` on the step thread, in the order of posting. Dropped once the loop has ended."""
        self._put(command, lambda: None)

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """As ``post``, with the result. Cancelled if the loop ends before it runs."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._put(run, future.cancel)
        return future

    def when_quiet(self, *, readers: bool = True) -> "Future[None]":
        """Done as soon as the role holds nothing; without ``readers``, nothing but cached prefixes that others read. Cancelled
        if the loop ends before."""
        quiet: Future[None] = Future()
        self._put(lambda: self._quiet.append((quiet, readers)), quiet.cancel)
        return quiet

    def replace_role(self, role: RoleHandler) -> None:
        """On the step thread: from now on the worker has this role. What attempts of the former one are left fail with NOT_SERVING,
        which routers place anew; all else it worked with goes on in the new one."""
        self.role.fail_all(pb.FAILURE_REASON_NOT_SERVING, "the worker has changed its role")
        self._outbox.flush()
        self.role = role
        self.load.forget_steps()

    def _put(self, run: Callable[[], None], drop: Callable[[], object]) -> None:
        with self._wake:
            ended = self._ended
            if not ended:
                self._inbox.append((run, drop))
                self._wake.notify()
        if ended:
            drop()

    def _run(self) -> None:
        try:
            self._enter()
            self._turns()
        finally:
            with self._wake:
                self._ended = True
                left, self._inbox = self._inbox, deque()
            for _, drop in left:
                drop()
            for quiet, _ in self._quiet:
                quiet.cancel()

    def _turns(self) -> None:
        failures = 0
        while not self._done():
            try:
                worked = self.turn()
                failures = 0
            except Exception as error:
                failures += 1
                log.exception("turn_failed", failures=failures)
                if failures >= FAILED_TURNS_MAX:
                    self._on_fatal(f"the step loop failed {failures} times in a row: {type(error).__name__}")
                    return
                self._recover(f"{type(error).__name__} in the step loop")
                self._sleep(FAILED_TURN_SECONDS)
                continue
            if not worked:
                self._sleep(IDLE_SECONDS_MAX)

    def _done(self) -> bool:
        with self._wake:
            self._ended = self._stopping and not self._inbox and self._flight is None
            return self._ended

    def turn(self) -> bool:
        """One turn. True if a step ran, so that the next turn should follow at once."""
        self._heartbeat = now = self._clock()
        if self._flight is None:
            self._drain()
            now = self._clock()
            self.role.on_clock(now)
            if self._pins is not None:
                self._pins.tick(now)
            self._poison()
            self._tell(now)
        worked = self._step(now)
        self._poison()
        if self.tap is not None:
            self.tap.drain()
        self._outbox.flush()
        if self._quiet and self._flight is None:
            self._tell_quiet()
        return worked

    def _tell(self, now: float) -> None:
        """What routers and scrapers learn. What commands and steps caused must not wait for a step that may take long."""
        self.load.tick(now)
        self._meters.tick(now, self.role.role)
        self._outbox.flush()

    def _tell_quiet(self) -> None:
        waiting, self._quiet = self._quiet, []
        for quiet, readers in waiting:
            if self.role.requests if readers else self.role.attempts:
                if not quiet.cancelled():
                    self._quiet.append((quiet, readers))
            elif quiet.set_running_or_notify_cancel():
                quiet.set_result(None)

    def _drain(self) -> None:
        with self._wake:
            batch, self._inbox = self._inbox, deque()
        for run, _ in batch:
            try:
                run()
            except Exception:
                # A role answers for its own commands; what still arrives here must not end the others.
                log.exception("command_failed")
            # Before the next command: it may start a read into blocks that this one freed.
            self._poison()

    def _step(self, now: float) -> bool:
        flight, self._flight = self._flight, None
        began = self._clock()
        plan = self._scheduler.plan(now) if flight is None else flight.plan
        if plan.empty:
            return self._nothing_to_run(plan)
        following: Flight | None = None
        try:
            flight = flight or self._begin(plan, began)
            following = self._follow(flight, now)
            if following is not None:
                self._tell(now)
            result = flight.step.finish()
        except Exception as error:
            log.exception("step_failed", sequences=len(plan.seq))
            self._meters.step_failed()
            # Blocks must not be given back while anything still writes to them.
            self._settle()
            self._scheduler.abort_plan(plan)
            self.role.on_step_failed(plan, f"{type(error).__name__} in a step")
            self.progress += 1
            return True
        self._scheduler.advance(plan, result.tokens)
        ended = self._clock()
        self._flight = following
        if following is not None:
            following.began = ended
        self.load.step_took(ended - flight.began)
        self._meters.step(plan, flight.plan_seconds, ended - flight.began, ahead=flight.row > 0)
        self.role.on_step(plan, result)
        self.progress += 1
        return True

    def _nothing_to_run(self, plan: StepPlan) -> bool:
        self._poison()
        self._scheduler.abort_plan(plan)
        if not self._scheduler.running:
            self.progress += 1
        return self._pins is not None and self._pins.make_way()

    def _begin(self, plan: StepPlan, began: float) -> Flight:
        planned = self._clock() - began
        # Blocks that the plan has taken from sequences keep their content until here.
        self._runner.swap(plan)
        # The step writes into blocks that the plan has given out: what it freed is poisoned before.
        self._poison()
        draws = self.role.draws(plan)
        # Peers need not wait for the step to hear what it starts from.
        self._outbox.flush()
        if self._ahead is not None:
            return Flight(plan, draws, self._ahead.begin(plan, draws), began, planned)
        result = self._runner.step(plan, draws)
        return Flight(plan, draws, BegunStep(lambda: result), began, planned)

    def _follow(self, flight: Flight, now: float) -> Flight | None:
        """Begins the step after ``flight``, unless something else is to be done first."""
        if (
            self._ahead is None
            or not self._ahead.may_follow(flight.step)
            or not self._at_leisure(flight, now)
        ):
            return None
        began = self._clock()
        plan = self._scheduler.plan_ahead(flight.plan)
        if plan.empty:
            return None
        planned = self._clock() - began
        self._poison()
        draws = [flight.draws[row] for row in plan.follows.tolist()]
        return Flight(
            plan, draws, self._ahead.follow(flight.step, plan, draws), began, planned, flight.row + 1
        )

    def _at_leisure(self, flight: Flight, now: float) -> bool:
        """Whether nobody waits for what only a turn without a step that was begun ahead can do."""
        if flight.row >= FOLLOWED_MAX or self._quiet:
            return False
        with self._wake:
            if self._inbox or self._stopping:
                return False
        wakes = (self.role.next_wake(now), self._pins.next_wake() if self._pins is not None else None)
        return not any(wake is not None and wake <= now for wake in wakes)

    def _settle(self) -> None:
        if self._ahead is not None:
            try:
                self._ahead.settle()
            except Exception:
                log.exception("device_failed")

    def _drop_flight(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            self._settle()
            self._scheduler.abort_plan(flight.plan)

    def _recover(self, detail: str) -> None:
        try:
            self._drop_flight()
            self.role.fail_all(pb.FAILURE_REASON_INTERNAL, detail)
            self._outbox.flush()
        except Exception:
            log.exception("recovery_failed")

    def _poison(self) -> None:
        """Overwrites what was freed. The block manager has raised its generation by then, so a reader whose lease
        has ended finds out."""
        if self._poison_freed:
            freed = self._blocks.drain_freed()
            if len(freed):
                self._pool.poison(freed)

    def _sleep(self, seconds_max: float) -> None:
        now = self._clock()
        pins = self._pins.next_wake() if self._pins is not None else None
        wakes = (self.role.next_wake(now), self.load.next_wake(), pins, now + seconds_max)
        until = min(wake for wake in wakes if wake is not None)
        with self._wake:
            if self._inbox or self._stopping:
                return
            self._wake.wait(max(0.0, until - now))
