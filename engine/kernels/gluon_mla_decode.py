# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""MLA decode for Hopper: 64 query rows x 64-token pages, three warpgroups in one persistent block.

- *scores*: S = Q K^T, the online softmax, P and its rescale factors into shared memory;
- *left*, *right*: O[:, half] = O[:, half] * alpha + P V[:, half] in registers, half = 256 latent columns. Each loads
  its own half of the pages with the bulk copy engine, and refills a slot the moment its product has used it up, so no
  loader warp and no hand-back of slots is needed.

The scores of page i + 1 run on the matrix unit beside the products of page i. Every block walks its share of the
schedule (see ``triton_schedule``) page by page, without draining the slots between sequences. The shapes are fixed:
512 + 64 columns of bfloat16, pages of 64 tokens.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

PAGE = gl.constexpr(64)
ROWS = gl.constexpr(64)
HALF = gl.constexpr(256)
ROPE = gl.constexpr(64)
WIDTH = gl.constexpr(576)
LATENT = gl.constexpr(512)
MINUS = gl.constexpr(-1.0e30)  # below every score, yet finite: the difference of two of them is no NaN
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _span(s, s0, p0, s1, p1, CONTEXT):
    """The pages ``[first, end)`` of sequence ``s`` that are this block's, its length and its number of pages."""
    context = gl.load(CONTEXT + s)
    pages = (context + (PAGE - 1)) // PAGE
    first = gl.where(s == s0, p0, 0)
    end = gl.where(s == s1, p1, pages)
    return first, end, context, pages


@gluon.jit
def _skip(s, i, end, s1, p1, stop, CONTEXT):
    """The cursor moved over sequences of which no page is left here; past the last page ``i >= end``."""
    while (i >= end) & (s + 1 < stop):
        s += 1
        i = 0
        end = gl.where(s == s1, p1, (gl.load(CONTEXT + s) + (PAGE - 1)) // PAGE)
    return s, i, end


@gluon.jit
def _fetch(SIDE: gl.constexpr, kv_desc, row, full, half, wanted):
    """Starts the copy of one half page if ``wanted``."""
    mbarrier.expect(full, 64 * 256 * 2, pred=wanted)
    tma.async_copy_global_to_shared(kv_desc, [row, SIDE * 256], full, half, pred=wanted)


@gluon.jit
def _fetch_rope(rope_desc, row, full, rope, wanted):
    """Starts the copy of a page's rotary columns if ``wanted``."""
    mbarrier.expect(full, 64 * 64 * 2, pred=wanted)
    tma.async_copy_global_to_shared(rope_desc, [row, 512], full, rope, pred=wanted)


@gluon.jit
def _load_query(Q, base, rows, col, WIDE: gl.constexpr):
    """``[64, WIDE]`` of the query from column ``col``; rows past ``rows`` are 0."""
    per_row: gl.constexpr = WIDE // 8
    lanes: gl.constexpr = per_row if per_row < 32 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, WIDE, layout=gl.SliceLayout(0, layout))
    pointers = Q + base + gl.expand_dims(r, 1) * WIDTH + gl.expand_dims(c + col, 0)
    mask = gl.expand_dims(r, 1) < rows
    return gl.load(pointers, mask=mask, other=0.0)


@gluon.jit
def _through(q_s, value, DOT: gl.constexpr):
    """A tile in the registers of a left operand, by way of shared memory."""
    q_s.store(value)
    return q_s.load(DOT)


@gluon.jit
def _stage_query(Q, base, rows, ql_s, qr_s, qx_s, DOT: gl.constexpr, LEAN: gl.constexpr):
    """Brings a sequence's 64 query rows on chip: (left, right, rotary) operands of the score products.

    LEAN keeps all but 128 columns in registers, in pieces of 64.
    """
    if LEAN:
        # All loads first: they cross the memory together.
        v0 = _load_query(Q, base, rows, 0, 64)
        v1 = _load_query(Q, base, rows, 64, 64)
        v2 = _load_query(Q, base, rows, 128, 64)
        v3 = _load_query(Q, base, rows, 192, 64)
        v4 = _load_query(Q, base, rows, 256, 64)
        v5 = _load_query(Q, base, rows, 320, 64)
        v6 = _load_query(Q, base, rows, 384, 64)
        v7 = _load_query(Q, base, rows, 448, 64)
        v8 = _load_query(Q, base, rows, 512, 64)
        q0 = _through(qx_s, v0, DOT)
        q1 = _through(qr_s, v1, DOT)
        q2 = _through(qx_s, v2, DOT)
        q3 = _through(qr_s, v3, DOT)
        q4 = _through(qx_s, v4, DOT)
        q5 = _through(qr_s, v5, DOT)
        q6 = _through(qx_s, v6, DOT)
        qr_s.store(v7)
        qx_s.store(v8)
        fence_async_shared()
        return (q0, q1, q2, q3), (q4, q5, q6, qr_s), qx_s
    else:
        ql_s.store(_load_query(Q, base, rows, 0, 256))
        qr_s.store(_load_query(Q, base, rows, 256, 256))
        qx_s.store(_load_query(Q, base, rows, 512, 64))
        fence_async_shared()
        return ql_s, qr_s, qx_s


