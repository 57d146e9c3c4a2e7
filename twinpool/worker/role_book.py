# SPDX-License-Identifier: Apache-2.0
"""The role that a worker had last, as etcd keeps it: it outlives the worker, whose next incarnation begins in it.

Its write is the moment in which a change of role counts. A write that etcd did not answer may have been made all the same, or may
come late: each write therefore names the revision that it replaces, so that of two only the one that was asked for first can win,
and it is read again before the next one.
"""

import asyncio
from typing import Final

from google.protobuf.message import DecodeError

from twinpool.errors import TwinpoolError
from twinpool.ids import WorkerKey
from twinpool.logs import get_logger
from twinpool.store import Item, Keys, Store
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.control_pb2 import RoleRecord
from twinpool.worker.commands import worker_id

RETRY_SECONDS: Final = 0.5
"""Time between two tries of a write."""

log = get_logger(__name__)


class RoleBook:
    """One a worker. On the event loop; etcd is called in threads."""

    def __init__(self, store: Store, cluster: str, pool: str, worker: WorkerKey) -> None:
        self._store = store
        self._key = Keys(cluster).role(pool, worker.name)
        self._worker = worker
        self.unsure = False
        """Whether a write was begun of which nobody knows whether it was made."""

    async def last(self) -> pb.Role.ValueType | None:
        """The role that the worker had last; None: etcd knows of none. Raises STORE_UNAVAILABLE."""
        found = _parse(await asyncio.to_thread(self._store.get, self._key))
        return found.role if found is not None else None

    async def holds(self, role: pb.Role.ValueType, epoch: int) -> bool:
        """Whether etcd has what ``write`` writes. Raises STORE_UNAVAILABLE."""
        return _parse(await asyncio.to_thread(self._store.get, self._key)) == self._record(role, epoch)

    async def write(self, role: pb.Role.ValueType, epoch: int) -> None:
        """Returns once etcd has it, however long etcd is away."""
        wanted = self._record(role, epoch)
        while True:
            try:
                item = await asyncio.to_thread(self._store.get, self._key)
                if _parse(item) == wanted:
                    break
                # From here on it may be made, whatever is heard of it.
                self.unsure = True
                await asyncio.to_thread(self._replace, item, wanted.SerializeToString())
            except TwinpoolError as error:
                log.warning("role_not_written", reason=error.reason, detail=error.message)
                await asyncio.sleep(RETRY_SECONDS)
        self.unsure = False

    def _replace(self, item: Item | None, value: bytes) -> None:
        if item is None:
            self._store.create(self._key, value)
        else:
            self._store.replace(self._key, value, item.mod_revision)

    def _record(self, role: pb.Role.ValueType, epoch: int) -> RoleRecord:
        return RoleRecord(worker=worker_id(self._worker), role=role, epoch=epoch)


def _parse(item: Item | None) -> RoleRecord | None:
    try:
        found = RoleRecord.FromString(item.value) if item is not None else None
    except DecodeError:
        return None
    return found if found is not None and found.role in (pb.ROLE_PREFILL, pb.ROLE_DECODE) else None
