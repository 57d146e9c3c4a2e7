# SPDX-License-Identifier: Apache-2.0
"""Watches of the embedded store. All methods of the hub are called with the store's lock held."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final

import grpc

from twinpool.store.embedded_kv import key_value
from twinpool.store.mvcc import Change, Mvcc, MvccError, in_range
from twinpool.store.protocol import kv_pb2, pb

_MAX_EVENTS: Final = 1000
"""Most events in one response when a watch catches up: bounds a message."""


@dataclass(slots=True)
class _Watcher:
    watch_id: int
    start: bytes
    end: bytes
    first: int
    prev_kv: bool
    no_put: bool
    no_delete: bool

    def events(self, changes: Iterable[Change]) -> list[Any]:
        """The changes that this watcher wants, as etcd's messages."""
        found = []
        for change in changes:
            deleted = change.now.value is None
            if not in_range(change.now.key, self.start, self.end) or (
                self.no_delete if deleted else self.no_put
            ):
                continue
            event = kv_pb2.Event(
                type=kv_pb2.Event.DELETE if deleted else kv_pb2.Event.PUT, kv=key_value(change.now)
            )
            if self.prev_kv and change.before is not None:
                event.prev_kv.CopyFrom(key_value(change.before))
            found.append(event)
        return found


class WatchHub:
    """All open watch streams."""

    def __init__(self, state: Mvcc, header: Callable[[], Any]) -> None:
        self.state = state
        self.header = header
        self.streams: set[WatchStream] = set()
        self.closed = False

    def publish(self, revision: int, changes: list[Change]) -> None:
        """Gives the changes of one revision to every watcher that wants them."""
        for stream in self.streams:
            stream.offer(revision, changes)

    def close(self) -> None:
        """Ends all streams."""
        self.closed = True
        for stream in list(self.streams):
            stream.responses_queue.put(None)


class WatchStream:
    """One Watch call: requests come in on a thread, responses go out through a queue."""

    def __init__(self, hub: WatchHub, lock: threading.Lock) -> None:
        self._hub = hub
        self._lock = lock
        self._watchers: dict[int, _Watcher] = {}
        self._next_id = 0
        self.responses_queue: SimpleQueue[Any] = SimpleQueue()
        with lock:
            if hub.closed:
                self.responses_queue.put(None)
            else:
                hub.streams.add(self)

    def responses(self) -> Iterator[Any]:
        """What goes to the client, until the stream ends."""
        try:
            while (response := self.responses_queue.get()) is not None:
                yield response
        finally:
            self.end()

    def end(self) -> None:
        """The call is over: the stream gets no more changes. Idempotent."""
        with self._lock:
            self._hub.streams.discard(self)
        self.responses_queue.put(None)

    def consume(self, requests: Iterator[Any]) -> None:
        """Reads requests until the client closes or the call ends. Half-closing leaves the watches open, as in etcd."""
        try:
            for request in requests:
                with self._lock:
                    self._handle(request)
        except grpc.RpcError:
            return

    def offer(self, revision: int, changes: list[Change]) -> None:
        """With the lock held: sends what the watchers want of a revision."""
        for watcher in self._watchers.values():
            if revision >= watcher.first and (events := watcher.events(changes)):
                self._send(watcher.watch_id, events=events)

    def _send(self, watch_id: int, **fields: Any) -> None:
        self.responses_queue.put(pb.WatchResponse(header=self._hub.header(), watch_id=watch_id, **fields))

    def _handle(self, request: Any) -> None:
        kind = request.WhichOneof("request_union")
        if kind == "create_request":
            self._create(request.create_request)
        elif kind == "cancel_request":
            if self._watchers.pop(request.cancel_request.watch_id, None) is not None:
                self._send(request.cancel_request.watch_id, canceled=True)
        elif kind == "progress_request":
            self._send(-1)

    def _create(self, request: Any) -> None:
        state = self._hub.state
        watcher = _Watcher(
            watch_id=self._next_id,
            start=request.key or b"\0",
            end=request.range_end,
            first=request.start_revision or state.revision + 1,
            prev_kv=request.prev_kv,
            no_put=pb.WatchCreateRequest.NOPUT in request.filters,
            no_delete=pb.WatchCreateRequest.NODELETE in request.filters,
        )
        self._next_id += 1
        self._send(watcher.watch_id, created=True)
        if watcher.first <= state.revision:
            try:
                missed = list(state.changes(watcher.first))
            except MvccError:
                reason = "etcdserver: mvcc: required revision has been compacted"
                self._send(
                    watcher.watch_id, canceled=True, compact_revision=state.compacted, cancel_reason=reason
                )
                return
            self._catch_up(watcher, missed)
        self._watchers[watcher.watch_id] = watcher

    def _catch_up(self, watcher: _Watcher, missed: list[tuple[int, list[Change]]]) -> None:
        batch: list[Any] = []
        for _revision, changes in missed:
            batch.extend(watcher.events(changes))
            # A revision is never split over two responses: a client resumes after the last whole one.
            if len(batch) >= _MAX_EVENTS:
                self._send(watcher.watch_id, events=batch)
                batch = []
        if batch:
            self._send(watcher.watch_id, events=batch)