@gluon.jit
def _times_half(q, half, acc, LEAN: gl.constexpr):
    if LEAN:
        for c in gl.static_range(4):
            acc = warpgroup_mma(q[c], half.slice(c * 64, 64, dim=1).permute((1, 0)), acc, is_async=True)
    else:
        acc = warpgroup_mma(q, half.permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def _begin_scores(
    ql, qr, qx, left, right, mix, left_full, right_full, rope_full, k,
    LS: gl.constexpr, DEPTH: gl.constexpr, LEAN: gl.constexpr,
):
    """Starts S = Q K^T of the block's k-th page, piece by piece as they arrive."""
    slot = k % DEPTH
    phase = (k // DEPTH) & 1
    acc = gl.full([64, 64], 0.0, gl.float32, LS)
    mbarrier.wait(left_full.index(slot), phase)
    acc = _times_half(ql, left.index(slot), acc, LEAN)
    mbarrier.wait(right_full.index(slot), phase)
    acc = _times_half(qr, right.index(slot), acc, LEAN)
    mbarrier.wait(rope_full.index(k % 2), (k // 2) & 1)
    return warpgroup_mma(qx, mix.index(k % 2).permute((1, 0)), acc, is_async=True)


@gluon.jit
def _soften(
    sc, i, certain, limit, m, norm, scale, k, mix, al_s, al_full, p_full,
    LS: gl.constexpr, EARLY: gl.constexpr, LATE: gl.constexpr,
):
    """One step of the online softmax; publishes alpha, then P in the place of the page's rotary columns."""
    if (i + 1) * PAGE > certain:
        position = i * PAGE + gl.arange(0, 64, layout=gl.SliceLayout(0, LS))
        sc = gl.where(gl.expand_dims(position, 0) < gl.expand_dims(limit, 1), sc, float("-inf"))
    highest = gl.maximum(m, gl.max(sc, 1) * scale)
    alpha = gl.exp2(m - highest)
    buf = k % 2
    al_s.index(buf).store(alpha)
    if EARLY:
        mbarrier.arrive(al_full.index(buf), count=1)
    p = gl.exp2(sc * scale - gl.expand_dims(highest, 1))
    mix.index(buf).store(p.to(gl.bfloat16))
    fence_async_shared()
    if not LATE:
        mbarrier.arrive(p_full.index(buf), count=1)
    return highest, norm * alpha + gl.sum(p, 1)


@gluon.jit
def _scores(
    Q, CONTEXT, Q_START, LSE, PART_LSE, scale, block, group, s0, p0, s1, p1, stop, part_rows,
    ql_s, qr_s, qx_s, left, right, mix, al_s, l_s, left_full, right_full, rope_full, al_full, p_full, l_full, l_empty,
    HEADS: gl.constexpr, MULTI: gl.constexpr, WITH_LSE: gl.constexpr, DEPTH: gl.constexpr,
    LEAN: gl.constexpr, EARLY: gl.constexpr, LATE: gl.constexpr,
):
    LS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    rs: gl.constexpr = gl.SliceLayout(1, LS)
    lane = gl.arange(0, 64, layout=rs)
    k = 0
    fragment = 0
    for s in range(s0, stop):
        first, end, context, pages = _span(s, s0, p0, s1, p1, CONTEXT)
        start = gl.load(Q_START + s)
        q_len = gl.load(Q_START + s + 1) - start
        rows = q_len * HEADS - group * 64
        row = start * HEADS + group * 64
        base = row.to(gl.int64) * WIDTH
        ql, qr, qx = _stage_query(Q, base, rows, ql_s, qr_s, qx_s, gl.DotOperandLayout(0, LS, 2), LEAN)
        # Query token j of q_len sees the first context - q_len + j + 1 entries.
        if MULTI:
            certain = context - q_len + 1
            limit = certain + (group * 64 + lane) // HEADS
        else:
            certain = context
            limit = gl.full([64], 0, gl.int32, rs) + context
        m = gl.full([64], MINUS, gl.float32, rs)
        norm = gl.full([64], 0.0, gl.float32, rs)
        for i in range(first, end):
            acc = _begin_scores(ql, qr, qx, left, right, mix, left_full, right_full, rope_full, k, LS, DEPTH, LEAN)
            sc = warpgroup_mma_wait(0, deps=[acc])
            if LATE:  # noqa: SIM102 (decided when compiling)
                # The product of a page waits for the scores of the next, and so fills the matrix unit while those
                # are softened.
                if i > first:
                    mbarrier.arrive(p_full.index((k + 1) % 2), count=1)
            m, norm = _soften(sc, i, certain, limit, m, norm, scale, k, mix, al_s, al_full, p_full, LS, EARLY, LATE)
            k += 1
        if LATE:  # noqa: SIM102
            if end > first:
                mbarrier.arrive(p_full.index((k + 1) % 2), count=1)
        mbarrier.wait(l_empty, (fragment & 1) ^ 1)
        l_s.store(norm)
        mbarrier.arrive(l_full, count=1)
        fragment += 1  # noqa: SIM113
        value = gl.where(norm > 0.0, m + gl.log2(norm), float("-inf"))
        if (first == 0) & (end == pages):
            if WITH_LSE:
                gl.store(LSE + row + lane, value * LN2, mask=lane < rows)
        else:
            slot = 2 * block + gl.where(first == 0, 1, 0)
            gl.store(PART_LSE + slot * part_rows + group * 64 + lane, value, mask=lane < rows)


@gluon.jit
def _blank_tail(half, valid):
    """Zeroes the tokens of a half page from ``valid`` on: their weights are 0, but 0 x NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    token = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    for c in gl.static_range(4):
        part = half.slice(c * 64, 64, dim=1)
        value = part.load(layout)
        part.store(gl.where(gl.expand_dims(token < valid, 1), value, 0.0))
    fence_async_shared()


@gluon.jit
def _values(
    SIDE: gl.constexpr, kv_desc, rope_desc, TABLE, table_stride, page_rows, CONTEXT, Q_START, OUT, PART,
    block, group, s0, p0, s1, p1, stop, part_rows,
    half, mix, al_s, l_s, full, rope_full, al_full, p_full, p_empty, l_full, l_empty,
    HEADS: gl.constexpr, DEPTH: gl.constexpr, EARLY: gl.constexpr,
):
    LO: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    rl: gl.constexpr = gl.SliceLayout(1, LO)
    # (cs, ci) is the next page to load, DEPTH pages ahead of the product; its number is fetched one page earlier still.
    # Rotary columns run two pages ahead.
    # An idle block behind the last sequence has no length to read.
    pages_there = (gl.load(CONTEXT + s0, mask=s0 < stop, other=0) + (PAGE - 1)) // PAGE
    cs, ci, cend = _skip(s0, p0, gl.where(s0 == s1, p1, pages_there), s1, p1, stop, CONTEXT)
    wanted = ci < cend
    row = gl.load(TABLE + cs * table_stride + ci, mask=wanted, other=0) * page_rows
    rope_wanted = wanted
    rope_row = row
    for d in gl.static_range(DEPTH):
        _fetch(SIDE, kv_desc, row, full.index(d), half.index(d), wanted)
        if SIDE == 0 and d < 2:
            _fetch_rope(rope_desc, row, rope_full.index(d), mix.index(d), wanted)
        rope_row = row
        rope_wanted = wanted
        cs, ci, cend = _skip(cs, ci + 1, cend, s1, p1, stop, CONTEXT)
        wanted = ci < cend
        row = gl.load(TABLE + cs * table_stride + ci, mask=wanted, other=0) * page_rows
    k = 0
    fragment = 0
    for s in range(s0, stop):
        first, end, context, pages = _span(s, s0, p0, s1, p1, CONTEXT)
        acc = gl.full([64, 256], 0.0, gl.float32, LO)
        for i in range(first, end):
            slot = k % DEPTH
            buf = k % 2
            phase = (k // 2) & 1
            if EARLY:
                mbarrier.wait(al_full.index(buf), phase)
            else:
                mbarrier.wait(p_full.index(buf), phase)
            acc = acc * gl.expand_dims(al_s.index(buf).load(rl), 1)
            if EARLY:
                mbarrier.wait(p_full.index(buf), phase)
            mbarrier.wait(full.index(slot), (k // DEPTH) & 1)
            if (i + 1) * PAGE > context:
                _blank_tail(half.index(slot), context - i * PAGE)
            running = warpgroup_mma(mix.index(buf), half.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[running])
            mbarrier.arrive(p_empty.index(buf), count=1)
            _fetch(SIDE, kv_desc, row, full.index(slot), half.index(slot), wanted)
            if SIDE == 0:
                # Both halves have used P: its place takes the rotary columns of the page after next.
                mbarrier.wait(p_empty.index(buf), phase)
                if DEPTH == 2:
                    _fetch_rope(rope_desc, row, rope_full.index(buf), mix.index(buf), wanted)
                else:
                    _fetch_rope(rope_desc, rope_row, rope_full.index(buf), mix.index(buf), rope_wanted)
            rope_row = row
            rope_wanted = wanted
            cs, ci, cend = _skip(cs, ci + 1, cend, s1, p1, stop, CONTEXT)
            wanted = ci < cend
            row = gl.load(TABLE + cs * table_stride + ci, mask=wanted, other=0) * page_rows
            k += 1
        mbarrier.wait(l_full, fragment & 1)
        norm = l_s.load(rl)
        mbarrier.arrive(l_empty, count=1)
        fragment += 1  # noqa: SIM113
        acc = acc * gl.expand_dims(gl.where(norm > 0.0, 1.0 / norm, 0.0), 1)
        start = gl.load(Q_START + s)
        rows = (gl.load(Q_START + s + 1) - start) * HEADS - group * 64
        lane = gl.arange(0, 64, layout=rl)
        cols = SIDE * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, LO))
        mask = gl.expand_dims(lane < rows, 1)
        offsets = gl.expand_dims(lane, 1) * LATENT + gl.expand_dims(cols, 0)
        if (first == 0) & (end == pages):
            whole = OUT + (start * HEADS + group * 64).to(gl.int64) * LATENT
            gl.store(whole + offsets, acc.to(OUT.dtype.element_ty), mask=mask)
        else:
            part = PART + ((2 * block + gl.where(first == 0, 1, 0)) * part_rows + group * 64).to(gl.int64) * LATENT
            gl.store(part + offsets, acc, mask=mask)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit(do_not_specialize=["table_stride", "blocks", "part_rows"])
def mla_decode(
    kv_desc, rope_desc, Q, TABLE, CONTEXT, Q_START, PLAN, OUT, LSE, PART, PART_LSE,
    scale, table_stride, page_rows, blocks, part_rows,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, MULTI: gl.constexpr, WITH_LSE: gl.constexpr,
    LEAN: gl.constexpr, EARLY: gl.constexpr, LATE: gl.constexpr, PDL: gl.constexpr,
):
    """See ``gluon_launch.mla_decode`` for the arguments."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    # Query columns in registers make room for a third page.
    DEPTH: gl.constexpr = 3 if LEAN else 2
    REGISTERS: gl.constexpr = 160 if LEAN else 168
    block = gl.program_id(0) // GROUPS
    group = gl.program_id(0) % GROUPS
    s0 = gl.load(PLAN + block)
    s1 = gl.load(PLAN + block + 1)
    p0 = gl.load(PLAN + blocks + 1 + block)
    p1 = gl.load(PLAN + blocks + 2 + block)
    stop = s1 + gl.where(p1 > 0, 1, 0)
    left = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, 64, 256], kv_desc.layout)
    right = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, 64, 256], kv_desc.layout)
    mix = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], rope_desc.layout)
    qx_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], rope_desc.layout)
    if LEAN:
        qr_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], rope_desc.layout)
        ql_s = qr_s
    else:
        qr_s = gl.allocate_shared_memory(gl.bfloat16, [64, 256], kv_desc.layout)
        ql_s = gl.allocate_shared_memory(gl.bfloat16, [64, 256], kv_desc.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    al_s = gl.allocate_shared_memory(gl.float32, [2, 64], flat)
    l_s = gl.allocate_shared_memory(gl.float32, [64], flat)
    left_full = _barriers(DEPTH, 1)
    right_full = _barriers(DEPTH, 1)
    rope_full = _barriers(2, 1)
    al_full = _barriers(2, 1)
    p_full = _barriers(2, 1)
    p_empty = _barriers(2, 2)
    l_full = _barriers(1, 1).index(0)
    l_empty = _barriers(1, 2).index(0)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _scores,
                (
                    Q, CONTEXT, Q_START, LSE, PART_LSE, scale, block, group, s0, p0, s1, p1, stop, part_rows,
                    ql_s, qr_s, qx_s, left, right, mix, al_s, l_s, left_full, right_full, rope_full,
                    al_full, p_full, l_full, l_empty, HEADS, MULTI, WITH_LSE, DEPTH, LEAN, EARLY, LATE,
                ),
            ),
            (
                _values,
                (
                    0, kv_desc, rope_desc, TABLE, table_stride, page_rows, CONTEXT, Q_START, OUT, PART,
                    block, group, s0, p0, s1, p1, stop, part_rows,
                    left, mix, al_s, l_s, left_full, rope_full, al_full, p_full, p_empty, l_full, l_empty,
                    HEADS, DEPTH, EARLY,
                ),
            ),
            (
                _values,
                (
                    1, kv_desc, rope_desc, TABLE, table_stride, page_rows, CONTEXT, Q_START, OUT, PART,
                    block, group, s0, p0, s1, p1, stop, part_rows,
                    right, mix, al_s, l_s, right_full, rope_full, al_full, p_full, p_empty, l_full, l_empty,
                    HEADS, DEPTH, EARLY,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )
