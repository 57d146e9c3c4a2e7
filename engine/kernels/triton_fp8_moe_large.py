# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Grouped products of experts whose weights are float8, for many rows an expert: bound by the matrix unit, which multiplies
codes. A token's row is packed once, a scale for each 128 values; the activations between the two products are packed
where they arise, in the same form. Every 128 columns the sums are scaled and added up in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twinpool.engine.kernels.operations import Fp8Weight
from twinpool.engine.kernels.triton_fp8_linear import BLOCK, code_product, pack_rows, pack_runs
from twinpool.engine.kernels.triton_fp8_tiles import Tile
from twinpool.engine.kernels.triton_launch import overlap
from twinpool.engine.kernels.triton_tiles import tile_of


@triton.jit(do_not_specialize=["tokens"])
def fp8_gate_up_large(
    X, X_SCALES, CODES, SCALES, LISTS, COUNT, OUT, OUT_SCALES, tokens,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, PAD: tl.constexpr, CHOSEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, tile): ``silu(gate) * up`` packed, ``OUT [tiles * ROWS, WIDTH]`` and its scales."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.program_id(1)
    expert, begin, count = tile_of(COUNT, slot, EXPERTS, PAD, ROWS)
    if expert < EXPERTS:
        line = begin + tl.arange(0, ROWS)
        real = line < count
        token = (tl.load(LISTS + expert * tokens + line, mask=real, other=0) // CHOSEN).to(tl.int64)
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inner = tl.arange(0, BLOCK)
        wide = column < WIDTH
        blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
        tall: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
        gates = CODES + expert.to(tl.int64) * 2 * WIDTH * SIZE + column[None, :] * SIZE + inner[:, None]
        gate_scales = SCALES + (expert * 2 * tall + tl.program_id(0)) * blocks
        gate = tl.zeros([ROWS, BLOCK], tl.float32)
        up = tl.zeros([ROWS, BLOCK], tl.float32)
        for block in range(blocks):
            at = block * BLOCK
            inside = at + inner < SIZE
            held = inside[:, None] & wide[None, :]
            x = tl.load(
                X + token[:, None] * SIZE + (at + inner)[None, :], mask=real[:, None] & inside[None, :], other=0.0
            )
            own = tl.load(X_SCALES + token * blocks + block, mask=real, other=0.0)
            scale = own * tl.load(gate_scales + block)
            gate += code_product(x, tl.load(gates + at, mask=held, other=0.0), CAST) * scale[:, None]
            scale = own * tl.load(gate_scales + tall * blocks + block)
            up += code_product(x, tl.load(gates + WIDTH * SIZE + at, mask=held, other=0.0), CAST) * scale[:, None]
        codes, packed = pack_runs(gate / (1.0 + tl.exp(-gate)) * up)
        row = (slot * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        tl.store(OUT + row[:, None] * WIDTH + column[None, :], codes.to(OUT.dtype.element_ty), mask=wide[None, :])
        tl.store(OUT_SCALES + row * tall + tl.program_id(0), packed)


@triton.jit(do_not_specialize=["tokens"])
def fp8_down_large(
    X, X_SCALES, CODES, SCALES, LISTS, COUNT, WEIGHTS, OUT, tokens,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, PAD: tl.constexpr, CHOSEN: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, tile): ``OUT [tokens, PARTS, SIZE]``, scaled by the pair's weight."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.program_id(1)
    expert, begin, count = tile_of(COUNT, slot, EXPERTS, PAD, ROWS)
    if expert < EXPERTS:
        line = begin + tl.arange(0, ROWS)
        real = line < count
        pair = tl.load(LISTS + expert * tokens + line, mask=real, other=0)
        row = (slot * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inner = tl.arange(0, BLOCK)
        wide = column < SIZE
        blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
        tall: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
        matrix = CODES + expert.to(tl.int64) * SIZE * WIDTH + column[None, :] * WIDTH + inner[:, None]
        scales = SCALES + (expert * blocks + tl.program_id(0)) * tall
        acc = tl.zeros([ROWS, BLOCK], tl.float32)
        for block in range(tall):
            at = block * BLOCK
            inside = at + inner < WIDTH
            x = tl.load(X + row[:, None] * WIDTH + (at + inner)[None, :], mask=inside[None, :], other=0.0)
            codes = tl.load(matrix + at, mask=inside[:, None] & wide[None, :], other=0.0)
            own = tl.load(X_SCALES + row * tall + block)
            acc += code_product(x, codes, CAST) * (own * tl.load(scales + block))[:, None]
        weight = tl.load(WEIGHTS + pair, mask=real, other=1.0)
        target = (pair // CHOSEN * PARTS + pair % CHOSEN).to(tl.int64)[:, None] * SIZE + column[None, :]
        result = (acc * weight[:, None]).to(OUT.dtype.element_ty)
        tl.store(OUT + target, result, mask=real[:, None] & wide[None, :])


LARGE = Tile(rows=64, columns=BLOCK, warps=8, stages=3)
"""For both products. The columns of the first are a block, for which its program makes the scales."""


def first(
    packed: tuple[Tensor, Tensor], gate_up: Fp8Weight, lists: tuple[Tensor, Tensor], chosen: int, tile: Tile = LARGE
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``silu(gate) * up`` for the pairs of all experts, packed: codes ``[tiles * rows, n]``, each expert's tiles in order.

    ``packed``: codes ``[T, size]`` and scales of the tokens; ``lists`` as ``triton_moe.lists_of`` gives them.
    """
    codes, scales = packed
    tokens, size = codes.shape
    experts, width = len(gate_up.codes), gate_up.codes.shape[1] // 2
    slots = _slots(tokens * chosen, experts, tile.rows)
    out = torch.empty(slots * tile.rows, width, dtype=codes.dtype, device=codes.device)
    out_scales = torch.empty(len(out), triton.cdiv(width, BLOCK), dtype=torch.float32, device=codes.device)
    fp8_gate_up_large[(triton.cdiv(width, BLOCK), slots)](
        codes, scales, *gate_up, lists[1], lists[0], out, out_scales, tokens, SIZE=size, WIDTH=width,
        **_shape(experts, chosen, tile, codes),
    )  # fmt: skip
    return out, out_scales


def second(
    active: tuple[Tensor, Tensor],
    down: Fp8Weight,
    lists: tuple[Tensor, Tensor],
    weights: Tensor,
    out: Tensor,
    tile: Tile = LARGE,
) -> None:
    """Fills the first parts of ``out [T, parts, size]``, one for each of ``weights [T, k]``, by what ``first`` gave."""
    tokens, chosen = weights.shape
    experts, size, width = down.codes.shape
    fp8_down_large[(triton.cdiv(size, BLOCK), _slots(tokens * chosen, experts, tile.rows))](
        *active, *down, lists[1], lists[0], weights, out, tokens, SIZE=size, WIDTH=width, PARTS=out.shape[1],
        **_shape(experts, chosen, tile, active[0]),
    )  # fmt: skip


def routed(
    hidden: Tensor,
    gate_up: Fp8Weight,
    down: Fp8Weight,
    weights: Tensor,
    lists: tuple[Tensor, Tensor],
    out: Tensor,
    tile: Tile = LARGE,
) -> None:
    """Fills the first parts of ``out [T, parts, size]``, one for each of ``weights [T, k]``."""
    active = first(pack_rows(hidden), gate_up, lists, weights.shape[1], tile)
    second(active, down, lists, weights, out, tile)


def _slots(pairs: int, experts: int, rows: int) -> int:
    """Tiles that any lists of so many pairs have at most."""
    return pairs // rows + min(experts, pairs)


def _shape(experts: int, chosen: int, tile: Tile, codes: Tensor) -> dict[str, int | bool]:
    return {
        "EXPERTS": experts, "PAD": max(triton.next_power_of_2(experts), 16), "CHOSEN": chosen, "ROWS": tile.rows,
        "BLOCK": BLOCK, "CAST": codes.device.type == "cpu", "num_warps": tile.warps, "num_stages": tile.stages,
        **overlap(codes),
    }  # fmt: skip
