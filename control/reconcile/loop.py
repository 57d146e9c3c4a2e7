# SPDX-License-Identifier: Apache-2.0
"""The reconciler: looks at a pool on every change and on a clock, and brings it to what is recorded of it.

It acts for the leader alone, and keeps still while it cannot trust what it sees: without etcd, and until workers had the time to
register again after etcd came back. Each turn starts from what is there, so a turn that was cut off leaves nothing behind.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

import grpc
import grpc.aio

from twinpool import metrics
from twinpool.config import TwinpoolConfig
from twinpool.control.actors import Look
from twinpool.control.cordons import Cordons
from twinpool.control.events import EventLog
from twinpool.control.gauges import show_pool
from twinpool.control.operations import Operations
from twinpool.control.pools import RayPools
from twinpool.control.reconcile.crashes import CrashBook
from twinpool.control.reconcile.members import Members
from twinpool.control.reconcile.observe import ROLE_NAMES, Phases, Sight, replicas_of
from twinpool.control.reconcile.plan import Change, Drain, Replica, Stage, Start, first_role, plan
from twinpool.control.reconcile.spec import PoolSpecs, desired
from twinpool.control.reconcile.watchman import Watchman
from twinpool.control.view import ClusterView
from twinpool.errors import TwinpoolError
from twinpool.logs import get_logger
from twinpool.membership import REGISTER_SECONDS
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2, worker_pb2_grpc

CLOCK_SECONDS: Final = 1.0
"""Longest time between two looks."""

RESYNC_SECONDS: Final = 5.0
"""How often the record of the pool is read again, though nobody else should write it."""

SYNC_SECONDS: Final = 1.0
"""Wait for the first list of workers, until it is said that etcd is away."""

INSPECT_SECONDS: Final = 2.0
"""Longest wait for a worker's counts; one that does not answer counts as idle."""

CHANGES_MAX: Final = 256
"""Most changes of one look; what is left is planned again at the next one."""

PARENT: Final = "reconciler"
"""Who begins drains that no operation of a pool is about."""

log = get_logger(__name__)


