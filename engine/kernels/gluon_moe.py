# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Grouped products of a mixture of experts for many tokens on Hopper: a persistent block, two warpgroups and a loader.

Rows lie in tiles of 128 of one expert each (``triton_moe_tiles``). A block walks tile after tile: the loader, one warp,
runs up to ``STAGES`` steps ahead of the two consumers, also over the end of a tile, so that the matrix unit does not
wait for memory between tiles. A consumer has 64 rows and two runs of 128 columns: gate and up of the same columns, or
256 columns of down.
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
ROWS = gl.constexpr(64)
COLUMNS = gl.constexpr(128)
STEP = gl.constexpr(64)


@gluon.jit
def _loader(
    left_desc, weight_desc, TILE_EXPERT, total, steps, a_s, b0_s, b1_s, full, empty,
    OUTPUTS: gl.constexpr, RUNS: gl.constexpr, NEXT: gl.constexpr, SECOND: gl.constexpr, STAGES: gl.constexpr,
):
    k = 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        tile = item // RUNS
        row = gl.load(TILE_EXPERT + tile) * OUTPUTS + (item % RUNS) * NEXT
        for step in range(steps):
            slot = k % STAGES
            mbarrier.wait(empty.index(slot), ((k // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), (2 * ROWS + 2 * COLUMNS) * STEP * 2)
            column = step * STEP
            for side in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    left_desc, [(tile * 2 + side) * ROWS, column], full.index(slot), a_s.index(slot * 2 + side)
                )
            tma.async_copy_global_to_shared(weight_desc, [row, column], full.index(slot), b0_s.index(slot))
            tma.async_copy_global_to_shared(weight_desc, [row + SECOND, column], full.index(slot), b1_s.index(slot))
            k += 1


@gluon.jit
def _multiply(k, steps, SIDE: gl.constexpr, a_s, b0_s, b1_s, full, empty, LO: gl.constexpr, STAGES: gl.constexpr):
    """Both products of one tile; ``k`` counts steps over all tiles."""
    one = gl.full([ROWS, COLUMNS], 0.0, gl.float32, LO)
    two = gl.full([ROWS, COLUMNS], 0.0, gl.float32, LO)
    for step in range(steps):
        slot = k % STAGES
        mbarrier.wait(full.index(slot), (k // STAGES) & 1)
        left = a_s.index(slot * 2 + SIDE)
        one = warpgroup_mma(left, b0_s.index(slot).permute((1, 0)), one, is_async=True)
        two = warpgroup_mma(left, b1_s.index(slot).permute((1, 0)), two, is_async=True)
        # This step runs on; the one before has read its operands.
        one, two = warpgroup_mma_wait(2, deps=[one, two])
        if step > 0:
            mbarrier.arrive(empty.index((k - 1) % STAGES), count=1)
        k += 1
    one, two = warpgroup_mma_wait(0, deps=[one, two])
    mbarrier.arrive(empty.index((k - 1) % STAGES), count=1)
    return k, one, two


@gluon.jit
def _consumer(
    SIDE: gl.constexpr, TILE_EXPERT, TILE_BEGIN, COUNT, LISTS, WEIGHTS, OUT, total, steps, tokens,
    a_s, b0_s, b1_s, full, empty,
    RUNS: gl.constexpr, CHOSEN: gl.constexpr, PARTS: gl.constexpr, SIZE: gl.constexpr, ACTIVATE: gl.constexpr,
    STAGES: gl.constexpr,
):
    LO: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    k = 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        tile = item // RUNS
        expert = gl.load(TILE_EXPERT + tile)
        line = gl.load(TILE_BEGIN + tile) + SIDE * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LO))
        real = line < gl.load(COUNT + expert)
        column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LO))
        mask = gl.expand_dims(real, 1)
        if ACTIVATE:
            k, one, two = _multiply(k, steps, SIDE, a_s, b0_s, b1_s, full, empty, LO, STAGES)
            active = one / (1.0 + gl.exp(-one)) * two
            row = tile * 2 * ROWS + SIDE * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LO))
            place = gl.expand_dims(row.to(gl.int64), 1) * SIZE + gl.expand_dims((item % RUNS) * COLUMNS + column, 0)
            gl.store(OUT + place, active.to(OUT.dtype.element_ty), mask=mask)
        else:
            # On their way while the products run.
            pair = gl.load(LISTS + expert * tokens + line, mask=real, other=0)
            weight = gl.load(WEIGHTS + pair, mask=real, other=1.0)
            k, one, two = _multiply(k, steps, SIDE, a_s, b0_s, b1_s, full, empty, LO, STAGES)
            target = (pair // CHOSEN * PARTS + pair % CHOSEN).to(gl.int64) * SIZE
            place = gl.expand_dims(target, 1) + gl.expand_dims((item % RUNS) * 2 * COLUMNS + column, 0)
            scale = gl.expand_dims(weight, 1)
            gl.store(OUT + place, (one * scale).to(OUT.dtype.element_ty), mask=mask)
            gl.store(OUT + place + COLUMNS, (two * scale).to(OUT.dtype.element_ty), mask=mask)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit(do_not_specialize=["tokens"])
def grouped_product(
    left_desc, weight_desc, TILE_EXPERT, TILE_BEGIN, TILES, COUNT, LISTS, WEIGHTS, OUT, steps, tokens,
    OUTPUTS: gl.constexpr, RUNS: gl.constexpr, NEXT: gl.constexpr, SECOND: gl.constexpr, CHOSEN: gl.constexpr,
    PARTS: gl.constexpr, SIZE: gl.constexpr, ACTIVATE: gl.constexpr, STAGES: gl.constexpr,
):
    """Program (share of the tiles and runs of columns). ``OUTPUTS`` rows of weights an expert; a run begins ``NEXT`` rows
    after the one before, its second half ``SECOND`` rows after its first. ``SIZE`` columns of a row of ``OUT``."""
    a_s = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, ROWS, STEP], left_desc.layout)
    b0_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLUMNS, STEP], weight_desc.layout)
    b1_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLUMNS, STEP], weight_desc.layout)
    full = _barriers(STAGES, 1)
    empty = _barriers(STAGES, 2)
    fence_async_shared()
    total = gl.load(TILES) * RUNS
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    0, TILE_EXPERT, TILE_BEGIN, COUNT, LISTS, WEIGHTS, OUT, total, steps, tokens,
                    a_s, b0_s, b1_s, full, empty, RUNS, CHOSEN, PARTS, SIZE, ACTIVATE, STAGES,
                ),
            ),
            (
                _consumer,
                (
                    1, TILE_EXPERT, TILE_BEGIN, COUNT, LISTS, WEIGHTS, OUT, total, steps, tokens,
                    a_s, b0_s, b1_s, full, empty, RUNS, CHOSEN, PARTS, SIZE, ACTIVATE, STAGES,
                ),
            ),
            (
                _loader,
                (
                    left_desc, weight_desc, TILE_EXPERT, total, steps, a_s, b0_s, b1_s, full, empty,
                    OUTPUTS, RUNS, NEXT, SECOND, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
