# SPDX-License-Identifier: Apache-2.0
"""Two router cores on the same workers: the first one decides; the second one, started late, says what it would have chosen."""

import dataclasses

from twinpool.control.replay.blocks import Hashes
from twinpool.control.simulate.job import Attempt
from twinpool.control.simulate.policies.ours import CoreRouter
from twinpool.control.simulate.router import Ended, Placement
from twinpool.control.simulate.setup import Setup
from twinpool.control.simulate.worker import Load, Worker


class LateRouter(CoreRouter):
    """The first router. The second one hears what a router that joins hears: the snapshot of the workers' blocks, their load
    reports, their cache events, and only its own requests, which are those that come after it started."""

    def __init__(self, setup: Setup, starts: float) -> None:
        super().__init__(setup)
        self.compared = self.same = self.same_pairs = 0
        self._setup = setup
        self._starts = starts
        self._late: CoreRouter | None = None
        self._known: dict[Worker, int] = {}
        self._events: list[tuple[Worker, str, Hashes]] = []
        self._loads: dict[Worker, Load] = {}
        self._shadows: dict[int, Attempt] = {}

    # --- workers: both hear the same --------------------------------------------------------

    def worker_up(self, now: float, worker: Worker, num_blocks: int) -> None:
        """See Router."""
        super().worker_up(now, worker, num_blocks)
        self._known[worker] = num_blocks

    def cache_event(self, worker: Worker, kind: str, hashes: Hashes) -> None:
        """See Router."""
        super().cache_event(worker, kind, hashes)
        if self._late is not None:
            self._late.cache_event(worker, kind, hashes)
        else:
            self._events.append((worker, kind, hashes))

    def report(self, now: float, worker: Worker, load: Load) -> None:
        """See Router."""
        super().report(now, worker, load)
        self._loads[worker] = load
        if self._late is not None:
            self._late.report(now, worker, load)

    def _start(self, now: float) -> CoreRouter:
        late = CoreRouter(self._setup)
        for worker, num_blocks in self._known.items():
            late.worker_up(now, worker, num_blocks)
        for worker, kind, hashes in self._events:
            late.cache_event(worker, kind, hashes)
        self._events.clear()
        for worker, load in self._loads.items():
            late.report(now, worker, load)
        return late

    # --- requests: the second one is asked when the first one has chosen -------------------

    def plan(self, now: float) -> list[Placement | Ended]:
        """See Router."""
        if self._late is None and now >= self._starts:
            self._late = self._start(now)
        actions = super().plan(now)
        if self._late is not None:
            for action in actions:
                if isinstance(action, Placement):
                    self._compare(now, self._late, action)
        return actions

    def _compare(self, now: float, late: CoreRouter, made: Placement) -> None:
        # One that the decode worker refused was compared before.
        if made.job.request.id in self._shadows:
            return
        job = dataclasses.replace(made.job)
        if late.submit(now, job):
            return
        self.compared += 1
        placed = [action for action in late.plan(now) if isinstance(action, Placement)]
        if not placed:
            # The first router knows of room that the second one does not see yet.
            late.withdraw(now, job)
            return
        (choice,) = placed
        if choice.prefill is not made.prefill:
            # The request runs elsewhere: the second router hears of it by the workers' reports, as of any other router's.
            late.withdraw(now, job, 1)
            return
        self.same += 1
        self.same_pairs += choice.decode is made.decode
        shadow = Attempt(job, 1, choice.prefill, choice.decode, local=choice.local)
        late.reserved(now, shadow)
        self._shadows[job.request.id] = shadow

    def first_token(self, now: float, attempt: Attempt, seconds: float) -> None:
        """See Router."""
        super().first_token(now, attempt, seconds)
        shadow = self._shadows.get(attempt.job.request.id)
        if self._late is not None and shadow is not None:
            shadow.job.cached = attempt.job.cached
            self._late.first_token(now, shadow, seconds)

    def handed_off(self, now: float, attempt: Attempt, blocks: int, seconds: float) -> None:
        """See Router."""
        super().handed_off(now, attempt, blocks, seconds)
        shadow = self._shadows.get(attempt.job.request.id)
        if self._late is not None and shadow is not None:
            self._late.handed_off(now, shadow, blocks, seconds)

    def finished(self, now: float, attempt: Attempt) -> None:
        """See Router."""
        super().finished(now, attempt)
        shadow = self._shadows.get(attempt.job.request.id)
        if self._late is not None and shadow is not None:
            del self._shadows[attempt.job.request.id]
            self._late.finished(now, shadow)
