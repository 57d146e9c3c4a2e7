# SPDX-License-Identifier: Apache-2.0
"""The rebalancer of a control process: reads each pool's load every interval, asks the policy, and has its decisions carried out.

What flips have done comes from the operations' own records, those of operators included, so that a control process that starts
anew, or another one that leads from now on, keeps the pace.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from twinpool import metrics
from twinpool.config import RebalanceSection
from twinpool.control.rebalance.decision import Decision
from twinpool.control.rebalance.history import KEPT, History, Move
from twinpool.control.rebalance.plan import ROLE_NAMES
from twinpool.control.rebalance.policy import Policy
from twinpool.control.rebalance.ports import Mover, Recorder, Source, Specs
from twinpool.control.rebalance.telemetry import Telemetry
from twinpool.control.rebalance.window import Window
from twinpool.errors import TwinpoolError
from twinpool.logs import get_logger
from twinpool.v1 import control_pb2 as pb

QUIET: Final = frozenset({"Unknown", "Balanced", "Confirming", "Cooldown", "UnderWay", "Starting"})
"""Reasons to do nothing that are no event: they pass by themselves."""

log = get_logger(__name__)


@dataclass(slots=True)
class _Watched:
    """One pool."""

    window: Window
    history: History
    telemetry: Telemetry | None = None
    decision: Decision | None = None
    told: tuple[str, str] = ("", "")
    """Reason and worker of the last event, so that one is not told again and again."""


class RebalanceLoop:
    """One a control process, while it leads. On its event loop."""

    def __init__(
        self,
        settings: RebalanceSection,
        specs: Specs,
        source: Source,
        mover: Mover,
        events: Recorder,
        drain_seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``settings``: read at each use.
        ``drain_seconds``: how long a worker that flips waits for its requests at most. ``clock``: seconds since the epoch, as in
        the operations' records."""
        self.settings = settings
        self.policy = Policy(settings)
        self._specs, self._source, self._mover, self._events = specs, source, mover, events
        self._drain_seconds = drain_seconds
        self._clock = clock
        self._pools: dict[str, _Watched] = {}
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    def start(self) -> None:
        """Begins to watch."""
        self._task = asyncio.create_task(self._run(), name="rebalance")

    async def stop(self) -> None:
        """Leaves what runs as it is."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def wake(self) -> None:
        """Its settings have changed: they count from now on, not after the interval."""
        self._wake.set()

    def telemetry(self, pool: str) -> Telemetry | None:
        """A pool as it was at the last decision; None if it is not known yet."""
        known = self._pools.get(pool)
        return None if known is None else known.telemetry

    def decision(self, pool: str) -> Decision | None:
        """The last decision about a pool."""
        known = self._pools.get(pool)
        return None if known is None else known.decision

    def history(self, pool: str) -> History:
        """What has been done in a pool."""
        known = self._pools.get(pool)
        return History() if known is None else known.history

    async def _run(self) -> None:
        while True:
            for spec in self._specs.all():
                try:
                    await self.tick(spec)
                except Exception as error:
                    # One pool's trouble must not end the loop for the others.
                    log.exception("rebalance_failed", pool=spec.pool, type=type(error).__name__)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self.settings.interval_seconds)
            self._wake.clear()

    async def tick(self, spec: pb.PoolSpec) -> Decision | None:
        """Decides once about a pool. None: its load could not be read."""
        now = self._clock()
        watched = self._pools.get(spec.pool)
        if watched is None:
            window = Window(spec.pool, self.settings, self._drain_seconds)
            watched = self._pools[spec.pool] = _Watched(window, History())
        watched.history = self._synced(spec.pool, watched.history, now)
        sample = await self._source.sample(spec.pool, now)
        if sample is None:
            return None
        watched.telemetry = watched.window.add(sample)
        decision = self.policy.decide(watched.telemetry, spec, watched.history, now)
        watched.history = watched.history.asked(decision.wish, now)
        watched.decision = decision
        metrics.CONTROL_REBALANCE_DECISIONS.labels(spec.pool, decision.kind, decision.reason).inc()
        if spec.auto:
            await self._act(spec.pool, watched, decision, now)
        return decision

    async def _act(self, pool: str, watched: _Watched, decision: Decision, now: float) -> None:
        if decision.kind == "nothing":
            if decision.reason not in QUIET:
                self._tell(watched, pool, decision, "RebalanceHeld")
            elif decision.reason == "Balanced":
                watched.told = ("", "")
            return
        if self._operated(pool):
            # What an operator has asked for comes first, and is looked at when it is done.
            return
        if self.settings.dry_run:
            self._tell(watched, pool, decision, "RebalanceDryRun")
            return
        try:
            operation = await self._carry_out(pool, decision)
        except TwinpoolError as error:
            # The worker is left alone for a while, and another one is tried next.
            if decision.worker and decision.to is not None:
                move = Move(decision.worker, decision.to, now, now, succeeded=False)
                watched.history = replace(watched.history, moves=(*watched.history.moves, move))
            message = f"{decision.message}; refused: {error.reason}: {error.message}"
            self._events.record("RebalanceRefused", message, pool=pool, subject=decision.worker, warning=True)
            return
        begun = move_of(self._mover.get(operation))
        if begun is not None:
            # As its record has it, so that it is found there again.
            watched.history = replace(watched.history, moves=(*watched.history.moves, begun))
        else:
            watched.history = watched.history.scaled(now)
        watched.told = ("", "")
        self._events.record(
            f"Rebalance{decision.reason}",
            decision.message,
            pool=pool,
            subject=decision.worker,
            operation=operation,
        )

    async def _carry_out(self, pool: str, decision: Decision) -> str:
        if decision.to is not None:
            return await self._mover.flip(decision.worker, decision.to, decision.message)
        assert decision.target is not None
        return await self._mover.scale(
            pool, decision.target.prefill, decision.target.decode, decision.message
        )

    def _tell(self, watched: _Watched, pool: str, decision: Decision, event: str) -> None:
        if watched.told == (decision.reason, decision.worker):
            return
        watched.told = (decision.reason, decision.worker)
        self._events.record(
            event, f"{decision.reason}: {decision.message}", pool=pool, subject=decision.worker
        )

    def _synced(self, pool: str, history: History, now: float) -> History:
        """The history with what the operations' records say."""
        moves = {(move.worker, move.began): move for move in history.moves}
        for operation in self._mover.all():
            if operation.pool != pool or operation.kind != pb.OPERATION_KIND_FLIP:
                continue
            found = move_of(operation)
            if found is None:
                continue
            moves[found.worker, found.began] = found
        ordered = sorted(moves.values(), key=lambda move: (move.began, move.worker))
        known = {move.worker for move in ordered if move.ended is None} & self._flipping()
        # One whose operation is not known any more has ended: only ended ones are forgotten.
        closed = [
            move if move.ended is not None or move.worker in known else replace(move, ended=now)
            for move in ordered[-KEPT:]
        ]
        return replace(history, moves=tuple(closed), scaled_at=self._scaled_at(pool, history))

    def _scaled_at(self, pool: str, history: History) -> float:
        scales = [op for op in self._mover.all() if op.pool == pool and op.kind == pb.OPERATION_KIND_SCALE]
        return max([history.scaled_at, *(op.created_at.ToNanoseconds() / 1e9 for op in scales)])

    def _operated(self, pool: str) -> bool:
        return any(
            op.pool == pool and op.state == pb.OPERATION_STATE_RUNNING and not op.HasField("worker")
            for op in self._mover.all()
        )

    def _flipping(self) -> set[str]:
        return {
            operation.worker.name
            for operation in self._mover.all()
            if operation.kind == pb.OPERATION_KIND_FLIP and operation.state == pb.OPERATION_STATE_RUNNING
        }


def move_of(operation: pb.Operation) -> Move | None:
    """A flip's record as the policy sees it; None for one without a role."""
    to = ROLE_NAMES.get(operation.target_role)
    if to is None:
        return None
    began = operation.created_at.ToNanoseconds() / 1e9
    if operation.state == pb.OPERATION_STATE_RUNNING:
        return Move(operation.worker.name, to, began)
    ended = max(began, operation.ended_at.ToNanoseconds() / 1e9)
    return Move(operation.worker.name, to, began, ended, operation.state == pb.OPERATION_STATE_SUCCEEDED)
