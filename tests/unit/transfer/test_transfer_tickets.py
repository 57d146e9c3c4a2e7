# SPDX-License-Identifier: Apache-2.0
"""Tickets that contradict themselves, the pool, the prompt or one another: each fails closed by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from tests.support.handoff_world import FIRST_TOKEN, Listener, Owner, Reader, World
from twinpool.ids import WorkerKey
from twinpool.transfer.base import AttemptKey
from twinpool.transfer.fence import HandoffFault
from twinpool.transfer.ticket import PromptShape
from twinpool.v1 import handoff_pb2, worker_pb2

ATTEMPT = AttemptKey("request", 1)
TRANSFER = 0x1234
POOL_BLOCKS = 24


class Bench:
    """A reader that waits for 40 tokens (blocks 0, 1 and half of 2), fed by hand-made messages."""

    def __init__(self) -> None:
        self.world = World()
        self.owner: Owner = self.world.owner(num_blocks=POOL_BLOCKS)
        self.reader: Reader = self.world.reader()
        self.world.link(self.reader, self.owner)
        self.sent: list[handoff_pb2.ExchangeRequest] = []
        self.reader.to_owner[self.owner.key] = self.sent.append  # type: ignore[assignment]
        self.listener: Listener = self.reader.expect(ATTEMPT, self.owner, PromptShape(40, 16, 0))

    def ticket(self, first_block: int, blocks: list[int], /, **change: object) -> handoff_pb2.Ticket:
        end = first_block + len(blocks)
        ticket = handoff_pb2.Ticket(
            transfer_id=TRANSFER,
            owner=worker_pb2.WorkerId(name=self.owner.key.name, incarnation=self.owner.key.incarnation),
            id=ATTEMPT.message(),
            first_block=first_block,
            blocks=blocks,
            generations=[0] * len(blocks),
            length_tokens=min(end * 16, 40),
            lease=Duration(seconds=3),
        )
        for name, value in change.items():
            if isinstance(value, list):
                del getattr(ticket, name)[:]
                getattr(ticket, name).extend(value)
            elif hasattr(value, "DESCRIPTOR"):
                getattr(ticket, name).CopyFrom(value)
            else:
                setattr(ticket, name, value)
        return ticket

    def chunk(self, first_block: int, blocks: list[int], /, **change: object) -> None:
        ticket = self.ticket(first_block, blocks, **change)
        self.feed(handoff_pb2.ExchangeResponse(chunk_ready=ticket))

    def complete(self, first_block: int, blocks: list[int], /, *, tokens: int = 1, **change: object) -> None:
        ticket = self.ticket(first_block, blocks, **change)
        complete = handoff_pb2.PrefillComplete(ticket=ticket, first_tokens=[FIRST_TOKEN] * tokens)
        self.feed(handoff_pb2.ExchangeResponse(complete=complete))

    def feed(self, message: handoff_pb2.ExchangeResponse) -> None:
        self.reader.pulls.on_message(self.world.now, self.owner.key, message)
        self.world.step()

    def releases(self) -> list[handoff_pb2.Release]:
        return [m.release for m in self.sent if m.WhichOneof("message") == "release"]

    def assert_failed(self, fault: HandoffFault) -> None:
        assert self.listener.events == ["failed", "drained"]
        assert self.listener.failure is not None
        assert self.listener.failure.fault is fault
        assert [release.success for release in self.releases()] == [False]
        assert self.reader.pulls.waiting == 0


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_bench_itself_succeeds(bench: Bench) -> None:
    bench.chunk(0, [3, 9])
    bench.complete(2, [4])
    assert bench.listener.events == ["ready"]
    assert [(r.transfer_id, r.success) for r in bench.releases()] == [(TRANSFER, True)]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"transfer_id": 0}, "transfer id 0"),
        ({"generations": [0]}, "1 generations for 2 blocks"),
        ({"generations": [0, 0, 0]}, "3 generations for 2 blocks"),
        ({"digests": [1]}, "1 digests for 2 blocks"),
        ({"blocks": [3, POOL_BLOCKS]}, f"block {POOL_BLOCKS} is outside"),
        ({"blocks": [3, 2**32 - 1]}, "is outside"),
        ({"blocks": [3, 3]}, "named twice"),
        ({"length_tokens": 31}, "31 tokens up to block 2"),
        ({"length_tokens": 0}, "0 tokens up to block 2"),
        ({"lease": Duration()}, "lease is not positive"),
        ({"lease": Duration(seconds=-1)}, "lease is not positive"),
        ({"first_block": 2, "length_tokens": 40}, "blocks up to 4 for a prompt of 3"),
    ],
)
def test_a_ticket_that_contradicts_itself(bench: Bench, change: dict[str, object], named: str) -> None:
    bench.chunk(0, [3, 9], **change)
    bench.assert_failed(HandoffFault.BAD_TICKET)
    assert bench.listener.failure is not None
    assert named in bench.listener.failure.detail
    assert bench.reader.agent.data_reads == 0


@pytest.mark.parametrize(
    "second",
    [
        lambda bench: bench.chunk(0, [3, 9]),  # the same again
        lambda bench: bench.chunk(1, [9]),  # overlaps
        lambda bench: bench.chunk(0, [5]),
    ],
)
def test_a_ticket_that_repeats_blocks(bench: Bench, second: Callable[[Bench], None]) -> None:
    bench.chunk(0, [3, 9])
    second(bench)
    bench.assert_failed(HandoffFault.OUT_OF_ORDER)


def test_a_ticket_that_skips_blocks(bench: Bench) -> None:
    bench.chunk(1, [9])
    bench.assert_failed(HandoffFault.OUT_OF_ORDER)


def test_a_ticket_before_the_first_wanted_block() -> None:
    bench = Bench()
    attempt = AttemptKey("suffix", 1)
    listener = bench.reader.expect(attempt, bench.owner, PromptShape(40, 16, 1))
    bench.chunk(0, [3], id=attempt.message())
    assert listener.failure is not None
    assert listener.failure.fault is HandoffFault.OUT_OF_ORDER


def test_another_transfer_id(bench: Bench) -> None:
    bench.chunk(0, [3, 9])
    bench.complete(2, [4], transfer_id=TRANSFER + 1)
    bench.assert_failed(HandoffFault.WRONG_TRANSFER)
    assert bench.releases()[0].transfer_id == TRANSFER


@pytest.mark.parametrize(
    "owner",
    [
        worker_pb2.WorkerId(name="owner", incarnation=99),
        worker_pb2.WorkerId(name="other", incarnation=1),
        worker_pb2.WorkerId(),
    ],
)
def test_a_ticket_of_another_owner(bench: Bench, owner: worker_pb2.WorkerId) -> None:
    bench.chunk(0, [3, 9], owner=owner)
    bench.assert_failed(HandoffFault.OWNER_CHANGED)


def test_complete_without_all_blocks(bench: Bench) -> None:
    bench.complete(0, [3, 9])
    bench.assert_failed(HandoffFault.SHORT)


def test_complete_without_a_first_token(bench: Bench) -> None:
    bench.chunk(0, [3, 9])
    bench.complete(2, [4], tokens=0)
    bench.assert_failed(HandoffFault.SHORT)


def test_a_ticket_after_complete(bench: Bench) -> None:
    bench.reader.agent.data.delay_seconds[1] = 0.1
    bench.chunk(0, [3, 9])
    bench.complete(2, [4])
    bench.chunk(2, [4])
    bench.world.run(0.5)
    bench.assert_failed(HandoffFault.OUT_OF_ORDER)


def test_nothing_that_comes_after_the_end_changes_it(bench: Bench) -> None:
    bench.chunk(0, [3, 9])
    bench.complete(2, [4])
    bench.complete(2, [4])
    bench.chunk(0, [3, 9])
    failed = handoff_pb2.TransferFailed(id=ATTEMPT.message(), reason=worker_pb2.FAILURE_REASON_INTERNAL)
    bench.feed(handoff_pb2.ExchangeResponse(failed=failed))
    bench.feed(handoff_pb2.ExchangeResponse(lease_lost=handoff_pb2.LeaseLost(transfer_ids=[TRANSFER])))
    assert bench.listener.events == ["ready"]
    assert len(bench.releases()) == 1


@pytest.mark.parametrize("attempt", [AttemptKey("request", 2), AttemptKey("stranger", 1), AttemptKey("", 0)])
def test_a_ticket_that_nobody_waits_for_is_released(bench: Bench, attempt: AttemptKey) -> None:
    bench.chunk(0, [3, 9], id=attempt.message(), transfer_id=77)
    bench.chunk(0, [3, 9], id=attempt.message(), transfer_id=77)
    released = bench.releases()
    assert [(AttemptKey.of(r.id), r.transfer_id, r.success) for r in released] == [(attempt, 77, False)]
    assert bench.listener.events == []


def test_a_ticket_over_the_wrong_stream_harms_nobody(bench: Bench) -> None:
    other = WorkerKey("intruder", 5)
    bench.reader.to_owner[other] = bench.sent.append  # type: ignore[assignment]
    message = handoff_pb2.ExchangeResponse(chunk_ready=bench.ticket(0, [3, 9]))
    bench.reader.pulls.on_message(bench.world.now, other, message)
    assert bench.listener.events == []
    assert bench.reader.agent.data_reads == 0
    bench.chunk(0, [3, 9])
    bench.complete(2, [4])
    assert bench.listener.events == ["ready"]


def test_a_ticket_of_an_owner_that_is_not_connected(bench: Bench) -> None:
    bench.reader.pump.disconnect(bench.owner.key)
    bench.world.step()
    bench.chunk(0, [3, 9])
    bench.assert_failed(HandoffFault.PEER_LOST)


def test_an_empty_message_is_ignored(bench: Bench) -> None:
    bench.feed(handoff_pb2.ExchangeResponse())
    assert bench.listener.events == []


def test_an_attempt_is_expected_once(bench: Bench) -> None:
    with pytest.raises(ValueError, match="expected already"):
        bench.reader.expect(ATTEMPT, bench.owner, PromptShape(1, 16, 0))


def test_the_reserved_blocks_must_fit_the_prompt(bench: Bench) -> None:
    none = np.empty(0, np.int32)
    with pytest.raises(ValueError, match="0 blocks for 1 to pull"):
        bench.reader.pulls.expect(
            0.0, AttemptKey("x", 1), bench.owner.key, PromptShape(1, 16, 0), none, bench.listener
        )


@pytest.mark.parametrize(("tokens", "block", "first"), [(0, 16, 0), (1, 0, 0), (16, 16, 2), (16, 16, -1)])
def test_shapes_that_make_no_sense(tokens: int, block: int, first: int) -> None:
    with pytest.raises(ValueError, match=r"prompt of|first block"):
        PromptShape(tokens, block, first)
