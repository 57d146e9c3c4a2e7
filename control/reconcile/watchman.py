# SPDX-License-Identifier: Apache-2.0
"""Looks after the actors of a pool: which have no place and why, which ended by themselves, which to start again and when."""

import time
from collections.abc import Collection, Mapping
from typing import Final

from twinpool.config.pools import PoolsSection
from twinpool.control.actors import Look
from twinpool.control.events import EventLog
from twinpool.control.pools import RayPools
from twinpool.control.reconcile.crashes import LOOP_CRASHES, WINDOW_SECONDS, CrashBook
from twinpool.control.reconcile.observe import Phases
from twinpool.control.reconcile.plan import ROLES, Replica, Stage
from twinpool.errors import TwinpoolError
from twinpool.logs import get_logger
from twinpool.v1 import control_pb2 as pb

LOOK_SECONDS: Final = 1.0
"""How often Ray is asked while a worker is not ready."""

REST_SECONDS: Final = 5.0
"""How often it is asked while all are."""

PLACE_SECONDS: Final = 2.0
"""Ray may take so long to place a worker before that is worth a word."""

BLIND_SECONDS: Final = 10.0
"""So long Ray's tables may be silent before that is worth a word."""

SILENT_SECONDS: Final = 30.0
"""So long a worker that runs may be without a registration until it is asked whether it lives."""

log = get_logger(__name__)


