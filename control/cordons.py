# SPDX-License-Identifier: Apache-2.0
"""Workers that new work is kept away from.

The wish lies in etcd, so that it outlives the worker and the control process; the worker is told, and says it in its record, which
routers follow. A worker that starts anew is told again.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

import grpc
import grpc.aio

from twinpool.control.events import EventLog
from twinpool.errors import TwinpoolError, from_rpc_error
from twinpool.ids import is_name
from twinpool.logs import get_logger
from twinpool.store import Keys, Store
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2, worker_pb2_grpc

CALL_SECONDS: Final = 5.0
"""Longest wait for a worker's answer."""

log = get_logger(__name__)


class Cordons:
    """One a control process. On its event loop."""

    def __init__(
        self, store: Store, cluster: str, events: EventLog, connect: Callable[[str], grpc.aio.Channel]
    ) -> None:
        self._store = store
        self._keys = Keys(cluster)
        self._events = events
        self._connect = connect
        self._names: set[str] = set()

    def __contains__(self, worker: str) -> bool:
        return worker in self._names

    async def load(self) -> None:
        """Reads the wishes. Raises STORE_UNAVAILABLE."""
        snapshot = await asyncio.to_thread(self._store.list_prefix, self._keys.cordons)
        self._names = {key.removeprefix(self._keys.cordons) for key in snapshot.items}

    async def set(self, worker: str, cordoned: bool, record: pb.WorkerRecord | None) -> bool:
        """Writes a wish and tells the worker, of which ``record`` is the registration. Whether it has heard it.

        Raises WORKER_NOT_FOUND, STORE_UNAVAILABLE."""
        if not is_name(worker) or (record is None and worker not in self._names):
            raise TwinpoolError("WORKER_NOT_FOUND", f"there is no worker {worker[:64]!r}")
        key = self._keys.cordon(worker)
        if cordoned:
            await asyncio.to_thread(self._store.put, key, b"")
            self._names.add(worker)
        else:
            await asyncio.to_thread(self._store.delete, key)
            self._names.discard(worker)
        reason, what = ("WorkerCordoned", "gets no") if cordoned else ("WorkerUncordoned", "gets")
        pool = "" if record is None else record.pool
        self._events.record(reason, f"{worker} {what} new work", pool=pool, subject=worker)
        return record is not None and await self._tell(record, cordoned)

    async def forget(self, workers: Iterable[str]) -> None:
        """Of workers that are gone for good: the next one under a name is another worker. Raises STORE_UNAVAILABLE."""
        for worker in sorted(self._names & set(workers)):
            await asyncio.to_thread(self._store.delete, self._keys.cordon(worker))
            self._names.discard(worker)

    def names(self) -> frozenset[str]:
        """Those that new work is kept away from."""
        return frozenset(self._names)

    async def tell(self, records: Iterable[pb.WorkerRecord]) -> None:
        """Tells each worker whose record says something else than the wish. What fails is tried in the next call."""
        wrong = [record for record in records if record.cordoned != (record.worker.name in self)]
        await asyncio.gather(*(self._tell(record, not record.cordoned) for record in wrong))

    async def _tell(self, record: pb.WorkerRecord, cordoned: bool) -> bool:
        request = worker_pb2.CordonRequest(worker=record.worker, cordoned=cordoned)
        try:
            async with self._connect(record.endpoint) as channel:
                await worker_pb2_grpc.WorkerServiceStub(channel).Cordon(request, timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            log.warning("cordon_not_told", worker=record.worker.name, reason=from_rpc_error(error).reason)
            return False
        return True
