# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Device functions of the Hopper kernels: walking the schedule, and joining partial results across thread blocks."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

# fmt: off
# Argument lists of kernels are read in groups.
PAGE = gl.constexpr(64)
LATENT = gl.constexpr(512)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def span(s, s0, p0, s1, p1, CONTEXT):
    """The pages ``[first, end)`` of sequence ``s`` that are this block's, its length and its number of pages."""
    context = gl.load(CONTEXT + s)
    pages = (context + (PAGE - 1)) // PAGE
    first = gl.where(s == s0, p0, 0)
    end = gl.where(s == s1, p1, pages)
    return first, end, context, pages


@gluon.jit
def queries(s, Q_START, MULTI: gl.constexpr):
    """The first query token of sequence ``s`` and how many it has; one each if not MULTI."""
    if MULTI:
        start = gl.load(Q_START + s)
        tokens = gl.load(Q_START + s + 1) - start
    else:
        start = s
        tokens = s - s + 1
    return start, tokens


@gluon.jit
def skip(s, i, end, s1, p1, stop, CONTEXT):
    """The cursor moved over sequences of which no page is left here; past the last page ``i >= end``."""
    while (i >= end) & (s + 1 < stop):
        s += 1
        i = 0
        end = gl.where(s == s1, p1, (gl.load(CONTEXT + s) + (PAGE - 1)) // PAGE)
    return s, i, end


@gluon.jit
def announce(counter, bound):
    """Makes the block's stores visible to the device and counts it; ``bound`` + 1 counts lead back to 0."""
    gl.thread_barrier()
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .u32 t;
        mov.u32 t, %tid.x;
        setp.eq.u32 p, t, 0;
        mov.u32 $0, 0;
        @p fence.acq_rel.gpu;
        @p atom.global.inc.u32 $0, [$1], $2;
        }""",
        "=r,l,r",
        [counter.to(gl.int64), bound],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _count(counter):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];",
        "=r,l",
        [counter.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def join(
    s, first, parts, counter, Q_START, OUT, LSE, PART, PART_LSE, block, group, part_rows,
    HEADS: gl.constexpr, MULTI: gl.constexpr, WITH_LSE: gl.constexpr,
    PARTS: gl.constexpr, RUNS: gl.constexpr, COLUMNS: gl.constexpr,
):
    """Waits until all blocks have left their part of sequence ``s``, and joins this block's share of the output.

    The output's rows, in runs of ``COLUMNS``, are dealt to these blocks alike; ``PARTS x RUNS x COLUMNS`` values are
    loaded at a time. All blocks of the launch are resident, or will be once other kernels end: none waits for another
    before it has left its own parts.
    """
    start, tokens = queries(s, Q_START, MULTI)
    rows = gl.minimum(tokens * HEADS - group * 64, 64)
    seen = _count(counter)
    while seen < parts:
        seen = _count(counter)
    ACROSS: gl.constexpr = 512 // COLUMNS
    tile: gl.constexpr = gl.BlockedLayout([1, 1, 4], [ACROSS, 1, 32 // ACROSS], [1, 1, 4], [2, 1, 0])
    flat: gl.constexpr = gl.SliceLayout(0, tile)
    by_part: gl.constexpr = gl.SliceLayout(2, tile)
    by_run: gl.constexpr = gl.SliceLayout(0, by_part)
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, flat))
    runs = gl.maximum(rows, 0) * ACROSS
    low = (block - first) * runs // parts
    high = (block - first + 1) * runs // parts
    for begin in range(low, high, RUNS):
        run = begin + gl.arange(0, RUNS, layout=by_run)
        real = run < high
        row = run // ACROSS
        offset = (run % ACROSS) * COLUMNS
        peak = gl.full([RUNS], float("-inf"), gl.float32, by_run)
        total = gl.full([RUNS], 0.0, gl.float32, by_run)
        acc = gl.full([RUNS, COLUMNS], 0.0, gl.float32, flat)
        for at in range(first, first + parts, PARTS):
            owner = at + gl.arange(0, PARTS, layout=gl.SliceLayout(1, by_part))
            slot = (2 * owner + gl.where(owner == first, 1, 0)) * part_rows + group * 64
            place = gl.expand_dims(slot, 1) + gl.expand_dims(row, 0)
            held = gl.expand_dims(owner < first + parts, 1) & gl.expand_dims(real, 0)
            where = gl.expand_dims(place * LATENT + gl.expand_dims(offset, 0), 2) + gl.expand_dims(
                gl.expand_dims(column, 0), 0
            )
            wide = gl.expand_dims(held, 2) & gl.expand_dims(gl.expand_dims(column < COLUMNS, 0), 0)
            sums = gl.load(PART_LSE + place, mask=held, other=float("-inf"), cache_modifier=".cg")
            values = gl.load(PART + where, mask=wide, other=0.0, cache_modifier=".cg")
            highest = gl.maximum(peak, gl.max(sums, 0))
            # If nothing was seen yet, -inf - -inf would be NaN.
            anchor = gl.where(highest == float("-inf"), 0.0, highest)
            old = gl.exp2(peak - anchor)
            weight = gl.exp2(sums - gl.expand_dims(anchor, 0))
            heavy = gl.expand_dims(weight, 2)
            acc = acc * gl.expand_dims(gl.convert_layout(old, gl.SliceLayout(1, flat)), 1) + gl.sum(
                gl.where(heavy > 0.0, values * heavy, 0.0), 0
            )
            total = total * old + gl.sum(weight, 0)
            peak = highest
        norm = gl.where(total > 0.0, 1.0 / total, 0.0)
        acc = acc * gl.expand_dims(gl.convert_layout(norm, gl.SliceLayout(1, flat)), 1)
        target = start * HEADS + group * 64 + row
        flat_run: gl.constexpr = gl.SliceLayout(1, flat)
        base = gl.convert_layout(target * LATENT + offset, flat_run)
        there = gl.expand_dims(gl.convert_layout(real, flat_run), 1) & gl.expand_dims(column < COLUMNS, 0)
        gl.store(
            OUT + (gl.expand_dims(base, 1) + gl.expand_dims(column, 0)),
            acc.to(OUT.dtype.element_ty),
            mask=there,
        )
        if WITH_LSE:
            value = gl.where(total > 0.0, (peak + gl.log2(total)) * LN2, float("-inf"))
            gl.store(LSE + target, value, mask=real & (offset == 0))
    announce(counter, 2 * parts - 1)


@gluon.jit
def join_shared(
    ROW, COUNTS, Q_START, OUT, LSE, PART, PART_LSE, block, group, part_rows,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, MULTI: gl.constexpr, WITH_LSE: gl.constexpr,
    PARTS: gl.constexpr, RUNS: gl.constexpr, COLUMNS: gl.constexpr,
):
    """Joins the sequences that this block shares: at most the one it begins in and the one it ends in."""
    s0 = gl.load(ROW)
    p0 = gl.load(ROW + 1)
    s1 = gl.load(ROW + 2)
    p1 = gl.load(ROW + 3)
    head_first = gl.load(ROW + 5)
    head_parts = gl.load(ROW + 6)
    tail_parts = gl.load(ROW + 7)
    head = (p0 > 0) | ((s0 == s1) & (p1 > 0))
    tail = (s1 > s0) & (p1 > 0)
    if head:
        announce(COUNTS + s0 * GROUPS + group, 2 * head_parts - 1)
    if tail:
        announce(COUNTS + s1 * GROUPS + group, 2 * tail_parts - 1)
    for turn in range(0, 2):
        if gl.where(turn == 0, head, tail):
            s = gl.where(turn == 0, s0, s1)
            first = gl.where(turn == 0, head_first, block)
            parts = gl.where(turn == 0, head_parts, tail_parts)
            join(
                s, first, parts, COUNTS + s * GROUPS + group, Q_START, OUT, LSE, PART, PART_LSE, block, group, part_rows,
                HEADS, MULTI, WITH_LSE, PARTS, RUNS, COLUMNS,
            )
