# SPDX-License-Identifier: Apache-2.0
"""Keeps the record of this process in etcd."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Final

from twinpool import metrics
from twinpool.logs import get_logger
from twinpool.membership.records import Record, incarnation_of, key_of, problem_of
from twinpool.store import Keys, Lease, LeaseKeeper, Store
from twinpool.v1.control_pb2 import ConfigState, WorkerRecord, WorkerState
from twinpool.v1.worker_pb2 import Role

WRITTEN_SECONDS: Final = 0.25
"""Longest stretch of a wait for a write: a thread cannot be told that nobody waits any more."""

_log = get_logger(__name__)


class Registration:
    """Keeps one record in etcd while this process lives. Runs on a thread of its own and never raises into it."""

    def __init__(
        self,
        store: Store,
        cluster: str,
        record: Record,
        *,
        ttl_seconds: int,
        on_change: Callable[[bool], None] | None = None,
        on_superseded: Callable[[], None] | None = None,
    ) -> None:
        """``on_change``: told on the thread whether the record is in etcd. ``on_superseded``: another incarnation
        has registered under the same name, so this one no longer does. Raises ValueError for an invalid record."""
        if problem := problem_of(record):
            raise ValueError(f"the record cannot be registered: {problem}")
        self._key = key_of(Keys(cluster), record)
        self._store = store
        self._on_change, self._on_superseded = on_change, on_superseded
        self._lock = threading.Lock()
        self._record = record.FromString(record.SerializeToString())
        self._value = self._encode()
        self._written = b""
        self._put = threading.Condition(self._lock)
        self._taken = False
        self._superseded = False
        self._registered = threading.Event()
        self._lease_id = 0
        self._keeper = LeaseKeeper(store, ttl_seconds, self, name="registration")

    @property
    def registered(self) -> bool:
        """Whether the record is in etcd, as far as is known here."""
        return self._registered.is_set()

    @property
    def lease_id(self) -> int:
        """The lease that the record is under, for whatever else shall vanish with it; 0: there is none now."""
        return self._lease_id

    @property
    def superseded(self) -> bool:
        """Whether another incarnation has taken the name over."""
        return self._superseded

    async def start(self) -> None:
        """Begins to register. Returns at once, whether or not etcd can be reached."""
        self._keeper.start()

    async def wait_registered(self, timeout_seconds: float) -> bool:
        """Waits until the record is in etcd; whether it is."""
        return await asyncio.to_thread(self._registered.wait, timeout_seconds)

    async def written(self) -> None:
        """Waits until etcd has the record as it is now, however long that takes."""
        while not await asyncio.to_thread(self._wait_written, WRITTEN_SECONDS):
            continue

    def _wait_written(self, seconds: float) -> bool:
        with self._lock:
            return self._put.wait_for(lambda: self._written == self._value, seconds)

    def update_state(
        self,
        state: WorkerState.ValueType,
        role: Role.ValueType | None = None,
        epoch: int | None = None,
    ) -> None:
        """Changes a worker's state, and role and epoch if given. Returns at once; etcd gets it as soon as it can be reached."""
        with self._lock:
            if not isinstance(self._record, WorkerRecord):
                raise TypeError("only a worker's record has a state")
            self._record.state = state
            if role is not None:
                self._record.role = role
            if epoch is not None:
                self._record.epoch = epoch
            self._value = self._encode()
        self._keeper.nudge()

    def update_cordoned(self, cordoned: bool) -> None:
        """Says whether new work is to be placed elsewhere. Returns at once, as ``update_state``."""
        with self._lock:
            if not isinstance(self._record, WorkerRecord):
                raise TypeError("only a worker's record can be cordoned")
            self._record.cordoned = cordoned
            self._value = self._encode()
        self._keeper.nudge()

    def update_config(self, state: ConfigState) -> None:
        """Says which applied configuration the process runs. Returns at once, as ``update_state``."""
        with self._lock:
            self._record.config.CopyFrom(state)
            self._value = self._encode()
        self._keeper.nudge()

    def complete(self, facts: WorkerRecord) -> None:
        """Adds what became known since the start: the fields that ``facts`` has set. Goes to etcd with the next change of
        state."""
        with self._lock:
            if not isinstance(self._record, WorkerRecord):
                raise TypeError("only a worker's record is completed")
            self._record.MergeFrom(facts)

    async def stop(self) -> None:
        """Removes the record and ends the thread. Without etcd the record goes when its lease runs out."""
        await asyncio.to_thread(self._keeper.stop)
        self._set(False)

    def _encode(self) -> bytes:
        return self._record.SerializeToString(deterministic=True)

    def hold(self, lease: Lease) -> None:
        """On the keeper's thread: puts the record, unless another incarnation has taken the key over."""
        if self._superseded:
            return
        with self._lock:
            value = self._value
        item = self._store.get(self._key)
        if item is not None and item.lease_id == lease.id and item.value == value:
            self._hold(lease, value)
            return
        own = incarnation_of(value, type(self._record))
        ours = (
            item is None or item.lease_id == lease.id or incarnation_of(item.value, type(self._record)) == own
        )
        # The first put takes the name over from an earlier incarnation. Later a foreign record is a newer start.
        if ours or not self._taken:
            done = (
                self._store.create(self._key, value, lease.id)
                if item is None
                else self._store.replace(self._key, value, item.mod_revision, lease.id)
            )
            if not done:
                # Somebody wrote in between: look again at once.
                self._keeper.nudge()
                return
            self._taken = True
            self._hold(lease, value)
            return
        self._superseded = True
        _log.error("registration_superseded", key=self._key)
        self._set(False)
        if self._on_superseded is not None:
            self._on_superseded()

    def _hold(self, lease: Lease, value: bytes) -> None:
        self._lease_id = lease.id
        self._set(True)
        with self._lock:
            self._written = value
            self._put.notify_all()

    def lost(self) -> None:
        """On the keeper's thread: the lease is gone."""
        metrics.MEMBERSHIP_LEASE_LOSSES.inc()
        self._set(False)

    def _set(self, registered: bool) -> None:
        metrics.MEMBERSHIP_REGISTERED.set(int(registered))
        if not registered:
            self._lease_id = 0
        if registered == self._registered.is_set():
            return
        if registered:
            self._registered.set()
        else:
            self._registered.clear()
        _log.info("registration_changed", key=self._key, registered=registered)
        if self._on_change is not None:
            self._on_change(registered)