class Watchman:
    """One a pool. On the event loop."""

    def __init__(
        self, pool: str, pools: RayPools, crashes: CrashBook, events: EventLog, config: PoolsSection
    ) -> None:
        self._pool, self._pools, self._crashes, self._events = pool, pools, crashes, events
        self._config = config
        self._looked_at = float("-inf")
        self._looks: dict[str, Look] = {}
        self._silent: dict[str, float] = {}
        # Why those that wait for a place have none, and since when that is known.
        self._pending: dict[str, tuple[str, float]] = {}
        self._suspected: dict[str, float] = {}
        self._failures: dict[str, TwinpoolError] = {}
        # Since when Ray's tables cannot be read, and whether that was told.
        self._blind: tuple[float, bool] | None = None

    async def look(
        self, records: Mapping[str, pb.WorkerRecord], busy: Collection[str], now: float
    ) -> dict[str, Look]:
        """What Ray says of the workers; ends those that are to be started again later. Those of ``busy`` are left alone."""
        names = self._pools.names
        ready = all(name in records and records[name].state == pb.WORKER_STATE_READY for name in names)
        for name in names:
            if name not in busy and (error := self._pools.failure(name)) is not None:
                self._failures[name] = error
                await self._failed(name, f"{error.reason}: {error.message}", now)
        if now - self._looked_at < (REST_SECONDS if ready else LOOK_SECONDS):
            return self._looks
        self._looked_at = now
        self._looks = await self._pools.look(self._pools.names)
        self._tell_blind(now)
        for name, look in self._looks.items():
            role = self._pools.role_of(name)
            new = self._crashes.restarted(name, role, look.restarts)
            if name in busy:
                continue
            for _ in range(new):
                self._crashes.note(name, role, self._words(name, look.cause), now)
            if look.state == "DEAD":
                await self._failed(name, look.cause or "its process has ended", now)
            elif new and self._crashes.looping(name, now):
                await self._back_off(name, role, now)
            elif new:
                self._say("WorkerCrashed", name, f"{name}: {self._crashes.cause(name)}")
        await self._wake_silent(records, busy, now)
        return self._looks

    async def _failed(self, name: str, cause: str, now: float) -> None:
        """A worker could not start, or is dead for Ray."""
        role = self._pools.role_of(name)
        started = name in self._looks and self._looks[name].state == "DEAD"
        self._crashes.note(name, role, self._words(name, cause), now)
        if self._crashes.looping(name, now):
            await self._back_off(name, role, now)
            return
        wait = await self._end(name, role, now)
        reason = "WorkerCrashed" if started else "WorkerStartFailed"
        self._say(reason, name, f"{name}, started again in {wait:g} s: {self._crashes.cause(name)}")

    async def _back_off(self, name: str, role: str, now: float) -> None:
        count = self._crashes.count(name, now)
        wait = await self._end(name, role, now)
        text = f"{name} has ended {count} times in {WINDOW_SECONDS:g} s, started again in {wait:g} s"
        self._say("WorkerCrashLooping", name, f"{text}: {self._crashes.cause(name)}")

    async def _end(self, name: str, role: str, now: float) -> float:
        """Ends what is left of it and keeps its place; the seconds until its next start."""
        wait = self._crashes.hold(name, now)
        self._looks.pop(name, None)
        await self._pools.retire(name)
        return wait

    def _words(self, name: str, cause: str) -> str:
        """What is known of an end: Ray's words, and the log's."""
        lines = self._pools.log_lines(name)
        said = cause or "its process has ended"
        return f"{said} | log: {' | '.join(lines)}" if lines else said

    def _tell_blind(self, now: float) -> None:
        """Without Ray's tables nobody sees who has no place and who was started anew. Said once it lasts, and once it is over."""
        why = self._pools.unseen
        since, told = self._blind or (now, False)
        if not why:
            self._blind = None
            if told:
                text = f"Ray's tables can be read again after {now - since:.0f} s"
                self._events.record("RayRead", text, pool=self._pool)
            return
        if not told and now - since >= BLIND_SECONDS:
            text = "who has no place and who has ended is not seen meanwhile, and what runs goes on"
            self._events.record("RayAway", f"{why}; {text}", pool=self._pool, warning=True)
            told = True
        self._blind = (since, told)

    @property
    def blind(self) -> str:
        """Why Ray's tables cannot be read, once that has lasted; "": they can."""
        return f"Ray: {self._pools.unseen}" if self._blind is not None and self._blind[1] else ""

    def _say(self, reason: str, name: str, text: str) -> None:
        self._events.record(reason, text, pool=self._pool, subject=name, warning=True)

    async def _wake_silent(
        self, records: Mapping[str, pb.WorkerRecord], busy: Collection[str], now: float
    ) -> None:
        """A process whose worker has ended, for instance since somebody told it to leave behind our back, is started again. A
        worker that only cannot reach etcd is left alone: it serves."""
        quiet = [
            name
            for name in self._pools.names
            if name not in records and name not in busy and self._pools.started(name)
        ]
        self._silent = {name: self._silent.get(name, now) for name in quiet}
        for name, since in list(self._silent.items()):
            if now - since >= SILENT_SECONDS and await self._pools.lives(name) is False:
                del self._silent[name]
                await self._failed(name, "its worker has left, and its process was still there", now)

    async def explain(self, replicas: list[Replica], phases: Phases) -> None:
        """Finds out why workers have no place."""
        now = time.monotonic()
        there = {each.name: each for each in replicas}
        waiting: dict[str, str] = {}
        for role in ROLES:
            pending = [each.name for each in replicas if each.stage is Stage.PENDING and each.role == role]
            late = [name for name in pending if phases.seconds(name) >= PLACE_SECONDS]
            if late:
                count, cause = await self._pools.lacking(role)
                # Ray does not say which. It places the oldest first; of the others the process only starts.
                waiting |= dict.fromkeys(sorted(late, key=phases.seconds)[:count], cause)
        # Its tables are not all of the same moment, so that something is missing has to be so for a while.
        self._suspected = {name: self._suspected.get(name, now) for name in waiting}
        waiting = {
            name: cause
            for name, cause in waiting.items()
            if name in self._pending or now - self._suspected[name] >= PLACE_SECONDS
        }
        for name, cause in waiting.items():
            if name not in self._pending:
                self._say("ReplicaPending", name, f"Ray has no place for {name}: {cause}")
            self._pending[name] = (cause, self._pending.get(name, ("", now))[1])
        for name in list(self._pending):
            if name in waiting:
                continue
            del self._pending[name]
            if name in there:
                text = f"Ray has a place for {name}"
                self._events.record("ReplicaPlaced", text, pool=self._pool, subject=name)

    def failure(self, name: str) -> TwinpoolError:
        """What a worker ended with last: the error of its start, or what is known else."""
        return self._failures.get(name) or TwinpoolError("INTERNAL", f"{name}: {self._crashes.cause(name)}")

    def cause(self, replica: Replica) -> str:
        """Why a replica is not ready, for people; "": there is nothing to say."""
        if replica.stage is Stage.PENDING:
            return self._pending.get(replica.name, ("its process is not there yet", 0.0))[0]
        if replica.stage in (Stage.ABSENT, Stage.STARTING):
            return self._crashes.cause(replica.name)
        if replica.stage is Stage.HELD:
            return "an operator has drained it for good"
        return ""

    def hindrance(self, replicas: list[Replica]) -> TwinpoolError | None:
        """What an operation need not wait for any longer."""
        now = time.monotonic()
        for replica in replicas:
            name = replica.name
            seconds = now - self._pending[name][1] if name in self._pending else 0.0
            if seconds >= self._config.pending_timeout_seconds:
                return TwinpoolError("REPLICA_PENDING", f"{name} for {seconds:.0f} s: {self.cause(replica)}")
            late = self._crashes.count(name, now) >= LOOP_CRASHES
            if replica.stage in (Stage.ABSENT, Stage.STARTING) and late:
                return TwinpoolError("REPLICA_CRASHING", f"{name}: {self._crashes.cause(name)}")
        return None
