# SPDX-License-Identifier: Apache-2.0
"""Events, questions and segments that no process of ours makes."""

import pytest
import zmq

from tests.support.cache_world import BLOCK_TOKENS, CHAINS, ROOTS
from twinpool.config import KvEventsConfig
from twinpool.ids import WorkerKey
from twinpool.kv_events import (
    END_SEQUENCE,
    EventDecodeError,
    KVEventBatch,
    decode,
    digest,
    read_sequence,
    read_state,
    wire,
)
from twinpool.v1.locality_pb2 import LocalitySegment
from twinpool.worker.kv_events.publisher import REQUEST_BYTES_MAX, REQUESTS_A_TURN, EventPublisher
from twinpool.worker.kv_events.ring import ReplayRing
from twinpool.worker.kv_events.shadow import RawEvent

KEY = WorkerKey("w", 7)
RAW = CHAINS[0][1].tobytes()


@pytest.mark.parametrize("parts", [2, 1 << 20, (1 << 32) - 1])
def test_a_segment_that_claims_many_parts_is_not_counted_up_to(parts: int) -> None:
    """Four thousand million parts would fill the memory of every router that reads the value."""
    segment = LocalitySegment(incarnation=7, generation=1, parts=parts, next_sequence=1)
    assert read_state([segment.SerializeToString()], 7) is None


def test_a_segment_with_a_number_beyond_all_is_as_good_as_missing() -> None:
    names = RAW[:32]
    values = dict(incarnation=7, generation=1, parts=1, stored=names, blocks=2, digest=digest(names))
    assert read_state([LocalitySegment(**values, next_sequence=wire.SEQUENCE_MAX).SerializeToString()], 7)
    beyond = LocalitySegment(**values, next_sequence=wire.SEQUENCE_MAX + 1)
    assert read_state([beyond.SerializeToString()], 7) is None


@pytest.mark.parametrize("frame", [b"", b"1234567", b"123456789", b"\xff" * 8, (1 << 62).to_bytes(8, "big")])
def test_numbers_that_are_none(frame: bytes) -> None:
    with pytest.raises(EventDecodeError):
        read_sequence(frame)


@pytest.mark.parametrize("ts", [float("inf"), float("-inf"), float("nan")])
def test_a_time_that_would_be_later_than_all_others(ts: float) -> None:
    with pytest.raises(EventDecodeError, match="finite"):
        decode(wire.encode(KVEventBatch(ts, [])))


def test_a_replay_from_beyond_the_end_is_empty() -> None:
    ring = ReplayRing(4, 1000)
    ring.append(b"x")
    for start in (1, 2, wire.SEQUENCE_MAX, (1 << 64) - 1):
        assert list(ring.since(start)) == []


def test_questions_that_are_none_are_left_and_the_next_is_answered() -> None:
    made = EventPublisher(KvEventsConfig(heartbeat_seconds=0.05), KEY, "m", BLOCK_TOKENS)
    made.open("127.0.0.1")
    made.start()
    made.publish([RawEvent(RAW, ROOTS[0], True)])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVTIMEO, 60_000)
    dealer.connect(f"tcp://{made.replay_endpoint}")
    for frames in (
        [b""],
        [b"", b""],
        [b"", b"\xff" * 8],
        [b"", b"snapshot"],
        [b"", b"snapsho", b""],
        [b"", wire.SNAPSHOT, b"", b""],
        [b"x"] * 50,
    ):
        dealer.send_multipart(frames)
    for _ in range(2 * REQUESTS_A_TURN):
        dealer.send_multipart([b"", b"\0" * 7])
    dealer.send_multipart([b"", wire.write_sequence(0)])
    answers = [dealer.recv_multipart() for _ in range(2)]
    assert [answer[1] for answer in answers] == [wire.write_sequence(0), END_SEQUENCE]
    # One that is longer than any question costs who sends it the connection, and nobody else theirs.
    rogue = context.socket(zmq.DEALER)
    rogue.connect(f"tcp://{made.replay_endpoint}")
    rogue.send_multipart([b"", b"x" * (REQUEST_BYTES_MAX + 1)])
    dealer.send_multipart([b"", wire.write_sequence(0)])
    assert dealer.recv_multipart()[1] == wire.write_sequence(0)
    context.destroy(linger=0)
    made.close()
