# SPDX-License-Identifier: Apache-2.0
"""Lets the record of a pool follow a worker that changes its role, so that nobody is started or drained in its stead.

A flip writes one worker less of the former role and one more of the new one before it asks the worker (step ``write``), and takes
that back if it fails. The record itself says which flips under way its numbers count: so each is counted once, whoever writes it
and however often, and the reconciler counts a worker by its new role from that very moment on. Numbers that an operator asks for
(``scaled``) are those of the end: flips that were under way by then change nothing of them any more.
"""

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Final

from twinpool.control.flips import ROLES
from twinpool.control.operations import Operations
from twinpool.control.patience import patiently
from twinpool.control.reconcile.spec import PoolSpecs, desired, resized
from twinpool.errors import TwinpoolError
from twinpool.v1 import control_pb2 as pb

_WRITTEN: Final = "write"

Change = Callable[[pb.PoolSpec, pb.Operation, Collection[str], str], pb.PoolSpec]
"""``counted`` or ``taken_back``."""


class FlipCounts:
    """One a control process that runs the workers of ``pools``. On its event loop."""

    def __init__(self, operations: Operations, specs: PoolSpecs, pools: Collection[str]) -> None:
        self._operations, self._specs, self._pools = operations, specs, pools
        operations.surround(
            pb.OPERATION_KIND_FLIP, {_WRITTEN: self._write}, prepare=self._prepare, undo=self._undo
        )

    def _prepare(self, operation: pb.Operation) -> None:
        """Says which numbers will be wanted afterwards. Raises POOL_BOUNDS, or OPERATION_RUNNING while the pool is scaled."""
        pool = operation.pool
        if pool not in self._pools:
            return
        for running in self._operations.running(pb.OPERATION_KIND_SCALE):
            if running.pool == pool and running.id != operation.parent:
                raise TwinpoolError("OPERATION_RUNNING", f"{running.id} of {pool} is under way")
        record = self._specs.get(pool)
        for flip in (*self._running(pool), operation):
            record = counted(record, flip, {}, self._specs.key(pool))
        operation.prefill, operation.decode = desired(record)["prefill"], desired(record)["decode"]

    async def _write(self, operation: pb.Operation) -> None:
        await self._change(operation, counted)

    async def _undo(self, operation: pb.Operation) -> None:
        await self._change(operation, taken_back)

    def _running(self, pool: str) -> list[pb.Operation]:
        flips = self._operations.running(pb.OPERATION_KIND_FLIP)
        return [flip for flip in reversed(flips) if flip.pool == pool]

    def _names(self, pool: str) -> set[str]:
        return {flip.id for flip in self._running(pool)}

    async def _change(self, operation: pb.Operation, change: Change) -> None:
        pool = operation.pool
        if pool not in self._pools:
            return
        key = self._specs.key(pool)

        def changed(record: pb.PoolSpec) -> pb.PoolSpec:
            return change(record, operation, self._names(pool), key)

        await patiently(operation, lambda: self._specs.change(pool, changed), "flip_waits")


def counted(
    record: pb.PoolSpec, flip: pb.Operation, running: Collection[str], key: str = "pools"
) -> pb.PoolSpec:
    """The record with a flip counted as done; as it is if it counts it already, or is newer. ``running``: ids of flips under way,
    others are forgotten; empty: it is not known. ``key``: where the bounds are configured. Raises POOL_BOUNDS."""
    if flip.id in (*record.counted, *record.settled):
        return record
    return _changed(record, flip, running, (*record.counted, flip.id), key)


def taken_back(
    record: pb.PoolSpec, flip: pb.Operation, running: Collection[str], key: str = "pools"
) -> pb.PoolSpec:
    """The record without what a flip has changed; as it is if that was nothing. Raises POOL_BOUNDS."""
    if flip.id not in record.counted:
        return record
    others = [name for name in record.counted if name != flip.id]
    return _changed(record, flip, running, others, key, back=True)


def scaled(
    record: pb.PoolSpec, prefill: int, decode: int, flips: Iterable[pb.Operation], key: str = "pools"
) -> pb.PoolSpec:
    """The record with numbers that an operator asks for, while ``flips`` are under way. Raises POOL_BOUNDS."""
    spec = resized(record, prefill, decode, key)
    del spec.counted[:], spec.settled[:]
    spec.settled.extend(sorted(flip.id for flip in flips))
    return _next(spec, record)


def _changed(
    record: pb.PoolSpec,
    flip: pb.Operation,
    running: Collection[str],
    names: Iterable[str],
    key: str,
    *,
    back: bool = False,
) -> pb.PoolSpec:
    former, target = ROLES[flip.role], ROLES[flip.target_role]
    if back:
        former, target = target, former
    numbers = desired(record)
    numbers[former] -= 1
    numbers[target] += 1
    spec = resized(record, numbers["prefill"], numbers["decode"], key)
    kept = partial(filter, lambda name: not running or name in running or name == flip.id)
    own, others = list(kept(names)), list(kept(record.settled))
    del spec.counted[:], spec.settled[:]
    spec.counted.extend(own)
    spec.settled.extend(others)
    return _next(spec, record)


def _next(spec: pb.PoolSpec, record: pb.PoolSpec) -> pb.PoolSpec:
    """With the next generation if anything has changed."""
    spec.generation = record.generation
    if spec != record:
        spec.generation += 1
    return spec
