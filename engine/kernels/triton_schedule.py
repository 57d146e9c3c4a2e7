# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""A balanced schedule for split attention: every thread block gets the same number of pages, wherever sequences end.

All pages of all sequences lie on one axis, each sequence preceded by some units that stand for its query load and its
output. The axis is cut into ``blocks`` equal runs; if all sequences are equally long, into a number of runs that puts
cuts between sequences, and the blocks left over are idle. A block walks its run; a sequence that a cut divides leaves
one partial result in each block it touches, and they are joined afterwards.

The plan is one ``int32`` tensor, made on the device from the context lengths alone, so that a captured graph follows
lengths that change between replays. A row of ``FIELDS`` values for each block comes first::

    0 sequence, 1 page: where its run begins      2 sequence, 3 page: where it ends (not included)
    4 context of the first sequence               5 first block of the first sequence
    6 blocks of the first sequence                7 blocks of the last sequence
    8 number of the first page, if pages have the schedule's size

then the first block of each sequence, then its last one. A partial result of block ``c`` lies in slot ``2 c`` if it
continues a sequence, ``2 c + 1`` if it begins one. A block whose two ends are equal is idle; if they lie inside a
sequence, it leaves an empty partial result (LSE -inf) all the same, so that nobody need look.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

OVERHEAD = 1
"""Units on the axis for each sequence, unless a kernel has measured its own."""
FIELDS = tl.constexpr(16)
_CHUNK = 32


@dataclass(frozen=True, slots=True)
class Schedule:
    """``plan`` as above for ``blocks`` blocks of which each walks units of ``tile`` tokens."""

    plan: Tensor
    blocks: int
    tile: int


@triton.jit
def _at_most(place, blocks, total):
    """The last cut that is not behind ``place``: cut c lies at c * total // blocks."""
    return tl.minimum(((place.to(tl.int64) + 1) * blocks - 1) // total, blocks - 1).to(tl.int32)


@triton.jit(do_not_specialize=["count", "blocks", "even", "table_stride"])
def plan_kernel(
    CONTEXT, TABLE, PLAN, count, blocks, even, table_stride,
    TILE: tl.constexpr, OVERHEAD: tl.constexpr, CUTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program. ``CUTS`` is a power of two above ``blocks``; ``even`` cuts are made if all sequences are equal."""
    cut = tl.arange(0, CUTS)
    item = tl.arange(0, CHUNK)
    total = 0
    length = (tl.load(CONTEXT) + TILE - 1) // TILE
    unequal = 0
    for begin in range(0, count, CHUNK):
        inside = begin + item < count
        pages = (tl.load(CONTEXT + begin + item, mask=inside, other=0) + TILE - 1) // TILE
        total += tl.sum(tl.where(inside, pages, 0))
        unequal += tl.sum((inside & (pages != length)).to(tl.int32))
    used = tl.where(unequal == 0, even, blocks)
    # Where cuts lie between sequences, one begins with a block, and costs it nothing beside its pages.
    between = (unequal == 0) & ((used % count == 0) | (count % used == 0))
    OVER = tl.where(between, 1, OVERHEAD)
    total += count * OVER
    place = (tl.minimum(cut, used).to(tl.int64) * total // used).to(tl.int32)
    sequence = tl.zeros([CUTS], tl.int32)
    base = tl.zeros([CUTS], tl.int32)
    past = 0
    for begin in range(0, count, CHUNK):
        inside = begin + item < count
        context = tl.load(CONTEXT + begin + item, mask=inside, other=0)
        units = tl.where(inside, (context + TILE - 1) // TILE + OVER, 0)
        end = past + tl.cumsum(units, 0)
        before = (end[None, :] <= place[:, None]) & inside[None, :]
        sequence += tl.sum(before.to(tl.int32), 1)
        base += tl.sum(tl.where(before, units[None, :], 0), 1)
        # The last cut at or before page 0 begins the sequence; the last one before its end ends it.
        first = _at_most(tl.minimum(end - units + OVER, end - 1), used, total)
        tl.store(PLAN + FIELDS * blocks + begin + item, first, mask=inside)
        tl.store(PLAN + FIELDS * blocks + count + begin + item, _at_most(end - 1, used, total), mask=inside)
        past += tl.sum(units)
    page = tl.maximum(place - base - OVER, 0)
    real = sequence < count
    context = tl.load(CONTEXT + sequence, mask=real, other=0)
    end = base + (context + TILE - 1) // TILE + OVER
    first = _at_most(tl.minimum(base + OVER, end - 1), used, total)
    parts = _at_most(end - 1, used, total) - first + 1
    number = tl.load(TABLE + sequence * table_stride + page, mask=real & (page * TILE < context), other=0)
    row = PLAN + cut * FIELDS
    begins, ends = cut < blocks, (cut > 0) & (cut <= blocks)
    tl.store(row, sequence, mask=begins)
    tl.store(row + 1, page, mask=begins)
    tl.store(row - FIELDS + 2, sequence, mask=ends)
    tl.store(row - FIELDS + 3, page, mask=ends)
    tl.store(row + 4, context, mask=begins)
    tl.store(row + 5, first, mask=begins)
    tl.store(row + 6, parts, mask=begins)
    tl.store(row - FIELDS + 7, parts, mask=ends)
    tl.store(row + 8, number, mask=begins)


def make_schedule(
    context: Tensor, table: Tensor, blocks: int, tile: int, overhead: int = OVERHEAD, even: int | None = None
) -> Schedule:
    """Plans ``context int32[n]`` over ``blocks`` thread blocks. Launches two small kernels; n and blocks are at least 1.

    ``overhead`` is what a sequence costs, in tiles; ``even``, at most ``blocks``, how many blocks share the work if all
    sequences are equally long. ``table int32[n, m]`` holds page numbers for field 8; if pages are not of ``tile`` tokens,
    that field means nothing.
    """
    count = len(context)
    plan = torch.empty(FIELDS.value * blocks + 2 * count + 1, dtype=torch.int32, device=context.device)
    plan_kernel[(1,)](
        context, table, plan, count, blocks, even or blocks, table.stride(0),
        TILE=tile, OVERHEAD=overhead, CUTS=triton.next_power_of_2(blocks + 1), CHUNK=_CHUNK, num_warps=8,
    )  # fmt: skip
    # A launch that overlaps the end of the one before it may read the plan early. So let another one lie in between.
    plan[-1:].zero_()
    return Schedule(plan, blocks, tile)
