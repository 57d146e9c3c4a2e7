# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Prefill of latent attention for Hopper, keys and values expanded: 128 queries of one head, two warpgroups and a loader.

- the *loader*, one warp, orders the tiles of keys, rotary columns and values with the bulk copy engine;
- each *consumer* has 64 queries: it starts the scores of the next tile, then the product of the last tile's weights, and
  softens the scores while that product runs. Weights stay in registers.

Tiles are walked from the diagonal to the first key, so that only the first ones are masked and the loop is not. With
``TURNS`` the two consumers order their products by turns: while one has the matrix unit, the other one softens.
The shapes are fixed: 128 + 64 columns of keys, 128 of values, bfloat16.
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

# fmt: off
# Argument lists of kernels are read in groups.
NOPE = gl.constexpr(128)
ROPE = gl.constexpr(64)
DIM = gl.constexpr(128)
ROWS = gl.constexpr(64)
MINUS = gl.constexpr(-1.0e30)  # below every score, yet finite: the difference of two of them is no NaN
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _loader(
    key_desc, rope_desc, value_desc, head, tiles, key_s, rope_s, value_s, key_full, key_empty, value_full, value_empty,
    LATENT: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
):
    """Orders the tiles, the last one first."""
    for i in range(tiles):
        slot = i % STAGES
        phase = (i // STAGES) & 1
        token = (tiles - 1 - i) * TOKENS
        mbarrier.wait(key_empty.index(slot), phase ^ 1)
        mbarrier.expect(key_full.index(slot), TOKENS * (NOPE + ROPE) * 2)
        tma.async_copy_global_to_shared(key_desc, [token, head * NOPE], key_full.index(slot), key_s.index(slot))
        tma.async_copy_global_to_shared(rope_desc, [token, LATENT], key_full.index(slot), rope_s.index(slot))
        mbarrier.wait(value_empty.index(slot), phase ^ 1)
        mbarrier.expect(value_full.index(slot), TOKENS * DIM * 2)
        tma.async_copy_global_to_shared(value_desc, [token, head * DIM], value_full.index(slot), value_s.index(slot))


@gluon.jit
def _begin_scores(q_s, qr_s, key_s, rope_s, key_full, i, LS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr):
    """Starts S = Q K^T of the i-th tile, once it is there."""
    slot = i % STAGES
    acc = gl.full([ROWS, TOKENS], 0.0, gl.float32, LS)
    mbarrier.wait(key_full.index(slot), (i // STAGES) & 1)
    acc = warpgroup_mma(q_s, key_s.index(slot).permute((1, 0)), acc, is_async=True)
    return warpgroup_mma(qr_s, rope_s.index(slot).permute((1, 0)), acc, is_async=True)


@gluon.jit
def _by_thread(p, TOKENS: gl.constexpr):
    """``[64, TOKENS]`` weights summed over what a thread holds of each row: ``[64, 4]``."""
    return gl.sum(gl.sum(gl.reshape(p, [ROWS, TOKENS // 8, 4, 2]), 3), 1)


@gluon.jit
def _soften(
    scores, m, norm, scale, begin, limit, LS: gl.constexpr, TOKENS: gl.constexpr, MASK: gl.constexpr
):
    """One step of the online softmax: weights as a left operand, alpha, the new peak and sums."""
    if MASK:
        token = begin + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, LS))
        scores = gl.where(gl.expand_dims(token, 0) < gl.expand_dims(limit, 1), scores, float("-inf"))
    highest = gl.maximum(m, gl.max(scores, 1) * scale)
    alpha = gl.exp2(m - highest)
    p = gl.exp2(scores * scale - gl.expand_dims(highest, 1))
    sums: gl.constexpr = norm.type.layout
    norm = norm * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, sums)), 1) + _by_thread(p, TOKENS)
    weights = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, LS, 2))
    return weights, alpha, highest, norm


@gluon.jit
def _step(
    i, begin, weights, acc, m, norm, limit, scale, q_s, qr_s, key_s, rope_s, value_s,
    key_full, key_empty, value_full, value_empty, mine, other,
    LS: gl.constexpr, LO: gl.constexpr, SIDE: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    MASK: gl.constexpr, TURNS: gl.constexpr,
):
    """Scores of the i-th tile beside the product of the tile before it."""
    if TURNS:
        mbarrier.wait(mine, (i & 1) ^ (1 - SIDE))
    scores = _begin_scores(q_s, qr_s, key_s, rope_s, key_full, i, LS, TOKENS, STAGES)
    before = (i - 1) % STAGES
    mbarrier.wait(value_full.index(before), ((i - 1) // STAGES) & 1)
    running = warpgroup_mma(weights, value_s.index(before), acc, is_async=True)
    if TURNS:
        mbarrier.arrive(other, count=1)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(key_empty.index(i % STAGES), count=1)
    weights, alpha, m, norm = _soften(scores, m, norm, scale, begin, limit, LS, TOKENS, MASK)
    acc = warpgroup_mma_wait(0, deps=[running])
    mbarrier.arrive(value_empty.index(before), count=1)
    acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, LO)), 1)
    return weights, acc, m, norm


