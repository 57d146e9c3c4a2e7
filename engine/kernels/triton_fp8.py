# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Latent attention over packed rows (layout ``fp8_latent``, see ``engine.kv.formats``): the split kernel, and what stores rows.

The scale of a run of 128 latent values is the same for all of them, so it is taken out of the products: scores are sums
over the runs of scale x (query run x codes), and an output run is (weights x scales) x codes. Codes turn into the
query's type exactly.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twinpool.engine.kernels.triton_schedule import FIELDS

MINUS = tl.constexpr(-1.0e30)
"""Below every score, yet finite: the difference of two of them is no NaN."""
LN2 = tl.constexpr(0.6931471805599453)
GROUP = tl.constexpr(128)
"""Latent values that share a scale; as ``formats.GROUP``."""
TOP = tl.constexpr(448.0)
TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _product(a, b, acc, CAST: tl.constexpr, PRECISION: tl.constexpr):
    # The interpreter multiplies the bit patterns of bfloat16.
    if CAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _query(q_row, real, NUMBER: tl.constexpr, LATENT: tl.constexpr, WIDE: tl.constexpr):
    """The query's columns of one run."""
    column = NUMBER * GROUP + tl.arange(0, WIDE)
    return tl.load(q_row[:, None] + column[None, :], mask=real[:, None] & (column < LATENT)[None, :], other=0.0)


