# SPDX-License-Identifier: Apache-2.0
"""The core's reader of tickets against protobuf's own, and its covers against NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from twinpool._core import CoreError, cover_blocks, read_ticket
from twinpool.v1 import handoff_pb2, worker_pb2

BLOCK_TOKENS = 16
POOL_BLOCKS = 1 << 20
uint64 = st.integers(0, (1 << 64) - 1)


@given(
    blocks=st.lists(st.integers(0, POOL_BLOCKS - 1), max_size=300, unique=True),
    first_block=st.integers(0, 500),
    transfer_id=st.integers(1, (1 << 64) - 1),
    digests=st.booleans(),
    data=st.data(),
)
def test_a_ticket_is_read_as_protobuf_reads_it(
    blocks: list[int], first_block: int, transfer_id: int, digests: bool, data: st.DataObject
) -> None:
    count, length = len(blocks), (first_block + len(blocks)) * BLOCK_TOKENS
    numbers = st.lists(uint64, min_size=count, max_size=count)
    made = handoff_pb2.Ticket(
        transfer_id=transfer_id,
        owner=worker_pb2.WorkerId(name="owner", incarnation=data.draw(uint64)),
        id=worker_pb2.AttemptId(request_id=data.draw(st.text(max_size=20)), attempt=3),
        first_block=first_block,
        blocks=blocks,
        generations=data.draw(numbers),
        digests=data.draw(numbers) if digests else [],
        length_tokens=length,
        lease=Duration(seconds=data.draw(st.integers(0, 60)), nanos=data.draw(st.integers(1, 999_999_999))),
    )
    read = read_ticket(made.SerializeToString(), POOL_BLOCKS, max(length, 1), BLOCK_TOKENS, 61)
    assert not isinstance(read, str), read
    assert read[:2] == (made.transfer_id, made.first_block)
    assert read[2].dtype == np.int32
    assert read[2].tolist() == list(made.blocks)
    assert read[3].dtype == np.uint64
    assert read[3].tolist() == list(made.generations)
    assert read[4] == tuple(made.digests)
    assert read[5] == made.length_tokens
    assert read[6] == pytest.approx(made.lease.seconds + made.lease.nanos / 1e9)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_ticket_are_refused(message: bytes) -> None:
    """None can be one here: a lease has to be longer than nothing, and this reader believes none that is."""
    assert isinstance(read_ticket(message, 0, 1, 1, 0), str)


@given(st.lists(st.integers(0, (1 << 31) - 1), max_size=200), st.integers(0, 1 << 20))
def test_a_cover_of_blocks_that_lie_far_apart(numbers: list[int], gap: int) -> None:
    blocks = np.array([number % (1 << 22) for number in numbers], dtype=np.int32)
    entries, positions = cover_blocks(blocks, gap)
    ordered = np.unique(blocks)
    joined = [np.arange(low, high + 1) for low, high in itertools.pairwise(ordered) if high - low <= gap]
    wanted = np.unique(np.concatenate([ordered, *joined])) if len(ordered) else ordered
    assert np.array_equal(entries, wanted)
    assert np.array_equal(entries[positions], blocks)


def test_what_a_caller_gets_wrong() -> None:
    with pytest.raises(CoreError, match="gap"):
        cover_blocks(np.zeros(1, np.int32), -1)
    with pytest.raises(TypeError, match="blocks must be"):
        cover_blocks(np.zeros(1, np.int64), 1)  # type: ignore[arg-type]
    with pytest.raises(CoreError, match="pool_blocks"):
        read_ticket(b"", -1, 1, 1, 1)
    with pytest.raises(CoreError, match="block_tokens"):
        read_ticket(b"", 1, 1, 0, 1)
    with pytest.raises(CoreError, match="lease_seconds_max"):
        read_ticket(b"", 1, 1, 1, -1)
