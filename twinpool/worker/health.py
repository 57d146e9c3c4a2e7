# SPDX-License-Identifier: Apache-2.0
"""Health of a worker that means something.

*Live*: its loops tick: the event loop, the step loop (a step ends, or there is nothing to run) and the transfer thread.
*Ready*: it is live, its lease lives, its transfer path works, and it neither drains nor changes its role.

What follows from each:

- A loop stands still for ``worker.hang_seconds``: the worker ends its sessions and takes no new one, so that routers place
  what ran here elsewhere, although gRPC would answer for ever. It takes sessions again once the loop goes on.
- It stands still for ``worker.give_up_seconds``: the worker ends, for whoever started it to start it anew.
- The transfer path is broken: new work is refused and the record says so; what runs goes on. If that lasts for
  ``worker.give_up_seconds`` the worker ends, too: an agent cannot make its link to itself anew.
- The lease is gone: only the answer to health checks of the process says so. Losing etcd stops nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from twinpool import metrics
from twinpool.config import WorkerSection
from twinpool.logs import get_logger
from twinpool.membership import Registration
from twinpool.rpc import LIVE, Server
from twinpool.transfer.base import TransferError
from twinpool.v1.control_pb2 import WorkerState
from twinpool.worker.serving import Serving
from twinpool.worker.watchdog import EventLoopBeat, Watchdog

PROBE_SECONDS: Final = 1.0
"""Time between two probes of the transfer path."""

FAILED_PROBES: Final = 2
"""Probes in a row that must fail: a lone one may have met a busy moment."""

EVENT_LOOP: Final = "event_loop"
STEP_LOOP: Final = "step_loop"
TRANSFER_THREAD: Final = "transfer_thread"
TRANSFER: Final = "transfer"
LEASE: Final = "lease"
CAUSES: Final = (EVENT_LOOP, STEP_LOOP, TRANSFER_THREAD, TRANSFER, LEASE)
"""Why a worker is not ready."""

EXIT_HUNG: Final = 70
"""Exit status of a process whose event loop stood still."""

log = get_logger(__name__)


class TransferProbe:
    """Whether reads through the agent work, by one of this worker's own memory now and then. On the event loop alone."""

    def __init__(self, probe: Callable[[Callable[[TransferError | None], None]], None]) -> None:
        self._probe = probe
        self._loop = asyncio.get_running_loop()
        self._asked = False
        self._due = 0.0
        self._failures = 0
        self.detail = ""

    @property
    def broken(self) -> bool:
        """Whether the path does not work; ``detail`` then says what the last probe met."""
        return self._failures >= FAILED_PROBES

    def tick(self) -> None:
        """Sends the next probe if it is time and the last one has been answered."""
        now = self._loop.time()
        if not self._asked and now >= self._due:
            self._asked, self._due = True, now + PROBE_SECONDS
            self._probe(self._answered)

    def _answered(self, error: TransferError | None) -> None:
        """On the step thread."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed: the worker has ended
            self._loop.call_soon_threadsafe(self._tell, error)

    def _tell(self, error: TransferError | None) -> None:
        self._asked = False
        self._failures = 0 if error is None else self._failures + 1
        self.detail = "" if error is None else str(error)


class Health:
    """Started once the worker serves; stopped before it ends. On the event loop, with the watchdog's thread beside it."""

    def __init__(
        self,
        config: WorkerSection,
        server: Server,
        serving: Serving,
        registration: Registration,
        on_failed: Callable[[str], None],
        end_process: Callable[[int], object] | None = None,
    ) -> None:
        """``on_failed``: told, on the event loop, why the worker cannot go on. ``end_process``: ends the process with a status,
        from any thread; None: the process is not this worker's to end."""
        self._server = server
        self._serving = serving
        self._registration = registration
        self._on_failed = on_failed
        self._end_process = end_process
        self._loop = asyncio.get_running_loop()
        self._probe = TransferProbe(serving.probe_transfer)
        self._watchdog = Watchdog(
            {
                EVENT_LOOP: EventLoopBeat(self._loop),
                STEP_LOOP: lambda: serving.step_progress,
                TRANSFER_THREAD: lambda: serving.transfer_ticks,
            },
            hang_seconds=config.hang_seconds,
            give_up_seconds=config.give_up_seconds,
            on_given_up=self._give_up,
        )
        self._give_up_seconds = config.give_up_seconds
        self._broken_seconds = 0.0
        self._task: asyncio.Task[None] | None = None
        self._shown: tuple[bool, bool, bool] | None = None
        self._draining = self._flipping = False
        self.causes: tuple[str, ...] = ()
        """Why the worker is not ready, of ``CAUSES``."""

    @property
    def live(self) -> bool:
        """Whether all loops tick."""
        return not self._watchdog.still

    @property
    def ready(self) -> bool:
        """Whether others should count on it."""
        return not self.causes and not self._draining and not self._flipping

    @property
    def draining(self) -> bool:
        """Whether the worker leaves."""
        return self._draining

    @property
    def unfit(self) -> tuple[str, ...]:
        """Why it cannot do what it is asked for: without a lease it can."""
        return tuple(cause for cause in self.causes if cause != LEASE)

    @property
    def _serves(self) -> bool:
        return not self.unfit

    async def start(self) -> None:
        """Says how the worker is, and begins to watch."""
        self._judge()
        await self._show()
        self._watchdog.start()
        self._task = self._loop.create_task(self._tend(), name="health")

    def drain(self) -> None:
        """The worker leaves: it is not ready from now on, but still watched."""
        self._draining = True

    def begin_flip(self) -> None:
        """The worker changes its role: it is not ready until that has ended, and its record is not written from here."""
        self._flipping = True

    def end_flip(self) -> WorkerState.ValueType:
        """It has a role again; the state that its record is to have."""
        self._flipping = False
        return WorkerState.WORKER_STATE_READY if self._serves else WorkerState.WORKER_STATE_UNREADY

    async def stop(self) -> None:
        """Ends the watch. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        await asyncio.to_thread(self._watchdog.stop)

    async def _tend(self) -> None:
        while True:
            if not self._serving.transfer_alive:
                self._on_failed("the transfer thread has ended")
                return
            self._probe.tick()
            self._judge()
            await self._show()
            # By turns of this loop: while the process stands still as a whole, nothing has broken.
            self._broken_seconds += self._watchdog.period_seconds
            if not self._probe.broken:
                self._broken_seconds = 0.0
            if 0 < self._give_up_seconds <= self._broken_seconds:
                self._on_failed(f"its transfer path stays broken: {self._probe.detail}")
                return
            await asyncio.sleep(self._watchdog.period_seconds)

    async def _show(self) -> None:
        live, ready = self.live, self.ready
        welcome = self._serves and not self._draining and not self._flipping
        if self._shown == (live, ready, welcome):
            return
        self._shown = (live, ready, welcome)
        await self._server.set_serving(live, LIVE)
        await self._server.set_serving(ready, "")
        for service in self._server.services:
            await self._server.set_serving(welcome, service)

    def _judge(self) -> None:
        still = self._watchdog.still
        broken = self._probe.broken
        found = (*sorted(still), *([TRANSFER] if broken else []))
        causes = found if self._registration.registered else (*found, LEASE)
        for cause in CAUSES:
            metrics.WORKER_UNREADY.labels(cause).set(cause in causes)
        if causes == self.causes:
            return
        serves, served = not found, self._serves
        log.warning("readiness_changed", causes=list(causes), detail=self._probe.detail)
        self.causes = causes
        self._serving.stall(f"stands still: {', '.join(sorted(still))}" if still else "")
        self._serving.refuse(f"its transfer path is broken: {self._probe.detail}" if broken else "")
        if serves != served and not self._draining and not self._flipping:
            state = WorkerState.WORKER_STATE_READY if serves else WorkerState.WORKER_STATE_UNREADY
            self._registration.update_state(state)

    def _give_up(self, name: str) -> None:
        """On the watchdog's thread."""
        if name == EVENT_LOOP:
            # Nothing else of the process can be ended in order.
            log.error("event_loop_given_up", exit_status=EXIT_HUNG)
            if self._end_process is not None:
                self._end_process(EXIT_HUNG)
            return
        self._loop.call_soon_threadsafe(self._on_failed, f"the {name} stands still")
