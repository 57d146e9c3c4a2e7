# SPDX-License-Identifier: Apache-2.0
"""What operators ask of pools, workers and events, beside operations on workers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Final, Protocol

import grpc
import grpc.aio

from twinpool.control.events import Filter
from twinpool.errors import TwinpoolError
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from twinpool.control.cordons import Cordons
    from twinpool.control.events import EventLog
    from twinpool.control.operations import Operations
    from twinpool.control.pools import RayPools
    from twinpool.control.reconcile.loop import Reconciler
    from twinpool.control.reconcile.spec import PoolSpecs
    from twinpool.control.scale import Scaling
    from twinpool.control.view import ClusterView

INSPECT_SECONDS: Final = 2.0
"""Longest wait for a worker's counts."""

EVENTS_SHOWN: Final = 20
"""Last events in the description of a worker."""


class Acting(Protocol):
    """A control process; see ``Controller``."""

    view: ClusterView
    pools: RayPools
    events: EventLog
    operations: Operations
    specs: PoolSpecs
    cordons: Cordons
    reconciler: Reconciler
    scaling: Scaling

    def check_leads(self) -> None: ...
    def check_reads(self) -> None: ...


class PoolDesk:
    """Answers for a controller. On its event loop."""

    def __init__(self, controller: Acting, connect: Callable[[str], grpc.aio.Channel]) -> None:
        self._controller = controller
        self._connect = connect

    def check(self, *, changes: bool) -> None:
        """Raises NOT_LEADER where another process is to be asked."""
        if changes:
            self._controller.check_leads()
        else:
            self._controller.check_reads()

    def pools(self, pool: str) -> list[pb.PoolStatus]:
        """All, or one. Raises POOL_NOT_FOUND."""
        controller = self._controller
        names = [pool] if pool else [spec.pool for spec in controller.specs.all()]
        return [controller.reconciler.status(name) for name in names]

    async def scale(self, request: pb.ScalePoolRequest, seconds: float | None) -> pb.Operation:
        """See ``Scaling.begin``."""
        return await self._controller.scaling.begin(
            request.pool,
            request.prefill if request.HasField("prefill") else None,
            request.decode if request.HasField("decode") else None,
            seconds=seconds,
            force=request.force,
            reason=request.reason,
        )

    async def cordon(self, worker: str, cordoned: bool) -> bool:
        """See ``Cordons.set``."""
        return await self._controller.cordons.set(worker, cordoned, self._record(worker))

    async def describe(self, worker: str) -> pb.DescribeWorkerResponse:
        """All that is known of a worker. Raises WORKER_NOT_FOUND."""
        controller, record = self._controller, self._record(worker)
        found = pb.DescribeWorkerResponse(
            operations=[op for op in controller.operations.all() if op.worker.name == worker],
            events=controller.events.all(Filter(subject=worker))[-EVENTS_SHOWN:],
            log=controller.pools.log_lines(worker),
        )
        for status in self.pools(""):
            for replica in status.replicas:
                if replica.worker == worker:
                    found.replica.CopyFrom(replica)
        if record is None and not found.HasField("replica"):
            raise TwinpoolError("WORKER_NOT_FOUND", f"there is no worker {worker[:64]!r}")
        if record is not None:
            found.record.CopyFrom(record)
            with contextlib.suppress(grpc.RpcError):
                async with self._connect(record.endpoint) as channel:
                    stub = worker_pb2_grpc.WorkerServiceStub(channel)
                    asked = stub.Inspect(worker_pb2.InspectRequest(), timeout=INSPECT_SECONDS)
                    found.counts.CopyFrom(await asked)
        return found

    def events(self, wanted: Filter) -> list[pb.Event]:
        """The oldest first."""
        return self._controller.events.all(wanted)

    def follow(self, wanted: Filter) -> AsyncIterator[pb.Event]:
        """Those there are, then those that come."""
        return self._controller.events.follow(wanted)

    def _record(self, worker: str) -> pb.WorkerRecord | None:
        found = (record for record in self._controller.view.workers() if record.worker.name == worker)
        return next(found, None)