class Reconciler:
    """One a pool; ``run`` while its control process leads. On the event loop. What one pool waits for holds up no other."""

    def __init__(
        self,
        config: TwinpoolConfig,
        view: ClusterView,
        pools: RayPools,
        operations: Operations,
        specs: PoolSpecs,
        cordons: Cordons,
        events: EventLog,
        connect: Callable[[str], grpc.aio.Channel],
        leads: Callable[[], bool],
    ) -> None:
        """``config``: as the processes of the pool see it. ``leads``: whether this process surely leads now."""
        self._view, self._pools, self._operations = view, pools, operations
        self._specs, self._cordons, self._events = specs, cordons, events
        self._connect, self._leads = connect, leads
        self._pool = config.worker.pool
        self._grace = config.cluster.lease_ttl_seconds + REGISTER_SECONDS
        self._crashes = CrashBook()
        self._phases = Phases()
        self._members = Members(self._pool, events)
        self._watchman = Watchman(self._pool, pools, self._crashes, events, config.pools)
        self._replicas: list[Replica] = []
        self._waiting = "it has not looked yet"
        self._away_since: float | None = None
        self._trusted_at = 0.0
        self._synced_at = float("-inf")
        self._told_at = float("-inf")
        self.turns = 0
        """Looks after which all was done that was to do. Whoever has changed something waits for more of them."""

    async def run(self) -> None:
        """Until it is cancelled."""
        self._synced_at = float("-inf")
        while not await self._view.wait_synced(SYNC_SECONDS):
            self._wait_for("etcd is away")
        while True:
            began, outcome = time.monotonic(), "done"
            try:
                if not await self._turn():
                    outcome = "waited"
            except TwinpoolError as error:
                outcome = "waited" if error.reason == "STORE_UNAVAILABLE" else "failed"
                self._wait_for(f"{error.reason}: {error.message}")
            except Exception as error:
                outcome = "failed"
                log.exception("reconcile_failed", pool=self._pool)
                self._wait_for(f"{type(error).__name__}: {error}")
            metrics.CONTROL_RECONCILE_TIME.labels(outcome).observe(time.monotonic() - began)
            with contextlib.suppress(TwinpoolError):  # its record could not be read yet
                show_pool(self.status())
            await self._view.changed(CLOCK_SECONDS)

    # --- what others ask

    def status(self) -> pb.PoolStatus:
        """What the pool shall be and what it is. Raises POOL_NOT_FOUND before its record was read."""
        spec = self._specs.get(self._pool)
        records = {record.worker.name: record for record in self._view.workers(self._pool)}
        shown: dict[str, pb.Replica] = {}
        now = time.monotonic()
        for replica in self._replicas:
            cause = self._watchman.cause(replica)
            count = self._crashes.count(replica.name, now)
            record = records.get(replica.name)
            shown[replica.name] = self._phases.shown(replica, record, cause, count)
        for name, record in records.items():
            if name not in shown:
                shown[name] = _external(record)
        replicas = [shown[name] for name in sorted(shown)]
        managed = self._pools.managed
        waiting = self._waiting or (self._watchman.blind if managed else "")
        return pb.PoolStatus(spec=spec, replicas=replicas, managed=managed, waiting=waiting)

    def settled(self, wanted: dict[str, int] | None = None) -> bool:
        """Whether as many workers as are wanted (None: by the record) take work, and none is on its way out."""
        counts = desired(self._specs.get(self._pool)) if wanted is None else wanted
        for role, count in counts.items():
            mine = [each for each in self._replicas if each.role == role and each.stage is not Stage.HELD]
            if len(mine) != count or any(each.stage is not Stage.READY or each.busy for each in mine):
                return False
        return True

    def hindrance(self) -> TwinpoolError | None:
        """What keeps the pool from what it shall be for longer than it may; None: nothing."""
        return self._watchman.hindrance(self._replicas)

    def failure(self, worker: str) -> TwinpoolError:
        """What a worker ended with last."""
        return self._watchman.failure(worker)

    # --- one look

    async def _turn(self) -> bool:
        """Whether it looked; it must not act on what it cannot trust."""
        if not self._leads():
            self._wait_for("this process does not lead")
            return False
        if not self._trusted():
            return False
        await self._resync()
        records = {record.worker.name: record for record in self._view.workers(self._pool)}
        now = time.monotonic()
        looks = await self._watchman.look(records, self._busy(), now)
        for name, record in records.items():
            # While it is down it counts as what it will be again.
            self._pools.note_role(name, ROLE_NAMES.get(record.role, ""))
        self._members.note(records, self._operations.running(), self._pools)
        await self._tell_cordons(list(records.values()), now)
        if not self._pools.managed:
            self._waiting = ""
            self.turns += 1
            return True
        await self._explain(looks)
        changed = await self._change(looks)
        self._waiting = ""
        self.turns += not changed
        return True

    def _trusted(self) -> bool:
        """Whether the list of workers can be acted on."""
        now = time.monotonic()
        if not self._view.connected:
            self._away_since = self._away_since or now
            self._wait_for("etcd is away")
            return False
        if self._away_since is not None:
            seconds, self._away_since = now - self._away_since, None
            self._trusted_at = now + self._grace
            self._events.record(
                "StoreAway",
                f"etcd was away for {seconds:.1f} s; nothing is changed for {self._grace:g} s more, in which workers register",
                pool=self._pool,
                warning=True,
            )
        if now < self._trusted_at:
            self._wait_for("etcd is back; workers register again")
            return False
        return True

    def _wait_for(self, why: str) -> None:
        if why != self._waiting:
            log.warning("reconciler_waits", pool=self._pool, why=why)
        self._waiting = why

    async def _resync(self) -> None:
        now = time.monotonic()
        if now - self._synced_at >= RESYNC_SECONDS:
            await self._specs.refresh(self._pool)
            self._synced_at = now

    def _busy(self) -> set[str]:
        return {op.worker.name for op in self._operations.running() if op.HasField("worker")}

    async def _tell_cordons(self, records: list[pb.WorkerRecord], now: float) -> None:
        if now - self._told_at >= CLOCK_SECONDS:
            self._told_at = now
            await self._cordons.tell(records)

    async def _explain(self, looks: dict[str, Look]) -> None:
        """Says what keeps workers, and forgets cordons of those that are gone."""
        self._plan(looks)
        self._phases.update(self._replicas)
        await self._watchman.explain(self._replicas, self._phases)
        records = self._view.workers(self._pool)
        known = {replica.name for replica in self._replicas} | {record.worker.name for record in records}
        gone = self._cordons.names() - known
        await self._cordons.forget(name for name in gone if first_role(self._pool, name) is not None)

    async def _change(self, looks: dict[str, Look]) -> bool:
        """Makes one change after the other until there is none left. Each is planned anew: while the one before it was made, an
        operation may have begun or ended that makes this one wrong. Whether there was any."""
        made, loads = set[Change](), dict[str, int]()
        while len(made) < CHANGES_MAX:
            changes = self._plan(looks, loads)
            if any(isinstance(change, Drain) for change in changes) and not loads:
                # Only now it matters who has the least to do.
                loads = await self._loads(
                    {record.worker.name: record for record in self._view.workers(self._pool)}
                )
                changes = self._plan(looks, loads)
            # Another process may lead by now: what it has begun must not be done twice.
            change = next((each for each in changes if each not in made), None)
            if change is None or not self._leads():
                break
            made.add(change)
            await self._do(change)
        return bool(made)

    def _plan(self, looks: dict[str, Look], loads: dict[str, int] | None = None) -> list[Change]:
        """What is to be done, by what is wanted, registered and under way at this moment: nothing here waits."""
        records = {record.worker.name: record for record in self._view.workers(self._pool)}
        operations, spec = self._operations, self._specs.get(self._pool)
        sight = Sight(
            self._pool,
            time.monotonic(),
            records,
            operations.running(),
            operations.retired,
            looks,
            loads or {},
            self._members.seen,
            frozenset((*spec.counted, *spec.settled)),
        )
        self._replicas = replicas_of(sight, self._pools, self._crashes)
        return plan(self._pool, desired(spec), self._replicas)

    async def _loads(self, records: dict[str, pb.WorkerRecord]) -> dict[str, int]:
        async def ask(record: pb.WorkerRecord) -> int:
            with contextlib.suppress(grpc.RpcError):
                async with self._connect(record.endpoint) as channel:
                    stub = worker_pb2_grpc.WorkerServiceStub(channel)
                    found = await stub.Inspect(worker_pb2.InspectRequest(), timeout=INSPECT_SECONDS)
                return found.requests
            return 0

        counts = await asyncio.gather(*(ask(record) for record in records.values()))
        return dict(zip(records, counts, strict=True))

    async def _do(self, change: Change) -> None:
        name, role = change.name, change.role
        if isinstance(change, Start):
            self._crashes.started(name)
            self._events.record("WorkerStarting", f"{role} worker {name}", pool=self._pool, subject=name)
            await self._pools.add(role, name)
            return
        parent = next(
            (
                op.id
                for op in self._operations.running()
                if not op.HasField("worker") and op.pool == self._pool
            ),
            PARENT,
        )
        self._crashes.forget(name)
        if isinstance(change, Drain):
            await self._operations.begin(pb.OPERATION_KIND_DRAIN, name, None, parent=parent)
            return
        if self._pools.manages(name):
            await self._pools.retire(name)
        text = f"{role} worker {name} is not wanted any more; it had not been ready"
        self._events.record("WorkerLeft", text, pool=self._pool, subject=name, operation=parent)


def _external(record: pb.WorkerRecord) -> pb.Replica:
    """A worker that somebody else runs."""
    phases = {
        pb.WORKER_STATE_STARTING: pb.REPLICA_PHASE_STARTING,
        pb.WORKER_STATE_READY: pb.REPLICA_PHASE_READY,
        pb.WORKER_STATE_DRAINING: pb.REPLICA_PHASE_DRAINING,
        pb.WORKER_STATE_FLIPPING: pb.REPLICA_PHASE_FLIPPING,
        pb.WORKER_STATE_UNREADY: pb.REPLICA_PHASE_UNREADY,
    }
    return pb.Replica(
        worker=record.worker.name,
        role=record.role,
        phase=phases.get(record.state, pb.REPLICA_PHASE_UNSPECIFIED),
        since=record.started_at,
        cordoned=record.cordoned,
    )
