# SPDX-License-Identifier: Apache-2.0
"""Lets the record of a pool follow a worker that changes its role, so that nobody is started or drained in its stead.

A flip writes the new numbers before it asks the worker (step ``write``), and the former ones if it fails.
"""

import asyncio
from collections.abc import Collection
from typing import Final

from twinpool.control.flips import RETRY_SECONDS, ROLES
from twinpool.control.operations import Operations
from twinpool.control.reconcile.spec import PoolSpecs, desired
from twinpool.errors import TwinpoolError
from twinpool.logs import get_logger
from twinpool.v1 import control_pb2 as pb

_WRITTEN: Final = "write"

log = get_logger(__name__)


class FlipCounts:
    """One a control process that runs the workers of ``pools``. On its event loop."""

    def __init__(self, operations: Operations, specs: PoolSpecs, pools: Collection[str]) -> None:
        self._operations, self._specs, self._pools = operations, specs, pools
        operations.surround(
            pb.OPERATION_KIND_FLIP, {_WRITTEN: self._write}, prepare=self._prepare, undo=self._undo
        )

    def _prepare(self, operation: pb.Operation) -> None:
        """Says which numbers are wanted afterwards. Raises POOL_BOUNDS, or OPERATION_RUNNING while the pool is scaled."""
        if operation.pool not in self._pools:
            return
        counts = desired(self._specs.get(operation.pool))
        for running in self._operations.running():
            if running.pool != operation.pool or running.id == operation.parent:
                continue
            if running.kind == pb.OPERATION_KIND_SCALE:
                raise TwinpoolError("OPERATION_RUNNING", f"{running.id} of {operation.pool} is under way")
        for running in reversed(self._operations.running(pb.OPERATION_KIND_FLIP)):
            if running.pool == operation.pool and not _written(running):
                _shift(counts, running)
        _shift(counts, operation)
        self._specs.resized(operation.pool, counts["prefill"], counts["decode"])
        operation.prefill, operation.decode = counts["prefill"], counts["decode"]

    async def _write(self, operation: pb.Operation) -> None:
        if operation.pool in self._pools:
            await self._resize(operation, {"prefill": operation.prefill, "decode": operation.decode})

    async def _undo(self, operation: pb.Operation) -> None:
        wanted = {"prefill": operation.prefill, "decode": operation.decode}
        # Whoever has written other numbers since wants those.
        if operation.pool not in self._pools or desired(self._specs.get(operation.pool)) != wanted:
            return
        _shift(wanted, operation, back=True)
        await self._resize(operation, wanted)

    async def _resize(self, operation: pb.Operation, counts: dict[str, int]) -> None:
        while True:
            try:
                await self._specs.resize(operation.pool, counts["prefill"], counts["decode"])
                return
            except TwinpoolError as error:
                if error.reason != "STORE_UNAVAILABLE":
                    raise
                log.warning("flip_waits", operation=operation.id, reason=error.reason)
                if operation.steps:
                    operation.steps[-1].detail = f"etcd cannot be written: {error.reason}"
                await asyncio.sleep(RETRY_SECONDS)


def _written(operation: pb.Operation) -> bool:
    return any(step.name == _WRITTEN and step.HasField("done_at") for step in operation.steps)


def _shift(counts: dict[str, int], operation: pb.Operation, *, back: bool = False) -> None:
    """One worker less in the role that it leaves, one more in the other."""
    former, target = ROLES[operation.role], ROLES[operation.target_role]
    if back:
        former, target = target, former
    counts[former] -= 1
    counts[target] += 1
