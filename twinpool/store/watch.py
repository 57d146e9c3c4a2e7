# SPDX-License-Identifier: Apache-2.0
"""A watch that survives: it lists, reports what differs from what it knew, and follows from the next revision.

The same three steps heal a cut connection, a killed etcd, a compacted history and a wiped one, so there is one path.
"""

from __future__ import annotations

import enum
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final

import grpc

from twinpool import metrics
from twinpool.errors import TwinpoolError
from twinpool.logs import get_logger
from twinpool.store.etcd import to_item
from twinpool.store.keys import check_prefix
from twinpool.store.protocol import kv_pb2
from twinpool.store.types import Item, Snapshot, Store

_log = get_logger(__name__)

_MIN_BACKOFF_SECONDS: Final = 0.05
_MAX_BACKOFF_SECONDS: Final = 1.0


class Origin(enum.Enum):
    """How a batch of changes was found."""

    FIRST = "first"
    """The first listing: everything is new."""
    LIVE = "live"
    """The watch reported it."""
    RELIST = "relist"
    """Found by comparing with a new listing, after the watch had been cut or had fallen behind."""
    RESET = "reset"
    """As RELIST, but etcd has lost its history: what is missing may only not have been written again yet."""


@dataclass(frozen=True, slots=True)
class Change:
    """One key that differs. ``now`` None: deleted; ``before`` None: created."""

    key: str
    before: Item | None
    now: Item | None


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes that belong together. After FIRST, RELIST and RESET it may be empty: the view is in step again."""

    origin: Origin
    changes: tuple[Change, ...]


class PrefixWatch:
    """Follows a prefix on a thread of its own and calls ``on_batch`` there, one batch at a time.

    A callback that raises is logged and does not end the watch. Without etcd the last view stays.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        on_batch: Callable[[Batch], None],
        *,
        name: str,
        on_connected: Callable[[bool], None] | None = None,
    ) -> None:
        """``prefix`` ends with "/". ``name``: of a few fixed ones; labels metrics and logs."""
        self._store = store
        self._prefix = check_prefix(prefix)
        self._on_batch = on_batch
        self._on_connected = on_connected
        self._name = name
        self._known: Snapshot | None = None
        self._items: dict[str, Item] = {}
        self._closing = threading.Event()
        self._connected = False
        self._lock = threading.Lock()
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name=f"watch-{name}", daemon=True)

    @property
    def connected(self) -> bool:
        """Whether the view follows etcd now."""
        return self._connected

    def items(self) -> Mapping[str, Item]:
        """The present view: a copy."""
        with self._lock:
            return dict(self._items)

    def start(self) -> None:
        """Starts the thread. Returns at once, whether or not etcd can be reached."""
        self._thread.start()

    def close(self) -> None:
        """Ends the watch; no callback runs afterwards, unless it is called from one. Idempotent."""
        self._closing.set()
        with self._lock:
            if self._call is not None:
                self._call.cancel()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        failures = 0
        while not self._closing.is_set():
            cause = "error"
            try:
                snapshot = self._store.list_prefix(self._prefix)
                self._apply_listing(snapshot)
                self._set_connected(True)
                failures = 0
                cause = self._follow(snapshot.revision + 1)
            except (TwinpoolError, grpc.RpcError) as error:
                # Told once for an outage, not once for each try.
                if self._connected and not self._closing.is_set():
                    _log.warning("watch_cut", watch=self._name, error=_describe(error))
            except Exception as error:
                # A fault of ours: keep the view and try again rather than follow nothing for ever.
                _log.exception("watch_failed", watch=self._name, type=type(error).__name__)
            if self._closing.is_set():
                break
            self._set_connected(False)
            metrics.STORE_WATCH_RESTARTS.labels(self._name, cause).inc()
            if cause != "compacted":
                ceiling = min(_MAX_BACKOFF_SECONDS, _MIN_BACKOFF_SECONDS * 2**failures)
                failures = min(failures + 1, 10)
                # Jitter: all watchers of a cluster lose etcd at the same moment.
                self._closing.wait(random.uniform(ceiling / 2, ceiling))
        self._set_connected(False)

    def _apply_listing(self, snapshot: Snapshot) -> None:
        """Reports the difference between a listing and the view."""
        before = self._items
        changes = [
            Change(key, before.get(key), item)
            for key, item in snapshot.items.items()
            if not _same(before.get(key), item)
        ]
        changes += [Change(key, item, None) for key, item in before.items() if key not in snapshot.items]
        origin = Origin.FIRST
        if self._known is not None:
            origin = Origin.RELIST if self._known.precedes(snapshot) else Origin.RESET
        self._known = snapshot
        with self._lock:
            self._items = dict(snapshot.items)
        self._emit(Batch(origin, tuple(changes)))

    def _follow(self, start_revision: int) -> str:
        """Applies events until the stream ends; why it did. Raises RpcError, TwinpoolError."""
        done: SimpleQueue[None] = SimpleQueue()
        call = self._store.watch_call(self._prefix, start_revision, _hold_open(done))
        with self._lock:
            self._call = call
        try:
            if self._closing.is_set():
                call.cancel()
            for response in call:
                if response.compact_revision:
                    return "compacted"
                if response.canceled:
                    _log.warning("watch_cancelled", watch=self._name, reason=response.cancel_reason)
                    return "cancelled"
                self._apply_events(response)
            return "ended"
        except grpc.RpcError:
            if not self._closing.is_set():
                self._store.fail_endpoint()
            raise
        finally:
            call.cancel()
            done.put(None)
            with self._lock:
                self._call = None

    def _apply_events(self, response: Any) -> None:
        changes = []
        for event in response.events:
            item = to_item(event.kv)
            before = self._items.get(item.key)
            if before is not None and before.mod_revision >= item.mod_revision:
                continue
            deleted = event.type == kv_pb2.Event.DELETE
            if deleted and before is None:
                continue
            with self._lock:
                if deleted:
                    del self._items[item.key]
                else:
                    self._items[item.key] = item
            changes.append(Change(item.key, before, None if deleted else item))
        if self._known is not None:
            # Keeps the proof of continuity up to date: a later listing below this revision is a wiped etcd.
            revision = max(self._known.revision, int(response.header.revision))
            self._known = Snapshot(self._items, revision, self._known.cluster_id)
        if changes:
            self._emit(Batch(Origin.LIVE, tuple(changes)))

    def _emit(self, batch: Batch) -> None:
        if self._closing.is_set():
            return
        try:
            self._on_batch(batch)
        except Exception as error:
            _log.exception("watch_callback_failed", watch=self._name, type=type(error).__name__)

    def _set_connected(self, connected: bool) -> None:
        metrics.STORE_CONNECTED.labels(self._name).set(int(connected))
        if connected == self._connected:
            return
        self._connected = connected
        if self._on_connected is not None and not self._closing.is_set():
            self._on_connected(connected)


def _same(before: Item | None, now: Item) -> bool:
    """Whether a listed item is the one known. Of a wiped etcd only the value can tell."""
    return before is not None and before.value == now.value


def _hold_open(done: SimpleQueue[None]) -> Iterator[Any]:
    """No further requests, but the sending side stays open until the watch ends."""
    done.get()
    yield from ()


def _describe(error: BaseException) -> str:
    call: Any = error
    if isinstance(call, grpc.Call):
        return f"{call.code().name}: {call.details()}"
    return str(error)
