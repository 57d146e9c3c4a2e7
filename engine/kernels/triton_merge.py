# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Joins the partial results of a split attention launch; see ``triton_schedule`` for where they lie."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twinpool.engine.kernels.triton_schedule import FIELDS, Schedule

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["count", "blocks", "part_rows"])
def merge_kernel(
    PART, PART_LSE, PLAN, Q_START, OUT, LSE, count, blocks, part_rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WITH_LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (run of ``ROWS`` rows, run of ``COLUMNS`` columns, sequence), ``PARTS`` parts at a time.

    Partial sums are logarithms to base 2.
    """
    sequence = tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.load(PLAN + FIELDS * blocks + sequence)
    last = tl.load(PLAN + FIELDS * blocks + count + sequence)
    start = tl.load(Q_START + sequence)
    rows = (tl.load(Q_START + sequence + 1) - start) * HEADS
    if PDL:
        # The plan is older than the split, which let this launch begin only after it had waited itself. In this order: what
        # follows may order what is older, too, while this one waits.
        gdc_launch_dependents()
        gdc_wait()
    # One block did the whole sequence: it wrote the output itself.
    if (first < last) & (tl.program_id(0) * ROWS < rows):
        real = row < rows
        wide = real[:, None] & (column < DIM)[None, :]
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(first, last + 1, PARTS):
            block = begin + tl.arange(0, PARTS)
            there = block <= last
            slot = (2 * block + tl.where(block == first, 1, 0)).to(tl.int64)
            place = slot[:, None] * part_rows + row[None, :]
            sums = tl.load(PART_LSE + place, mask=there[:, None] & real[None, :], other=float("-inf"))
            held = there[:, None, None] & wide[None, :, :]
            values = tl.load(PART + place[:, :, None] * DIM + column[None, None, :], mask=held, other=0.0)
            highest = tl.maximum(peak, tl.max(sums, 0))
            # If nothing was seen yet, -inf - -inf would be NaN.
            anchor = tl.where(highest == float("-inf"), 0.0, highest)
            old = tl.exp2(peak - anchor)
            weight = tl.exp2(sums - anchor[None, :])
            part = tl.where(weight[:, :, None] > 0, values * weight[:, :, None], 0.0)
            acc = acc * old[:, None] + tl.sum(part, 0)
            total = total * old + tl.sum(weight, 0)
            peak = highest
        target = (start * HEADS + row).to(tl.int64)
        seen = total > 0
        result = tl.where(seen[:, None], acc / tl.where(seen, total, 1.0)[:, None], 0.0)
        tl.store(OUT + target[:, None] * DIM + column[None, :], result.to(OUT.dtype.element_ty), mask=wide)
        if WITH_LSE:
            value = tl.where(seen, (peak + tl.log2(tl.where(seen, total, 1.0))) * LN2, float("-inf"))
            tl.store(LSE + target, value, mask=real & (tl.program_id(1) == 0))


def tiling(rows: int, count: int, blocks: int, padded: int) -> tuple[int, int, int]:
    """(parts, rows, columns) of a program: all loads of a program should be in flight at once, 8,192 values at most.

    Sequences that many blocks share are few: their programs take many parts and few columns, so that all processors
    have work. Sequences that a few blocks share come in numbers, with whole rows.
    """
    shares = blocks // count + 2
    if shares > 8:
        columns = min(padded, max(64, triton.next_power_of_2(rows * count)))
        return min(triton.next_power_of_2(shares), 128, max(8192 // columns, 8)), 1, columns
    return 4, 4 if rows * count > 512 else 2, min(padded, 512)


def merge(
    part: Tensor,
    part_lse: Tensor,
    schedule: Schedule,
    q_start: Tensor,
    output: Tensor,
    lse: Tensor | None,
    *,
    heads: int,
    rows: int,
    pdl: bool,
) -> None:
    """Fills the rows of ``output [T, heads, dim]`` (and ``lse [T, heads]``) whose sequences were divided.

    ``rows`` is the largest number of query rows (tokens x heads) of a sequence; ``pdl`` lets the launch overlap the end
    of the launch before it, which must then be the split.
    """
    count, dim = len(q_start) - 1, output.shape[-1]
    parts, tall, columns = tiling(rows, count, schedule.blocks, triton.next_power_of_2(dim))
    grid = (triton.cdiv(rows, tall), triton.cdiv(dim, columns), count)
    options = {"launch_pdl": True} if pdl else {}
    merge_kernel[grid](
        part, part_lse, schedule.plan, q_start, output, lse if lse is not None else part_lse,
        count, schedule.blocks, part.shape[1], HEADS=heads, DIM=dim, PARTS=parts, ROWS=tall, COLUMNS=columns,
        WITH_LSE=lse is not None, PDL=pdl, num_warps=4, **options,
    )  # fmt: skip
