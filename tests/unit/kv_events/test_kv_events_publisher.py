# SPDX-License-Identifier: Apache-2.0
"""The publisher over real sockets, read as a foreign subscriber would."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from tests.support.cache_world import BLOCK_TOKENS, CHAINS, ROOTS
from twinpool.config import KvEventsConfig
from twinpool.errors import TwinpoolError
from twinpool.ids import WorkerKey
from twinpool.kv_events import END_SEQUENCE, EventDecodeError, KVEventBatch, decode, digest, split, wire
from twinpool.worker.kv_events import stream as module
from twinpool.worker.kv_events.publisher import EventPublisher
from twinpool.worker.kv_events.ring import ReplayRing
from twinpool.worker.kv_events.shadow import Change, RawEvent
from twinpool.worker.kv_events.stream import batches_of

KEY = WorkerKey("w", 0xABC)
SETTINGS = KvEventsConfig(heartbeat_seconds=0.05, replay_batches=4, silence_seconds=1.0)
RAW = [chain[1].tobytes() for chain in CHAINS]


class Subscriber:
    """A SUB socket for one kind of topic, and a DEALER to the replay socket."""

    def __init__(self, publisher: EventPublisher, kind: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, wire.worker_prefix(kind, KEY.name))
        self.sub.setsockopt(zmq.RCVTIMEO, 60_000)
        self.sub.connect(f"tcp://{publisher.events_endpoint}")
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.RCVTIMEO, 60_000)
        self.dealer.connect(f"tcp://{publisher.replay_endpoint}")

    def next(self) -> tuple[bytes, int, bytes]:
        topic, sequence, payload = self.sub.recv_multipart()
        return topic, int.from_bytes(sequence, "big"), payload

    def ask(self, *frames: bytes) -> list[tuple[int, KVEventBatch]]:
        self.dealer.send_multipart([b"", *frames])
        answer = []
        while True:
            empty, sequence, payload = self.dealer.recv_multipart()
            assert empty == b""
            if sequence == END_SEQUENCE:
                assert payload == b""
                return answer
            answer.append((int.from_bytes(sequence, "big"), decode(payload)))


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    made = EventPublisher(SETTINGS, KEY, "m", BLOCK_TOKENS)
    made.open("localhost")
    made.start()
    yield made
    made.close()


@pytest.fixture
def alive(publisher: EventPublisher) -> Iterator[Subscriber]:
    made = Subscriber(publisher, wire.ALIVE)
    yield made
    made.context.destroy(linger=0)


@pytest.fixture
def events(publisher: EventPublisher, alive: Subscriber) -> Iterator[Subscriber]:
    """Subscribed for sure: a heartbeat that came over the same connection says so."""
    made = Subscriber(publisher, wire.EVENTS)
    made.sub.setsockopt(zmq.SUBSCRIBE, wire.worker_prefix(wire.ALIVE, KEY.name))
    made.next()
    made.sub.setsockopt(zmq.UNSUBSCRIBE, wire.worker_prefix(wire.ALIVE, KEY.name))
    yield made
    made.context.destroy(linger=0)


def next_event(subscriber: Subscriber) -> tuple[bytes, int, bytes]:
    """The next message that is no heartbeat which was still under way."""
    while True:
        message = subscriber.next()
        if message[0].startswith(b"kv@"):
            return message


def chain(number: int, blocks: int) -> RawEvent:
    return RawEvent(RAW[number][: 16 * blocks], ROOTS[0], True)


def test_the_layout_is_that_of_vllm(publisher: EventPublisher, events: Subscriber) -> None:
    publisher.publish([chain(0, 2)])
    publisher.publish([RawEvent(RAW[0][16:32], None, False)])
    topic, sequence, payload = next_event(events)
    assert topic == b"kv@w.0000000000000abc@m"
    assert sequence == 0
    first: Any = msgspec.msgpack.decode(payload)
    names = split(RAW[0][:32])
    assert first[1:] == [
        [
            {
                "type": "BlockStored",
                "block_hashes": names,
                "parent_block_hash": None,
                "token_ids": [],
                "block_size": BLOCK_TOKENS,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            }
        ],
        None,
        0xABC,
        2,
        digest(RAW[0][:32]),
    ]
    _, sequence, payload = next_event(events)
    second: Any = msgspec.msgpack.decode(payload)
    assert sequence == 1
    assert second[1] == [{"type": "BlockRemoved", "block_hashes": names[1:], "medium": "GPU"}]
    assert second[3:] == [0xABC, 1, digest(names[0])]
    assert second[0] >= first[0]


def test_a_quiet_worker_says_what_comes_next(publisher: EventPublisher, alive: Subscriber) -> None:
    topic, sequence, _ = alive.next()
    assert (topic, sequence) == (b"alive@w.0000000000000abc@m", 0)
    publisher.publish([chain(0, 1)])
    while sequence == 0:
        _, sequence, payload = alive.next()
    batch = decode(payload)
    assert (sequence, batch.events, batch.blocks, batch.digest) == (1, [], 1, digest(RAW[0][:16]))


def test_missed_batches_are_replayed(publisher: EventPublisher, events: Subscriber) -> None:
    for number in range(3):
        publisher.publish([chain(number, 6)])
        next_event(events)
    answer = events.ask((1).to_bytes(8, "big"))
    assert [sequence for sequence, _ in answer] == [1, 2]
    assert {batch.incarnation for _, batch in answer} == {0xABC}
    assert events.ask((3).to_bytes(8, "big")) == []


def test_a_replay_begins_with_the_oldest_there_is(publisher: EventPublisher, events: Subscriber) -> None:
    for number in range(7):
        publisher.publish([chain(number, 6)])
        next_event(events)
    assert [sequence for sequence, _ in events.ask((0).to_bytes(8, "big"))] == [3, 4, 5, 6]


def test_a_snapshot_is_the_whole_set(publisher: EventPublisher, events: Subscriber, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "HASHES_A_BATCH", 4)
    for number in range(3):
        publisher.publish([chain(number, 6)])
    wanted = {name for raw in RAW[:3] for name in split(raw)}
    while decode(next_event(events)[2]).blocks < len(wanted):
        pass
    answer = events.ask(b"snapshot", b"")
    assert len(answer) > 1
    assert {sequence for sequence, _ in answer} == {publisher.position().next_sequence}
    assert isinstance(answer[0][1].events[0], wire.AllBlocksCleared)
    held: set[bytes] = set()
    for _, batch in answer:
        for event in batch.events:
            if isinstance(event, wire.BlockStored):
                assert event.parent_block_hash is None or event.parent_block_hash in held
                held.update(event.block_hashes)
    assert held == wanted
    assert (answer[0][1].blocks, answer[0][1].digest) == (len(held), digest(b"".join(held)))


def test_a_snapshot_of_nothing_says_so(events: Subscriber) -> None:
    ((sequence, batch),) = events.ask(b"snapshot", b"")
    assert (sequence, batch.blocks) == (0, 0)
    assert batch.events == [wire.AllBlocksCleared()]


def test_requests_that_make_no_sense_are_not_answered(events: Subscriber) -> None:
    for frames in ([b"short"], [b"other", b""], [], [b"a", b"b", b"c"]):
        events.dealer.send_multipart([b"", *frames])
    assert len(events.ask(b"snapshot", b"")) == 1


def test_a_port_that_is_taken_is_named(publisher: EventPublisher) -> None:
    port = int(publisher.events_endpoint.rpartition(":")[2])
    other = EventPublisher(KvEventsConfig(port=port), KEY, "m", BLOCK_TOKENS)
    with pytest.raises(TwinpoolError, match=f"localhost:{port}") as caught:
        other.open("localhost")
    assert caught.value.reason == "PORT_UNAVAILABLE"


def test_a_burst_is_cut_into_batches(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "HASHES_A_BATCH", 4)
    names = split(RAW[0])
    batches = batches_of([Change(True, names, None), Change(False, names[5:], None)])
    assert batches == [
        [Change(True, names[:4], None)],
        [Change(True, names[4:], names[3]), Change(False, names[5:], None)],
    ]
    assert batches_of([]) == []


def test_the_ring_is_bounded_by_count_and_bytes() -> None:
    ring = ReplayRing(3, 10)
    assert [ring.append(payload) for payload in (b"a", b"bb", b"ccc", b"dddd")] == [0, 1, 2, 3]
    assert list(ring.since(0)) == [(1, b"bb"), (2, b"ccc"), (3, b"dddd")]
    ring.append(b"e" * 8)
    assert list(ring.since(0)) == [(4, b"e" * 8)]
    ring.append(b"f" * 11)
    assert (len(ring), ring.size_bytes, ring.next) == (0, 0, 6)
    assert list(ring.since(4)) == []


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockStolen"}]]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": [b"short"], "medium": None}]]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": [12], "medium": None}]]),
    ],
)
def test_foreign_payloads_are_refused(payload: bytes) -> None:
    with pytest.raises(EventDecodeError):
        decode(payload)
