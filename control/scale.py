# SPDX-License-Identifier: Apache-2.0
"""Scaling a pool: an operation of two steps.

    write     the record of the pool says the new numbers
    converge  as many workers take work, and none is on its way out

The reconciler does the work. So an operation that fails, for instance since a worker has no place, takes nothing back: the record
stays, and so does the wish. A later scale takes the place of one that is under way.
"""

import asyncio
import secrets
import time
from collections.abc import Mapping
from functools import partial
from typing import Final

from twinpool.config import TwinpoolConfig
from twinpool.control.events import EventLog
from twinpool.control.flip_counts import scaled
from twinpool.control.leaves import LEAVE_SECONDS
from twinpool.control.operations import Operations
from twinpool.control.patience import is_away, patiently
from twinpool.control.pool_set import PoolSet
from twinpool.control.reconcile.loop import Reconciler
from twinpool.control.reconcile.plan import ROLES
from twinpool.control.reconcile.spec import PoolSpecs, desired
from twinpool.errors import TwinpoolError
from twinpool.v1 import control_pb2 as pb

CHECK_SECONDS: Final = 0.05
"""Time between two looks whether the pool is what it shall be."""


class Scaling:
    """One a control process. On its event loop."""

    def __init__(
        self,
        config: TwinpoolConfig,
        operations: Operations,
        specs: PoolSpecs,
        reconcilers: Mapping[str, Reconciler],
        events: EventLog,
        pools: PoolSet,
    ) -> None:
        """``reconcilers``: by pool. ``pools``: which of them are run here."""
        self._config = config
        self._operations, self._specs = operations, specs
        self._reconcilers, self._events = reconcilers, events
        self._pools = pools
        self._lock = asyncio.Lock()
        operations.register(pb.OPERATION_KIND_SCALE, {"write": self._write, "converge": self._converge})

    async def begin(
        self,
        pool: str,
        prefill: int | None,
        decode: int | None,
        *,
        seconds: float | None = None,
        force: bool = False,
        reason: str = "",
        parent: str = "",
    ) -> pb.Operation:
        """Records a scale and begins it. None: as many as are wanted now. Asked again for the same while it runs, returns that
        one. ``force``: a role may be left without workers. ``parent``: the operation that it is a part of.

        Raises POOL_NOT_FOUND, POOL_NOT_MANAGED, POOL_BOUNDS, OPERATION_RUNNING if another operation on the pool runs, or
        STORE_UNAVAILABLE."""
        async with self._lock:
            spec = self._specs.get(pool)
            self._pools.check(pool)
            now = desired(spec)
            wanted = {
                role: now[role] if asked is None else asked
                for role, asked in zip(ROLES, (prefill, decode), strict=True)
            }
            self._specs.resized(pool, wanted["prefill"], wanted["decode"])
            for role in ROLES:
                if wanted[role] == 0 < now[role] and not force:
                    raise TwinpoolError(
                        "POOL_BOUNDS", f"without {role} workers {pool} serves nothing; that needs --force"
                    )
            operation = self._make(pool, wanted, seconds, reason, parent)
            for running in self._operations.running():
                if running.HasField("worker") or running.pool != pool or running.id == parent:
                    continue
                if running.kind != pb.OPERATION_KIND_SCALE:
                    raise TwinpoolError("OPERATION_RUNNING", f"{running.id} of {pool} is under way")
                if (running.prefill, running.decode) == (operation.prefill, operation.decode):
                    return running
                await self._operations.supersede(running, operation.id)
            return await self._operations.submit(operation)

    def _make(
        self, pool: str, wanted: dict[str, int], seconds: float | None, reason: str, parent: str
    ) -> pb.Operation:
        operation = pb.Operation(
            id=f"scale-{secrets.token_hex(6)}",
            kind=pb.OPERATION_KIND_SCALE,
            state=pb.OPERATION_STATE_RUNNING,
            pool=pool,
            prefill=wanted["prefill"],
            decode=wanted["decode"],
            reason=reason[:256],
            parent=parent,
        )
        worker, pools = self._config.worker, self._config.pools
        usual = pools.start_timeout_seconds + worker.drain_timeout_seconds + LEAVE_SECONDS
        operation.timeout.FromNanoseconds(int((usual if seconds is None else seconds) * 1e9))
        operation.created_at.GetCurrentTime()
        return operation

    async def _write(self, operation: pb.Operation) -> None:
        before = self._specs.get(operation.pool).generation

        async def write() -> pb.PoolSpec:
            spec = await self._specs.change(operation.pool, partial(self._scaled, operation))
            # Who wants so many workers wants them to work: places that were kept empty are filled.
            await self._operations.release(operation.pool, operation.id)
            return spec

        def passes(error: TwinpoolError) -> bool:
            return is_away(error) and not _late(operation)

        spec = await patiently(operation, write, "scale_waits", passes)
        if spec.generation != before:
            text = f"{operation.prefill} prefill and {operation.decode} decode workers are wanted"
            self._events.record(
                "PoolScaled",
                f"{text}: {operation.reason}" if operation.reason else text,
                pool=operation.pool,
                operation=operation.id,
            )

    def _scaled(self, operation: pb.Operation, record: pb.PoolSpec) -> pb.PoolSpec:
        flips = self._operations.running(pb.OPERATION_KIND_FLIP)
        flips = [flip for flip in flips if flip.pool == record.pool]
        return scaled(record, operation.prefill, operation.decode, flips, self._specs.key(record.pool))

    async def _converge(self, operation: pb.Operation) -> None:
        reconciler = self._reconciler(operation.pool)
        turns, wanted = reconciler.turns, {"prefill": operation.prefill, "decode": operation.decode}
        while reconciler.turns == turns or not reconciler.settled(wanted):
            # Of before the record was written it says nothing.
            looked = reconciler.turns != turns
            if looked and (error := reconciler.hindrance()) is not None:
                raise error
            state = self._state(operation)
            if _late(operation):
                raise TwinpoolError("DEADLINE_EXCEEDED", state)
            operation.steps[-1].detail = state
            await asyncio.sleep(CHECK_SECONDS)

    def _reconciler(self, pool: str) -> Reconciler:
        """Raises POOL_NOT_MANAGED: the pool of an operation of before may not be configured any more."""
        self._pools.check(pool)
        return self._reconcilers[pool]

    def _state(self, operation: pb.Operation) -> str:
        """How far it is, for people."""
        status = self._reconciler(operation.pool).status()
        lines = [
            f"{replica.worker} is {pb.ReplicaPhase.Name(replica.phase).removeprefix('REPLICA_PHASE_').lower()}"
            for replica in status.replicas
            if replica.phase != pb.REPLICA_PHASE_READY
        ]
        ready = len(status.replicas) - len(lines)
        wanted = operation.prefill + operation.decode
        found = ", ".join([f"{ready} workers ready of {wanted} that are wanted", *lines])
        return f"{found} ({status.waiting})" if status.waiting else found


def _late(operation: pb.Operation) -> bool:
    taken = time.time() - operation.created_at.ToNanoseconds() / 1e9
    return taken > operation.timeout.ToNanoseconds() / 1e9
