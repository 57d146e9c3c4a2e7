# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Grouped-query attention over pages for any CUDA device: few query tokens split over a balanced schedule, many in tiles.

A cache row is ``[V of all KV heads | K of all KV heads]``. Both kernels read the columns of one KV head where they lie.
"""

import triton
import triton.language as tl

from twinpool.engine.kernels.triton_schedule import FIELDS

MINUS = tl.constexpr(-1.0e30)
"""Below every score, yet finite: the difference of two of them is no NaN."""
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _product(a, b, acc, CAST: tl.constexpr, PRECISION: tl.constexpr):
    # The interpreter multiplies the bit patterns of bfloat16.
    if CAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _step(
    q, KV, TABLE_ROW, begin, seen, limit, m, norm, acc, scale, page_stride, kv, column,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, MASK: tl.constexpr,
    CAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over ``TOKENS`` keys from ``begin``; keys past ``seen`` are not read."""
    position = begin + tl.arange(0, TOKENS)
    there = position < seen
    page = tl.load(TABLE_ROW + position // PAGE, mask=there, other=0).to(tl.int64)
    row = KV + page * page_stride + (position % PAGE) * (2 * KV_HEADS * DIM) + kv * DIM
    held = there[:, None] & (column < DIM)[None, :]
    keys = tl.load(row[:, None] + KV_HEADS * DIM + column[None, :], mask=held, other=0.0)
    scores = tl.zeros([q.shape[0], TOKENS], tl.float32)
    scores = _product(q, tl.trans(keys), scores, CAST, PRECISION)
    if MASK:
        scores = tl.where(position[None, :] < limit[:, None], scores, float("-inf"))
    highest = tl.maximum(m, tl.max(scores, 1) * scale)
    alpha = tl.exp2(m - highest)
    p = tl.exp2(scores * scale - highest[:, None])
    norm = norm * alpha + tl.sum(p, 1)
    values = tl.load(row[:, None] + column[None, :], mask=held, other=0.0)
    acc = _product(p.to(values.dtype), values, acc * alpha[:, None], CAST, PRECISION)
    return highest, norm, acc


@triton.jit
def _finish(m, norm, acc):
    """Output and LSE to base 2; 0 and -inf for what has seen nothing."""
    some = norm > 0
    acc = tl.where(some[:, None], acc / tl.where(some, norm, 1.0)[:, None], 0.0)
    return acc, tl.where(some, m + tl.log2(tl.where(some, norm, 1.0)), float("-inf"))


@triton.jit(do_not_specialize=["table_stride", "part_rows"])
def gqa_split(
    Q, KV, TABLE, CONTEXT, Q_START, PLAN, OUT, LSE, PART, PART_LSE,
    scale, table_stride, page_stride, part_rows,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
    WITH_LSE: tl.constexpr, CAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (block of the schedule; KV head and run of ``ROWS`` of its query rows).

    A sequence's query rows of a KV head are its tokens times the heads that share it. ``scale`` includes log2(e).
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    block = tl.program_id(0)
    kv = tl.program_id(1) % KV_HEADS
    low = tl.program_id(1) // KV_HEADS * ROWS
    s0 = tl.load(PLAN + block * FIELDS)
    p0 = tl.load(PLAN + block * FIELDS + 1)
    s1 = tl.load(PLAN + block * FIELDS + 2)
    p1 = tl.load(PLAN + block * FIELDS + 3)
    line = low + tl.arange(0, ROWS)
    # Where a query row lies among all rows (token, head) of its sequence.
    within = (line // GROUP) * HEADS + kv * GROUP + line % GROUP
    column = tl.arange(0, DIM_PAD)
    for s in range(s0, tl.where(p1 > 0, s1 + 1, s1)):
        context = tl.load(CONTEXT + s)
        start = tl.load(Q_START + s)
        q_len = tl.load(Q_START + s + 1) - start
        if low < q_len * GROUP:
            units = (context + TILE - 1) // TILE
            first = tl.where(s == s0, p0, 0)
            end = tl.where(s == s1, p1, units)
            real = line < q_len * GROUP
            held = real[:, None] & (column < DIM)[None, :]
            row = (start * HEADS + within).to(tl.int64)
            q = tl.load(Q + row[:, None] * DIM + column[None, :], mask=held, other=0.0)
            # Query token j of q_len sees the first context - q_len + j + 1 entries.
            limit = context - q_len + 1 + tl.minimum(line // GROUP, q_len - 1)
            seen = context - q_len + 1 + tl.minimum((low + ROWS - 1) // GROUP, q_len - 1)
            m = tl.full([ROWS], MINUS, tl.float32)
            norm = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
            for begin in tl.range(first * TILE, tl.minimum(end * TILE, seen), TOKENS, num_stages=STAGES):
                m, norm, acc = _step(
                    q, KV, TABLE + s * table_stride, begin, seen, limit, m, norm, acc, scale, page_stride, kv, column,
                    KV_HEADS, DIM, PAGE, TOKENS, True, CAST, PRECISION,
                )  # fmt: skip
            acc, value = _finish(m, norm, acc)
            if (first == 0) & (end == units):
                tl.store(OUT + row[:, None] * DIM + column[None, :], acc.to(OUT.dtype.element_ty), mask=held)
                if WITH_LSE:
                    tl.store(LSE + row, value * LN2, mask=real)
            else:
                slot = (2 * block + tl.where(first == 0, 1, 0)).to(tl.int64) * part_rows + within
                tl.store(PART + slot[:, None] * DIM + column[None, :], acc, mask=held)
                tl.store(PART_LSE + slot, value, mask=real)


@triton.jit(do_not_specialize=["table_stride"])
def gqa_prefill(
    Q, KV, TABLE, CONTEXT, Q_START, OUT, LSE, scale, table_stride, page_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr,
    QUERIES: tl.constexpr, TOKENS: tl.constexpr, WITH_LSE: tl.constexpr, CAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile of queries, the longest first; head; sequence): only the tiles on the diagonal are masked."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    s = tl.program_id(2)
    start = tl.load(Q_START + s)
    count = tl.load(Q_START + s + 1) - start
    context = tl.load(CONTEXT + s)
    if tile * QUERIES < count:
        row = tile * QUERIES + tl.arange(0, QUERIES)
        real = row < count
        column = tl.arange(0, DIM_PAD)
        place = (start + row).to(tl.int64) * HEADS + head
        held = real[:, None] & (column < DIM)[None, :]
        q = tl.load(Q + place[:, None] * DIM + column[None, :], mask=held, other=0.0)
        limit = context - count + 1 + row
        seen = tl.maximum(tl.minimum(context - count + (tile + 1) * QUERIES, context), 0)
        whole = tl.maximum(context - count + tile * QUERIES + 1, 0) // TOKENS * TOKENS
        m = tl.full([QUERIES], MINUS, tl.float32)
        norm = tl.zeros([QUERIES], tl.float32)
        acc = tl.zeros([QUERIES, DIM_PAD], tl.float32)
        kv = head // (HEADS // KV_HEADS)
        for begin in range(0, whole, TOKENS):
            m, norm, acc = _step(
                q, KV, TABLE + s * table_stride, begin, seen, limit, m, norm, acc, scale, page_stride, kv, column,
                KV_HEADS, DIM, PAGE, TOKENS, False, CAST, PRECISION,
            )  # fmt: skip
        for begin in range(whole, seen, TOKENS):
            m, norm, acc = _step(
                q, KV, TABLE + s * table_stride, begin, seen, limit, m, norm, acc, scale, page_stride, kv, column,
                KV_HEADS, DIM, PAGE, TOKENS, True, CAST, PRECISION,
            )  # fmt: skip
        acc, value = _finish(m, norm, acc)
        tl.store(OUT + place[:, None] * DIM + column[None, :], acc.to(OUT.dtype.element_ty), mask=held)
        if WITH_LSE:
            tl.store(LSE + place, value * LN2, mask=real)
