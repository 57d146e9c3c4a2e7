# SPDX-License-Identifier: Apache-2.0
"""Operations on workers: drain one for good, restart it, or give it the other role (``flips``). Each lies in etcd with its steps,
so a control process that starts anew goes on where the last one was.

    ask    the worker is told to leave (WorkerService.Drain)
    leave  its registration is gone: what ran there has finished, moved or been pulled
    end    its process is ended for good, where this control process runs it
    start  a restart: the next one is started, where this control process runs it
    ready  a restart: another incarnation is ready under the name

A step that was begun may be begun again: each looks first whether it is done already.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Final, Protocol, TypeAlias

import grpc
import grpc.aio

from twinpool.config import TwinpoolConfig
from twinpool.control.flips import ROLES, FlipSteps, check_flip
from twinpool.control.view import ClusterView
from twinpool.errors import TwinpoolError, as_twinpool_error, from_rpc_error
from twinpool.logs import get_logger
from twinpool.store import Keys, Store
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2, worker_pb2_grpc

LEAVE_SECONDS: Final = 45.0
"""What a worker's leave takes at most beyond the time for its requests: offers, the linger, the end of its threads."""

RETRY_SECONDS: Final = 1.0
"""Time between two tries of what failed for the moment."""

CALL_SECONDS: Final = 10.0
"""Longest wait for a worker's answer."""

KEPT: Final = 64
"""Ended operations that are kept, beside those that say that a worker was drained for good."""

Steps: TypeAlias = dict[str, Callable[[pb.Operation], Awaitable[None]]]
"""What is done, in its order, by the names that a record has for it."""

log = get_logger(__name__)


