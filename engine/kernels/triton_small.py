# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Latent attention of a decode step of very few tokens, in five launches: there, a layer is bound by launches and latency.

Every kernel orders what does not depend on the launch before it (its weights, old KV), and only then waits for that
launch; so weights cross the memory while the launch before ends. What a kernel reads before it waits must not be
written by the launch just before it. Sums that used to be launches of their own (residual and norm, the join of split
attention) are taken by each program that needs them.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MINUS = tl.constexpr(-1.0e30)
"""Below every score, yet finite: the difference of two of them is no NaN."""


@triton.jit
def begin(PDL: tl.constexpr):
    """From here on the launch before is over, and the next one may be prepared."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def normed(HIDDEN, DELTA, SUM, scale, m, column, eps, write, SIZE: tl.constexpr, PARTS: tl.constexpr):
    """Token ``m``'s hidden state plus its ``PARTS`` parts, normed, as float32; ``write`` keeps the sum."""
    inside = column < SIZE
    value = tl.load(HIDDEN + m * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        value += tl.load(DELTA + (m * PARTS + part) * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        rounded = value.to(SUM.dtype.element_ty)
        tl.store(SUM + m * SIZE + column, rounded, mask=inside & write)
        value = rounded.to(tl.float32)
    norm = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    return (value * norm * scale).to(HIDDEN.dtype.element_ty).to(tl.float32)


@triton.jit
def project_kernel(
    HIDDEN, DELTA, NORM, WEIGHT, SUM, OUT, eps,
    OUTPUTS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (run of outputs): residual, norm and one product, ``OUT [TOKENS, OUTPUTS]``; the first one stores the sum."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    held = (row < OUTPUTS)[:, None] & (column < SIZE)[None, :]
    weight = tl.load(WEIGHT + row[:, None] * SIZE + column[None, :], mask=held, other=0.0)
    scale = tl.load(NORM + column, mask=column < SIZE, other=0.0).to(tl.float32)
    begin(PDL)
    for m in tl.static_range(TOKENS):
        x = normed(HIDDEN, DELTA, SUM, scale, m, column, eps, tl.program_id(0) == 0, SIZE, PARTS)
        y = tl.sum(weight.to(tl.float32) * x[None, :], 1)
        tl.store(OUT + m * OUTPUTS + row, y.to(OUT.dtype.element_ty), mask=row < OUTPUTS)


@triton.jit
def _cache_row(
    KV, WEIGHT, COS, SIN, SLOTS, PAGES, m, eps, page_stride, kv_stride,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Norms and rotates token ``m``'s cache row and stores it; none for slot -1."""
    pair = tl.arange(0, HALF_PAD)
    real = pair < HALF
    cos = tl.load(COS + m * 2 * HALF + pair, mask=real, other=0.0).to(tl.float32)
    sin = tl.load(SIN + m * 2 * HALF + HALF + pair, mask=real, other=0.0).to(tl.float32)
    slot = tl.load(SLOTS + m)
    row = KV + m * kv_stride
    column = tl.arange(0, LATENT_PAD)
    inside = column < LATENT
    latent = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    norm = tl.rsqrt(tl.sum(latent * latent, 0) / LATENT + eps)
    weight = tl.load(WEIGHT + column, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(row + LATENT + pair, mask=real, other=0.0).to(tl.float32)
    second = tl.load(row + LATENT + HALF + pair, mask=real, other=0.0).to(tl.float32)
    there = PAGES + (slot // PAGE) * page_stride + (slot % PAGE) * (LATENT + 2 * HALF)
    kind = PAGES.dtype.element_ty
    tl.store(there + column, (latent * norm * weight).to(kind), mask=inside & (slot >= 0))
    tl.store(there + LATENT + pair, (first * cos - second * sin).to(kind), mask=real & (slot >= 0))
    tl.store(there + LATENT + HALF + pair, (second * cos + first * sin).to(kind), mask=real & (slot >= 0))


@triton.jit
def absorb_kernel(
    BOTH, UP, NORM, COS, SIN, SLOTS, PAGES, OUT, eps, page_stride, up_head, both_stride,
    HEADS: tl.constexpr, NOPE: tl.constexpr, NOPE_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, COLUMNS: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (head, run of latent columns): absorbed queries; the first run rotates, head ``HEADS`` stores cache rows.

    ``BOTH [TOKENS, HEADS * (nope + rope) + latent + rope]`` -> ``OUT [TOKENS, HEADS, latent + rope]``.
    """
    head = tl.program_id(0)
    nope = tl.arange(0, NOPE_PAD)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    held = (nope < NOPE)[:, None] & (column < LATENT)[None, :] & (head < HEADS)
    weight = tl.load(UP + head * up_head + nope[:, None] * LATENT + column[None, :], mask=held, other=0.0)
    begin(PDL)
    kind = OUT.dtype.element_ty
    if head < HEADS:
        for m in tl.static_range(TOKENS):
            query = BOTH + m * both_stride + head * (NOPE + 2 * HALF)
            x = tl.load(query + nope, mask=nope < NOPE, other=0.0).to(tl.float32)
            y = tl.sum(weight.to(tl.float32) * x[:, None], 0)
            target = OUT + (m * HEADS + head) * (LATENT + 2 * HALF)
            tl.store(target + column, y.to(kind), mask=column < LATENT)
            if tl.program_id(1) == 0:
                pair = tl.arange(0, HALF_PAD)
                real = pair < HALF
                cos = tl.load(COS + m * 2 * HALF + pair, mask=real, other=0.0).to(tl.float32)
                sin = tl.load(SIN + m * 2 * HALF + HALF + pair, mask=real, other=0.0).to(tl.float32)
                low = tl.load(query + NOPE + pair, mask=real, other=0.0).to(tl.float32)
                high = tl.load(query + NOPE + HALF + pair, mask=real, other=0.0).to(tl.float32)
                tl.store(target + LATENT + pair, (low * cos - high * sin).to(kind), mask=real)
                tl.store(target + LATENT + HALF + pair, (high * cos + low * sin).to(kind), mask=real)
    elif tl.program_id(1) == 0:
        for m in tl.static_range(TOKENS):
            _cache_row(
                BOTH + HEADS * (NOPE + 2 * HALF), NORM, COS, SIN, SLOTS, PAGES, m, eps, page_stride, both_stride,
                HALF, HALF_PAD, LATENT, LATENT_PAD, PAGE,
            )  # fmt: skip


@triton.jit
def _dot(a, b, acc, CAST: tl.constexpr):
    if CAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _rows(PAGES, TABLE_ROW, position, there, page_stride, column, FROM: tl.constexpr, COUNT: tl.constexpr,
          WIDTH: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    page = tl.load(TABLE_ROW + position // PAGE, mask=there, other=0).to(tl.int64)
    row = PAGES + page * page_stride + (position % PAGE) * WIDTH + FROM
    return tl.load(row[:, None] + column[None, :], mask=there[:, None] & (column < COUNT)[None, :], other=0.0)


@triton.jit
def _soften(q, qr, k, kr, position, context, m, norm, acc, scale, CAST: tl.constexpr):
    """One step of the online softmax."""
    scores = _dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32), CAST)
    scores = _dot(qr, tl.trans(kr), scores, CAST)
    scores = tl.where((position < context)[None, :], scores, float("-inf"))
    highest = tl.maximum(m, tl.max(scores, 1) * scale)
    alpha = tl.exp2(m - highest)
    p = tl.exp2(scores * scale - highest[:, None])
    return highest, norm * alpha + tl.sum(p, 1), _dot(p.to(k.dtype), k, acc * alpha[:, None], CAST)


@triton.jit(do_not_specialize=["table_stride"])
def attend_kernel(
    Q, PAGES, TABLE, CONTEXT, PART, PART_LSE, scale, table_stride, page_stride,
    HEADS: tl.constexpr, ROWS: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, CAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (split, token, run of ``ROWS`` heads): ``PART [TOKENS, SPLITS, HEADS, latent]``, and its LSE to base 2, which
    is -inf for an empty split.

    The newest row is what the launch before stores; all others are older. ``scale`` includes log2(e).
    """
    split = tl.program_id(0)
    token = tl.program_id(1)
    context = tl.load(CONTEXT + token)
    each = tl.cdiv(tl.cdiv(context, TILE), SPLITS) * TILE
    start = split * each
    end = tl.minimum(start + each, context)
    head = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    real = head < HEADS
    latent = tl.arange(0, LATENT_PAD)
    rope = tl.arange(0, ROPE_PAD)
    width: tl.constexpr = LATENT + ROPE
    table = TABLE + token * table_stride
    position = start + tl.arange(0, TILE)
    old = position < tl.minimum(end, context - 1)
    k = _rows(PAGES, table, position, old, page_stride, latent, 0, LATENT, width, PAGE)
    kr = _rows(PAGES, table, position, old, page_stride, rope, LATENT, ROPE, width, PAGE)
    begin(PDL)
    place = (token * SPLITS + split) * HEADS + head
    m = tl.full([ROWS], MINUS, tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, LATENT_PAD], tl.float32)
    if start < end:
        query = Q + (token * HEADS + head) * width
        q = tl.load(query[:, None] + latent[None, :], mask=real[:, None] & (latent < LATENT)[None, :], other=0.0)
        qr = tl.load(query[:, None] + LATENT + rope[None, :], mask=real[:, None] & (rope < ROPE)[None, :], other=0.0)
        fresh = (position < end) & (position == context - 1)
        kn = _rows(PAGES, table, position, fresh, page_stride, latent, 0, LATENT, width, PAGE)
        krn = _rows(PAGES, table, position, fresh, page_stride, rope, LATENT, ROPE, width, PAGE)
        k = tl.where(fresh[:, None], kn, k)
        kr = tl.where(fresh[:, None], krn, kr)
        m, norm, acc = _soften(q, qr, k, kr, position, end, m, norm, acc, scale, CAST)
        for n in tl.range(start + TILE, end, TILE, num_stages=2):
            position = n + tl.arange(0, TILE)
            there = position < end
            k = _rows(PAGES, table, position, there, page_stride, latent, 0, LATENT, width, PAGE)
            kr = _rows(PAGES, table, position, there, page_stride, rope, LATENT, ROPE, width, PAGE)
            m, norm, acc = _soften(q, qr, k, kr, position, end, m, norm, acc, scale, CAST)
        acc = acc / norm[:, None]
        held = real[:, None] & (latent < LATENT)[None, :]
        tl.store(PART + place[:, None].to(tl.int64) * LATENT + latent[None, :], acc, mask=held)
    tl.store(PART_LSE + place, tl.where(norm > 0, m + tl.log2(tl.where(norm > 0, norm, 1.0)), float("-inf")), mask=real)


@triton.jit
def _join(PART, PART_LSE, m, head, column, HEADS: tl.constexpr, LATENT: tl.constexpr, SPLITS: tl.constexpr,
          SPLITS_PAD: tl.constexpr):  # fmt: skip
    """Columns of what attention over all splits gives for one head."""
    split = tl.arange(0, SPLITS_PAD)
    place = (m * SPLITS + split) * HEADS + head
    sums = tl.load(PART_LSE + place, mask=split < SPLITS, other=float("-inf"))
    peak = tl.max(sums, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    share = tl.exp2(sums - peak)
    some = (share > 0)[:, None] & (column < LATENT)[None, :]
    parts = tl.load(PART + place[:, None].to(tl.int64) * LATENT + column[None, :], mask=some, other=0.0)
    total = tl.sum(share, 0)
    return tl.sum(parts * share[:, None], 0) / tl.where(total > 0, total, 1.0)


@triton.jit
def value_kernel(
    PART, PART_LSE, UP, OUT, up_head,
    HEADS: tl.constexpr, LATENT: tl.constexpr, VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (head, run of latent columns): joins the splits and multiplies, ``OUT float32 [runs, TOKENS, HEADS * v]``."""
    head = tl.program_id(0)
    run = tl.program_id(1)
    value = tl.arange(0, VALUE_PAD)
    column = run * COLUMNS + tl.arange(0, COLUMNS)
    held = (value < VALUE)[:, None] & (column < LATENT)[None, :]
    weight = tl.load(UP + head * up_head + value[:, None] * LATENT + column[None, :], mask=held, other=0.0)
    begin(PDL)
    for m in tl.static_range(TOKENS):
        x = _join(PART, PART_LSE, m, head, column, HEADS, LATENT, SPLITS, SPLITS_PAD)
        x = x.to(UP.dtype.element_ty).to(tl.float32)
        y = tl.sum(weight.to(tl.float32) * x[None, :], 1)
        tl.store(OUT + ((run * TOKENS + m) * HEADS + head) * VALUE + value, y, mask=value < VALUE)


@triton.jit
def output_kernel(
    PARTS, WEIGHT, OUT,
    OUTPUTS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, RUNS: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (run of outputs): sums ``PARTS [RUNS, TOKENS, SIZE]`` over the runs and multiplies, ``OUT [TOKENS, OUTPUTS]``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    held = (row < OUTPUTS)[:, None] & (column < SIZE)[None, :]
    weight = tl.load(WEIGHT + row[:, None] * SIZE + column[None, :], mask=held, other=0.0)
    begin(PDL)
    for m in tl.static_range(TOKENS):
        x = tl.zeros([BLOCK], tl.float32)
        for run in tl.static_range(RUNS):
            x += tl.load(PARTS + (run * TOKENS + m) * SIZE + column, mask=column < SIZE, other=0.0)
        x = x.to(WEIGHT.dtype.element_ty).to(tl.float32)
        y = tl.sum(weight.to(tl.float32) * x[None, :], 1)
        tl.store(OUT + m * OUTPUTS + row, y.to(OUT.dtype.element_ty), mask=row < OUTPUTS)


@triton.jit
def scores_small(
    HIDDEN, DELTA, NORM, WEIGHT, SUM, NORMED, LOGITS, ZERO, eps, zeros,
    EXPERTS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (run of experts): residual, norm and the router's product; the first one stores the sum and the norm, and
    fills ZERO with zeros."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    held = (row < EXPERTS)[:, None] & (column < SIZE)[None, :]
    weight = tl.load(WEIGHT + row[:, None] * SIZE + column[None, :], mask=held, other=0.0)
    scale = tl.load(NORM + column, mask=column < SIZE, other=0.0).to(tl.float32)
    begin(PDL)
    if tl.program_id(0) == 0:
        tl.store(ZERO + column, tl.zeros([BLOCK], tl.int32), mask=column < zeros)
    for m in tl.static_range(TOKENS):
        first = tl.program_id(0) == 0
        x = normed(HIDDEN, DELTA, SUM, scale, m, column, eps, first, SIZE, 1)
        tl.store(NORMED + m * SIZE + column, x.to(NORMED.dtype.element_ty), mask=(column < SIZE) & first)
        tl.store(LOGITS + m * EXPERTS + row, tl.sum(weight * x[None, :], 1), mask=row < EXPERTS)
