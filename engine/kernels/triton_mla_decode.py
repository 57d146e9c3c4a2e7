# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Absorbed MLA attention over pages for any CUDA device: split over a balanced schedule, any dimensions and page size."""

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
def _keys(
    KV,
    TABLE_ROW,
    position,
    seen,
    page_stride,
    column,
    ROW: tl.constexpr,
    TO: tl.constexpr,
    PAGE: tl.constexpr,
):
    """``[tokens, columns]`` of the cache; 0 beyond ``seen`` tokens and ``TO`` columns, whatever lies there."""
    there = position < seen
    page = tl.load(TABLE_ROW + position // PAGE, mask=there, other=0).to(tl.int64)
    row = KV + page * page_stride + (position % PAGE) * ROW
    return tl.load(row[:, None] + column[None, :], mask=there[:, None] & (column < TO)[None, :], other=0.0)


@triton.jit(do_not_specialize=["table_stride", "part_rows"])
def mla_split(
    Q, KV, TABLE, CONTEXT, Q_START, PLAN, OUT, LSE, PART, PART_LSE,
    scale, table_stride, page_stride, part_rows,
    HEADS: tl.constexpr, LATENT: tl.constexpr, WIDTH: tl.constexpr, LATENT_PAD: tl.constexpr, ROPE_PAD: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
    WITH_LSE: tl.constexpr, CAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (block of the schedule, run of ``ROWS`` query rows of each sequence). Row r is token r // HEADS.

    ``scale`` includes log2(e). Partial results are normalised, their LSE is to base 2.
    """
    block = tl.program_id(0)
    s0 = tl.load(PLAN + block * FIELDS)
    p0 = tl.load(PLAN + block * FIELDS + 1)
    s1 = tl.load(PLAN + block * FIELDS + 2)
    p1 = tl.load(PLAN + block * FIELDS + 3)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    latent = tl.arange(0, LATENT_PAD)
    rope = LATENT + tl.arange(0, ROPE_PAD)
    token = tl.arange(0, TOKENS)
    for s in range(s0, tl.where(p1 > 0, s1 + 1, s1)):
        context = tl.load(CONTEXT + s)
        start = tl.load(Q_START + s)
        q_len = tl.load(Q_START + s + 1) - start
        rows = q_len * HEADS
        if tl.program_id(1) * ROWS < rows:
            units = (context + TILE - 1) // TILE
            first = tl.where(s == s0, p0, 0)
            end = tl.where(s == s1, p1, units)
            real = row < rows
            query = Q + (start * HEADS + row).to(tl.int64)[:, None] * WIDTH
            q = tl.load(query + latent[None, :], mask=real[:, None] & (latent < LATENT)[None, :], other=0.0)
            qr = tl.load(query + rope[None, :], mask=real[:, None] & (rope < WIDTH)[None, :], other=0.0)
            # Query token j of q_len sees the first context - q_len + j + 1 entries.
            limit = context - q_len + 1 + tl.minimum(row // HEADS, q_len - 1)
            seen = context - q_len + 1 + tl.minimum((tl.program_id(1) * ROWS + ROWS - 1) // HEADS, q_len - 1)
            m = tl.full([ROWS], MINUS, tl.float32)
            norm = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, LATENT_PAD], tl.float32)
            for n in tl.range(first * TILE, tl.minimum(end * TILE, seen), TOKENS, num_stages=STAGES):
                position = n + token
                k = _keys(
                    KV, TABLE + s * table_stride, position, seen, page_stride, latent, WIDTH, LATENT, PAGE
                )
                kr = _keys(
                    KV, TABLE + s * table_stride, position, seen, page_stride, rope, WIDTH, WIDTH, PAGE
                )
                qk = _product(q, tl.trans(k), tl.zeros([ROWS, TOKENS], tl.float32), CAST, PRECISION)
                qk = _product(qr, tl.trans(kr), qk, CAST, PRECISION)
                qk = tl.where(position[None, :] < limit[:, None], qk, float("-inf"))
                highest = tl.maximum(m, tl.max(qk, 1) * scale)
                alpha = tl.exp2(m - highest)
                p = tl.exp2(qk * scale - highest[:, None])
                norm = norm * alpha + tl.sum(p, 1)
                acc = _product(p.to(k.dtype), k, acc * alpha[:, None], CAST, PRECISION)
                m = highest
            seen_any = norm > 0
            acc = tl.where(seen_any[:, None], acc / tl.where(seen_any, norm, 1.0)[:, None], 0.0)
            value = tl.where(seen_any, m + tl.log2(tl.where(seen_any, norm, 1.0)), float("-inf"))
            held = real[:, None] & (latent < LATENT)[None, :]
            if (first == 0) & (end == units):
                target = (start * HEADS + row).to(tl.int64)
                tl.store(
                    OUT + target[:, None] * LATENT + latent[None, :], acc.to(OUT.dtype.element_ty), mask=held
                )
                if WITH_LSE:
                    tl.store(LSE + target, value * LN2, mask=real)
            else:
                slot = (2 * block + tl.where(first == 0, 1, 0)).to(tl.int64) * part_rows + row
                tl.store(PART + slot[:, None] * LATENT + latent[None, :], acc, mask=held)
                tl.store(PART_LSE + slot, value, mask=real)
