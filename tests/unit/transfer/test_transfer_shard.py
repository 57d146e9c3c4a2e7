# SPDX-License-Identifier: Apache-2.0
"""Which bytes go where between workers of unequal degree. A model of a row says what every rank holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.ids import WorkerKey
from twinpool.transfer.base import MemoryRegion, PeerDescriptor
from twinpool.transfer.descriptor import DescriptorError, from_message, to_message
from twinpool.transfer.shard import KvShard, share, share_of, sources, strided
from twinpool.v1 import handoff_pb2
from twinpool.worker.handoff_server import descriptor_error

GQA = KvShard(degree=1, rank=0, heads=8, head_bytes=(64, 32), rows=6)
MLA = KvShard(degree=1, rank=0, heads=0, head_bytes=(1152,), rows=6)


def labels(shard: KvShard) -> np.ndarray:
    """What a rank's row holds, from the definition: a number for each byte of the whole model's row."""
    if shard.replicated:
        return np.arange(sum(shard.head_bytes))
    parts, start = [], 0
    for size in shard.head_bytes:
        part = start + np.arange(shard.heads * size).reshape(shard.heads, size)
        each = shard.heads // shard.degree
        parts.append(part[shard.rank * each : (shard.rank + 1) * each].reshape(-1))
        start += shard.heads * size
    return np.concatenate(parts)


def pulled(
    reader: KvShard, degree: int, chosen: tuple[int, ...] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The reader's row after its reads, and how often each byte of it was written."""
    row = np.full(reader.row_bytes, -1)
    written = np.zeros(reader.row_bytes, int)
    for rank in sources(reader, degree) if chosen is None else chosen:
        owner = reader.of_degree(degree, rank)
        theirs, part = labels(owner), share(reader, owner)
        runs = [(0, 0, len(theirs))] if part is None else [(r.remote, r.local, r.length) for r in part.runs]
        for remote, local, length in runs:
            row[local : local + length] = theirs[remote : remote + length]
            written[local : local + length] += 1
    return row, written


@st.composite
def pairs(draw: st.DrawFn) -> tuple[KvShard, int]:
    """A reader's rank and the degree of an owner."""
    mine, theirs = draw(st.integers(1, 16)), draw(st.integers(1, 16))
    head_bytes = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))
    heads = draw(st.sampled_from((0, 1, 2, 3))) * int(np.lcm(mine, theirs))
    shard = KvShard(mine, draw(st.integers(0, mine - 1)), heads, head_bytes, draw(st.integers(1, 9)))
    return shard, theirs


@given(pairs())
def test_every_byte_is_read_once_from_a_rank_that_has_it(pair: tuple[KvShard, int]) -> None:
    reader, degree = pair
    row, written = pulled(reader, degree)
    assert (written == 1).all()
    assert np.array_equal(row, labels(reader))


@given(pairs())
def test_a_rank_that_is_not_a_source_has_nothing_that_is_needed(pair: tuple[KvShard, int]) -> None:
    reader, degree = pair
    chosen = sources(reader, degree)
    others = [reader.of_degree(degree, rank) for rank in range(degree) if rank not in chosen]
    if reader.replicated:
        assert len(chosen) == 1
        return
    for owner in others:
        part = share(reader, owner)
        assert part is not None
        assert part.runs == ()
    parts = [share(reader, reader.of_degree(degree, rank)) for rank in chosen]
    assert (
        sum(reader.block_bytes if part is None else part.block_bytes for part in parts) == reader.block_bytes
    )


@given(st.integers(1, 32), st.integers(1, 32))
def test_readers_of_a_replicated_cache_spread_over_the_owners_ranks(mine: int, theirs: int) -> None:
    chosen = [sources(MLA.of_degree(mine, rank), theirs) for rank in range(mine)]
    counts = np.bincount([ranks[0] for ranks in chosen], minlength=theirs)
    assert counts.max() - counts.min() <= 1


def test_equal_degrees_share_whole_blocks() -> None:
    for shard in (GQA.of_degree(4, 3), MLA.of_degree(4, 3), GQA):
        assert share(shard, shard) is None
        assert share_of(None, None) is None
    assert share_of(GQA, None) is None
    assert share(MLA.of_degree(4, 1), MLA.of_degree(2, 0)) is None


