# SPDX-License-Identifier: Apache-2.0
"""Operations on workers: drain one for good, or restart it. Each lies in etcd with its steps, so a control process that starts
anew goes on where the last one was.

    ask    the worker is told to leave (WorkerService.Drain)
    leave  its registration is gone: what ran there has finished, moved or been pulled
    end    its process is ended for good, where this control process runs it
    start  a restart: the next one is started, where this control process runs it
    ready  a restart: another incarnation is ready under the name

Operations on pools have steps of their own: who carries them out registers them.

A step that was begun may be begun again: each looks first whether it is done already.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, Protocol

import grpc
import grpc.aio

from twinpool.config import TwinpoolConfig
from twinpool.control.view import ClusterView
from twinpool.errors import TwinpoolError, as_twinpool_error, from_rpc_error
from twinpool.logs import get_logger
from twinpool.store import Keys, Store
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2, worker_pb2_grpc

ROLES: Final = {worker_pb2.ROLE_PREFILL: "prefill", worker_pb2.ROLE_DECODE: "decode"}

LEAVE_SECONDS: Final = 45.0
"""What a worker's leave takes at most beyond the time for its requests: offers, the linger, the end of its threads."""

RETRY_SECONDS: Final = 1.0
"""Time between two tries of what failed for the moment."""

CALL_SECONDS: Final = 10.0
"""Longest wait for a worker's answer."""

KEPT: Final = 64
"""Ended operations that are kept, beside those that say that a worker was drained for good."""

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
        self._pools = pools
        self._connect = connect
        self._known: dict[str, pb.Operation] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._listeners: list[Listener] = []
        self._beginning = asyncio.Lock()
        leave: dict[str, Step] = {"ask": self._ask, "leave": self._leave, "end": self._end}
        self._steps: dict[int, Mapping[str, Step]] = {
            pb.OPERATION_KIND_DRAIN: leave,
            pb.OPERATION_KIND_RESTART: leave | {"start": self._start, "ready": self._ready},
        }

    def register(self, kind: "pb.OperationKind.ValueType", steps: Mapping[str, Step]) -> None:
        """Gives a kind of operation its steps, in their order. Each looks first whether it is done already; what it raises ends
        the operation as failed. To be called before ``load``."""
        self._steps[kind] = steps

    def listen(self, listener: Listener) -> None:
        """``listener`` is told of each operation that has "begun", was "resumed", has "succeeded" or "failed"."""
        self._listeners.append(listener)

    # --- what operators ask

    async def begin(
        self, kind: "pb.OperationKind.ValueType", worker: str, seconds: float | None, parent: str = ""
    ) -> pb.Operation:
        """Records an operation and begins it. Asked again for the same while it runs, returns that one. ``parent``: the operation
        that it is a part of, or "reconciler"; a drain with a parent does not keep the worker's place empty.

        Raises WORKER_NOT_FOUND, OPERATION_RUNNING if another one of the worker runs, or STORE_UNAVAILABLE.
        """
        async with self._beginning:
            running = next((op for op in self._of(worker) if op.state == pb.OPERATION_STATE_RUNNING), None)
            if running is not None:
                if running.kind == kind:
                    return running
                raise TwinpoolError("OPERATION_RUNNING", f"{running.id} of {worker} is under way")
            operation = self._make(kind, worker, seconds)
            operation.parent = parent
            return await self.submit(operation)

    async def submit(self, operation: pb.Operation) -> pb.Operation:
        """Records an operation that was made elsewhere and begins it. Raises STORE_UNAVAILABLE."""
        await self._put(operation)
        self._known[operation.id] = operation
        self._spawn(operation)
        self._tell(operation, "begun")
        await self._tidy(operation.worker.name)
        return operation

    async def supersede(self, operation: pb.Operation, by: str) -> None:
        """Ends an operation that another one takes the place of, unless it has ended."""
        task = self._tasks.pop(operation.id, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if operation.state == pb.OPERATION_STATE_RUNNING:
            operation.state = pb.OPERATION_STATE_FAILED
            operation.error = f"OPERATION_SUPERSEDED: {by} has taken its place"
            self._tell(operation, "failed")
            await self._record(operation)

    async def release(self, pool: str, by: str) -> None:
        """Forgets that workers of a pool were drained for good; those that are being drained make their place free. Raises
        STORE_UNAVAILABLE."""
        retired = self.retired
        held = [op for op in self.all() if op.pool == pool and op.worker.name in retired]
        for operation in held:
            if operation.state == pb.OPERATION_STATE_RUNNING and not operation.parent:
                operation.parent = by
                await self._put(operation)
        await self._forget(op for op in held if op.state != pb.OPERATION_STATE_RUNNING)

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
        newest = {op.worker.name: op for op in reversed(self.all()) if op.HasField("worker")}
        return frozenset(
            name
            for name, op in newest.items()
            if op.kind == pb.OPERATION_KIND_DRAIN and op.state != pb.OPERATION_STATE_FAILED and not op.parent
        )

    # --- inside

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
                step.done_at.GetCurrentTime()
                log.info("operation_step", operation=operation.id, step=name)
            operation.state = pb.OPERATION_STATE_SUCCEEDED
        except Exception as error:
            known = as_twinpool_error(error)
            operation.state = pb.OPERATION_STATE_FAILED
            operation.error = f"{known.reason}: {known.message}"
            log.warning("operation_failed", operation=operation.id, error=operation.error)
        self._tell(operation, "succeeded" if operation.state == pb.OPERATION_STATE_SUCCEEDED else "failed")
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
        await self._pools.retire(operation.worker.name)

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
        while True:
            try:
                return await self._put(operation)
            except TwinpoolError as error:
                log.warning("operation_not_recorded", operation=operation.id, reason=error.reason)
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
