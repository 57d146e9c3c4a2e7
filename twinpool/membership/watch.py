# SPDX-License-Identifier: Apache-2.0
"""Follows the registered workers or routers, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, Generic

from twinpool import metrics
from twinpool.logs import get_logger
from twinpool.membership.records import R, RecordError, incarnation, name_of, parse
from twinpool.store import Batch, Keys, Origin, PrefixWatch, Store
from twinpool.v1.control_pb2 import RouterRecord, WorkerRecord

_log = get_logger(__name__)

REGISTER_SECONDS: Final = 2.0
"""How long after the end of its lease at the latest a process is registered again, once etcd can be reached."""

GRACE_SECONDS: Final = 12.0
"""How long a record is kept that is missing for a reason which says nothing about its owner: the default lease, after whose
end at the latest an owner has noticed and put its record again, and two seconds."""


class EventKind(enum.Enum):
    """What happened to a member."""

    ADDED = "added"
    UPDATED = "updated"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class MemberEvent(Generic[R]):
    """One change. Another incarnation under the same name is REMOVED, then ADDED."""

    kind: EventKind
    record: R
    """The record now; of REMOVED the last one known."""


class RecordWatch(Generic[R]):
    """The view of one kind of record. Make it anywhere; use it on one event loop, on which callbacks run, too.

    Without etcd the last view stays. After a cut connection, missing records are removed at once, unless ``is_alive`` says that
    the owner is there (the caller has a stream to it): then they stay for ``grace_seconds``, in which their owners put them
    again. After an etcd that lost its data it is the same, but who cannot tell (no ``is_alive``) gives all that grace.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        prefix: str,
        kind: type[R],
        *,
        name: str,
        on_event: Callable[[MemberEvent[R]], None] | None = None,
        is_alive: Callable[[R], bool] | None = None,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._keys = keys
        self._kind = kind
        self._on_event = on_event
        self._is_alive = is_alive
        self._grace = grace_seconds
        self._view: dict[str, R] = {}
        self._held: dict[str, asyncio.TimerHandle] = {}
        self._queues: set[asyncio.Queue[MemberEvent[R] | None]] = set()
        self._synced = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False
        self._watch = PrefixWatch(store, prefix, self._from_thread, name=name)

    @property
    def connected(self) -> bool:
        """Whether the view follows etcd now."""
        return self._watch.connected

    async def start(self) -> None:
        """Starts to follow. Returns at once, whether or not etcd can be reached."""
        self._loop = asyncio.get_running_loop()
        self._watch.start()

    async def stop(self) -> None:
        """Ends the watch and all iterators. Idempotent."""
        self._stopped = True
        await asyncio.to_thread(self._watch.close)
        for timer in self._held.values():
            timer.cancel()
        self._held.clear()
        for queue in self._queues:
            queue.put_nowait(None)

    async def wait_synced(self, timeout_seconds: float) -> bool:
        """Waits for the first listing; whether there was one."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._synced.wait(), timeout_seconds)
        return self._synced.is_set()

    def records(self) -> list[R]:
        """The present view, ordered by key. Treat the records as read-only."""
        return [self._view[key] for key in sorted(self._view)]

    def get(self, name: str) -> R | None:
        """The record of a name, or None."""
        return next((record for record in self._view.values() if name_of(record) == name), None)

    async def events(self) -> AsyncIterator[MemberEvent[R]]:
        """All changes from now on, after an ADDED for each record there is. Ends with :meth:`stop`."""
        queue: asyncio.Queue[MemberEvent[R] | None] = asyncio.Queue()
        for record in self.records():
            queue.put_nowait(MemberEvent(EventKind.ADDED, record))
        if self._stopped:
            queue.put_nowait(None)
        self._queues.add(queue)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._queues.discard(queue)

    def _from_thread(self, batch: Batch) -> None:
        assert self._loop is not None, "a batch before start()"
        # The loop may close while the watch still ends.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._apply, batch)

    def _apply(self, batch: Batch) -> None:
        if self._stopped:
            return
        for change in batch.changes:
            record = None if change.now is None else self._parse(change.key, change.now.value)
            if record is not None:
                self._set(change.key, record)
            elif change.now is None and self._spared(change.key, batch.origin):
                self._hold(change.key)
            else:
                self._remove(change.key)
        self._synced.set()

    def _parse(self, key: str, value: bytes) -> R | None:
        try:
            return parse(self._keys, self._kind, key, value)
        except RecordError as error:
            metrics.MEMBERSHIP_INVALID_RECORDS.labels(error.cause).inc()
            _log.warning("invalid_record", cause=error.cause, detail=str(error))
            return None

    def _set(self, key: str, record: R) -> None:
        self._release(key)
        before = self._view.get(key)
        if before == record:
            return
        if before is not None and incarnation(before) != incarnation(record):
            self._remove(key)
            before = None
        self._view[key] = record
        self._tell(EventKind.ADDED if before is None else EventKind.UPDATED, record)

    def _remove(self, key: str) -> None:
        self._release(key)
        record = self._view.pop(key, None)
        if record is not None:
            self._tell(EventKind.REMOVED, record)

    def _spared(self, key: str, origin: Origin) -> bool:
        """Whether a missing key may only not be there yet."""
        record = self._view.get(key)
        if record is None or origin in (Origin.LIVE, Origin.FIRST):
            return False
        if self._is_alive is not None:
            return self._is_alive(record)
        return origin is Origin.RESET

    def _hold(self, key: str) -> None:
        if key not in self._held:
            _log.info("missing_record_kept", key=key, seconds=self._grace)
            self._held[key] = asyncio.get_running_loop().call_later(self._grace, self._grace_over, key)

    def _grace_over(self, key: str) -> None:
        self._held.pop(key, None)
        if self._watch.connected:
            self._remove(key)
        else:
            # etcd is away again: nobody can have put a record meanwhile.
            self._hold(key)

    def _release(self, key: str) -> None:
        timer = self._held.pop(key, None)
        if timer is not None:
            timer.cancel()

    def _tell(self, kind: EventKind, record: R) -> None:
        metrics.MEMBERSHIP_EVENTS.labels(kind.value).inc()
        _log.info(
            "member_changed",
            kind=kind.value,
            member=name_of(record),
            incarnation=f"{incarnation(record):016x}",
        )
        event = MemberEvent(kind, record)
        for queue in self._queues:
            queue.put_nowait(event)
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception as error:
                _log.exception("member_callback_failed", type=type(error).__name__)


class WorkerWatch(RecordWatch[WorkerRecord]):
    """The workers of a cluster, or of one of its pools. See :class:`RecordWatch`."""

    def __init__(
        self,
        store: Store,
        cluster: str,
        *,
        pool: str | None = None,
        on_event: Callable[[MemberEvent[WorkerRecord]], None] | None = None,
        is_alive: Callable[[WorkerRecord], bool] | None = None,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        keys = Keys(cluster)
        super().__init__(
            store,
            keys,
            keys.workers(pool),
            WorkerRecord,
            name="workers",
            on_event=on_event,
            is_alive=is_alive,
            grace_seconds=grace_seconds,
        )


class RouterWatch(RecordWatch[RouterRecord]):
    """The routers of a cluster. See :class:`RecordWatch`."""

    def __init__(
        self,
        store: Store,
        cluster: str,
        *,
        on_event: Callable[[MemberEvent[RouterRecord]], None] | None = None,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        keys = Keys(cluster)
        super().__init__(
            store,
            keys,
            keys.routers,
            RouterRecord,
            name="routers",
            on_event=on_event,
            grace_seconds=grace_seconds,
        )