class Pools(Protocol):
    """Whoever runs the workers' processes."""

    def manages(self, name: str) -> bool:
        """Whether a worker's process is run by it."""
        ...

    async def retire(self, name: str) -> None:
        """Ends a worker's process, if there is one, and does not start it again."""
        ...

    async def add(self, role: str, name: str) -> None:
        """Starts a worker, unless it runs."""
        ...

    def check_one(self, name: str) -> None:
        """Raises the error of a worker that could not start."""
        ...


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
        self._pools = pools
        self._connect = connect
        flips = FlipSteps(store, config, view, connect)
        drain: Steps = {"ask": self._ask, "leave": self._leave, "end": self._end}
        self._steps: dict[int, Steps] = {
            pb.OPERATION_KIND_DRAIN: drain,
            pb.OPERATION_KIND_RESTART: drain | {"start": self._start, "ready": self._ready},
            pb.OPERATION_KIND_FLIP: {"ask": flips.ask, "drain": flips.drain, "commit": flips.commit},
        }
        # What is asked at the same time is judged one after the other.
        self._beginning = asyncio.Lock()
        self._known: dict[str, pb.Operation] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    # --- what operators ask

    async def begin(
        self,
        kind: "pb.OperationKind.ValueType",
        worker: str,
        seconds: float | None,
        role: "worker_pb2.Role.ValueType" = worker_pb2.ROLE_UNSPECIFIED,
        *,
        force: bool = False,
    ) -> pb.Operation:
        """Records an operation and begins it. Asked again for the same while it runs, returns that one. ``role``: of a flip, the
        one that the worker is to have; ``force``: also if no other worker is left in its own.

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
            await self._put(operation)
            self._known[operation.id] = operation
            self._spawn(operation)
        await self._tidy(worker)
        return operation

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

    async def stop(self) -> None:
        """Leaves everything as it is, for the next control process."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    @property
    def retired(self) -> frozenset[str]:
        """Workers that were drained for good, or are being: nobody is to start them."""
        newest = {op.worker.name: op for op in reversed(self.all())}
        return frozenset(
            name
            for name, op in newest.items()
            if op.kind == pb.OPERATION_KIND_DRAIN and op.state != pb.OPERATION_STATE_FAILED
        )

    # --- inside

    def _of(self, worker: str) -> list[pb.Operation]:
        return [op for op in self.all() if op.worker.name == worker]

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
            operation.state = pb.OPERATION_STATE_SUCCEEDED
        except Exception as error:
            known = as_twinpool_error(error)
            operation.state = pb.OPERATION_STATE_FAILED
            operation.error = f"{known.reason}: {known.message}"
            log.warning("operation_failed", operation=operation.id, error=operation.error)
        await self._record(operation)
        self._tasks.pop(operation.id, None)

    async def _ask(self, operation: pb.Operation) -> None:
        request = worker_pb2.DrainRequest(worker=operation.worker, timeout=operation.timeout)
        while (record := self._registered(operation)) is not None:
            try:
                async with self._connect(record.endpoint) as channel:
                    await worker_pb2_grpc.WorkerServiceStub(channel).Drain(request, timeout=CALL_SECONDS)
                return
            except grpc.RpcError as error:
                known = from_rpc_error(error)
                if known.reason == "INCARNATION_MISMATCH":
                    return
                if self._late(operation):
                    raise known from None
                log.warning("drain_not_asked", operation=operation.id, reason=known.reason)
            await asyncio.sleep(RETRY_SECONDS)

    async def _leave(self, operation: pb.Operation) -> None:
        while self._registered(operation) is not None:
            if self._late(operation):
                if self._pools.manages(operation.worker.name):
                    log.warning("worker_does_not_leave", operation=operation.id)
                    return  # it is ended
                raise TwinpoolError("DEADLINE_EXCEEDED", f"{operation.worker.name} has not left")
            await self._view.changed(RETRY_SECONDS)

    async def _end(self, operation: pb.Operation) -> None:
        """Whoever starts a worker of that name again, after it was drained for good, says in which role."""
        await self._pools.retire(operation.worker.name)
        if operation.kind == pb.OPERATION_KIND_DRAIN:
            key = self._keys.role(operation.pool, operation.worker.name)
            await self._patiently(operation, partial(self._store.delete, key))

    async def _start(self, operation: pb.Operation) -> None:
        role = ROLES.get(operation.role)
        if role is not None:
            await self._pools.add(role, operation.worker.name)

    async def _ready(self, operation: pb.Operation) -> None:
        """Where nobody here runs the worker, whoever supervises its process starts it."""
        wait = self._config.pools.start_timeout_seconds
        deadline = asyncio.get_running_loop().time() + wait
        while (record := self._successor(operation)) is None:
            self._pools.check_one(operation.worker.name)
            if asyncio.get_running_loop().time() > deadline:
                raise TwinpoolError(
                    "DEADLINE_EXCEEDED", f"no other {operation.worker.name} came in {wait:g} s"
                )
            await self._view.changed(RETRY_SECONDS)
        operation.successor.CopyFrom(record.worker)

    def _registered(self, operation: pb.Operation) -> pb.WorkerRecord | None:
        found = (record for record in self._view.workers() if record.worker == operation.worker)
        return next(found, None)

    def _successor(self, operation: pb.Operation) -> pb.WorkerRecord | None:
        for record in self._view.workers():
            same = record.worker.name == operation.worker.name
            if same and record.worker != operation.worker and record.state == pb.WORKER_STATE_READY:
                return record
        return None

    def _late(self, operation: pb.Operation) -> bool:
        now = pb.OperationStep()
        now.began_at.GetCurrentTime()
        taken = (now.began_at.ToNanoseconds() - operation.created_at.ToNanoseconds()) / 1e9
        return taken > operation.timeout.ToNanoseconds() / 1e9 + LEAVE_SECONDS

    async def _put(self, operation: pb.Operation) -> None:
        value = operation.SerializeToString()
        await asyncio.to_thread(self._store.put, self._keys.operation(operation.id), value)

    async def _record(self, operation: pb.Operation) -> None:
        """As ``_put``, however long etcd is away."""
        key, value = self._keys.operation(operation.id), operation.SerializeToString()
        await self._patiently(operation, partial(self._store.put, key, value))

    async def _patiently(self, operation: pb.Operation, write: Callable[[], object]) -> None:
        """Writes to etcd, however long it is away."""
        while True:
            try:
                await asyncio.to_thread(write)
                return
            except TwinpoolError as error:
                log.warning("operation_not_recorded", operation=operation.id, reason=error.reason)
                if operation.steps:
                    operation.steps[-1].detail = f"etcd cannot be written: {error.reason}"
                await asyncio.sleep(RETRY_SECONDS)

    async def _tidy(self, worker: str) -> None:
        """Forgets what is superseded, and the oldest of what has ended."""
        superseded = self._of(worker)[1:]
        ended = [op for op in self.all() if op.state != pb.OPERATION_STATE_RUNNING]
        old = [op for op in ended if op.worker.name not in self.retired][KEPT:]
        with contextlib.suppress(TwinpoolError):
            await self._forget(op for op in (*superseded, *old) if op.id not in self._tasks)

    async def _forget(self, operations: Iterable[pb.Operation]) -> None:
        for name in {operation.id for operation in operations}:
            await asyncio.to_thread(self._store.delete, self._keys.operation(name))
            self._known.pop(name, None)


def _step_of(operation: pb.Operation) -> str:
    return operation.steps[-1].name if operation.steps else ""
