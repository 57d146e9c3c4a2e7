# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Both grouped products of a mixture of experts for few tokens, in one launch.

A block takes a ticket. The first ones are for tiles of gate and up with the activation; the others for tiles of the down
product, which wait until all of gate and up of their rows is there. As tickets are given out in order, what a block
waits for is under way; mostly it is long there, so that no processor idles between the two products, and the memory is
kept busy. The shared experts are further experts,
each a slice of the shared MLP, whose lists hold every token.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twinpool.engine.kernels.operations import ExpertWeights, Routing
from twinpool.engine.kernels.triton_launch import overlap
from twinpool.engine.kernels.triton_tiles import rows_of


@triton.jit
def _product(left, right, acc, CAST: tl.constexpr):
    """``acc + left @ right``; the interpreter has no products of bfloat16."""
    if CAST:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit
def _gate_up(
    HIDDEN, WEIGHT, SHARED, LISTS, COUNT, OUT, tokens, tiles, slot, run,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, EXTRA: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, CAST: tl.constexpr,
    SINGLE: tl.constexpr,
):  # fmt: skip
    """The ``run``-th columns of ``silu(gate) * up`` for tile ``slot`` of the experts' lists: ``OUT [tokens, parts, WIDTH]``."""
    expert, _pair, token, part, real, some = rows_of(
        LISTS, COUNT, slot, tiles, tokens, ROWS, EXPERTS, CHOSEN, SINGLE
    )
    if some:
        column = run * COLUMNS + tl.arange(0, COLUMNS)
        inner = tl.arange(0, STEP)
        wide = column < WIDTH
        gates = WEIGHT + expert.to(tl.int64) * 2 * WIDTH * SIZE
        ups = gates + WIDTH * SIZE
        if expert >= EXPERTS:
            gates = SHARED + (expert - EXPERTS).to(tl.int64) * WIDTH * SIZE
            ups = gates + EXTRA * WIDTH * SIZE
        rows = HIDDEN + token[:, None].to(tl.int64) * SIZE + inner[None, :]
        place = column[None, :] * SIZE + inner[:, None]
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in tl.range(0, SIZE, STEP, num_stages=STAGES):
            inside = begin + inner < SIZE
            held = inside[:, None] & wide[None, :]
            left = tl.load(rows + begin, mask=real[:, None] & inside[None, :], other=0.0)
            gate = _product(left, tl.load(gates + place + begin, mask=held, other=0.0), gate, CAST)
            up = _product(left, tl.load(ups + place + begin, mask=held, other=0.0), up, CAST)
        active = gate / (1.0 + tl.exp(-gate)) * up
        target = (token.to(tl.int64) * (CHOSEN + EXTRA) + part)[:, None] * WIDTH + column[None, :]
        tl.store(OUT + target, active.to(OUT.dtype.element_ty), mask=real[:, None] & wide[None, :])


@triton.jit
def _down(
    ACTIVE, WEIGHT, SHARED, LISTS, COUNT, WEIGHTS, OUT, DONE, needed, tokens, tiles, slot, run,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, EXTRA: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, CAST: tl.constexpr,
    SINGLE: tl.constexpr,
):  # fmt: skip
    """The ``run``-th columns of the down product for tile ``slot``, scaled by the pairs' weights, once the tile's counter in
    DONE is ``needed``: ``OUT [tokens, parts, SIZE]``."""
    expert, pair, token, part, real, some = rows_of(
        LISTS, COUNT, slot, tiles, tokens, ROWS, EXPERTS, CHOSEN, SINGLE
    )
    if some:
        column = run * COLUMNS + tl.arange(0, COLUMNS)
        inner = tl.arange(0, STEP)
        wide = column < SIZE
        line = token.to(tl.int64) * (CHOSEN + EXTRA) + part
        rows = ACTIVE + line[:, None] * WIDTH + inner[None, :]
        matrix = WEIGHT + expert.to(tl.int64) * SIZE * WIDTH
        pitch = WIDTH
        if expert >= EXPERTS:
            matrix = SHARED + (expert - EXPERTS) * WIDTH
            pitch = EXTRA * WIDTH
        place = column[None, :] * pitch + inner[:, None]
        while tl.load(DONE + slot, volatile=True) < needed:
            pass
        # What others have stored before they counted is visible from here on.
        tl.atomic_add(DONE + slot, 0, sem="acquire")
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in tl.range(0, WIDTH, STEP, num_stages=STAGES):
            inside = begin + inner < WIDTH
            left = tl.load(rows + begin, mask=real[:, None] & inside[None, :], other=0.0)
            right = tl.load(matrix + place + begin, mask=inside[:, None] & wide[None, :], other=0.0)
            acc = _product(left, right, acc, CAST)
        weight = tl.load(WEIGHTS + pair, mask=real & (expert < EXPERTS), other=1.0)
        target = line[:, None] * SIZE + column[None, :]
        tl.store(OUT + target, (acc * weight[:, None]).to(OUT.dtype.element_ty), mask=real[:, None] & wide[None, :])


