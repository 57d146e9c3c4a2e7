# SPDX-License-Identifier: Apache-2.0
"""Workers of unequal tensor-parallel degree: which ranks of an owner a reader's rank reads, and which bytes of them.

A worker of degree ``n`` is ``n`` ranks, each with a pool of its own and the same block numbers. A pool's block is rows,
one for each layer and token. Of a model with latent attention (MLA) every rank holds whole rows, so one rank of the owner
will do, and readers are spread over them. With grouped-query attention (GQA) a row is parts, the values of all KV heads
and then their keys, and rank ``r`` of ``n`` holds heads ``r * H / n`` to ``(r + 1) * H / n`` of each part. A reader's rank
then reads from every rank of the owner whose heads overlap its own: heads of one part and row lie side by side, so that
is one run of bytes for each row and part, ``layers * block_tokens * 2`` descriptors a block, at a constant stride.

Equal degrees share whole blocks, one descriptor each, as ever. All here is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

DEGREE_MAX: Final = 1024
"""Most ranks of a worker."""

ROW_BYTES_MAX: Final = 1 << 24
"""Longest row, in bytes; DeepSeek-V3's have 1,152."""

PARTS_MAX: Final = 8
"""Most parts of a row; a cache of values and keys has two."""


@dataclass(frozen=True, slots=True)
class KvShard:
    """What part of every row the pool of one rank holds. ``heads`` 0: all of it, ``sum(head_bytes)`` bytes.

    ``head_bytes`` are the bytes of one head in each part, in the order of the parts; ``rows`` those of a block.
    """

    degree: int
    rank: int
    heads: int
    head_bytes: tuple[int, ...]
    rows: int

    def __post_init__(self) -> None:
        if not 1 <= self.degree <= DEGREE_MAX or not 0 <= self.rank < self.degree:
            raise ValueError(f"rank {self.rank} of {self.degree}; at most {DEGREE_MAX} ranks")
        if not 1 <= len(self.head_bytes) <= PARTS_MAX or min(self.head_bytes) < 1 or self.rows < 1:
            raise ValueError(f"{self.rows} rows with heads of {self.head_bytes} bytes")
        if self.heads < 0 or self.heads % self.degree:
            raise ValueError(
                f"tensor-parallel degree {self.degree} does not divide the model's {self.heads} KV heads: "
                "choose a degree that does"
            )
        if max(1, self.heads) * sum(self.head_bytes) > ROW_BYTES_MAX:
            raise ValueError(f"rows of more than {ROW_BYTES_MAX} bytes")

    @property
    def replicated(self) -> bool:
        """Whether every rank holds whole rows."""
        return self.heads == 0

    @property
    def heads_here(self) -> range:
        """Heads of the model that this rank holds; one for the whole row if it is replicated."""
        if self.replicated:
            return range(1)
        each = self.heads // self.degree
        return range(self.rank * each, (self.rank + 1) * each)

    @property
    def row_bytes(self) -> int:
        return len(self.heads_here) * sum(self.head_bytes)

    @property
    def block_bytes(self) -> int:
        return self.rows * self.row_bytes

    def of_degree(self, degree: int, rank: int = 0) -> KvShard:
        """The shard of a rank of another worker of the same model. Raises ValueError if the degree does not divide."""
        return replace(self, degree=degree, rank=rank)

    def offset(self, part: int, head: int) -> int:
        """Where in this rank's rows ``head`` of the model begins in ``part``, in bytes."""
        here = self.heads_here
        before = sum(self.head_bytes[:part]) * len(here)
        return before + (head - here.start) * self.head_bytes[part]


@dataclass(frozen=True, slots=True)
class Run:
    """``length`` bytes at ``remote`` of each row of an owner's rank, which go to ``local`` of the reader's row."""

    remote: int
    local: int
    length: int


@dataclass(frozen=True, slots=True)
class Share:
    """What a reader's rank reads of each block of one rank of an owner: ``runs`` of every row."""

    rows: int
    remote_row_bytes: int
    local_row_bytes: int
    runs: tuple[Run, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block that are read."""
        return self.rows * sum(run.length for run in self.runs)

    @property
    def descriptors(self) -> int:
        """Descriptors of a block on either side."""
        return self.rows * len(self.runs)


def strided(
    blocks: NDArray[np.int32],
    address: int,
    device: int,
    rows: int,
    row_bytes: int,
    runs: Sequence[tuple[int, int]],
) -> NDArray[np.uint64]:
    """NIXL's compressed descriptors, ``uint64[n * runs, 5]``: of each block of a pool at ``address``, ``runs`` (offset in a
    row and length, bytes) of all its rows."""
    starts = np.uint64(address) + blocks.astype(np.uint64) * np.uint64(rows * row_bytes)
    table = np.empty((len(blocks), len(runs), 5), np.uint64)
    for index, (offset, length) in enumerate(runs):
        table[:, index, 0] = starts + np.uint64(offset)
        table[:, index, 1:] = (length, device, row_bytes, rows)
    return table.reshape(-1, 5)


def mismatch(one: KvShard, other: KvShard) -> str | None:
    """Why ranks with these shards cannot exchange blocks; None if they can, whatever their degrees are."""
    for name in ("heads", "head_bytes", "rows"):
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine != theirs:
            return (
                f"{name} {theirs} against {mine} here: both have to serve the same model in the same layout"
            )
    return None


def sources(reader: KvShard, degree: int) -> tuple[int, ...]:
    """Ranks of an owner of ``degree`` that ``reader`` reads. Raises ValueError if the degree does not divide.

    Of a replicated cache one, so that the readers' ranks spread evenly over the owner's.
    """
    owner = reader.of_degree(degree)
    if owner.replicated:
        return (reader.rank * degree // reader.degree,)
    each, here = owner.heads // degree, reader.heads_here
    return tuple(range(here.start // each, (here.stop - 1) // each + 1))


def share(reader: KvShard, owner: KvShard) -> Share | None:
    """What ``reader`` reads of each block of the rank ``owner``; None: the whole block, which is the same on both.

    No run at all if they have no head in common. Raises ValueError for a :func:`mismatch`.
    """
    problem = mismatch(reader, owner)
    if problem is not None:
        raise ValueError(problem)
    ours, theirs = reader.heads_here, owner.heads_here
    if ours == theirs:
        return None
    low, high = max(ours.start, theirs.start), min(ours.stop, theirs.stop)
    runs = tuple(
        Run(owner.offset(part, low), reader.offset(part, low), (high - low) * size)
        for part, size in enumerate(reader.head_bytes)
        if low < high
    )
    return Share(reader.rows, owner.row_bytes, reader.row_bytes, runs)


def share_of(reader: KvShard | None, owner: KvShard | None) -> Share | None:
    """As :func:`share`, where None stands for a pool with whole rows of whatever model the other one has."""
    known = reader or owner
    if known is None:
        return None
    whole = known.of_degree(1)
    return share(reader or whole, owner or whole)
