# SPDX-License-Identifier: Apache-2.0
"""Follows the event streams of all workers on a thread of its own.

The event loop says which workers to follow; what they say goes into the core from here, which is thread-safe. A worker whose
mirror needs something is asked for it, that worker alone, a few at a time, with growing pauses if it is asked in vain.
While it can't be asked, its segments in etcd are followed.

Each worker has a socket of its own, which is closed with it: ``zmq_disconnect`` of a subscriber in the middle of a message
ends the process in libzmq 4.3. The sockets' descriptors are watched by the system's selector, so that a turn costs what has
come and not what there is.
"""

import logging
import random
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import zmq

from twinpool import metrics
from twinpool._core import RouterCore
from twinpool.config import KvEventsConfig
from twinpool.ids import WorkerKey, to_hex64
from twinpool.kv_events import (
    ALIVE,
    EVENTS,
    CacheState,
    EventDecodeError,
    decode,
    read_sequence,
    worker_prefix,
)
from twinpool.kv_events.waker import Waker
from twinpool.logs import get_logger
from twinpool.router.index.mirror import Mirror
from twinpool.router.index.resync import MESSAGE_BYTES_MAX, Resync
from twinpool.router.index.status import WorkerLocality
from twinpool.v1.control_pb2 import WorkerRecord

log = get_logger(__name__)

RESYNCS_MAX: Final = 8
"""Questions under way at a time: a router that starts must not make all workers write snapshots at once."""

STEADY_SECONDS: Final = 10.0
"""In step for so long, a worker's earlier resyncs are forgotten."""

TICK_SECONDS: Final = 0.1

SWEEP_SECONDS: Final = 1.0
"""So often every socket is read. Its descriptor tells of changes alone, and one may be taken for told by another call."""

RECEIVE_QUEUE: Final = 10_000
MESSAGES_A_TURN: Final = 256
STOP_SECONDS: Final = 5.0

_FIRST_BACKOFF_SECONDS: Final = 0.1
_MAX_BACKOFF_SECONDS: Final = 5.0

Segments = Callable[[WorkerKey], CacheState | None]


@dataclass(slots=True)
class Followed:
    """One worker."""

    mirror: Mirror
    events_endpoint: str
    replay_endpoint: str
    heard_at: float
    heard: bool = False
    resync: Resync | None = None
    ask_at: float = 0.0
    attempts: int = 0
    failures: int = 0
    resyncs: int = 0
    live_since: float | None = None
    topics: tuple[bytes, ...] = ()
    sub: "zmq.Socket[bytes] | None" = None

    @property
    def state(self) -> str:
        """See ``WorkerLocality``."""
        if not self.events_endpoint:
            return "segments"
        if self.mirror.need is None:
            return "live"
        return "unreachable" if self.failures else "resyncing"


