# SPDX-License-Identifier: Apache-2.0
"""What a pool is: from records, actors and operations to the replicas of a plan."""

import time
from dataclasses import dataclass, field
from typing import Final, Protocol

from google.protobuf.timestamp_pb2 import Timestamp

from twinpool.control.actors import Look
from twinpool.control.reconcile.crashes import CrashBook
from twinpool.control.reconcile.plan import Replica, Stage, first_role
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2

ROLE_NAMES: Final[dict[int, str]] = {worker_pb2.ROLE_PREFILL: "prefill", worker_pb2.ROLE_DECODE: "decode"}
ROLE_VALUES: Final = {"prefill": worker_pb2.ROLE_PREFILL, "decode": worker_pb2.ROLE_DECODE}

_STAGES: Final = {
    pb.WORKER_STATE_STARTING: Stage.STARTING,
    pb.WORKER_STATE_READY: Stage.READY,
    pb.WORKER_STATE_FLIPPING: Stage.READY,
    pb.WORKER_STATE_DRAINING: Stage.LEAVING,
    pb.WORKER_STATE_UNREADY: Stage.UNREADY,
}
_PHASES: Final = {
    Stage.ABSENT: pb.REPLICA_PHASE_BACKOFF,
    Stage.PENDING: pb.REPLICA_PHASE_PENDING,
    Stage.STARTING: pb.REPLICA_PHASE_STARTING,
    Stage.UNREADY: pb.REPLICA_PHASE_UNREADY,
    Stage.READY: pb.REPLICA_PHASE_READY,
    Stage.LEAVING: pb.REPLICA_PHASE_DRAINING,
    Stage.HELD: pb.REPLICA_PHASE_HELD,
}


class Actors(Protocol):
    """Whoever runs the workers' processes, as far as it is looked at."""

    @property
    def names(self) -> list[str]:
        """Names of the workers."""
        ...

    def role_of(self, name: str) -> str:
        """The role that a worker has or will have again."""
        ...


@dataclass(slots=True)
class Sight:
    """One look at a pool, all of the same moment."""

    pool: str
    now: float
    records: dict[str, pb.WorkerRecord]
    running: list[pb.Operation]
    retired: frozenset[str]
    looks: dict[str, Look]
    loads: dict[str, int] = field(default_factory=dict)
    # Workers that were registered once and still run: silence says nothing about them.
    seen: set[str] = field(default_factory=set)
    # Flips that the wanted numbers count as done.
    counted: frozenset[str] = frozenset()


def replicas_of(sight: Sight, actors: Actors, crashes: CrashBook) -> list[Replica]:
    """The workers of the pool that this control process is to look after, ordered by name."""
    busy = {op.worker.name: op for op in sight.running if op.HasField("worker") and op.pool == sight.pool}
    run = set(actors.names)
    absent = crashes.absent()
    names = run | set(absent)
    # Of others only those that may have been run here.
    others = set(busy) | sight.retired
    names |= {name for name in others if first_role(sight.pool, name) is not None}
    return [_replica(name, sight, actors, crashes, busy.get(name)) for name in sorted(names)]


def _replica(
    name: str, sight: Sight, actors: Actors, crashes: CrashBook, operation: pb.Operation | None
) -> Replica:
    record = sight.records.get(name)
    run = name in actors.names
    role = _role(name, sight, actors, crashes, operation)
    look = sight.looks.get(name)
    if operation is not None and operation.kind == pb.OPERATION_KIND_DRAIN:
        # What an operator drains keeps its place empty from the start.
        stage = Stage.LEAVING if operation.parent or operation.released else Stage.HELD
    elif name in sight.retired and not run:
        stage = Stage.HELD
    elif record is not None:
        stage = _STAGES.get(record.state, Stage.STARTING)
    elif run:
        stage = Stage.STARTING if look is None or look.placed else Stage.PENDING
    elif operation is not None:
        stage = Stage.STARTING
    else:
        stage = Stage.ABSENT
    if operation is not None and stage is Stage.LEAVING and operation.kind != pb.OPERATION_KIND_DRAIN:
        # It leaves to come back.
        stage = Stage.STARTING
    return Replica(
        name=name,
        role=role,
        stage=stage,
        registered=record is not None,
        busy=operation is not None or (run and record is None and name in sight.seen),
        cordoned=record is not None and record.cordoned,
        due=crashes.due(name, sight.now),
        load=sight.loads.get(name, 0),
        started=0.0 if record is None else record.started_at.ToNanoseconds() / 1e9,
    )


def _role(name: str, sight: Sight, actors: Actors, crashes: CrashBook, operation: pb.Operation | None) -> str:
    # Of a worker that changes its role, the one that it will have, from the moment on in which the pool's record wants that.
    counted = operation is not None and operation.id in sight.counted
    target = operation.target_role if operation is not None and counted else 0
    record = sight.records.get(name)
    for value in (target, 0 if record is None else record.role, 0 if operation is None else operation.role):
        if value in ROLE_NAMES:
            return ROLE_NAMES[value]
    return actors.role_of(name) or crashes.absent().get(name) or first_role(sight.pool, name) or "decode"


class Phases:
    """Since when each replica is where it is."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[Stage, float]] = {}

    def update(self, replicas: list[Replica]) -> None:
        """Told of each look."""
        before = self._since
        self._since = {}
        for replica in replicas:
            known = before.get(replica.name)
            same = known is not None and known[0] is replica.stage
            self._since[replica.name] = known if known is not None and same else (replica.stage, time.time())

    def seconds(self, name: str) -> float:
        """How long it has been there."""
        return time.time() - self._since[name][1] if name in self._since else 0.0

    def shown(self, replica: Replica, record: pb.WorkerRecord | None, cause: str, crashes: int) -> pb.Replica:
        """A replica as operators see it."""
        phase = _PHASES[replica.stage]
        if record is not None and record.state == pb.WORKER_STATE_FLIPPING:
            phase = pb.REPLICA_PHASE_FLIPPING
        elif record is not None and replica.stage is Stage.HELD:
            phase = pb.REPLICA_PHASE_DRAINING
        since = Timestamp()
        since.FromNanoseconds(int(self._since.get(replica.name, (replica.stage, time.time()))[1] * 1e9))
        return pb.Replica(
            worker=replica.name,
            role=ROLE_VALUES[replica.role],
            phase=phase,
            cause=cause,
            since=since,
            crashes=crashes,
            cordoned=replica.cordoned,
            managed=True,
        )
