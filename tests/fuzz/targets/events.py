# SPDX-License-Identifier: Apache-2.0
"""What comes over ZeroMQ: events of hostile workers to a router, answers to its questions, questions to a worker.

Whatever comes, the router goes on following, knows what it must ask next, and holds no more than was told.
"""

import random
from collections import deque
from functools import cache
from typing import Any

import msgspec

from tests.fuzz.shake import frames, frames_mutator, packed, shake_json
from tests.fuzz.target import Target, mutate_bytes
from tests.support.cache_world import BLOCK_TOKENS, CHAINS, ROOTS
from tests.support.event_world import add_worker, core_with
from twinpool.config import KvEventsConfig
from twinpool.ids import WorkerKey
from twinpool.kv_events import (
    EventDecodeError,
    KVEventBatch,
    decode,
    digest,
    read_sequence,
    wire,
    write_sequence,
)
from twinpool.router.index import follower, mirror
from twinpool.router.index.resync import Resync
from twinpool.worker.kv_events.publisher import EventPublisher
from twinpool.worker.kv_events.shadow import RawEvent

KEY = WorkerKey("w", 7)
RAW = CHAINS[0][1].tobytes()
CONFIG = KvEventsConfig()


def topic(kind: str) -> bytes:
    return wire.topic(kind, KEY, "m")


class Sub:
    """A socket in which messages lie already."""

    def __init__(self, messages: list[list[bytes]]) -> None:
        self.messages = deque(messages)

    def recv_multipart(self, _flags: int) -> list[bytes]:
        if not self.messages:
            raise follower.zmq.Again
        return self.messages.popleft()


def check_mirror(known: mirror.Mirror) -> None:
    if known.next is not None:
        write_sequence(known.next)  # what it asks for next can be said
    assert known.parked <= mirror.PARKED_MAX


def run_events(data: bytes) -> None:
    """Frames: each a message, whose own frames lie in it the same way."""
    core = core_with()
    add_worker(core, KEY)
    known = mirror.Mirror(core, KEY)
    # At the beginning, or at the end of all numbers.
    known.need, known.next = None, 0 if len(data) % 4 else wire.SEQUENCE_MAX
    thread = follower.Follower(core, CONFIG, lambda key: None)
    sub: Any = Sub([frames(message) for message in frames(data)])
    followed = follower.Followed(known, "127.0.0.1:9", "127.0.0.1:9", 0.0, sub=sub)
    followed.topics = tuple(wire.worker_prefix(kind, KEY.name) for kind in (wire.EVENTS, wire.ALIVE))
    thread._workers[KEY] = followed
    thread._receive(KEY)
    check_mirror(known)
    assert core.stats()["index_blocks"] <= len(data) // 16
    thread.close()


def batch(events: list[Any], blocks: int, sum_: int, ts: float = 1.0, incarnation: int = 7) -> bytes:
    return wire.encode(KVEventBatch(ts, events, None, incarnation, blocks, sum_))


def event_seeds() -> list[bytes]:
    names = [RAW[at : at + 16] for at in range(0, 64, 16)]
    stored = batch([wire.stored(names, None, BLOCK_TOKENS)], 4, digest(RAW[:64]))
    removed = batch([wire.removed(names[3:])], 3, digest(RAW[:48]), 2.0)
    alive = batch([], 3, digest(RAW[:48]), 3.0)
    cleared = batch([wire.AllBlocksCleared()], 0, 0, 4.0)
    messages = [
        [topic("kv"), write_sequence(0), stored],
        [topic("kv"), write_sequence(1), removed],
        [topic("alive"), write_sequence(2), alive],
        [topic("kv"), write_sequence(2), cleared],
        [topic("kv"), write_sequence(1 << 62), cleared],
    ]
    return [packed([packed(message) for message in messages]), packed([packed(messages[0])])]


def run_snapshot(data: bytes) -> None:
    """Answers to a question: frames as above, the last one maybe the end."""
    clock = iter(range(1 << 30))
    socket: Any = Sub([frames(message) for message in frames(data)])
    asked = Resync.__new__(Resync)
    asked.kind, asked.messages, asked.done, asked.failed = "snapshot", [], False, ""
    asked._timeout, asked._clock, asked.deadline, asked.socket = 1.0, lambda: float(next(clock)), 1e9, socket
    asked._give_up, asked._bytes = 1e9, 0
    asked.read()
    core = core_with()
    add_worker(core, KEY)
    for kind in ("snapshot", "replay"):
        known = mirror.Mirror(core, KEY)
        if kind == "snapshot":
            known.snapshot(asked.messages)
        else:
            known.next = 0
            known.replayed(asked.messages)
        check_mirror(known)


def snapshot_seeds() -> list[bytes]:
    names = [RAW[at : at + 16] for at in range(0, 64, 16)]
    whole = batch([wire.AllBlocksCleared(), wire.stored(names, None, BLOCK_TOKENS)], 4, digest(RAW[:64]))
    answer = [[b"", write_sequence(5), whole], [b"", wire.END_SEQUENCE, b""]]
    replay = [[b"", write_sequence(0), batch([wire.stored(names, None, 16)], 4, digest(RAW[:64]))], answer[1]]
    return [packed([packed(message) for message in messages]) for messages in (answer, replay)]


class Replay(Sub):
    """The worker's side, which also answers."""

    def __init__(self, messages: list[list[bytes]]) -> None:
        super().__init__(messages)
        self.sent = 0

    def send_multipart(self, parts: tuple[bytes, ...], _flags: int) -> None:
        self.sent += sum(map(len, parts))


@cache
def publisher() -> EventPublisher:
    made = EventPublisher(KvEventsConfig(replay_batches=4), KEY, "m", BLOCK_TOKENS)
    made._stream.tell([RawEvent(RAW, ROOTS[0], True)])
    return made


def run_requests(data: bytes) -> None:
    made = publisher()
    socket: Any = Replay([[b"id", *frames(message)] for message in frames(data)])
    made._replay = socket
    while socket.messages:
        made._answer()


def request_seeds() -> list[bytes]:
    return [
        packed([packed([b"", write_sequence(0)])]),
        packed([packed([b"", wire.SNAPSHOT, b""]), packed([b"", write_sequence(1 << 40)])]),
    ]


def run_payload(data: bytes) -> None:
    for read in (decode, read_sequence):
        try:
            read(data)
        except EventDecodeError:
            continue


def _both(data: bytes) -> None:
    run_payload(data)
    run_events(data)


_SEQUENCES = (0, 1, 2, 3, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1)


def mutate_frame(data: bytes, source: random.Random) -> bytes:
    """A sequence number, a payload, or whatever else."""
    if len(data) == 8 and source.random() < 0.8:
        return source.choice(_SEQUENCES).to_bytes(8, "big")
    try:
        return msgspec.msgpack.encode(shake_json(msgspec.msgpack.decode(data), source))
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, UnicodeError):
        return mutate_bytes(data, source)


MUTATE = frames_mutator(frames_mutator(mutate_frame))
TARGETS = {
    "kv_events": Target("kv_events", _both, event_seeds, MUTATE),
    "kv_snapshot": Target("kv_snapshot", run_snapshot, snapshot_seeds, MUTATE),
    "kv_requests": Target("kv_requests", run_requests, request_seeds, MUTATE),
}