@triton.jit
def _run(q, CODES, SCALES, at, there, scores, NUMBER: tl.constexpr, LATENT: tl.constexpr, WIDE: tl.constexpr,
         CAST: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Codes and scales of one run of latent columns of the tokens ``at`` (bytes), and the scores with its share."""
    column = NUMBER * GROUP + tl.arange(0, WIDE)
    held = there[:, None] & (column < LATENT)[None, :]
    codes = tl.load(CODES + at[:, None] + column[None, :], mask=held, other=0.0).to(q.dtype)
    scale = tl.load(SCALES + (at + LATENT) // 4 + NUMBER, mask=there, other=0.0)
    share = _product(q, tl.trans(codes), tl.zeros([q.shape[0], at.shape[0]], tl.float32), CAST, PRECISION)
    return codes, scale, scores + share * scale[None, :]


@triton.jit
def _add(p, codes, scale, acc, alpha, CAST: tl.constexpr, PRECISION: tl.constexpr):
    """``acc * alpha + (p * scale) @ codes``."""
    return _product((p * scale[None, :]).to(codes.dtype), codes, acc * alpha[:, None], CAST, PRECISION)


@triton.jit
def _store_run(TARGET, row, acc, share, held, NUMBER: tl.constexpr, LATENT: tl.constexpr, WIDE: tl.constexpr):
    column = NUMBER * GROUP + tl.arange(0, WIDE)
    result = (acc * share[:, None]).to(TARGET.dtype.element_ty)
    tl.store(TARGET + row[:, None] * LATENT + column[None, :], result, mask=held[:, None] & (column < LATENT)[None, :])


@triton.jit
def _store(TARGET, row, a0, a1, a2, a3, share, held, RUNS: tl.constexpr, LATENT: tl.constexpr, WIDE: tl.constexpr):
    _store_run(TARGET, row, a0, share, held, 0, LATENT, WIDE)
    if RUNS > 1:
        _store_run(TARGET, row, a1, share, held, 1, LATENT, WIDE)
    if RUNS > 2:
        _store_run(TARGET, row, a2, share, held, 2, LATENT, WIDE)
    if RUNS > 3:
        _store_run(TARGET, row, a3, share, held, 3, LATENT, WIDE)


@triton.jit(do_not_specialize=["table_stride", "part_rows"])
def mla_split_fp8(
    Q, CODES, SCALES, ROTARY, TABLE, CONTEXT, Q_START, PLAN, OUT, LSE, PART, PART_LSE,
    scale, table_stride, page_bytes, part_rows,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, ROW_BYTES: tl.constexpr,
    RUNS: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, STAGES: tl.constexpr, WITH_LSE: tl.constexpr, CAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (block of the schedule, run of ``ROWS`` query rows of each sequence). Row r is token r // HEADS.

    ``CODES``, ``SCALES`` and ``ROTARY`` are the pool as float8, float32 and bfloat16; ``scale`` includes log2(e).
    """
    block = tl.program_id(0)
    s0 = tl.load(PLAN + block * FIELDS)
    p0 = tl.load(PLAN + block * FIELDS + 1)
    s1 = tl.load(PLAN + block * FIELDS + 2)
    p1 = tl.load(PLAN + block * FIELDS + 3)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    rope = tl.arange(0, ROPE_PAD)
    for s in range(s0, tl.where(p1 > 0, s1 + 1, s1)):
        context = tl.load(CONTEXT + s)
        start = tl.load(Q_START + s)
        q_len = tl.load(Q_START + s + 1) - start
        if tl.program_id(1) * ROWS < q_len * HEADS:
            units = (context + TILE - 1) // TILE
            first = tl.where(s == s0, p0, 0)
            end = tl.where(s == s1, p1, units)
            real = row < q_len * HEADS
            q_row = Q + (start * HEADS + row).to(tl.int64) * (LATENT + ROPE)
            turned = real[:, None] & (rope < ROPE)[None, :]
            qr = tl.load(q_row[:, None] + LATENT + rope[None, :], mask=turned, other=0.0)
            # Query token j of q_len sees the first context - q_len + j + 1 entries.
            limit = context - q_len + 1 + tl.minimum(row // HEADS, q_len - 1)
            seen = context - q_len + 1 + tl.minimum((tl.program_id(1) * ROWS + ROWS - 1) // HEADS, q_len - 1)
            q0 = _query(q_row, real, 0, LATENT, WIDE)
            if RUNS > 1:
                q1 = _query(q_row, real, 1, LATENT, WIDE)
            if RUNS > 2:
                q2 = _query(q_row, real, 2, LATENT, WIDE)
            if RUNS > 3:
                q3 = _query(q_row, real, 3, LATENT, WIDE)
            m = tl.full([ROWS], MINUS, tl.float32)
            norm = tl.zeros([ROWS], tl.float32)
            a0 = tl.zeros([ROWS, WIDE], tl.float32)
            a1 = tl.zeros([ROWS, WIDE], tl.float32)
            a2 = tl.zeros([ROWS, WIDE], tl.float32)
            a3 = tl.zeros([ROWS, WIDE], tl.float32)
            for n in tl.range(first * TILE, tl.minimum(end * TILE, seen), TOKENS, num_stages=STAGES):
                position = n + tl.arange(0, TOKENS)
                there = position < seen
                page = tl.load(TABLE + s * table_stride + position // PAGE, mask=there, other=0).to(tl.int64)
                at = page * page_bytes + (position % PAGE) * ROW_BYTES
                place = ROTARY + (at + LATENT + 4 * RUNS) // 2
                known = there[:, None] & (rope < ROPE)[None, :]
                kr = tl.load(place[:, None] + rope[None, :], mask=known, other=0.0).to(qr.dtype)
                qk = _product(qr, tl.trans(kr), tl.zeros([ROWS, TOKENS], tl.float32), CAST, PRECISION)
                c0, k0, qk = _run(q0, CODES, SCALES, at, there, qk, 0, LATENT, WIDE, CAST, PRECISION)
                if RUNS > 1:
                    c1, k1, qk = _run(q1, CODES, SCALES, at, there, qk, 1, LATENT, WIDE, CAST, PRECISION)
                if RUNS > 2:
                    c2, k2, qk = _run(q2, CODES, SCALES, at, there, qk, 2, LATENT, WIDE, CAST, PRECISION)
                if RUNS > 3:
                    c3, k3, qk = _run(q3, CODES, SCALES, at, there, qk, 3, LATENT, WIDE, CAST, PRECISION)
                qk = tl.where(position[None, :] < limit[:, None], qk, float("-inf"))
                highest = tl.maximum(m, tl.max(qk, 1) * scale)
                alpha = tl.exp2(m - highest)
                p = tl.exp2(qk * scale - highest[:, None])
                norm = norm * alpha + tl.sum(p, 1)
                a0 = _add(p, c0, k0, a0, alpha, CAST, PRECISION)
                if RUNS > 1:
                    a1 = _add(p, c1, k1, a1, alpha, CAST, PRECISION)
                if RUNS > 2:
                    a2 = _add(p, c2, k2, a2, alpha, CAST, PRECISION)
                if RUNS > 3:
                    a3 = _add(p, c3, k3, a3, alpha, CAST, PRECISION)
                m = highest
            some = norm > 0
            share = tl.where(some, 1.0 / tl.where(some, norm, 1.0), 0.0)
            value = tl.where(some, m + tl.log2(tl.where(some, norm, 1.0)), float("-inf"))
            if (first == 0) & (end == units):
                target = (start * HEADS + row).to(tl.int64)
                _store(OUT, target, a0, a1, a2, a3, share, real, RUNS, LATENT, WIDE)
                if WITH_LSE:
                    tl.store(LSE + target, value * LN2, mask=real)
            else:
                slot = (2 * block + tl.where(first == 0, 1, 0)).to(tl.int64) * part_rows + row
                _store(PART, slot, a0, a1, a2, a3, share, real, RUNS, LATENT, WIDE)
                tl.store(PART_LSE + slot, value, mask=real)


@triton.jit
def mla_rows_fp8_kernel(
    QUERY, KV, WEIGHT, COS, SIN, SLOTS, CODES, SCALES, ROTARY, OUT,
    eps, query_stride, kv_stride, page_bytes,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, NOPE: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    LATENT: tl.constexpr, RUNS: tl.constexpr, RUNS_PAD: tl.constexpr, WIDE: tl.constexpr, ROW_BYTES: tl.constexpr,
    PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token): its rotated queries, and its cache row, normed, rotated and packed; none for slot -1."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF_PAD)
    real = pair < HALF
    cos = tl.load(COS + token * 2 * HALF + pair, mask=real, other=0.0).to(tl.float32)
    # The first half of the table is negated: see rotary.RotaryTables.
    sin = tl.load(SIN + token * 2 * HALF + pair + HALF, mask=real, other=0.0).to(tl.float32)
    head = tl.arange(0, HEADS_PAD)
    wide = (head < HEADS)[:, None] & real[None, :]
    place = QUERY + token * query_stride + head[:, None] * (NOPE + 2 * HALF) + NOPE + pair[None, :]
    low = tl.load(place, mask=wide, other=0.0).to(tl.float32)
    high = tl.load(place + HALF, mask=wide, other=0.0).to(tl.float32)
    target = OUT + (token * HEADS + head[:, None]) * (LATENT + 2 * HALF) + LATENT + pair[None, :]
    kind = OUT.dtype.element_ty
    tl.store(target, (low * cos[None, :] - high * sin[None, :]).to(kind), mask=wide)
    tl.store(target + HALF, (high * cos[None, :] + low * sin[None, :]).to(kind), mask=wide)
    slot = tl.load(SLOTS + token)
    stored = slot >= 0
    row = KV + token * kv_stride
    run = tl.arange(0, RUNS_PAD)
    column = run[:, None] * GROUP + tl.arange(0, WIDE)[None, :]
    inside = column < LATENT
    latent = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    norm = tl.rsqrt(tl.sum(tl.sum(latent * latent, 1), 0) / LATENT + eps)
    weight = tl.load(WEIGHT + column, mask=inside, other=0.0).to(tl.float32)
    # Rounded as a row of the model's type would be, then packed.
    value = (latent * norm * weight).to(kind).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 1) / TOP, TINY)
    # max drops a NaN, which has to stay one.
    scale = tl.where(tl.max((value != value).to(tl.int32), 1) > 0, float("nan"), scale)
    codes = tl.minimum(tl.maximum(value / scale[:, None], -TOP), TOP)
    at = (slot // PAGE) * page_bytes + (slot % PAGE) * ROW_BYTES
    tl.store(CODES + at + column, codes.to(CODES.dtype.element_ty), mask=inside & stored)
    tl.store(SCALES + (at + LATENT) // 4 + run, scale, mask=(run < RUNS) & stored)
    first = tl.load(row + LATENT + pair, mask=real, other=0.0).to(tl.float32)
    second = tl.load(row + LATENT + HALF + pair, mask=real, other=0.0).to(tl.float32)
    turned = ROTARY + (at + LATENT + 4 * RUNS) // 2 + pair
    narrow = ROTARY.dtype.element_ty
    tl.store(turned, (first * cos - second * sin).to(kind).to(narrow), mask=real & stored)
    tl.store(turned + HALF, (second * cos + first * sin).to(kind).to(narrow), mask=real & stored)