@triton.jit(do_not_specialize=["tokens", "tiles", "slots"])
def experts_kernel(
    HIDDEN, GATE_UP, SHARED_UP, DOWN, SHARED_DOWN, LISTS, COUNT, SYNC, WEIGHTS, ACTIVE, OUT, tokens, tiles, slots,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, EXTRA: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS_UP: tl.constexpr, STEP_UP: tl.constexpr, STAGES_UP: tl.constexpr,
    COLUMNS_DOWN: tl.constexpr, STEP_DOWN: tl.constexpr, STAGES_DOWN: tl.constexpr,
    CAST: tl.constexpr, SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: whatever its ticket says. SYNC, zeros at first: the next ticket, and for each tile how much of it is done."""
    # The zeros are older than the launch before this one.
    turn = tl.atomic_add(SYNC, 1, sem="relaxed")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    ups: tl.constexpr = (WIDTH + COLUMNS_UP - 1) // COLUMNS_UP
    downs: tl.constexpr = (SIZE + COLUMNS_DOWN - 1) // COLUMNS_DOWN
    if turn < slots * ups:
        slot = turn // ups
        _gate_up(
            HIDDEN, GATE_UP, SHARED_UP, LISTS, COUNT, ACTIVE, tokens, tiles, slot, turn % ups,
            SIZE, WIDTH, EXPERTS, CHOSEN, EXTRA, ROWS, COLUMNS_UP, STEP_UP, STAGES_UP, CAST, SINGLE,
        )  # fmt: skip
        # All threads have stored before one of them says so.
        tl.debug_barrier()
        tl.atomic_add(SYNC + 1 + slot, 1, sem="release")
    else:
        turn -= slots * ups
        _down(
            ACTIVE, DOWN, SHARED_DOWN, LISTS, COUNT, WEIGHTS, OUT, SYNC + 1, ups, tokens, tiles, turn // downs,
            turn % downs, SIZE, WIDTH, EXPERTS, CHOSEN, EXTRA, ROWS, COLUMNS_DOWN, STEP_DOWN, STAGES_DOWN, CAST, SINGLE,
        )  # fmt: skip


class Tile(NamedTuple):
    """Columns of a program, inner columns of a step, pipeline depth and warps."""

    columns: int
    step: int
    stages: int
    warps: int


TILES = {
    16: (Tile(64, 128, 3, 4), Tile(128, 128, 3, 4)),
    32: (Tile(64, 128, 3, 4), Tile(128, 64, 4, 4)),
    64: (Tile(64, 64, 3, 4), Tile(128, 64, 3, 4)),
    128: (Tile(64, 64, 4, 8), Tile(128, 64, 4, 8)),
}
"""By rows of a tile, for gate and up and for down. Measured on an H200 but for the last: see docs/kernels.md."""

FEW, FEW_TILES = 32, (Tile(32, 128, 4, 4), Tile(64, 128, 4, 4))
"""As ``TILES``, for up to ``FEW`` tokens."""
SINGLE_TILES = (Tile(32, 256, 3, 4), Tile(64, 256, 3, 4))
"""As ``TILES``, for one token: two blocks fit on a processor, and the last third of the first product runs beside the
second one's beginning."""


MOST_SHARED = 8
"""Shared experts for which a router leaves counters."""


def tile_rows(pairs: int, experts: int) -> int:
    """Rows of a tile for an expert's mean share of the pairs, with room for the larger ones."""
    mean = pairs / experts
    return 16 if mean <= 8 else 32 if mean <= 16 else 64 if mean <= 64 else 128


def sync_size(tokens: int, chosen: int, experts: int) -> int:
    """Counters that a launch needs, with room for ``MOST_SHARED`` shared experts."""
    tiles: int = triton.cdiv(tokens, tile_rows(tokens * chosen, experts))
    return 1 + (experts + MOST_SHARED) * tiles


def products(
    hidden: Tensor, routing: Routing, experts: ExpertWeights, lists: tuple[Tensor, Tensor, Tensor], out: Tensor
) -> None:
    """Fills ``out [T, parts, size]``. ``lists``: see ``triton_moe.lists_of``; the counters are zeros and are used up."""
    tokens, size = hidden.shape
    number, width = experts.down.shape[0], experts.down.shape[2]
    chosen = routing.experts.shape[1]
    extra = out.shape[1] - chosen
    single = tokens == 1
    count, pairs, sync = lists
    rows = tile_rows(tokens * chosen, number)
    tiles = triton.cdiv(tokens, rows)
    slots = chosen + extra if single else (number + extra) * tiles
    first, second = SINGLE_TILES if single else FEW_TILES if tokens <= FEW else TILES[rows]
    active = hidden.new_empty(tokens, chosen + extra, width)
    blocks = slots * (triton.cdiv(width, first.columns) + triton.cdiv(size, second.columns))
    experts_kernel[(blocks,)](
        hidden, experts.gate_up, experts.gate_up if experts.shared_gate_up is None else experts.shared_gate_up,
        experts.down, experts.down if experts.shared_down is None else experts.shared_down,
        routing.experts if single else pairs, count, sync, routing.weights.contiguous(), active, out,
        tokens, tiles, slots, SIZE=size, WIDTH=width, EXPERTS=number, CHOSEN=chosen, EXTRA=extra, ROWS=rows,
        COLUMNS_UP=first.columns, STEP_UP=first.step, STAGES_UP=first.stages,
        COLUMNS_DOWN=second.columns, STEP_DOWN=second.step, STAGES_DOWN=second.stages,
        CAST=hidden.device.type == "cpu", SINGLE=single, num_warps=first.warps, **overlap(hidden),
    )  # fmt: skip