@gluon.jit
def _consumer(
    SIDE: gl.constexpr, OUT, LSE, row, count, context, tiles, scale, out_stride, lse_stride,
    q_s, qr_s, key_s, rope_s, value_s, q_full, key_full, key_empty, value_full, value_empty, mine, other,
    LS: gl.constexpr, LO: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, WITH_LSE: gl.constexpr,
    TURNS: gl.constexpr,
):
    rs: gl.constexpr = gl.SliceLayout(1, LS)
    rl: gl.constexpr = gl.SliceLayout(1, LO)
    first = row + SIDE * ROWS
    # How many keys each query sees.
    limit = context - count + 1 + first + gl.arange(0, ROWS, layout=rs)
    m = gl.full([ROWS], MINUS, gl.float32, rs)
    norm = _by_thread(gl.full([ROWS, TOKENS], 0.0, gl.float32, LS), TOKENS)
    acc = gl.full([ROWS, DIM], 0.0, gl.float32, LO)
    mbarrier.wait(q_full, 0)
    if TURNS:
        mbarrier.wait(mine, 1 - SIDE)
    scores = _begin_scores(q_s, qr_s, key_s, rope_s, key_full, 0, LS, TOKENS, STAGES)
    if TURNS:
        mbarrier.arrive(other, count=1)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(key_empty.index(0), count=1)
    weights, _alpha, m, norm = _soften(
        scores, m, norm, scale, (tiles - 1) * TOKENS, limit, LS, TOKENS, True
    )
    # Tiles that the first query does not see whole.
    whole = (context - count + 1 + first) // TOKENS
    masked = gl.maximum(gl.minimum(tiles - whole, tiles), 1)
    for i in range(1, masked):
        weights, acc, m, norm = _step(
            i, (tiles - 1 - i) * TOKENS, weights, acc, m, norm, limit, scale, q_s, qr_s, key_s, rope_s, value_s,
            key_full, key_empty, value_full, value_empty, mine, other, LS, LO, SIDE, TOKENS, STAGES, True, TURNS,
        )
    for i in range(masked, tiles):
        weights, acc, m, norm = _step(
            i, 0, weights, acc, m, norm, limit, scale, q_s, qr_s, key_s, rope_s, value_s,
            key_full, key_empty, value_full, value_empty, mine, other, LS, LO, SIDE, TOKENS, STAGES, False, TURNS,
        )
    last = (tiles - 1) % STAGES
    mbarrier.wait(value_full.index(last), ((tiles - 1) // STAGES) & 1)
    acc = warpgroup_mma(weights, value_s.index(last), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    total = gl.convert_layout(gl.sum(norm, 1), rs)
    share = gl.convert_layout(gl.where(total > 0.0, 1.0 / total, 0.0), rl)
    acc = acc * gl.expand_dims(share, 1)
    lane = first + gl.arange(0, ROWS, layout=rl)
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, LO))
    place = gl.expand_dims(lane, 1).to(gl.int64) * out_stride + gl.expand_dims(column, 0)
    gl.store(OUT + place, acc.to(OUT.dtype.element_ty), mask=gl.expand_dims(lane < count, 1))
    if WITH_LSE:
        query = first + gl.arange(0, ROWS, layout=rs)
        sums = gl.where(total > 0.0, (m + gl.log2(total)) * LN2, float("-inf"))
        gl.store(LSE + query.to(gl.int64) * lse_stride, sums, mask=query < count)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit(do_not_specialize=["count", "context"])
def mla_prefill(
    query_desc, query_rope_desc, key_desc, rope_desc, value_desc, OUT, LSE, count, context, scale,
    out_stride, out_head, lse_stride,
    LATENT: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, WITH_LSE: gl.constexpr, TURNS: gl.constexpr,
):
    """Program (tile of 128 queries, the longest first; head). The last of ``count`` queries sees all of ``context``."""
    LS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TOKENS, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16])
    row = (gl.num_programs(0) - 1 - gl.program_id(0)) * 2 * ROWS
    head = gl.program_id(1)
    tiles = (gl.minimum(context - count + row + 2 * ROWS, context) + (TOKENS - 1)) // TOKENS
    q_s = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, NOPE], query_desc.layout)
    qr_s = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, ROPE], query_rope_desc.layout)
    key_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, NOPE], key_desc.layout)
    rope_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, ROPE], rope_desc.layout)
    value_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, DIM], value_desc.layout)
    q_full = _barriers(2, 1)
    key_full = _barriers(STAGES, 1)
    key_empty = _barriers(STAGES, 2)
    value_full = _barriers(STAGES, 1)
    value_empty = _barriers(STAGES, 2)
    turns = _barriers(2, 1)
    fence_async_shared()
    for side in gl.static_range(2):
        mbarrier.expect(q_full.index(side), ROWS * (NOPE + ROPE) * 2)
        tma.async_copy_global_to_shared(
            query_desc, [row + side * ROWS, head * (NOPE + ROPE)], q_full.index(side), q_s.index(side)
        )
        tma.async_copy_global_to_shared(
            query_rope_desc, [row + side * ROWS, head * (NOPE + ROPE) + NOPE], q_full.index(side), qr_s.index(side)
        )
    target = OUT + head * out_head
    sums = LSE + head
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    0, target, sums, row, count, context, tiles, scale, out_stride, lse_stride,
                    q_s.index(0), qr_s.index(0), key_s, rope_s, value_s, q_full.index(0),
                    key_full, key_empty, value_full, value_empty, turns.index(0), turns.index(1),
                    LS, LO, TOKENS, STAGES, WITH_LSE, TURNS,
                ),
            ),
            (
                _consumer,
                (
                    1, target, sums, row, count, context, tiles, scale, out_stride, lse_stride,
                    q_s.index(1), qr_s.index(1), key_s, rope_s, value_s, q_full.index(1),
                    key_full, key_empty, value_full, value_empty, turns.index(1), turns.index(0),
                    LS, LO, TOKENS, STAGES, WITH_LSE, TURNS,
                ),
            ),
            (
                _loader,
                (
                    key_desc, rope_desc, value_desc, head, tiles, key_s, rope_s, value_s,
                    key_full, key_empty, value_full, value_empty, LATENT, TOKENS, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
