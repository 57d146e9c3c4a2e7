# SPDX-License-Identifier: Apache-2.0
"""Tells what happens to the registrations of a pool's workers: who is ready, who left, who was lost."""

from typing import Protocol

from twinpool.control.events import EventLog
from twinpool.v1 import control_pb2 as pb


class Runs(Protocol):
    """Whoever runs the workers' processes."""

    def manages(self, name: str) -> bool:
        """Whether a worker's process is run by it."""
        ...


class Members:
    """Compares one look with the one before. The first look tells nothing: what it finds is no news."""

    def __init__(self, pool: str, events: EventLog) -> None:
        self._pool = pool
        self._events = events
        self._known: dict[str, tuple[int, int]] | None = None
        self.seen: set[str] = set()
        """Workers that were registered once and whose process is run still."""

    def note(self, records: dict[str, pb.WorkerRecord], running: list[pb.Operation], runs: Runs) -> None:
        """Told of each look."""
        leaving = {op.worker.name: op.id for op in running if op.HasField("worker")}
        now: dict[str, tuple[int, int]] = {
            name: (record.worker.incarnation, record.state) for name, record in records.items()
        }
        self.seen = {name for name in self.seen if runs.manages(name)} | {
            name for name, record in records.items() if record.state == pb.WORKER_STATE_READY
        }
        before, self._known = self._known, now
        if before is None:
            return
        for name, (incarnation, _) in before.items():
            if name not in now or now[name][0] != incarnation:
                self._gone(name, incarnation, leaving.get(name, ""), told=before[name][1])
        for name, (incarnation, state) in now.items():
            if before.get(name) != (incarnation, state):
                self._changed(name, incarnation, state, leaving.get(name, ""))

    def _gone(self, name: str, incarnation: int, operation: str, told: int) -> None:
        orderly = bool(operation) or told == pb.WORKER_STATE_DRAINING
        reason, what = ("WorkerLeft", "has left") if orderly else ("WorkerLost", "is gone")
        self._events.record(
            reason,
            f"{name}@{incarnation:016x} {what}",
            pool=self._pool,
            subject=name,
            operation=operation,
            warning=not orderly,
        )

    def _changed(self, name: str, incarnation: int, state: int, operation: str) -> None:
        if state == pb.WORKER_STATE_READY:
            reason, what = "WorkerReady", "takes work"
        elif state == pb.WORKER_STATE_UNREADY:
            reason, what = "WorkerUnready", "is not fit for work"
        else:
            return
        self._events.record(
            reason,
            f"{name}@{incarnation:016x} {what}",
            pool=self._pool,
            subject=name,
            operation=operation,
            warning=reason == "WorkerUnready",
        )