class Follower:
    """``follow`` and ``drop`` are for the event loop; all else happens on the thread."""

    def __init__(
        self,
        core: RouterCore,
        config: KvEventsConfig,
        segments: Segments,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``segments``: what lies in etcd of a worker. Called on the thread."""
        self._core = core
        self._config = config
        self._segments = segments
        self._clock = clock
        self._commands: deque[Callable[[], None]] = deque()
        self._waker = Waker()
        self._workers: dict[WorkerKey, Followed] = {}
        self._unread: set[WorkerKey] = set()
        self._swept_at = 0.0
        self._stopping = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="twinpool-locality", daemon=True)

    # --- for the event loop

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and closes all sockets. Idempotent."""
        self._stopping = True
        self._waker.wake()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)
            if self._thread.is_alive():
                log.error("locality_thread_stuck", seconds=STOP_SECONDS)
                return
        self._context.destroy(linger=0)
        self._selector.close()
        self._waker.close()

    def follow(self, key: WorkerKey, record: WorkerRecord) -> None:
        """Follows a worker that the core knows. Idempotent."""
        events, replay = record.events_endpoint, record.replay_endpoint
        self._post(lambda: self._follow(key, events, replay))

    def drop(self, key: WorkerKey) -> None:
        """Follows it no more. The core forgets its part of the index with the worker."""
        self._post(lambda: self._drop(key))

    def segments_changed(self, key: WorkerKey) -> None:
        """Its segments in etcd differ. From any thread; costs nothing while the worker's events are followed."""
        followed = self._workers.get(key)
        if followed is not None and followed.state in ("segments", "unreachable"):
            self._post(lambda: self._adopt_newer(key))

    def statuses(self) -> list[WorkerLocality]:
        """All followed workers, ordered by name. From any thread."""
        now = self._clock()
        return [
            WorkerLocality(
                key=key,
                state=followed.state,
                cause=followed.mirror.need.cause if followed.mirror.need is not None else "",
                blocks=followed.mirror.blocks,
                next_sequence=followed.mirror.next or 0,
                heard_seconds=now - followed.heard_at if followed.heard else -1.0,
                resyncs=followed.resyncs,
                failures=followed.failures,
            )
            for key, followed in sorted(list(self._workers.items()))
        ]

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._waker.wake()

    # --- the thread

    def _run(self) -> None:
        self._selector.register(self._waker, selectors.EVENT_READ)
        while not self._stopping:
            try:
                self._turn()
            except Exception as error:
                # A fault in what one worker said must not end the following of all.
                log.exception("locality_turn_failed", type=type(error).__name__)

    def _turn(self) -> None:
        idle = TICK_SECONDS if self._workers else None
        ready = self._selector.select(0.0 if self._unread else idle)
        self._unread |= {key.data for key, _ in ready if key.data is not None}
        self._waker.clear()
        while self._commands:
            self._commands.popleft()()
        now = self._clock()
        if now - self._swept_at >= SWEEP_SECONDS:
            self._swept_at = now
            self._unread |= self._workers.keys()
        unread, self._unread = self._unread, set()
        for worker in unread:
            self._receive(worker)
        for followed in list(self._workers.values()):
            self._tend(followed, now)

    def _follow(self, key: WorkerKey, events_endpoint: str, replay_endpoint: str) -> None:
        known = self._workers.get(key)
        if known is not None:
            if (known.events_endpoint, known.replay_endpoint) == (events_endpoint, replay_endpoint):
                return
            self._drop(key)
        followed = Followed(Mirror(self._core, key), events_endpoint, replay_endpoint, self._clock())
        self._workers[key] = followed
        if events_endpoint:
            # Before the first look at its state, so that as little as possible is missed in between.
            self._subscribe(key, followed)
        state = self._segments(key)
        if state is not None:
            followed.mirror.adopt(state)
        log.info(
            "locality_followed",
            worker=str(key),
            events=events_endpoint or "none",
            blocks=state.blocks if state is not None else 0,
        )

    def _subscribe(self, key: WorkerKey, followed: Followed) -> None:
        followed.topics = tuple(worker_prefix(kind, key.name) for kind in (EVENTS, ALIVE))
        followed.sub = sub = self._context.socket(zmq.SUB)
        sub.set_hwm(RECEIVE_QUEUE)
        sub.setsockopt(zmq.LINGER, 0)
        sub.setsockopt(zmq.IPV6, 1)
        sub.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        # A connection that died without a word is dialled anew.
        sub.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        sub.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
        for topic in followed.topics:
            sub.setsockopt(zmq.SUBSCRIBE, topic)
        sub.connect(f"tcp://{followed.events_endpoint}")
        self._selector.register(sub.fileno(), selectors.EVENT_READ, key)
        self._unread.add(key)

    def _drop(self, key: WorkerKey) -> None:
        followed = self._workers.pop(key, None)
        if followed is None:
            return
        self._end_resync(followed)
        if followed.sub is not None:
            self._selector.unregister(followed.sub.fileno())
            followed.sub.close(0)
        log.info("locality_dropped", worker=str(key))

    # --- what workers say

    def _receive(self, key: WorkerKey) -> None:
        followed = self._workers.get(key)
        if followed is None or followed.sub is None:
            return
        for _ in range(MESSAGES_A_TURN):
            try:
                frames = followed.sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(followed, frames)
            except EventDecodeError as error:
                metrics.ROUTER_KV_EVENT_BATCHES.labels("invalid").inc()
                log.warning("kv_events_invalid", worker=str(key), detail=str(error))
        # More is there: the next turn takes it, after the commands and the other workers.
        self._unread.add(key)

    def _take(self, followed: Followed, frames: list[bytes]) -> None:
        if len(frames) != 3:
            raise EventDecodeError(f"a message has {len(frames)} frames, not 3")
        topic = frames[0]
        incarnation = to_hex64(followed.mirror.key.incarnation).encode() + b"@"
        if not any(topic.startswith(prefix + incarnation) for prefix in followed.topics):
            # Another incarnation speaks where this one did. Its record in etcd says when to follow it; the one that was
            # there before is gone already.
            metrics.ROUTER_KV_EVENT_BATCHES.labels("foreign").inc()
            followed.mirror.replaced()
            return
        sequence, batch = read_sequence(frames[1]), decode(frames[2])
        if batch.incarnation != followed.mirror.key.incarnation:
            raise EventDecodeError("the incarnation in a payload is not that of its topic")
        followed.heard_at, followed.heard = self._clock(), True
        mirror = followed.mirror
        if topic.startswith(followed.topics[1]):
            mirror.alive(sequence, batch)
            return
        before = mirror.applied, mirror.duplicates
        mirror.event(sequence, batch)
        outcome = (
            "applied"
            if mirror.applied > before[0]
            else "duplicate"
            if mirror.duplicates > before[1]
            else "parked"
        )
        metrics.ROUTER_KV_EVENT_BATCHES.labels(outcome).inc()
        metrics.ROUTER_KV_EVENT_DELAY.observe(max(0.0, time.time() - batch.ts))

    # --- what they are asked

    def _tend(self, followed: Followed, now: float) -> None:
        if not followed.events_endpoint:
            return
        if followed.resync is not None:
            followed.resync.read()
            if followed.resync.over:
                self._finish_resync(followed, followed.resync)
        if followed.mirror.need is None and now - followed.heard_at > self._config.silence_seconds:
            followed.mirror.silent()
        if followed.mirror.need is None:
            followed.live_since = followed.live_since or now
            if now - followed.live_since > STEADY_SECONDS:
                followed.attempts = 0
            return
        followed.live_since = None
        if followed.resync is None and now >= followed.ask_at and self._asking() < RESYNCS_MAX:
            self._ask(followed)

    def _asking(self) -> int:
        return sum(followed.resync is not None for followed in self._workers.values())

    def _ask(self, followed: Followed) -> None:
        need, mirror = followed.mirror.need, followed.mirror
        assert need is not None
        kind = need.kind if mirror.next is not None else "snapshot"
        followed.attempts += 1
        metrics.ROUTER_LOCALITY_RESYNCS.labels(kind, need.cause).inc()
        log.log(
            # The first question of a worker is no news.
            logging.INFO if need.cause != "start" else logging.DEBUG,
            "locality_resync",
            worker=str(mirror.key),
            kind=kind,
            cause=need.cause,
            next_sequence=mirror.next,
        )
        followed.resync = Resync(
            self._context,
            followed.replay_endpoint,
            kind,
            mirror.next or 0,
            self._config.resync_timeout_seconds,
            self._clock,
        )
        self._selector.register(followed.resync.socket.fileno(), selectors.EVENT_READ, None)

    def _end_resync(self, followed: Followed) -> None:
        if followed.resync is not None:
            self._selector.unregister(followed.resync.socket.fileno())
            followed.resync.close()
            followed.resync = None

    def _finish_resync(self, followed: Followed, resync: Resync) -> None:
        self._end_resync(followed)
        now = self._clock()
        pause = min(_MAX_BACKOFF_SECONDS, _FIRST_BACKOFF_SECONDS * 2 ** min(followed.attempts, 10))
        # One question after a good answer is free: a replay that came too late is followed by a snapshot.
        followed.ask_at = now + (
            random.uniform(pause / 2, pause) if resync.failed or followed.attempts > 2 else 0.0
        )
        if resync.failed:
            followed.failures += 1
            metrics.ROUTER_LOCALITY_RESYNC_FAILURES.inc()
            if followed.failures == 1:
                log.warning("locality_resync_failed", worker=str(followed.mirror.key), cause=resync.failed)
            self._adopt_newer(followed.mirror.key)
            return
        followed.heard_at, followed.heard = now, True
        followed.failures = 0
        followed.resyncs += 1
        if resync.kind == "snapshot":
            followed.mirror.snapshot(resync.messages)
        else:
            followed.mirror.replayed(resync.messages)

    def _adopt_newer(self, key: WorkerKey) -> None:
        """Takes the segments in etcd if they say more than is known here."""
        followed = self._workers.get(key)
        if followed is None or followed.state not in ("segments", "unreachable"):
            return
        state, known = self._segments(key), followed.mirror.next
        if state is not None and (known is None or state.next_sequence > known):
            followed.mirror.adopt(state)
