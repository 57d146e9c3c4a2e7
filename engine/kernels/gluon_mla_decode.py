# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""MLA decode for Hopper: 64 query rows x 64-token pages, three warpgroups in one persistent block.

- *scores*: S = Q K^T, the online softmax, P and its rescale factors into shared memory;
- *left*, *right*: O[:, half] = O[:, half] * alpha + P V[:, half] in registers, half = 256 latent columns. Each loads
  its own half of the pages with the bulk copy engine, and refills a slot the moment its product has used it up, so no
  loader warp and no hand-back of slots is needed.

The products of page i wait until the scores of page i + 1 are done: so they fill the matrix unit while those are
softened. That takes three pages on chip, for which the query has to make room: 496 of its 576 columns lie in the
registers of the scores' warpgroup. P takes the place of its page's rotary columns.

Every block walks its share of the schedule (see ``triton_schedule``) page by page, without draining the slots between
sequences; ``triton_merge`` joins the parts of a divided sequence.
The shapes are fixed: 512 + 64 columns of bfloat16, pages of 64 tokens.
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

from twinpool.engine.kernels.gluon_parts import LATENT, LN2, PAGE, queries, row_of, skip, span

# fmt: off
# Argument lists of kernels are read in groups.
WIDTH = gl.constexpr(576)
DEPTH = gl.constexpr(3)
MINUS = gl.constexpr(-1.0e30)  # below every score, yet finite: the difference of two of them is no NaN


@gluon.jit
def _await_launch(PDL: gl.constexpr):
    """Waits until the launch before this one has ended, if this one may have begun before."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _old(s, i, wanted, CONTEXT):
    """Whether page ``i`` of sequence ``s`` is wanted and full of tokens of earlier steps: all but the last one."""
    return wanted & ((i + 1) * PAGE < gl.load(CONTEXT + s, mask=wanted, other=0))


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
def _load_query(Q, base, rows, col, WIDE: gl.constexpr, SPREAD: gl.constexpr):
    """``[64, WIDE]`` of the query from column ``col``; rows past ``rows`` are 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDE, WIDE // 8], [4, 1], [1, 0])
    r, real = row_of(gl.arange(0, 64, layout=gl.SliceLayout(1, layout)), rows, SPREAD)
    c = gl.arange(0, WIDE, layout=gl.SliceLayout(0, layout))
    pointers = Q + base + gl.expand_dims(r, 1) * WIDTH + gl.expand_dims(c + col, 0)
    return gl.load(pointers, mask=gl.expand_dims(real, 1), other=0.0)


@gluon.jit
def _through(q_s, value, DOT: gl.constexpr):
    """A tile in the registers of a left operand, by way of shared memory."""
    q_s.store(value)
    return q_s.load(DOT)


@gluon.jit
def _stage_query(Q, base, rows, qx_s, qz_s, DOT: gl.constexpr, SPREAD: gl.constexpr):
    """Brings a sequence's 64 query rows on chip, as the left operands of (left, right, rotary) score products."""
    # All loads first: they cross the memory together.
    v0 = _load_query(Q, base, rows, 0, 64, SPREAD)
    v1 = _load_query(Q, base, rows, 64, 64, SPREAD)
    v2 = _load_query(Q, base, rows, 128, 64, SPREAD)
    v3 = _load_query(Q, base, rows, 192, 64, SPREAD)
    v4 = _load_query(Q, base, rows, 256, 64, SPREAD)
    v5 = _load_query(Q, base, rows, 320, 64, SPREAD)
    v6 = _load_query(Q, base, rows, 384, 64, SPREAD)
    v7 = _load_query(Q, base, rows, 448, 32, SPREAD)
    v8 = _load_query(Q, base, rows, 480, 16, SPREAD)
    v9 = _load_query(Q, base, rows, 496, 16, SPREAD)
    vx = _load_query(Q, base, rows, 512, 64, SPREAD)
    q0 = _through(qx_s, v0, DOT)
    q1 = _through(qx_s, v1, DOT)
    q2 = _through(qx_s, v2, DOT)
    q3 = _through(qx_s, v3, DOT)
    q4 = _through(qx_s, v4, DOT)
    q5 = _through(qx_s, v5, DOT)
    q6 = _through(qx_s, v6, DOT)
    q7 = _through(qx_s.slice(0, 32, dim=1), v7, DOT)
    q8 = _through(qz_s, v8, DOT)
    qx_s.store(vx)
    qz_s.store(v9)
    fence_async_shared()
    return (q0, q1, q2, q3), (q4, q5, q6, q7, q8), qx_s


