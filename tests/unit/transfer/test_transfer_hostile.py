# SPDX-License-Identifier: Apache-2.0
"""Messages that no peer of ours sends: each is refused, nothing raises, and nothing is held for it."""

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from tests.support.handoff_world import BLOCK_TOKENS, LEASE_SECONDS, Owner, Reader, World
from twinpool._core import hash_blocks, root_hash
from twinpool.transfer.base import AttemptKey
from twinpool.transfer.fence import HandoffFailure
from twinpool.transfer.owner import PREFIX_BLOCKS_MAX
from twinpool.transfer.ticket import LEASE_SECONDS_MAX, PromptShape, parse_ticket
from twinpool.v1 import handoff_pb2 as pb
from twinpool.v1 import worker_pb2

ATTEMPT = AttemptKey("r", 1)
SHAPE = PromptShape(40, BLOCK_TOKENS, 0)


def ticket(blocks: int = 2, lease: Duration | None = None) -> pb.Ticket:
    made = pb.Ticket(
        owner=worker_pb2.WorkerId(name="owner", incarnation=1), id=ATTEMPT.message(), transfer_id=9,
        blocks=range(blocks), generations=[0] * blocks, length_tokens=min(blocks * BLOCK_TOKENS, 40),
    )  # fmt: skip
    made.lease.CopyFrom(Duration(seconds=3) if lease is None else lease)
    return made


@pytest.mark.parametrize(
    "lease",
    [
        Duration(seconds=(1 << 63) - 1),
        Duration(seconds=LEASE_SECONDS_MAX + 1),
        Duration(seconds=-1, nanos=-1),
        Duration(seconds=1, nanos=-2_000_000_000),
        Duration(),
    ],
)
def test_a_lease_that_nobody_gives(lease: Duration) -> None:
    found = parse_ticket(ticket(lease=lease), pool_blocks=24, shape=SHAPE)
    assert isinstance(found, HandoffFailure)
    assert "lease" in found.detail


def test_the_longest_lease_is_believed() -> None:
    found = parse_ticket(ticket(lease=Duration(seconds=LEASE_SECONDS_MAX)), pool_blocks=24, shape=SHAPE)
    assert not isinstance(found, HandoffFailure)
    assert found.lease_seconds == LEASE_SECONDS_MAX


def test_a_ticket_with_a_million_blocks_is_refused_by_their_number() -> None:
    """It is in no prompt, which is said before they are compared with anything."""
    found = parse_ticket(ticket(1_000_000), pool_blocks=1 << 30, shape=SHAPE)
    assert isinstance(found, HandoffFailure)
    assert found.detail == "blocks up to 1000000 for a prompt of 3"


def cached(owner: Owner, blocks: int) -> bytes:
    """The hashes of a prefix that lies in the owner's cache."""
    root = root_hash(b"f", b"", b"")
    hashes = hash_blocks(root, np.arange(blocks * BLOCK_TOKENS, dtype=np.int32), BLOCK_TOKENS)
    taken = owner.take(blocks)
    owner.blocks.commit(taken, hashes, root)
    owner.give(taken)
    return hashes.tobytes()


def linked() -> tuple[World, Owner, Reader, int, list[pb.ExchangeResponse]]:
    world = World()
    owner, reader = world.owner(), world.reader()
    stream = world.link(reader, owner)
    told: list[pb.ExchangeResponse] = []
    reader.from_owner[owner.key] = told.append  # type: ignore[assignment]
    return world, owner, reader, stream, told


@pytest.mark.parametrize("first_block", [PREFIX_BLOCKS_MAX - 3, (1 << 32) - 1])
def test_a_fetch_beyond_every_prompt_holds_nothing(first_block: int) -> None:
    world, owner, _, stream, told = linked()
    fetch = pb.Fetch(id=ATTEMPT.message(), block_hashes=cached(owner, 4), first_block=first_block)
    owner.book.on_message(world.now, stream, pb.ExchangeRequest(fetch=fetch))
    assert [message.failed.reason for message in told] == [worker_pb2.FAILURE_REASON_INVALID]
    assert (owner.book.open, owner.blocks.pinned_transfers()) == (0, 0)


def test_another_owner_cannot_end_a_hand_off() -> None:
    world = World()
    owner, stranger, reader = world.owner(), world.owner("stranger"), world.reader()
    for one in (owner, stranger):
        world.link(reader, one)
    listener = reader.expect(ATTEMPT, owner, SHAPE)
    whole = pb.PrefillComplete(
        ticket=ticket(3), first_tokens=[worker_pb2.FirstToken(token_id=7)], traceparent="x"
    )
    for message in (
        pb.ExchangeResponse(complete=whole),
        pb.ExchangeResponse(failed=pb.TransferFailed(id=ATTEMPT.message(), reason=1)),
        pb.ExchangeResponse(lease_lost=pb.LeaseLost(transfer_ids=[0])),
    ):
        reader.pulls.on_message(world.now, stranger.key, message)
        world.step()
    assert listener.events == []
    assert reader.pulls.waiting == 1
    (session,) = reader.pulls._sessions.values()
    assert session.traceparent == ""
    world.cut(reader, owner)
    world.run(2 * LEASE_SECONDS)
    assert listener.events == ["failed", "drained"]
