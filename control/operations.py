# SPDX-License-Identifier: Apache-2.0
"""Operations on workers: drain one for good or restart it (``leaves``), or give it the other role (``flips``). Each lies in etcd
with its steps, so a control process that starts anew goes on where the last one was.

Operations on pools have steps of their own: who carries them out registers them.

A step that was begun may be begun again: each looks first whether it is done already.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Final

import grpc.aio

from twinpool.config import TwinpoolConfig
from twinpool.control.flips import FlipSteps, check_flip
from twinpool.control.leaves import LeaveSteps, Pools
from twinpool.control.patience import patiently
from twinpool.control.view import ClusterView
from twinpool.errors import TwinpoolError, as_twinpool_error
from twinpool.logs import get_logger
from twinpool.store import Keys, Store
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2

KEPT: Final = 256
"""Ended operations of a cluster that are kept, the newest; beside those that say that a worker was drained for good."""

log = get_logger(__name__)

Step = Callable[[pb.Operation], Awaitable[None]]
Listener = Callable[[pb.Operation, str], None]


class Operations:
    """One a control process. On its event loop."""

    def __init__(
        self,
        store: Store,
        config: TwinpoolConfig,
        view: ClusterView,
        pools: Pools,
        connect: Callable[[str], grpc.aio.Channel],
    ) -> None:
        self._store = store
        self._config = config
        self._keys = Keys(config.cluster.name)
        self._view = view
        leave = LeaveSteps(store, config, view, pools, connect, self.patiently)
        flip = FlipSteps(store, config, view, connect)
        away: dict[str, Step] = {"ask": leave.ask, "leave": leave.leave, "end": leave.end}
        self._steps: dict[int, Mapping[str, Step]] = {
            pb.OPERATION_KIND_DRAIN: away,
            pb.OPERATION_KIND_RESTART: away | {"start": leave.start, "ready": leave.ready},
            pb.OPERATION_KIND_FLIP: {"ask": flip.ask, "drain": flip.drain, "commit": flip.commit},
        }
        self._prepare: dict[int, Callable[[pb.Operation], None]] = {}
        self._undo: dict[int, Step] = {}
        # What is asked at the same time is judged one after the other.
        self._beginning = asyncio.Lock()
        self._known: dict[str, pb.Operation] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._listeners: list[Listener] = []

    def register(self, kind: "pb.OperationKind.ValueType", steps: Mapping[str, Step]) -> None:
        """Gives a kind of operation its steps, in their order. Each looks first whether it is done already; what it raises ends
        the operation as failed. To be called before ``load``."""
        self._steps[kind] = steps

    def surround(
        self,
        kind: "pb.OperationKind.ValueType",
        first: Mapping[str, Step],
        prepare: Callable[[pb.Operation], None],
        undo: Step,
    ) -> None:
        """Adds to a kind of operation on workers: ``prepare`` completes a new one or refuses it, ``first`` are steps before its
        own, ``undo`` is done once it has failed, maybe more than once. To be called before ``load``."""
        self._steps[kind] = dict(first) | dict(self._steps[kind])
        self._prepare[kind], self._undo[kind] = prepare, undo

    @property
    def steps(self) -> dict[int, tuple[str, ...]]:
        """The names of the steps of each kind of operation (``OperationKind``), in their order."""
        return {kind: tuple(steps) for kind, steps in self._steps.items()}

    def listen(self, listener: Listener) -> None:
        """``listener`` is told of each operation that has "begun", was "resumed", has "succeeded" or "failed"."""
        self._listeners.append(listener)

    # --- what operators ask

    async def begin(
        self,
        kind: "pb.OperationKind.ValueType",
        worker: str,
        seconds: float | None,
        role: "worker_pb2.Role.ValueType" = worker_pb2.ROLE_UNSPECIFIED,
        *,
        force: bool = False,
        parent: str = "",
        reason: str = "",
    ) -> pb.Operation:
        """Records an operation and begins it. Asked again for the same while it runs, returns that one. ``role``: of a flip, the
        one that the worker is to have; ``force``: also if no other worker is left in its own. ``parent``: the operation that it is
        a part of, or "reconciler"; a drain with a parent does not keep the worker's place empty. ``reason``: why, for people.

        Raises WORKER_NOT_FOUND, OPERATION_RUNNING if another one of the worker runs, or STORE_UNAVAILABLE; of a flip what
        ``check_flip`` raises.
        """
        async with self._beginning:
            running = next((op for op in self._of(worker) if op.state == pb.OPERATION_STATE_RUNNING), None)
            if running is not None:
                if (running.kind, running.target_role) == (kind, role):
                    return running
                raise TwinpoolError("OPERATION_RUNNING", f"{running.id} of {worker} is under way")
            operation = self._make(kind, worker, seconds)
            if kind == pb.OPERATION_KIND_FLIP:
                self._aim(operation, role, force)
            if kind in self._prepare:
                self._prepare[kind](operation)
            operation.parent, operation.reason = parent, reason
            return await self.submit(operation)

    async def submit(self, operation: pb.Operation) -> pb.Operation:
        """Records an operation that was made elsewhere and begins it. Raises STORE_UNAVAILABLE."""
        # Known at once, so that nobody begins what it excludes while it is recorded.
        self._known[operation.id] = operation
        try:
            await self._put(operation)
        except BaseException:
            self._known.pop(operation.id, None)
            # It may have been written all the same, and must not come to life with the next leader.
            self._tasks[operation.id] = asyncio.create_task(self._unwrite(operation), name=operation.id)
            raise
        self._spawn(operation)
        self._tell(operation, "begun")
        await self._tidy()
        return operation

    async def supersede(self, operation: pb.Operation, by: str) -> None:
        """Ends an operation that another one takes the place of, unless it has ended."""
        task = self._tasks.pop(operation.id, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if operation.state == pb.OPERATION_STATE_RUNNING:
            operation.error = f"OPERATION_SUPERSEDED: {by} has taken its place"
            _end(operation, pb.OPERATION_STATE_FAILED)
            self._tell(operation, "failed")
            await self._record(operation)

    async def release(self, pool: str, by: str) -> None:
        """Workers of a pool that were drained for good, or are being drained, make their places free. Raises STORE_UNAVAILABLE."""
        for operation in [op for op in self._retiring() if op.pool == pool]:
            operation.released = by
            try:
                await self._put(operation)
            except TwinpoolError:
                operation.released = ""
                raise

    def running(self, kind: "pb.OperationKind.ValueType | None" = None) -> list[pb.Operation]:
        """Those under way, of one kind if given; the newest first."""
        return [
            op
            for op in self.all()
            if op.state == pb.OPERATION_STATE_RUNNING and (kind is None or op.kind == kind)
        ]

    def get(self, name: str) -> pb.Operation:
        """Raises OPERATION_NOT_FOUND."""
        if name not in self._known:
            raise TwinpoolError("OPERATION_NOT_FOUND", f"there is no operation {name[:64]!r}")
        return self._known[name]

    def all(self) -> list[pb.Operation]:
        """The newest first."""
        return sorted(self._known.values(), key=lambda op: op.created_at.ToNanoseconds(), reverse=True)

    # --- life

    async def load(self) -> None:
        """Reads what was recorded. Raises STORE_UNAVAILABLE."""
        snapshot = await asyncio.to_thread(self._store.list_prefix, self._keys.operations)
        self._known.clear()
        for key, item in snapshot.items.items():
            with contextlib.suppress(Exception):
                operation = pb.Operation.FromString(item.value)
                if self._keys.operation(operation.id) == key:
                    self._known[operation.id] = operation

    def resume(self) -> None:
        """Goes on with what was under way when the last control process ended."""
        for operation in self._known.values():
            if operation.state == pb.OPERATION_STATE_RUNNING and operation.id not in self._tasks:
                log.info("operation_resumed", operation=operation.id, step=_step_of(operation))
                self._spawn(operation)
                self._tell(operation, "resumed")

    async def stop(self) -> None:
        """Leaves everything as it is, for the next control process."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()

    @property
    def retired(self) -> frozenset[str]:
        """Workers that an operator drained for good, or is draining: nobody is to start them."""
        return frozenset(op.worker.name for op in self._retiring())

    # --- inside

    def _retiring(self) -> list[pb.Operation]:
        """The drains that keep a worker's place empty: each the last word about its worker."""
        newest = {op.worker.name: op for op in reversed(self.all()) if op.HasField("worker")}
        return [
            op
            for op in newest.values()
            if op.kind == pb.OPERATION_KIND_DRAIN
            and op.state != pb.OPERATION_STATE_FAILED
            and not (op.parent or op.released)
        ]

    def _of(self, worker: str) -> list[pb.Operation]:
        return [op for op in self.all() if op.HasField("worker") and op.worker.name == worker]

    def _tell(self, operation: pb.Operation, what: str) -> None:
        for listener in self._listeners:
            listener(operation, what)

    def _make(self, kind: "pb.OperationKind.ValueType", worker: str, seconds: float | None) -> pb.Operation:
        operation = pb.Operation(
            id=f"{worker}-{secrets.token_hex(4)}", kind=kind, state=pb.OPERATION_STATE_RUNNING
        )
        record = next((record for record in self._view.workers() if record.worker.name == worker), None)
        if record is not None:
            operation.worker.CopyFrom(record.worker)
            operation.pool, operation.role = record.pool, record.role
        elif kind == pb.OPERATION_KIND_RESTART and worker in self.retired:
            # It was drained for good: what is left of a restart is the start.
            before = self._of(worker)[0]
            operation.worker.CopyFrom(before.worker)
            operation.pool, operation.role = before.pool, before.role
        else:
            raise TwinpoolError("WORKER_NOT_FOUND", f"there is no worker {worker[:64]!r}")
        wait = self._config.worker.drain_timeout_seconds if seconds is None else seconds
        operation.timeout.FromNanoseconds(int(wait * 1e9))
        operation.created_at.GetCurrentTime()
        return operation

    def _aim(self, operation: pb.Operation, role: "worker_pb2.Role.ValueType", force: bool) -> None:
        """Completes a flip. Raises what ``check_flip`` raises."""
        busy = {op.worker.name for op in self._known.values() if op.state == pb.OPERATION_STATE_RUNNING}
        workers = self._view.workers()
        others = [record for record in workers if record.worker.name not in busy]
        record = next(record for record in workers if record.worker == operation.worker)
        check_flip(record, role, others, force=force)
        operation.target_role, operation.epoch = role, record.epoch

    def _spawn(self, operation: pb.Operation) -> None:
        self._tasks[operation.id] = asyncio.create_task(self._run(operation), name=operation.id)

    async def _run(self, operation: pb.Operation) -> None:
        """Never raises but for its cancellation, after which the operation is as it was."""
        try:
            for name, do in self._steps[operation.kind].items():
                step = next((step for step in operation.steps if step.name == name), None)
                if step is not None and step.HasField("done_at"):
                    continue
                if step is None:
                    step = operation.steps.add(name=name)
                    step.began_at.GetCurrentTime()
                    await self._record(operation)
                await do(operation)
                step.detail = ""
                step.done_at.GetCurrentTime()
                log.info("operation_step", operation=operation.id, step=name)
            _end(operation, pb.OPERATION_STATE_SUCCEEDED)
        except Exception as error:
            known = as_twinpool_error(error)
            operation.error = f"{known.reason}: {known.message}"
            log.warning("operation_failed", operation=operation.id, error=operation.error)
            # Under way until then: what it has changed is nobody else's to mend.
            await self._take_back(operation)
            _end(operation, pb.OPERATION_STATE_FAILED)
        self._tell(operation, "succeeded" if operation.state == pb.OPERATION_STATE_SUCCEEDED else "failed")
        await self._record(operation)
        self._tasks.pop(operation.id, None)

    async def _take_back(self, operation: pb.Operation) -> None:
        """Never raises: an operation that has failed ends, whatever is left of it."""
        if operation.kind in self._undo:
            try:
                await self._undo[operation.kind](operation)
            except TwinpoolError as error:
                log.warning("operation_not_taken_back", operation=operation.id, reason=error.reason)

    async def _put(self, operation: pb.Operation) -> None:
        value = operation.SerializeToString()
        await asyncio.to_thread(self._store.put, self._keys.operation(operation.id), value)

    async def _record(self, operation: pb.Operation) -> None:
        """As ``_put``, however long etcd is away."""
        key, value = self._keys.operation(operation.id), operation.SerializeToString()
        await self.patiently(operation, partial(self._store.put, key, value))

    async def _unwrite(self, operation: pb.Operation) -> None:
        await self.patiently(
            operation,
            partial(self._store.delete, self._keys.operation(operation.id)),
            "operation_not_deleted",
        )
        self._tasks.pop(operation.id, None)

    async def patiently(
        self, operation: pb.Operation, write: Callable[[], object], event: str = "operation_not_recorded"
    ) -> None:
        """Writes to etcd, however long it is away."""
        await patiently(operation, partial(asyncio.to_thread, write), event, passes=lambda _: True)

    async def _tidy(self) -> None:
        """Forgets the oldest of what has ended, but for what is needed yet."""
        needed = {op.id for op in (*self.running(), *self._retiring())}
        ended = [op for op in self.all() if not needed & {op.id, op.parent}]
        with contextlib.suppress(TwinpoolError):
            await self._forget(op for op in ended[KEPT:] if op.id not in self._tasks)

    async def _forget(self, operations: Iterable[pb.Operation]) -> None:
        for name in {operation.id for operation in operations}:
            await asyncio.to_thread(self._store.delete, self._keys.operation(name))
            self._known.pop(name, None)


def _end(operation: pb.Operation, state: "pb.OperationState.ValueType") -> None:
    operation.ended_at.GetCurrentTime()
    operation.state = state


def _step_of(operation: pb.Operation) -> str:
    return operation.steps[-1].name if operation.steps else ""
