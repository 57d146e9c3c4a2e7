# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""A balanced schedule for split attention: every thread block gets the same number of pages, wherever sequences end.

All pages of all sequences lie on one axis, each sequence preceded by ``OVERHEAD`` units that stand for its query load
and its output. The axis is cut into ``blocks`` equal runs. A block walks its run; a sequence that a cut divides leaves
one partial result in each block it touches, and ``triton_merge`` joins them.

The plan is one ``int32`` tensor, made on the device from the context lengths alone, so that a captured graph follows
lengths that change between replays::

    sequence [blocks + 1] | page [blocks + 1] | first block [n] | last block [n]

Block ``c`` owns everything from (sequence[c], page[c]) up to, and without, (sequence[c + 1], page[c + 1]). A partial result
lies in slot ``2 c`` if it continues a sequence, ``2 c + 1`` if it begins one. A block whose two ends are equal is idle; if
they lie inside a sequence, it leaves an empty partial result (LSE -inf) all the same, so that the merge need not look.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

OVERHEAD = 1
"""Units on the axis for each sequence, in pages. Measured: see docs/kernels.md."""
_CHUNK = 32


@dataclass(frozen=True, slots=True)
class Schedule:
    """``plan`` as above for ``blocks`` blocks of which each walks units of ``tile`` tokens."""

    plan: Tensor
    blocks: int
    tile: int


@triton.jit(do_not_specialize=["count", "blocks"])
def plan_kernel(
    CONTEXT, PLAN, count, blocks, TILE: tl.constexpr, OVER: tl.constexpr, CUTS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """One program. ``CUTS`` is a power of two above ``blocks``."""
    cut = tl.arange(0, CUTS)
    item = tl.arange(0, CHUNK)
    total = 0
    for begin in range(0, count, CHUNK):
        inside = begin + item < count
        context = tl.load(CONTEXT + begin + item, mask=inside, other=0)
        total += tl.sum(tl.where(inside, (context + TILE - 1) // TILE + OVER, 0))
    place = (tl.minimum(cut, blocks).to(tl.int64) * total // blocks).to(tl.int32)
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
        # The first block that reaches page 0 of the sequence, and the last one that has a page of it.
        head = tl.minimum(end - units + OVER, end - 1)
        real = cut[None, :] < blocks
        first = tl.sum((real & (place[None, :] <= head[:, None])).to(tl.int32), 1) - 1
        last = tl.sum((real & (place[None, :] < end[:, None])).to(tl.int32), 1) - 1
        tl.store(PLAN + 2 * (blocks + 1) + begin + item, first, mask=inside)
        tl.store(PLAN + 2 * (blocks + 1) + count + begin + item, last, mask=inside)
        past += tl.sum(units)
    tl.store(PLAN + cut, sequence, mask=cut <= blocks)
    tl.store(PLAN + blocks + 1 + cut, tl.maximum(place - base - OVER, 0), mask=cut <= blocks)


def make_schedule(context: Tensor, blocks: int, tile: int, overhead: int = OVERHEAD) -> Schedule:
    """Plans ``context int32[n]`` over ``blocks`` thread blocks. Launches one small kernel; n and blocks are at least 1."""
    count = len(context)
    plan = torch.empty(2 * (blocks + 1) + 2 * count, dtype=torch.int32, device=context.device)
    cuts = triton.next_power_of_2(blocks + 1)
    plan_kernel[(1,)](
        context, plan, count, blocks, TILE=tile, OVER=overhead, CUTS=cuts, CHUNK=_CHUNK, num_warps=8
    )
    return Schedule(plan, blocks, tile)
