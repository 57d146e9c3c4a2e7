# SPDX-License-Identifier: Apache-2.0
"""The steps of an operation that gives a worker the other role.

    ask     the worker has begun (WorkerService.ChangeRole): it takes no new work
    drain   nothing runs there any more
    commit  its record says the new role, or that of the incarnation that has come after it

The worker does it all by itself, bounded in time; what is done here is to ask, to follow and to tell. What decides is the role that
etcd keeps for the worker: a worker that ends before that was written comes back in its former role and the operation fails, one that
ends afterwards comes back in the new one and the operation goes on.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import grpc
import grpc.aio

from twinpool.config import TwinpoolConfig
from twinpool.control.view import ClusterView
from twinpool.errors import TwinpoolError, from_rpc_error
from twinpool.logs import get_logger
from twinpool.store import Keys, Store
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2, worker_pb2_grpc

ROLES: Final = {worker_pb2.ROLE_PREFILL: "prefill", worker_pb2.ROLE_DECODE: "decode"}

SILENT_SECONDS: Final = 45.0
"""So long after its time a worker that cannot be asked counts as one that has failed."""

GONE_SECONDS: Final = 10.0
"""A worker that is not registered for so long has ended."""

RETRY_SECONDS: Final = 1.0
"""Time between two tries of what failed for the moment."""

CALL_SECONDS: Final = 10.0
"""Longest wait for a worker's answer."""

_FINAL: Final = frozenset(
    {"STALE_EPOCH", "FLIP_REFUSED", "OPERATION_RUNNING", "INVALID_ARGUMENT", "PERMISSION_DENIED"}
)
"""What a worker says that will not be otherwise a moment later."""

log = get_logger(__name__)


def check_flip(
    record: pb.WorkerRecord, role: worker_pb2.Role.ValueType, others: list[pb.WorkerRecord], *, force: bool
) -> None:
    """``others``: workers that nobody is about to take away. Raises INVALID_ARGUMENT, FLIP_REFUSED, or LAST_OF_ROLE unless it is
    done by ``force``."""
    name = record.worker.name
    if role not in ROLES:
        raise TwinpoolError("INVALID_ARGUMENT", f"role: {role} is neither prefill nor decode", field="role")
    if record.role == role:
        raise TwinpoolError("FLIP_REFUSED", f"{name} is a {ROLES[role]} worker already")
    if record.state != pb.WORKER_STATE_READY:
        state = pb.WorkerState.Name(record.state).removeprefix("WORKER_STATE_").lower()
        raise TwinpoolError("FLIP_REFUSED", f"{name} is {state}; only a ready worker changes its role")
    if not force and not any(_alike(record, other) for other in others):
        former = ROLES.get(record.role, "other")
        raise TwinpoolError(
            "LAST_OF_ROLE", f"without {name} no ready {former} worker of {record.model} is left"
        )


def _alike(record: pb.WorkerRecord, other: pb.WorkerRecord) -> bool:
    """Whether another worker does the same work."""
    same = (other.pool, other.role, other.fingerprint) == (record.pool, record.role, record.fingerprint)
    return same and other.worker.name != record.worker.name and other.state == pb.WORKER_STATE_READY


