# SPDX-License-Identifier: Apache-2.0
"""Workers that answer a router's question wrongly or without end."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from tests.support.cache_world import CHAINS
from tests.support.watching import wait_until
from twinpool.kv_events import KVEventBatch, wire, write_sequence
from twinpool.router.index import resync as module
from twinpool.router.index.resync import Resync

NAMES = [CHAINS[0][1].tobytes()[at : at + 16] for at in range(0, 64, 16)]
PIECE = wire.encode(KVEventBatch(1.0, [wire.stored(NAMES, None, 16)], None, 7, 4, 0))


@contextmanager
def answered_with(frames: list[bytes], times: int) -> Iterator[tuple["zmq.Context[zmq.Socket[bytes]]", str]]:
    """A replay socket that answers any question with the same message so often."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.set_hwm(0)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def serve() -> None:
        who = router.recv_multipart()[0]
        for _ in range(times):
            router.send_multipart([who, *frames])

    thread = threading.Thread(target=serve)
    thread.start()
    yield context, f"127.0.0.1:{port}"
    thread.join(60)
    context.destroy(linger=0)


def test_an_answer_of_any_length_is_taken_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_BYTES_MAX", 20 * len(PIECE))
    with answered_with([b"", write_sequence(1), PIECE], 50) as (context, endpoint):
        asked = Resync(context, endpoint, "snapshot", 0, 60.0, lambda: 0.0)
        wait_until(lambda: asked.read() or asked.over)
        assert "more than" in asked.failed
        assert len(asked.messages) <= 20
        asked.close()


def test_an_answer_that_never_ends_is_given_up() -> None:
    """Each message comes in time; the whole does not."""
    now = 0.0
    with answered_with([b"", write_sequence(1), PIECE], 40) as (context, endpoint):
        asked = Resync(context, endpoint, "snapshot", 0, 1.0, lambda: now)
        wait_until(lambda: asked.read() or len(asked.messages) == 40)
        now = 0.9
        assert not asked.over
        now = module.ANSWER_TIMEOUTS_MAX + 0.1
        assert asked.over
        assert asked.failed == "no answer"
        asked.close()


def test_who_says_much_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MESSAGES_A_TURN", 5)
    with answered_with([b"", write_sequence(1), PIECE], 12) as (context, endpoint):
        asked = Resync(context, endpoint, "snapshot", 0, 60.0, lambda: 0.0)
        taken = [0]

        def read() -> bool:
            asked.read()
            taken.append(len(asked.messages))
            return taken[-1] == 12

        wait_until(read)
        assert max(after - before for before, after in itertools.pairwise(taken)) <= 5
        asked.close()


@pytest.mark.parametrize(
    "frames",
    [
        [b"", b"junk", PIECE],
        [b"", b"\xfe" * 8, PIECE],
        [b"", write_sequence(1), b"junk"],
        [write_sequence(1), PIECE],
        [b"x"],
    ],
)
def test_an_answer_that_makes_no_sense_has_failed(frames: list[bytes]) -> None:
    with answered_with(frames, 1) as (context, endpoint):
        asked = Resync(context, endpoint, "snapshot", 0, 60.0, lambda: 0.0)
        wait_until(lambda: asked.read() or asked.over)
        assert asked.failed
        asked.close()