def test_what_descriptors_result() -> None:
    part = share(GQA.of_degree(2, 1), GQA)
    assert part is not None
    assert [(run.remote, run.local, run.length) for run in part.runs] == [
        (4 * 64, 0, 4 * 64),
        (8 * 64 + 4 * 32, 4 * 64, 4 * 32),
    ]
    assert part.descriptors == 2 * 6
    assert part.block_bytes == 6 * 4 * 96


def test_a_list_has_the_runs_of_all_rows_of_its_blocks() -> None:
    table = strided(np.array([3, 1], np.int32), 1000, 2, rows=6, row_bytes=10, runs=[(0, 4), (7, 3)])
    assert table.tolist() == [
        [1000 + 180, 4, 2, 10, 6],
        [1000 + 187, 3, 2, 10, 6],
        [1000 + 60, 4, 2, 10, 6],
        [1000 + 67, 3, 2, 10, 6],
    ]


@pytest.mark.parametrize(
    ("degree", "rank", "heads", "head_bytes", "rows"),
    [
        (0, 0, 8, (64,), 6),
        (2, 2, 8, (64,), 6),
        (3, 0, 8, (64,), 6),
        (2048, 0, 2048, (64,), 6),
        (1, 0, 8, (), 6),
        (1, 0, 8, (0,), 6),
        (1, 0, 8, (64,), 0),
        (1, 0, 1 << 20, (64,), 6),
    ],
)
def test_impossible_shards_are_refused(
    degree: int, rank: int, heads: int, head_bytes: tuple[int, ...], rows: int
) -> None:
    with pytest.raises(ValueError, match=r"rank|degree|rows"):
        KvShard(degree, rank, heads, head_bytes, rows)


# --- descriptors on the wire


def descriptor(shard: KvShard | None, name: str = "owner", block_bytes: int | None = None) -> PeerDescriptor:
    size = block_bytes if block_bytes is not None else (shard or GQA).block_bytes
    pool, table = MemoryRegion(4096, 4 * size), MemoryRegion(8192, 32)
    key = WorkerKey(name, 7)
    return PeerDescriptor(key, "f", pool, size, 4, table, str(key), b"metadata", shard)


def refusal(theirs: handoff_pb2.WorkerDescriptor, own: PeerDescriptor) -> DescriptorError:
    with pytest.raises(DescriptorError) as refused:
        from_message(theirs, own=own)
    return refused.value


@pytest.mark.parametrize("theirs", [None, GQA, GQA.of_degree(2, 1), GQA.of_degree(8, 5)])
@pytest.mark.parametrize("mine", [None, GQA, GQA.of_degree(4, 1)])
def test_ranks_of_any_degree_pair(mine: KvShard | None, theirs: KvShard | None) -> None:
    peer = descriptor(theirs)
    assert from_message(to_message(peer), own=descriptor(mine, "reader")) == peer


def test_ranks_of_different_layouts_do_not_pair() -> None:
    own = descriptor(GQA.of_degree(2, 0), "reader")
    for other in (replace(GQA, heads=16), replace(GQA, head_bytes=(32, 64)), replace(GQA, rows=12), MLA):
        error = refusal(to_message(descriptor(other)), own)
        assert error.field == "shard"
        assert "the same model in the same layout" in error.detail


def test_a_degree_that_does_not_divide_is_told_to_the_operator() -> None:
    message = to_message(descriptor(GQA.of_degree(2, 0)))
    message.shard.degree = 3
    error = refusal(message, descriptor(GQA, "reader"))
    assert error.field == "shard"
    assert "tensor-parallel degree 3 does not divide the model's 8 KV heads" in error.detail
    assert descriptor_error(error).reason == "FINGERPRINT_MISMATCH"


def test_blocks_must_have_the_length_that_their_shard_has() -> None:
    whole, half = GQA.block_bytes, GQA.block_bytes // 2
    own = descriptor(GQA.of_degree(2, 0), "reader")
    assert refusal(to_message(descriptor(GQA, block_bytes=half)), own).field == "block_bytes"
    assert refusal(to_message(descriptor(None, block_bytes=half)), own).field == "block_bytes"
    # A rank of one that holds whole rows of another model, which only its length tells.
    other = descriptor(None, "reader", block_bytes=whole + 96)
    assert refusal(to_message(descriptor(GQA.of_degree(2, 1))), other).field == "block_bytes"
