# SPDX-License-Identifier: Apache-2.0
"""Publishes KV events, and answers who missed some, on a thread of its own. See ``kv_events.wire`` for the layout."""

import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, ParamSpec

import zmq

from twinpool import metrics
from twinpool.config import KvEventsConfig
from twinpool.errors import TwinpoolError
from twinpool.ids import WorkerKey
from twinpool.kv_events import wire
from twinpool.kv_events.waker import Waker
from twinpool.logs import get_logger
from twinpool.rpc import join_address
from twinpool.worker.kv_events.segment_log import Position, Write
from twinpool.worker.kv_events.shadow import RawEvent
from twinpool.worker.kv_events.stream import EventStream, Numbered

log = get_logger(__name__)
P = ParamSpec("P")

SEND_QUEUE: Final = 20_000
"""Messages that may wait for one slow subscriber or for one who asked for a replay. More are lost, which it notices."""

REQUEST_BYTES_MAX: Final = 4096
"""Longest message that is taken from others: a question or a subscription has less than 100 bytes."""

REQUESTS_A_TURN: Final = 32
"""Who asks more must not keep the thread from publishing."""

STOP_SECONDS: Final = 5.0


class EventPublisher:
    """``open`` binds, ``start`` runs the thread, ``close`` ends both. ``publish`` may be called from one other thread.

    Implements ``segment_writer.SegmentSource``.
    """

    def __init__(self, config: KvEventsConfig, worker: WorkerKey, model: str, block_tokens: int) -> None:
        self._config = config
        self._worker = worker
        self._topic = wire.topic(wire.EVENTS, worker, model)
        self._alive_topic = wire.topic(wire.ALIVE, worker, model)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._pub: zmq.Socket[bytes]
        self._replay: zmq.Socket[bytes]
        self.events_endpoint = ""
        self.replay_endpoint = ""
        self._inbox: deque[list[RawEvent]] = deque()
        self._waker = Waker()
        self._stopping = False
        # The segment writer's thread asks, too.
        self._lock = threading.Lock()
        self._stream = EventStream(config, worker, block_tokens)
        self._said_at = 0.0
        self._thread = threading.Thread(target=self._run, name="twinpool-kv-events", daemon=True)

    # --- life

    def open(self, host: str) -> None:
        """Binds both sockets on free ports, or on the configured one and the next. Raises PORT_UNAVAILABLE."""
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        port = self._config.port
        try:
            self.events_endpoint = _bind(self._pub, host, port)
            self.replay_endpoint = _bind(self._replay, host, port + 1 if port else 0)
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and closes the sockets. Idempotent."""
        self._stopping = True
        self._waker.wake()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)
            if self._thread.is_alive():
                log.error("kv_events_thread_stuck", seconds=STOP_SECONDS)
                return
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        self._waker.close()

    def publish(self, events: list[RawEvent]) -> None:
        """Hands events over. Never blocks; costs a system call if the thread sleeps."""
        self._inbox.append(events)
        self._waker.wake()

    # --- SegmentSource

    def next_write(self) -> Write | None:
        """See ``SegmentLog``."""
        with self._lock:
            return self._stream.log.next_write()

    def done(self, write: Write) -> None:
        """See ``SegmentLog``."""
        with self._lock:
            self._stream.log.done(write)

    def restart(self) -> None:
        """See ``SegmentLog``."""
        with self._lock:
            self._stream.log.restart()

    def position(self) -> Position:
        """Where the stream and the set stand."""
        with self._lock:
            return self._stream.position

    # --- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        while not self._stopping:
            try:
                self._turn(poller)
            except Exception as error:
                # One bad request or event must not end the stream for all.
                log.exception("kv_events_turn_failed", type=type(error).__name__)

    def _turn(self, poller: zmq.Poller) -> None:
        wait = max(0.0, self._said_at + self._config.heartbeat_seconds - time.monotonic())
        poller.poll(math.ceil(wait * 1000))
        self._waker.clear()
        self._publish_inbox()
        self._answer()
        if time.monotonic() >= self._said_at + self._config.heartbeat_seconds:
            self._say_alive()

    def _publish_inbox(self) -> None:
        while self._inbox:
            events = self._inbox.popleft()
            with self._lock:
                batches = self._stream.tell(events)
            for sequence, payload in batches:
                self._pub.send_multipart((self._topic, wire.write_sequence(sequence), payload))
                metrics.WORKER_KV_EVENT_BATCHES.inc()
            if batches:
                self._said_at = time.monotonic()

    def _say_alive(self) -> None:
        with self._lock:
            sequence, payload = self._stream.alive()
        self._pub.send_multipart((self._alive_topic, wire.write_sequence(sequence), payload))
        self._said_at = time.monotonic()

    # --- those who missed something

    def _answer(self) -> None:
        for _ in range(REQUESTS_A_TURN):
            try:
                frames = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                kind, answer = self._asked(frames)
            except wire.EventDecodeError:
                metrics.WORKER_KV_EVENT_REQUESTS.labels("invalid").inc()
                continue
            metrics.WORKER_KV_EVENT_REQUESTS.labels(kind).inc()
            for sequence, payload in answer:
                self._send(frames[0], wire.write_sequence(sequence), payload)
            self._send(frames[0], wire.END_SEQUENCE, b"")

    def _asked(self, frames: list[bytes]) -> tuple[str, list[Numbered]]:
        if len(frames) == 3:
            return "replay", self._locked(self._stream.replay, wire.read_sequence(frames[2]))
        if len(frames) == 4 and frames[2] == wire.SNAPSHOT:
            return "snapshot", self._locked(self._stream.snapshot)
        raise wire.EventDecodeError("neither a number nor a snapshot is asked for")

    def _locked(self, call: Callable[P, list[Numbered]], *args: P.args, **kwargs: P.kwargs) -> list[Numbered]:
        with self._lock:
            return call(*args, **kwargs)

    def _send(self, to: bytes, sequence: bytes, payload: bytes) -> None:
        # To a reader that is gone, or whose queue is full, the socket drops; the reader asks again.
        self._replay.send_multipart((to, b"", sequence, payload), zmq.NOBLOCK)


def _bind(sock: "zmq.Socket[bytes]", host: str, port: int) -> str:
    """Binds and returns host:port, with the host as it was given."""
    sock.set_hwm(SEND_QUEUE)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
    sock.setsockopt(zmq.IPV6, 1)
    try:
        # ZeroMQ binds to addresses alone.
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        shown = f"[{address}]" if ":" in str(address) else str(address)
        sock.bind(f"tcp://{shown}:{port or '*'}")
    except (OSError, zmq.ZMQError) as error:
        raise TwinpoolError(
            "PORT_UNAVAILABLE", f"cannot bind {host}:{port} for KV events: {error.strerror}"
        ) from None
    bound = str(sock.getsockopt_string(zmq.LAST_ENDPOINT))
    return join_address(host, int(bound.rpartition(":")[2]))
