# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Joins the partial results of a split attention launch; see ``triton_schedule`` for where they lie."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twinpool.engine.kernels.triton_schedule import Schedule

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["count", "blocks", "part_rows"])
def merge_kernel(
    PART, PART_LSE, PLAN, Q_START, OUT, LSE, count, blocks, part_rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    WITH_LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row of the sequence, run of ``COLUMNS`` columns, sequence). Partial sums are logarithms to base 2."""
    row = tl.program_id(0)
    sequence = tl.program_id(2)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.load(PLAN + 2 * (blocks + 1) + sequence)
    last = tl.load(PLAN + 2 * (blocks + 1) + count + sequence)
    start = tl.load(Q_START + sequence)
    rows = (tl.load(Q_START + sequence + 1) - start) * HEADS
    if PDL:
        # The plan is older than the split, which let this launch begin only after it had waited itself.
        gdc_wait()
        gdc_launch_dependents()
    # One block did the whole sequence: it wrote the output itself.
    if (first < last) & (row < rows):
        peak = float("-inf")
        total = 0.0
        acc = tl.zeros([COLUMNS], tl.float32)
        for begin in range(first, last + 1, PARTS):
            block = begin + tl.arange(0, PARTS)
            there = block <= last
            slot = (2 * block + tl.where(block == first, 1, 0)).to(tl.int64) * part_rows + row
            sums = tl.load(PART_LSE + slot, mask=there, other=float("-inf"))
            held = there[:, None] & (column < DIM)[None, :]
            values = tl.load(PART + slot[:, None] * DIM + column[None, :], mask=held, other=0.0)
            highest = tl.maximum(peak, tl.max(sums, 0))
            # If nothing was seen yet, -inf - -inf would be NaN.
            anchor = tl.where(highest == float("-inf"), 0.0, highest)
            old = tl.exp2(peak - anchor)
            weight = tl.exp2(sums - anchor)
            acc = acc * old + tl.sum(tl.where(weight[:, None] > 0, values * weight[:, None], 0.0), 0)
            total = total * old + tl.sum(weight, 0)
            peak = highest
        target = (start * HEADS + row).to(tl.int64)
        result = tl.where(total > 0, acc / total, 0.0)
        tl.store(OUT + target * DIM + column, result.to(OUT.dtype.element_ty), mask=column < DIM)
        if WITH_LSE:
            tl.store(LSE + target, (peak + tl.log2(total)) * LN2, mask=tl.program_id(1) == 0)


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
    padded = triton.next_power_of_2(dim)
    # Few rows: narrow programs, so that every processor has some; many: wide ones.
    columns = min(padded, 64 if rows * count <= 64 else 128 if rows * count <= 1024 else 256)
    parts = min(max(8192 // columns, 8), triton.next_power_of_2(schedule.blocks))
    grid = (rows, triton.cdiv(dim, columns), count)
    options = {"launch_pdl": True} if pdl else {}
    merge_kernel[grid](
        part, part_lse, schedule.plan, q_start, output, lse if lse is not None else part_lse,
        count, schedule.blocks, part.shape[1], HEADS=heads, DIM=dim, COLUMNS=columns, PARTS=parts,
        WITH_LSE=lse is not None, PDL=pdl, num_warps=4, **options,
    )  # fmt: skip
