# SPDX-License-Identifier: Apache-2.0
"""What operators ask of pools, workers and events, beside operations on workers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Final

import grpc
import grpc.aio

from twinpool.control.cordons import Cordons
from twinpool.control.events import EventLog, Filter
from twinpool.control.operations import Operations
from twinpool.control.pool_set import PoolSet
from twinpool.control.reconcile.loop import Reconciler
from twinpool.control.reconcile.spec import PoolSpecs
from twinpool.control.scale import Scaling
from twinpool.control.view import ClusterView
from twinpool.errors import TwinpoolError
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2, worker_pb2_grpc

INSPECT_SECONDS: Final = 2.0
"""Longest wait for a worker's counts."""

EVENTS_SHOWN: Final = 20
"""Last events in the description of a worker."""

OPERATIONS_SHOWN: Final = 20
"""Last operations there."""


@dataclass(frozen=True, slots=True)
class PoolDesk:
    """Answers for a controller, of whose parts it is made. On its event loop."""

    check_leads: Callable[[], None]
    """Raises NOT_LEADER unless this process acts."""
    check_reads: Callable[[], None]
    """As ``check_leads``, where what was true when it led last will do."""
    view: ClusterView
    pools: PoolSet
    operations: Operations
    specs: PoolSpecs
    reconcilers: Mapping[str, Reconciler]
    scaling: Scaling
    cordons: Cordons
    log: EventLog
    connect: Callable[[str], grpc.aio.Channel]

    def check(self, *, changes: bool) -> None:
        """Raises NOT_LEADER where another process is to be asked."""
        if changes:
            self.check_leads()
        else:
            self.check_reads()

    def list_pools(self, pool: str) -> list[pb.PoolStatus]:
        """All, or one. Raises POOL_NOT_FOUND."""
        specs = [self.specs.get(pool)] if pool else self.specs.all()
        return [self.reconcilers[spec.pool].status() for spec in specs]

    async def scale(self, request: pb.ScalePoolRequest, seconds: float | None) -> pb.Operation:
        """See ``Scaling.begin``."""
        return await self.scaling.begin(
            request.pool,
            request.prefill if request.HasField("prefill") else None,
            request.decode if request.HasField("decode") else None,
            seconds=seconds,
            force=request.force,
            reason=request.reason,
        )

    async def cordon(self, worker: str, cordoned: bool) -> bool:
        """See ``Cordons.set``."""
        return await self.cordons.set(worker, cordoned, self._record(worker))

    async def describe(self, worker: str) -> pb.DescribeWorkerResponse:
        """All that is known of a worker. Raises WORKER_NOT_FOUND."""
        record = self._record(worker)
        found = pb.DescribeWorkerResponse(
            operations=[op for op in self.operations.all() if op.worker.name == worker][:OPERATIONS_SHOWN],
            events=self.log.all(Filter(subject=worker))[-EVENTS_SHOWN:],
            log=self.pools.log_lines(worker),
        )
        for status in self.list_pools(""):
            for replica in status.replicas:
                if replica.worker == worker:
                    found.replica.CopyFrom(replica)
        if record is None and not found.HasField("replica"):
            raise TwinpoolError("WORKER_NOT_FOUND", f"there is no worker {worker[:64]!r}")
        if record is not None:
            found.record.CopyFrom(record)
            with contextlib.suppress(grpc.RpcError):
                async with self.connect(record.endpoint) as channel:
                    stub = worker_pb2_grpc.WorkerServiceStub(channel)
                    asked = stub.Inspect(worker_pb2.InspectRequest(), timeout=INSPECT_SECONDS)
                    found.counts.CopyFrom(await asked)
        return found

    def events(self, wanted: Filter) -> list[pb.Event]:
        """The oldest first."""
        return self.log.all(wanted)

    def follow(self, wanted: Filter) -> AsyncIterator[pb.Event]:
        """Those there are, then those that come."""
        return self.log.follow(wanted)

    def _record(self, worker: str) -> pb.WorkerRecord | None:
        found = (record for record in self.view.workers() if record.worker.name == worker)
        return next(found, None)
