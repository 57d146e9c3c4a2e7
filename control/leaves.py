# SPDX-License-Identifier: Apache-2.0
"""The steps of operations that take a worker out, for good or to start another one under its name.

ask    the worker is told to leave (WorkerService.Drain)
leave  its registration is gone: what ran there has finished, moved or been pulled
end    its process is ended for good, where this control process runs it
start  a restart: the next one is started, where this control process runs it
ready  a restart: another incarnation is ready under the name
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Protocol

import grpc
import grpc.aio

from twinpool.config import TwinpoolConfig
from twinpool.control.flips import CALL_SECONDS, RETRY_SECONDS, ROLES
from twinpool.control.view import ClusterView
from twinpool.errors import TwinpoolError, from_rpc_error
from twinpool.logs import get_logger
from twinpool.store import Keys, Store
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2, worker_pb2_grpc

LEAVE_SECONDS: Final = 45.0
"""What a worker's leave takes at most beyond the time for its requests: offers, the linger, the end of its threads."""

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


class LeaveSteps:
    """One a control process. A step that was begun may be begun again: each looks first whether it is done already."""

    def __init__(
        self,
        store: Store,
        config: TwinpoolConfig,
        view: ClusterView,
        pools: Pools,
        connect: Callable[[str], grpc.aio.Channel],
        patiently: Callable[[pb.Operation, Callable[[], object]], Awaitable[None]],
    ) -> None:
        """``patiently`` writes to etcd, however long it is away."""
        self._store = store
        self._config = config
        self._keys = Keys(config.cluster.name)
        self._view = view
        self._pools = pools
        self._connect = connect
        self._patiently = patiently

    async def ask(self, operation: pb.Operation) -> None:
        """Done once the worker has been told."""
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

    async def leave(self, operation: pb.Operation) -> None:
        """Done once its registration is gone, or its time is over."""
        while self._registered(operation) is not None:
            if self._late(operation):
                if self._pools.manages(operation.worker.name):
                    log.warning("worker_does_not_leave", operation=operation.id)
                    return  # it is ended
                raise TwinpoolError("DEADLINE_EXCEEDED", f"{operation.worker.name} has not left")
            await self._view.changed(RETRY_SECONDS)

    async def end(self, operation: pb.Operation) -> None:
        """Whoever starts a worker of that name again, after it was drained for good, says in which role."""
        await self._pools.retire(operation.worker.name)
        if operation.kind == pb.OPERATION_KIND_DRAIN:
            key = self._keys.role(operation.pool, operation.worker.name)
            await self._patiently(operation, partial(self._store.delete, key))

    async def start(self, operation: pb.Operation) -> None:
        """Done once the next one is on its way."""
        role = ROLES.get(operation.role)
        if role is not None:
            await self._pools.add(role, operation.worker.name)

    async def ready(self, operation: pb.Operation) -> None:
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
