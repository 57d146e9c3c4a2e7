# SPDX-License-Identifier: Apache-2.0
"""What has happened to the pools: records in etcd, of which the newest are kept.

Every control process reads them, the leader writes them. Writing never holds anybody up: while etcd is away the newest wait.
"""

import asyncio
import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from twinpool import metrics
from twinpool.errors import TwinpoolError
from twinpool.logs import get_logger
from twinpool.store import Batch, Keys, PrefixWatch, Store
from twinpool.v1 import control_pb2 as pb

EVENTS_MAX: Final = 1000
"""Events that are kept."""

WAITING_MAX: Final = 1000
"""Events that wait for etcd; of more the oldest are lost."""

MESSAGE_CHARS_MAX: Final = 1000
"""Longest message; what is longer is cut."""

RETRY_SECONDS: Final = 1.0
"""Time between two tries of a write."""

TRIM_BATCH: Final = 50
"""Events beyond those that are kept, until the oldest are deleted."""

REASONS: Final[dict[str, str]] = {
    "ControllerLeads": "a control process has become the one that acts",
    "StoreAway": "etcd could not be reached for a while, in which nothing was changed",
    "PoolConfigured": "the record of a pool was made, or changed, from the configuration",
    "PoolScaled": "another number of workers is wanted",
    "OperationBegun": "an operation has begun",
    "OperationResumed": "a control process goes on with an operation of the one before",
    "OperationSucceeded": "an operation has reached its end",
    "OperationFailed": "an operation was given up; the message says why",
    "WorkerStarting": "a worker is started",
    "WorkerReady": "a worker takes work, a new incarnation of one included",
    "WorkerLeft": "a worker has left because it was told to",
    "WorkerLost": "a worker is gone without being told to leave",
    "WorkerUnready": "a worker is registered, but not fit for work",
    "WorkerCordoned": "new work is kept away from a worker",
    "WorkerUncordoned": "a worker gets new work again",
    "WorkerStartFailed": "a worker could not start; the message says why",
    "WorkerCrashed": "a worker's process has ended by itself; the message holds what Ray and its log say",
    "WorkerCrashLooping": "a worker has ended several times of late and is started again after a while",
    "ConfigApplied": "keys of the configuration of running processes were changed",
    "ConfigRefused": "a process cannot run what was applied and keeps what it had, as a whole; the message says why",
    "ReplicaPending": "Ray has no place for a worker; the message names the resource that is missing",
    "RayAway": "Ray's tables could not be read for a while; the message says why and what is not seen meanwhile",
    "RayRead": "Ray's tables can be read again",
    "ReplicaPlaced": "Ray has found a place for a worker that was pending",
}
"""All reasons of this package, with what each means. docs/pools.md has the same table."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Filter:
    """Which events are asked for. ``since_seconds`` None: of any age."""

    pool: str = ""
    subject: str = ""
    since_seconds: float | None = None
    warning: bool = False

    def takes(self, event: pb.Event) -> bool:
        """Whether an event is one of them."""
        if (self.pool and event.pool != self.pool) or (self.warning and not event.warning):
            return False
        if self.subject and self.subject not in (event.subject, event.operation):
            return False
        if self.since_seconds is None:
            return True
        return time.time() - event.at.ToNanoseconds() / 1e9 <= self.since_seconds


class EventLog:
    """One a control process. On its event loop, but for the watch's thread."""

    def __init__(self, store: Store, cluster: str) -> None:
        self._store = store
        self._keys = Keys(cluster)
        self._lock = threading.Lock()
        self._known: dict[str, pb.Event] = {}
        self._waiting: deque[pb.Event] = deque(maxlen=WAITING_MAX)
        self._wake = asyncio.Event()
        self._queues: set[asyncio.Queue[pb.Event]] = set()
        self._watch = PrefixWatch(store, self._keys.events, self._from_thread, name="events")
        self._aio: asyncio.AbstractEventLoop | None = None
        self._writer: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to follow and to write. Returns at once."""
        self._aio = asyncio.get_running_loop()
        self._watch.start()
        self._writer = asyncio.create_task(self._write(), name="events")

    async def stop(self) -> None:
        """Ends both. What waits for etcd is lost."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        await asyncio.to_thread(self._watch.close)

    def record(
        self,
        reason: str,
        message: str,
        *,
        pool: str,
        subject: str = "",
        operation: str = "",
        warning: bool = False,
    ) -> None:
        """Notes that something has happened. Never raises. ``subject``: a worker or an operation; "": the pool."""
        event = pb.Event(
            id=f"{time.time_ns():016x}-{secrets.token_hex(2)}",
            pool=pool,
            subject=subject or pool,
            reason=reason,
            message=message[:MESSAGE_CHARS_MAX],
            operation=operation,
            warning=warning,
        )
        event.at.GetCurrentTime()
        say = log.warning if warning else log.info
        say("pool_event", reason=reason, pool=pool, subject=event.subject, message=event.message)
        metrics.CONTROL_EVENTS.labels(reason).inc()
        self._waiting.append(event)
        self._wake.set()

    def all(self, wanted: Filter | None = None) -> list[pb.Event]:
        """The oldest first."""
        with self._lock:
            found = [self._known[key] for key in sorted(self._known)]
        return [event for event in found if wanted is None or wanted.takes(event)]

    async def follow(self, wanted: Filter) -> AsyncIterator[pb.Event]:
        """Those there are, then those that come. Without an end."""
        queue: asyncio.Queue[pb.Event] = asyncio.Queue()
        self._queues.add(queue)
        told: set[str] = set()
        try:
            for event in self.all(wanted):
                told.add(event.id)
                yield event
            while True:
                event = await queue.get()
                if event.id not in told and wanted.takes(event):
                    yield event
        finally:
            self._queues.discard(queue)

    async def drained(self) -> None:
        """Returns once all that was recorded is written."""
        while self._waiting:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(RETRY_SECONDS / 100)

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                event = self._waiting[0]
                try:
                    key = self._keys.event(event.id)
                    await asyncio.to_thread(self._store.put, key, event.SerializeToString())
                except TwinpoolError:
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                # While it was written, a newer one may have pushed it out.
                if self._waiting and self._waiting[0] is event:
                    self._waiting.popleft()
            with contextlib.suppress(TwinpoolError):
                await self._trim()

    async def _trim(self) -> None:
        """Deletes the oldest."""
        with self._lock:
            names = sorted(self._known)
        if len(names) < EVENTS_MAX + TRIM_BATCH:
            return
        for name in names[: len(names) - EVENTS_MAX]:
            await asyncio.to_thread(self._store.delete, self._keys.event(name))

    def _from_thread(self, batch: Batch) -> None:
        """On the watch's thread."""
        new: list[pb.Event] = []
        for change in batch.changes:
            name = change.key.removeprefix(self._keys.events)
            with self._lock:
                if change.now is None:
                    self._known.pop(name, None)
                    continue
            with contextlib.suppress(Exception):
                event = pb.Event.FromString(change.now.value)
                if event.id == name:
                    with self._lock:
                        self._known[name] = event
                    new.append(event)
        if new and self._aio is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._aio.call_soon_threadsafe(self._tell, sorted(new, key=lambda event: event.id))

    def _tell(self, events: list[pb.Event]) -> None:
        for queue in self._queues:
            for event in events:
                queue.put_nowait(event)