class FlipSteps:
    """One a control process. A step that was begun may be begun again."""

    def __init__(
        self,
        store: Store,
        config: TwinpoolConfig,
        view: ClusterView,
        connect: Callable[[str], grpc.aio.Channel],
    ) -> None:
        self._store = store
        self._keys = Keys(config.cluster.name)
        self._start_seconds = config.pools.start_timeout_seconds
        self._view = view
        self._connect = connect

    async def ask(self, operation: pb.Operation) -> None:
        """Done once the worker has begun. Raises what it refuses with."""
        if await self._phase(operation) is None:
            await self._check_committed(operation)

    async def drain(self, operation: pb.Operation) -> None:
        """Done once nothing runs there. Raises FLIP_FAILED if the worker gave up."""
        while (phase := await self._phase(operation)) == worker_pb2.ROLE_CHANGE_PHASE_DRAINING:
            await self._view.changed(RETRY_SECONDS)
        if phase is None:
            await self._check_committed(operation)

    async def commit(self, operation: pb.Operation) -> None:
        """Done once everybody can see the new role, however long etcd is away. Raises FLIP_FAILED."""
        while (phase := await self._phase(operation)) is not None:
            if phase == worker_pb2.ROLE_CHANGE_PHASE_COMMITTED and self._shown(operation):
                return
            await self._view.changed(RETRY_SECONDS)
        await self._check_committed(operation)
        operation.successor.CopyFrom((await self._successor(operation)).worker)

    # --- the worker

    async def _phase(self, operation: pb.Operation) -> "worker_pb2.RoleChangePhase.ValueType | None":
        """What the worker says of it; None: that incarnation of it has ended. Raises FLIP_FAILED, and what is final of what the
        worker refuses with."""
        request = worker_pb2.ChangeRoleRequest(
            worker=operation.worker,
            role=operation.target_role,
            epoch=operation.epoch,
            timeout=operation.timeout,
        )
        while (record := await self._standing(operation)) is not None:
            try:
                async with self._connect(record.endpoint) as channel:
                    stub = worker_pb2_grpc.WorkerServiceStub(channel)
                    answer = await stub.ChangeRole(request, timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                known = from_rpc_error(error)
                if known.reason in _FINAL or self._late(operation):
                    raise known from None
                log.warning("flip_not_asked", operation=operation.id, reason=known.reason)
                _tell(operation, f"the worker cannot be asked: {known.reason}")
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if answer.phase == worker_pb2.ROLE_CHANGE_PHASE_ROLLED_BACK:
                role = ROLES.get(answer.role, "")
                raise TwinpoolError(
                    "FLIP_FAILED", f"{record.worker.name} is a {role} worker still, {answer.detail}"
                )
            _tell(operation, answer.detail)
            return answer.phase
        return None

    async def _standing(self, operation: pb.Operation) -> pb.WorkerRecord | None:
        """The record of the worker; None if it has ended: another incarnation has its name, or it is missing for long."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        while True:
            named = [found for found in self._view.workers() if _named(found, operation)]
            if any(found.worker == operation.worker for found in named):
                return next(found for found in named if found.worker == operation.worker)
            if named or loop.time() - since > GONE_SECONDS:
                return None
            await self._view.changed(RETRY_SECONDS)

    def _shown(self, operation: pb.Operation) -> bool:
        return any(
            found.worker == operation.worker
            and found.role == operation.target_role
            and found.epoch > operation.epoch
            and found.state != pb.WORKER_STATE_FLIPPING
            for found in self._view.workers()
        )

    # --- its end

    async def _check_committed(self, operation: pb.Operation) -> None:
        """Raises FLIP_FAILED if the worker has ended before the change counted."""
        key = self._keys.role(operation.pool, operation.worker.name)
        while True:
            try:
                item = await asyncio.to_thread(self._store.get, key)
                break
            except TwinpoolError as error:
                log.warning("role_not_read", operation=operation.id, reason=error.reason)
                _tell(operation, f"etcd cannot be read: {error.reason}")
                await asyncio.sleep(RETRY_SECONDS)
        last = pb.RoleRecord.FromString(item.value) if item is not None else pb.RoleRecord()
        wanted = (operation.worker, operation.target_role, operation.epoch + 1)
        if (last.worker, last.role, last.epoch) != wanted:
            former = ROLES.get(operation.role, "")
            raise TwinpoolError(
                "FLIP_FAILED",
                f"{operation.worker.name} has ended before it changed; it comes back as {former}",
            )

    async def _successor(self, operation: pb.Operation) -> pb.WorkerRecord:
        """The next incarnation, which begins in the new role."""
        _tell(operation, "the worker has ended; its next incarnation begins in the new role")
        deadline = asyncio.get_running_loop().time() + self._start_seconds
        while True:
            for found in self._view.workers():
                if (
                    _named(found, operation)
                    and found.worker != operation.worker
                    and found.role == operation.target_role
                    and found.state == pb.WORKER_STATE_READY
                ):
                    return found
            if asyncio.get_running_loop().time() > deadline:
                raise TwinpoolError(
                    "FLIP_FAILED", f"no other {operation.worker.name} came in {self._start_seconds:g} s"
                )
            await self._view.changed(RETRY_SECONDS)

    @staticmethod
    def _late(operation: pb.Operation) -> bool:
        now = pb.OperationStep()
        now.began_at.GetCurrentTime()
        taken = (now.began_at.ToNanoseconds() - operation.created_at.ToNanoseconds()) / 1e9
        return taken > operation.timeout.ToNanoseconds() / 1e9 + SILENT_SECONDS


def _named(record: pb.WorkerRecord, operation: pb.Operation) -> bool:
    return (record.pool, record.worker.name) == (operation.pool, operation.worker.name)


def _tell(operation: pb.Operation, detail: str) -> None:
    """What the step waits for, for whoever looks."""
    if operation.steps:
        operation.steps[-1].detail = detail