@gluon.jit
def _part(half, START: gl.constexpr, SIZE: gl.constexpr):
    return half.slice(START, SIZE, dim=1).permute((1, 0))


@gluon.jit
def _begin_scores(ql, qr, qz_s, qx_s, left, right, mix, left_full, right_full, rope_full, k, LS: gl.constexpr):
    """Starts S = Q K^T of the block's k-th page, piece by piece as they arrive."""
    slot = k % DEPTH
    phase = (k // DEPTH) & 1
    acc = gl.full([64, 64], 0.0, gl.float32, LS)
    mbarrier.wait(left_full.index(slot), phase)
    half = left.index(slot)
    for c in gl.static_range(4):
        acc = warpgroup_mma(ql[c], _part(half, c * 64, 64), acc, is_async=True)
    mbarrier.wait(right_full.index(slot), phase)
    half = right.index(slot)
    for c in gl.static_range(3):
        acc = warpgroup_mma(qr[c], _part(half, c * 64, 64), acc, is_async=True)
    acc = warpgroup_mma(qr[3], _part(half, 192, 32), acc, is_async=True)
    acc = warpgroup_mma(qr[4], _part(half, 224, 16), acc, is_async=True)
    acc = warpgroup_mma(qz_s, _part(half, 240, 16), acc, is_async=True)
    mbarrier.wait(rope_full.index(slot), phase)
    return warpgroup_mma(qx_s, mix.index(slot).permute((1, 0)), acc, is_async=True)


@gluon.jit
def _by_thread(p):
    """``[64, 64]`` weights summed over what a thread holds of each row: ``[64, 4]``."""
    return gl.sum(gl.sum(gl.reshape(p, [64, 8, 4, 2]), 3), 1)


@gluon.jit
def _soften(sc, i, certain, limit, m, norm, scale, k, mix, al_s, p_empty, LS: gl.constexpr):
    """One step of the online softmax; leaves alpha, and P in the place of the page's rotary columns."""
    if (i + 1) * PAGE > certain:
        position = i * PAGE + gl.arange(0, 64, layout=gl.SliceLayout(0, LS))
        sc = gl.where(gl.expand_dims(position, 0) < gl.expand_dims(limit, 1), sc, float("-inf"))
    highest = gl.maximum(m, gl.max(sc, 1) * scale)
    alpha = gl.exp2(m - highest)
    # The products of the page before last have read what lay here.
    mbarrier.wait(p_empty.index(k % 2), ((k // 2) & 1) ^ 1)
    al_s.index(k % 2).store(alpha)
    p = gl.exp2(sc * scale - gl.expand_dims(highest, 1))
    mix.index(k % DEPTH).store(p.to(gl.bfloat16))
    sums: gl.constexpr = norm.type.layout
    norm = norm * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, sums)), 1) + _by_thread(p)
    return highest, norm


@gluon.jit
def _scores(
    Q, CONTEXT, Q_START, LSE, PART_LSE, scale, block, group, s0, p0, s1, p1, stop, part_rows,
    qx_s, qz_s, left, right, mix, al_s, left_full, right_full, rope_full, al_full, p_full, p_empty, l_full, l_empty,
    HEADS: gl.constexpr, MULTI: gl.constexpr, WITH_LSE: gl.constexpr, SOON: gl.constexpr, PDL: gl.constexpr,
):
    _await_launch(PDL)
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    LS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    rs: gl.constexpr = gl.SliceLayout(1, LS)
    lane = gl.arange(0, 64, layout=rs)
    SPREAD: gl.constexpr = HEADS <= 16 and not MULTI
    k = 0
    fragment = 0
    for s in range(s0, stop):
        start, tokens = queries(s, Q_START, MULTI)
        rows = tokens * HEADS - group * 64
        row = start * HEADS + group * 64
        ql, qr, qx = _stage_query(
            Q, row.to(gl.int64) * WIDTH, rows, qx_s, qz_s, gl.DotOperandLayout(0, LS, 2), SPREAD
        )
        first, end, context, pages = span(s, s0, p0, s1, p1, CONTEXT)
        # Query token j of q_len sees the first context - q_len + j + 1 entries.
        certain = context - tokens + 1
        if MULTI:  # noqa: SIM108
            limit = certain + (group * 64 + lane) // HEADS
        else:
            limit = gl.full([64], 0, gl.int32, rs) + context
        m = gl.full([64], MINUS, gl.float32, rs)
        norm = _by_thread(gl.full([64, 64], 0.0, gl.float32, LS))
        for i in range(first, end):
            acc = _begin_scores(ql, qr, qz_s, qx, left, right, mix, left_full, right_full, rope_full, k, LS)
            # While they run: what the page before left becomes visible. Its products wait for these scores, and so
            # fill the matrix unit while these are softened.
            if i > first:
                fence_async_shared()
                mbarrier.arrive(al_full.index((k + 1) % 2), count=1)
            if SOON > 0:
                m = warpgroup_mma_wait(SOON, deps=[m])
                if i > first:
                    mbarrier.arrive(p_full.index((k + 1) % 2), count=1)
            sc = warpgroup_mma_wait(0, deps=[acc])
            if SOON == 0:  # noqa: SIM102
                if i > first:
                    mbarrier.arrive(p_full.index((k + 1) % 2), count=1)
            if i == first:
                # The sum of the sequence before lies where alpha goes.
                mbarrier.wait(l_empty, (fragment & 1) ^ 1)
            m, norm = _soften(sc, i, certain, limit, m, norm, scale, k, mix, al_s, p_empty, LS)
            k += 1
        if end > first:
            fence_async_shared()
            mbarrier.arrive(al_full.index((k + 1) % 2), count=1)
            mbarrier.arrive(p_full.index((k + 1) % 2), count=1)
        else:
            mbarrier.wait(l_empty, (fragment & 1) ^ 1)
        total = gl.convert_layout(gl.sum(norm, 1), rs)
        mbarrier.wait(p_empty.index(k % 2), ((k // 2) & 1) ^ 1)
        al_s.index(k % 2).store(total)
        mbarrier.arrive(l_full, count=1)
        fragment += 1  # noqa: SIM113
        value = gl.where(total > 0.0, m + gl.log2(total), float("-inf"))
        line, real = row_of(lane, rows, SPREAD)
        if (first == 0) & (end == pages):
            if WITH_LSE:
                gl.store(LSE + row + line, value * LN2, mask=real)
        else:
            slot = 2 * block + gl.where(first == 0, 1, 0)
            gl.store(PART_LSE + slot * part_rows + group * 64 + line, value, mask=real)


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
    block, group, s0, p0, s1, p1, stop, length, number, part_rows,
    half, mix, al_s, full, rope_full, al_full, p_full, p_empty, l_full, l_empty,
    HEADS: gl.constexpr, MULTI: gl.constexpr, GENTLE: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):
    LO: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    rl: gl.constexpr = gl.SliceLayout(1, LO)
    # (cs, ci) is the next page to load, three pages ahead of the product; its number is fetched one page earlier still.
    # The first one comes with the plan, unless the run begins with a sequence without pages.
    cend = gl.where(s0 == s1, p1, (length + (PAGE - 1)) // PAGE)
    known = p0 < cend
    cs, ci, cend = skip(s0, p0, cend, s1, p1, stop, CONTEXT)
    w0 = ci < cend
    e0 = _old(cs, ci, w0, CONTEXT) & (EARLY > 0)
    r0 = gl.load(TABLE + cs * table_stride + ci, mask=w0 & (known == 0), other=number) * page_rows
    _fetch(SIDE, kv_desc, r0, full.index(0), half.index(0), e0)
    if SIDE == 0:
        _fetch_rope(rope_desc, r0, rope_full.index(0), mix.index(0), e0)
    cs, ci, cend = skip(cs, ci + 1, cend, s1, p1, stop, CONTEXT)
    w1 = ci < cend
    e1 = _old(cs, ci, w1, CONTEXT) & (EARLY > 1)
    r1 = gl.load(TABLE + cs * table_stride + ci, mask=w1, other=0) * page_rows
    _fetch(SIDE, kv_desc, r1, full.index(1), half.index(1), e1)
    if SIDE == 0:
        _fetch_rope(rope_desc, r1, rope_full.index(1), mix.index(1), e1)
    cs, ci, cend = skip(cs, ci + 1, cend, s1, p1, stop, CONTEXT)
    w2 = ci < cend
    e2 = _old(cs, ci, w2, CONTEXT) & (EARLY > 2)
    r2 = gl.load(TABLE + cs * table_stride + ci, mask=w2, other=0) * page_rows
    _fetch(SIDE, kv_desc, r2, full.index(2), half.index(2), e2)
    if SIDE == 0:
        _fetch_rope(rope_desc, r2, rope_full.index(2), mix.index(2), e2)
    # A sequence's last page takes a token of this step; what is written here may still be read by the launch before.
    _await_launch(PDL)
    w0 = w0 & (e0 == 0)
    w1 = w1 & (e1 == 0)
    w2 = w2 & (e2 == 0)
    _fetch(SIDE, kv_desc, r0, full.index(0), half.index(0), w0)
    if SIDE == 0:
        _fetch_rope(rope_desc, r0, rope_full.index(0), mix.index(0), w0)
    if GENTLE:  # noqa: SIM102
        # The query is on its way too. It would come last, if all pages were ordered at once.
        if w0 | e0:
            mbarrier.wait(full.index(0), 0)
    if SIDE == 0:
        _fetch_rope(rope_desc, r1, rope_full.index(1), mix.index(1), w1)
        _fetch_rope(rope_desc, r2, rope_full.index(2), mix.index(2), w2)
    _fetch(SIDE, kv_desc, r1, full.index(1), half.index(1), w1)
    _fetch(SIDE, kv_desc, r2, full.index(2), half.index(2), w2)
    cs, ci, cend = skip(cs, ci + 1, cend, s1, p1, stop, CONTEXT)
    wanted = ci < cend
    row = gl.load(TABLE + cs * table_stride + ci, mask=wanted, other=0) * page_rows
    k = 0
    fragment = 0
    for s in range(s0, stop):
        first, end, context, pages = span(s, s0, p0, s1, p1, CONTEXT)
        acc = gl.full([64, 256], 0.0, gl.float32, LO)
        for i in range(first, end):
            slot = k % DEPTH
            buf = k % 2
            phase = (k // 2) & 1
            mbarrier.wait(al_full.index(buf), phase)
            acc = acc * gl.expand_dims(al_s.index(buf).load(rl), 1)
            mbarrier.wait(p_full.index(buf), phase)
            mbarrier.wait(full.index(slot), (k // DEPTH) & 1)
            if (i + 1) * PAGE > context:
                _blank_tail(half.index(slot), context - i * PAGE)
            running = warpgroup_mma(mix.index(slot), half.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[running])
            mbarrier.arrive(p_empty.index(buf), count=1)
            _fetch(SIDE, kv_desc, row, full.index(slot), half.index(slot), wanted)
            if SIDE == 0:
                # Both halves have used P: its place takes rotary columns again.
                mbarrier.wait(p_empty.index(buf), phase)
                _fetch_rope(rope_desc, row, rope_full.index(slot), mix.index(slot), wanted)
            cs, ci, cend = skip(cs, ci + 1, cend, s1, p1, stop, CONTEXT)
            wanted = ci < cend
            row = gl.load(TABLE + cs * table_stride + ci, mask=wanted, other=0) * page_rows
            k += 1
        mbarrier.wait(l_full, fragment & 1)
        norm = al_s.index(k % 2).load(rl)
        mbarrier.arrive(l_empty, count=1)
        fragment += 1  # noqa: SIM113
        acc = acc * gl.expand_dims(gl.where(norm > 0.0, 1.0 / norm, 0.0), 1)
        start, tokens = queries(s, Q_START, MULTI)
        rows = tokens * HEADS - group * 64
        line, real = row_of(gl.arange(0, 64, layout=rl), rows, HEADS <= 16 and not MULTI)
        column = SIDE * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, LO))
        mask = gl.expand_dims(real, 1)
        offsets = gl.expand_dims(line, 1) * LATENT + gl.expand_dims(column, 0)
        if (first == 0) & (end == pages):
            whole = OUT + (start * HEADS + group * 64).to(gl.int64) * LATENT
            gl.store(whole + offsets, acc.to(OUT.dtype.element_ty), mask=mask)
        else:
            slot = 2 * block + gl.where(first == 0, 1, 0)
            part = PART + (slot * part_rows + group * 64).to(gl.int64) * LATENT
            gl.store(part + offsets, acc, mask=mask)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit(do_not_specialize=["table_stride", "part_rows"])
def mla_decode(
    kv_desc, rope_desc, Q, TABLE, CONTEXT, Q_START, PLAN, OUT, LSE, PART, PART_LSE,
    scale, table_stride, page_rows, part_rows,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, MULTI: gl.constexpr, WITH_LSE: gl.constexpr, SOON: gl.constexpr,
    GENTLE: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):
    """Program (block of the schedule, run of 64 query rows). See ``gluon_launch.attend``."""
    block = gl.program_id(0) // GROUPS
    group = gl.program_id(0) % GROUPS
    ROW = PLAN + block * 16
    s0 = gl.load(ROW)
    p0 = gl.load(ROW + 1)
    s1 = gl.load(ROW + 2)
    p1 = gl.load(ROW + 3)
    length = gl.load(ROW + 4)
    number = gl.load(ROW + 8)
    stop = s1 + gl.where(p1 > 0, 1, 0)
    left = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, 64, 256], kv_desc.layout)
    right = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, 64, 256], kv_desc.layout)
    mix = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, 64, 64], rope_desc.layout)
    qx_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], rope_desc.layout)
    narrow: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    qz_s = gl.allocate_shared_memory(gl.bfloat16, [64, 16], narrow)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    al_s = gl.allocate_shared_memory(gl.float32, [2, 64], flat)
    left_full = _barriers(DEPTH, 1)
    right_full = _barriers(DEPTH, 1)
    rope_full = _barriers(DEPTH, 1)
    al_full = _barriers(2, 1)
    p_full = _barriers(2, 1)
    p_empty = _barriers(2, 2)
    l_full = _barriers(1, 1).index(0)
    l_empty = _barriers(1, 2).index(0)
    fence_async_shared()
    # Plan, lengths and page numbers are older than the launch before this one, so are all pages but sequences' last ones.
    gl.warp_specialize(
        [
            (
                _scores,
                (
                    Q, CONTEXT, Q_START, LSE, PART_LSE, scale, block, group, s0, p0, s1, p1, stop, part_rows,
                    qx_s, qz_s, left, right, mix, al_s, left_full, right_full, rope_full,
                    al_full, p_full, p_empty, l_full, l_empty, HEADS, MULTI, WITH_LSE, SOON, PDL,
                ),
            ),
            (
                _values,
                (
                    0, kv_desc, rope_desc, TABLE, table_stride, page_rows, CONTEXT, Q_START, OUT, PART,
                    block, group, s0, p0, s1, p1, stop, length, number, part_rows,
                    left, mix, al_s, left_full, rope_full, al_full, p_full, p_empty, l_full, l_empty, HEADS, MULTI,
                    GENTLE, EARLY, PDL,
                ),
            ),
            (
                _values,
                (
                    1, kv_desc, rope_desc, TABLE, table_stride, page_rows, CONTEXT, Q_START, OUT, PART,
                    block, group, s0, p0, s1, p1, stop, length, number, part_rows,
                    right, mix, al_s, right_full, rope_full, al_full, p_full, p_empty, l_full, l_empty, HEADS, MULTI,
                    GENTLE, EARLY, PDL,
                ),
            ),
        ],
        [4, 4],
        [160, 160],
    )
