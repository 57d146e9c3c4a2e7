# SPDX-License-Identifier: Apache-2.0
"""The router's view of the workers: who is registered, who can be reached, how loaded each is.

A worker can be chosen once its record says ready *and* its stream is up. When the stream breaks it is put into
quarantine at once, long before its lease ends, and comes back when the session's next attempt is welcomed: the
session's own reconnecting is the probe. What the worker reports (load) and what the router itself has reserved are
kept apart by the core.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import grpc.aio

from twinpool import metrics
from twinpool._core import RouterCore
from twinpool.config import TwinpoolConfig, served_pools
from twinpool.ids import WorkerKey
from twinpool.logs import get_logger
from twinpool.membership import takes_work
from twinpool.router.admission import Admission
from twinpool.router.background import Background
from twinpool.router.breaker import Breakers
from twinpool.router.dispatch import Leg, LegEvents, LegId, WorkerSession
from twinpool.router.locality import Locality
from twinpool.router.models import ModelTable, group_id
from twinpool.router.request import group_label
from twinpool.v1 import control_pb2
from twinpool.v1 import worker_pb2 as pb

log = get_logger(__name__)

_ROLES: Final = {pb.ROLE_PREFILL: "prefill", pb.ROLE_DECODE: "decode"}
_STATES: Final = {
    control_pb2.WORKER_STATE_STARTING: "starting",
    control_pb2.WORKER_STATE_READY: "ready",
    control_pb2.WORKER_STATE_DRAINING: "draining",
    control_pb2.WORKER_STATE_FLIPPING: "flipping",
}
# A broken stream keeps its worker in quarantine until it is welcomed again, however long that takes.
_UNTIL_WELCOMED: Final = 1e9


@dataclass(slots=True)
class _Worker:
    """One incarnation of one worker."""

    record: control_pb2.WorkerRecord
    session: WorkerSession
    # No longer registered; its stream stays until what runs on it has ended.
    retired: bool = False
    broken_at: float | None = None
    # It says that it has another role than its record, which is about to change.
    differs: bool = False
    report: pb.LoadReport | None = None
    reported_at: float = 0.0
    leaving_since: float | None = None

    @property
    def leaves(self) -> bool:
        """Whether it says that it will take no more work in its role."""
        return self.record.state in (control_pb2.WORKER_STATE_DRAINING, control_pb2.WORKER_STATE_FLIPPING)


class Fleet:
    """Keeps a session to every registered worker and tells the core what it knows."""

    def __init__(
        self,
        config: TwinpoolConfig,
        admission: Admission,
        models: ModelTable,
        locality: Locality,
        background: Background,
        connect: Callable[[str], grpc.aio.Channel],
        hello: pb.Hello,
    ) -> None:
        self._config = config
        self._pools = frozenset(served_pools(config))
        self._admission = admission
        self._models = models
        self._locality = locality
        self._background = background
        self.connect = connect
        self._hello = hello
        self._workers: dict[WorkerKey, _Worker] = {}
        # Whose calibration the core has. It gets it once: what it has learned since is worth more.
        self._calibrated: set[WorkerKey] = set()
        # In which role the core has each.
        self._told_role: dict[WorkerKey, pb.Role.ValueType] = {}
        self.breakers = Breakers(config.router, self._hold, self._has_spare)

    async def close(self) -> None:
        """Ends every session."""
        workers, self._workers = self._workers, {}
        await asyncio.gather(*(worker.session.close() for worker in workers.values()))

    # --- membership -----------------------------------------------------------------------

    def upsert(self, record: control_pb2.WorkerRecord) -> None:
        """A worker was registered or its record changed. Those of other pools are ignored."""
        if record.pool not in self._pools or record.role not in _ROLES or not record.endpoint:
            return
        key = WorkerKey(record.worker.name, record.worker.incarnation)
        for other in [other for other in self._workers if other.name == key.name and other != key]:
            log.info("worker_restarted", worker=str(key), before=str(other))
            self._forget(other)
            self._close_session(other)
        known = self._workers.get(key)
        if known is not None and known.record.endpoint != record.endpoint:
            self._close_session(key)
            known = None
        if known is None:
            known = self._workers[key] = _Worker(record, self._open_session(key, record.endpoint))
            log.info("worker_added", worker=str(key), role=_ROLES[record.role], endpoint=record.endpoint)
        if record.state == control_pb2.WORKER_STATE_READY != known.record.state:
            # It may have been out of reach until now.
            known.session.retry_now()
        flipped = record.role != known.record.role
        known.record, known.retired = record, False
        if not known.leaves:
            known.leaving_since = None
        elif known.leaving_since is None:
            known.leaving_since = time.monotonic()
        self._models.upsert(key, record)
        if known.session.up:
            self._tell_core(key, record)
        if flipped:
            self._changed_role(key, known)
        self._count()

    def remove(self, record: control_pb2.WorkerRecord) -> None:
        """A worker's registration ended. What still runs on its stream may end there."""
        key = WorkerKey(record.worker.name, record.worker.incarnation)
        known = self._workers.get(key)
        if known is None:
            return
        log.info("worker_removed", worker=str(key), legs=known.session.legs)
        self._forget(key)
        if known.session.up and known.session.legs:
            known.retired = True
        else:
            self._close_session(key)
        self._count()

    def reachable(self, record: control_pb2.WorkerRecord) -> bool:
        """Whether there is a stream to the worker: then a missing registration does not mean that it is dead."""
        known = self._workers.get(WorkerKey(record.worker.name, record.worker.incarnation))
        return known is not None and known.session.up

    @property
    def core(self) -> RouterCore:
        """The core that is told of the workers."""
        return self._admission.core

    def session(self, key: WorkerKey) -> WorkerSession | None:
        """The stream to a worker; None if it is gone."""
        known = self._workers.get(key)
        return known.session if known is not None else None

    def start_leg(
        self, key: WorkerKey, leg_id: LegId, command: pb.SessionRequest, events: LegEvents
    ) -> Leg | None:
        """Sends a prefill or decode command to a worker that placement chose, with the epoch in which the worker has the role that it
        is meant for, as far as is known; None if the worker is gone meanwhile."""
        known = self._workers.get(key)
        if known is None:
            return None
        (command.prefill if command.HasField("prefill") else command.decode).epoch = known.record.epoch
        return known.session.start_leg(leg_id, command, events)

    def record(self, key: WorkerKey) -> control_pb2.WorkerRecord | None:
        """What the worker registered."""
        known = self._workers.get(key)
        return known.record if known is not None else None

    def records(self) -> list[control_pb2.WorkerRecord]:
        """What the workers that are registered have registered."""
        return [known.record for known in self._workers.values() if not known.retired]

    def decode_endpoints(self) -> list[str]:
        """Where those listen that may know of answers: decode workers and those that may have been one, also if they leave or cannot
        be reached."""
        return [
            known.record.endpoint
            for known in self._workers.values()
            if known.record.role == pb.ROLE_DECODE or known.record.epoch > 1
        ]

    def reported(self, key: WorkerKey) -> tuple[float, pb.LoadReport] | None:
        """What the worker said last of its load, and how many seconds ago; None: nothing."""
        known = self._workers.get(key)
        if known is None or known.report is None:
            return None
        return time.monotonic() - known.reported_at, known.report

    def leaving(self) -> list[tuple[WorkerKey, float]]:
        """Decode workers that take no more work, and since when (``time.monotonic``)."""
        return [
            (key, known.leaving_since)
            for key, known in self._workers.items()
            if known.leaving_since is not None and known.record.role == pb.ROLE_DECODE and known.session.up
        ]

    def replaceable(self, key: WorkerKey, suits: Callable[[WorkerKey], bool] = lambda _key: True) -> bool:
        """Whether another worker of its group and role takes work, and ``suits``."""
        own = self._workers[key].record
        return any(
            takes_work(known.record)
            and known.record.role == own.role
            and group_id(known.record) == group_id(own)
            and known.session.up
            for other, known in self._workers.items()
            if other != key and suits(other)
        )

    def reap(self) -> None:
        """Closes the streams of workers that are gone and have nothing left to do."""
        for key, known in list(self._workers.items()):
            if known.retired and not known.session.legs:
                self._close_session(key)

    # --- what sessions say ----------------------------------------------------------------

    def session_up(self, session: WorkerSession, role: pb.Role.ValueType) -> None:
        """See ``dispatch.SessionOwner``."""
        known = self._workers.get(session.key)
        if known is None or known.retired:
            return
        known.differs = role != known.record.role
        if known.differs:
            log.warning("worker_role_differs", worker=str(session.key), role=_ROLES.get(role, "unknown"))
        else:
            self._welcomed(session.key, known)

    def _welcomed(self, key: WorkerKey, known: _Worker) -> None:
        self._tell_core(key, known.record)
        # One that came back at once may break again at once: it waits out its quarantine.
        since = time.monotonic() - known.broken_at if known.broken_at is not None else math.inf
        left = max(0.0, self._config.router.quarantine_seconds - since)
        held = self.breakers.hold_seconds(key)
        self._admission.quarantine(key, max(left, held or 0.0), held is not None)
        self._count()

    def session_down(self, session: WorkerSession, cause: str) -> None:
        """See ``dispatch.SessionOwner``."""
        known = self._workers.get(session.key)
        if known is None:
            return
        role = _ROLES[known.record.role]
        metrics.ROUTER_SESSION_FAILURES.labels(role).inc()
        if known.retired:
            self._close_session(session.key)
        else:
            log.warning("worker_session_lost", worker=str(session.key), role=role, cause=cause)
            metrics.ROUTER_QUARANTINES.labels(role).inc()
            known.broken_at = time.monotonic()
            self.breakers.failed(session.key)
            self._admission.quarantine(session.key, _UNTIL_WELCOMED)
        self._count()

    def load_reported(self, session: WorkerSession, report: pb.LoadReport) -> None:
        """See ``dispatch.SessionOwner``."""
        known = self._workers.get(session.key)
        if known is not None:
            known.report, known.reported_at = report, time.monotonic()
        self._admission.report_load(session.key, report)

    # --- inside ---------------------------------------------------------------------------

    def _changed_role(self, key: WorkerKey, known: _Worker) -> None:
        """What it failed in the other role says nothing of this one; what it has cached is as it was."""
        role = _ROLES[known.record.role]
        log.info("worker_changed_role", worker=str(key), role=role, epoch=known.record.epoch)
        metrics.ROUTER_ROLE_CHANGES.labels(role).inc()
        self.breakers.pardon(key)
        if known.differs and known.session.up:
            known.differs = False
            self._welcomed(key, known)

    def _hold(self, key: WorkerKey, seconds: float, probation: bool) -> None:
        known = self._workers.get(key)
        # One whose stream is down is in quarantine until it is welcomed, and then what its breaker says.
        if known is not None and known.session.up:
            self._admission.quarantine(key, seconds, probation)

    def _has_spare(self, key: WorkerKey) -> bool:
        return key in self._workers and self.replaceable(key, self.breakers.closed)

    def _tell_core(self, key: WorkerKey, record: control_pb2.WorkerRecord) -> None:
        pool = group_label(record.pool, record.model, record.fingerprint)
        state = _STATES.get(record.state, "starting")
        if state == "ready" and not takes_work(record):
            # To the core a cordoned worker is one that takes no more work; here nothing is moved away from it.
            state = "draining"
        self._admission.upsert_worker(key, pool, _ROLES[record.role], state, record)
        if key not in self._calibrated:
            if self._admission.seed_costs(key, record):
                self._calibrated.add(key)
        elif record.role == pb.ROLE_DECODE != self._told_role.get(key):
            # What its steps took when they were those of prompts is forgotten.
            self._admission.seed_costs(key, record, ("step",))
        self._told_role[key] = record.role
        self._locality.follow(key, record)

    def _forget(self, key: WorkerKey) -> None:
        self._admission.remove_worker(key)
        self._calibrated.discard(key)
        self._told_role.pop(key, None)
        self.breakers.forget(key)
        self._locality.drop(key)
        self._models.remove(key)

    def _open_session(self, key: WorkerKey, endpoint: str) -> WorkerSession:
        hello = pb.Hello()
        hello.CopyFrom(self._hello)
        hello.worker.name, hello.worker.incarnation = key.name, key.incarnation
        session = WorkerSession(
            key, endpoint, hello, self, self.connect, self._config.rpc.connect_timeout_seconds
        )
        session.start()
        return session

    def _close_session(self, key: WorkerKey) -> None:
        known = self._workers.pop(key, None)
        if known is not None:
            self._background.start(known.session.close())

    def _count(self) -> None:
        counts = {(role, state): 0 for role in _ROLES.values() for state in _STATES.values()}
        for known in self._workers.values():
            state = _STATES.get(known.record.state, "starting")
            counts[_ROLES[known.record.role], state] += not known.retired
        for (role, state), count in counts.items():
            metrics.ROUTER_WORKERS.labels(role, state).set(count)
        metrics.ROUTER_SESSIONS.set(sum(known.session.up for known in self._workers.values()))
