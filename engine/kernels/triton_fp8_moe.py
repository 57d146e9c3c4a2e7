# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Grouped products of experts whose weights are float8, for few rows an expert: the weights are what has to be read, so
codes turn into the type of the activations on chip (exactly), the sums of each 128 columns are scaled in float32, and
nothing else is rounded. From ``PACK_PAIRS`` rows an expert up see ``triton_fp8_moe_large``.

Lists of pairs, tiles and parts are those of ``triton_moe``. A shared expert is a slice of the shared MLP and runs as a
further expert where its rows are whole blocks; else the shared MLP is a part by itself.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twinpool.engine.kernels import triton_fp8_moe_large
from twinpool.engine.kernels.operations import Fp8ExpertWeights, Fp8Weight, Routing
from twinpool.engine.kernels.triton_fp8_linear import BLOCK, code_product, fp8_linear
from twinpool.engine.kernels.triton_fp8_tiles import Tile
from twinpool.engine.kernels.triton_fused import silu_mul
from twinpool.engine.kernels.triton_launch import overlap
from twinpool.engine.kernels.triton_moe import lists_of
from twinpool.engine.kernels.triton_tiles import rows_of

PACK_PAIRS = 64
"""Rows of an expert, in the mean, from which activations are packed: then the product is bound by the matrix unit."""


@triton.jit(do_not_specialize=["tokens", "tiles"])
def fp8_gate_up_kernel(
    HIDDEN, CODES, SCALES, SHARED, SHARED_SCALES, LISTS, COUNT, OUT, tokens, tiles,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, EXTRA: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, CAST: tl.constexpr, SINGLE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (run of columns of one block, tile of an expert's list): ``silu(gate) * up`` of ``WIDTH`` columns."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, _pair, token, part, real, some = rows_of(
        LISTS, COUNT, tl.program_id(1), tiles, tokens, ROWS, EXPERTS, CHOSEN, SINGLE
    )
    if some:
        first = tl.program_id(0) * COLUMNS
        column = first + tl.arange(0, COLUMNS)
        inner = tl.arange(0, BLOCK)
        wide = column < WIDTH
        blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
        tall: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
        gates = CODES + expert.to(tl.int64) * 2 * WIDTH * SIZE
        ups = gates + WIDTH * SIZE
        gate_scales = SCALES + expert * 2 * tall * blocks
        up_scales = gate_scales + tall * blocks
        if expert >= EXPERTS:
            gates = SHARED + (expert - EXPERTS).to(tl.int64) * WIDTH * SIZE
            ups = gates + EXTRA * WIDTH * SIZE
            gate_scales = SHARED_SCALES + (expert - EXPERTS) * tall * blocks
            up_scales = gate_scales + EXTRA * tall * blocks
        rows = HIDDEN + token[:, None].to(tl.int64) * SIZE + inner[None, :]
        place = column[None, :] * SIZE + inner[:, None]
        own = first // BLOCK * blocks
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for block in range(blocks):
            begin = block * BLOCK
            inside = begin + inner < SIZE
            held = inside[:, None] & wide[None, :]
            x = tl.load(rows + begin, mask=real[:, None] & inside[None, :], other=0.0)
            codes = tl.load(gates + place + begin, mask=held, other=0.0)
            gate += code_product(x, codes.to(x.dtype), CAST) * tl.load(gate_scales + own + block)
            codes = tl.load(ups + place + begin, mask=held, other=0.0)
            up += code_product(x, codes.to(x.dtype), CAST) * tl.load(up_scales + own + block)
        active = gate / (1.0 + tl.exp(-gate)) * up
        line = token.to(tl.int64) * (CHOSEN + EXTRA) + part
        place = line[:, None] * WIDTH + column[None, :]
        tl.store(OUT + place, active.to(OUT.dtype.element_ty), mask=real[:, None] & wide[None, :])


@triton.jit(do_not_specialize=["tokens", "tiles"])
def fp8_down_kernel(
    ACTIVE, CODES, SCALES, SHARED, SHARED_SCALES, LISTS, COUNT, WEIGHTS, OUT, tokens, tiles,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, EXTRA: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, CAST: tl.constexpr,
    SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (run of columns of one block, tile of an expert's list): ``OUT [tokens, PARTS, SIZE]``, scaled by the pair's
    weight."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, pair, token, part, real, some = rows_of(
        LISTS, COUNT, tl.program_id(1), tiles, tokens, ROWS, EXPERTS, CHOSEN, SINGLE
    )
    if some:
        first = tl.program_id(0) * COLUMNS
        column = first + tl.arange(0, COLUMNS)
        inner = tl.arange(0, BLOCK)
        wide = column < SIZE
        blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
        tall: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
        line = token.to(tl.int64) * (CHOSEN + EXTRA) + part
        rows = ACTIVE + line[:, None] * WIDTH + inner[None, :]
        matrix = CODES + expert.to(tl.int64) * SIZE * WIDTH
        pitch = WIDTH
        scales = SCALES + (expert * blocks + first // BLOCK) * tall
        if expert >= EXPERTS:
            matrix = SHARED + (expert - EXPERTS) * WIDTH
            pitch = EXTRA * WIDTH
            scales = SHARED_SCALES + (first // BLOCK * EXTRA + expert - EXPERTS) * tall
        place = column[None, :] * pitch + inner[:, None]
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for block in range(tall):
            begin = block * BLOCK
            inside = begin + inner < WIDTH
            x = tl.load(rows + begin, mask=real[:, None] & inside[None, :], other=0.0)
            codes = tl.load(matrix + place + begin, mask=inside[:, None] & wide[None, :], other=0.0)
            acc += code_product(x, codes.to(x.dtype), CAST) * tl.load(scales + block)
        weight = tl.load(WEIGHTS + pair, mask=real & (expert < EXPERTS), other=1.0)
        target = (token.to(tl.int64) * PARTS + part)[:, None] * SIZE + column[None, :]
        tl.store(OUT + target, (acc * weight[:, None]).to(OUT.dtype.element_ty), mask=real[:, None] & wide[None, :])


def tile_for(pairs: int, experts: int, itemsize: int) -> Tile:
    """The tile of both products: rows for an expert's mean share of the pairs with room for the larger ones, and columns
    that divide a block."""
    mean = pairs / experts
    rows = 16 if mean <= 8 else 32 if mean <= 16 else 64
    return Tile(rows, 64, 4, 3 if itemsize <= 2 else 2)


def fp8_moe(hidden: Tensor, routing: Routing, experts: Fp8ExpertWeights) -> Tensor:
    """See ``operations.Fp8Moe``: ``[T, parts, size]``."""
    hidden = hidden.contiguous()
    tokens, size = hidden.shape
    number, width = experts.down.codes.shape[0], experts.down.codes.shape[2]
    chosen = routing.experts.shape[1]
    extra = 0 if experts.shared_down is None else experts.shared_down.codes.shape[1] // width
    large = routing.experts.numel() >= PACK_PAIRS * number
    # Slices of the shared MLP have scales of their own only if they begin where blocks do.
    apart = extra > 0 and (large or (extra > 1 and width % BLOCK != 0))
    out = hidden.new_empty(tokens, chosen + (1 if apart else extra), size)
    if large:
        triton_fp8_moe_large.routed(
            hidden, experts.gate_up, experts.down, routing.weights.contiguous(), lists_of(routing, number)[:2], out
        )  # fmt: skip
    else:
        _few(hidden, routing, experts, 0 if apart else extra, out)
    if apart and experts.shared_gate_up is not None and experts.shared_down is not None:
        out[:, chosen] = shared_mlp(hidden, experts.shared_gate_up, experts.shared_down)
    return out


def _few(hidden: Tensor, routing: Routing, experts: Fp8ExpertWeights, extra: int, out: Tensor) -> None:
    """Fills the parts of the routed experts and of ``extra`` shared ones."""
    tokens, size = hidden.shape
    number, width = experts.down.codes.shape[0], experts.down.codes.shape[2]
    chosen = routing.experts.shape[1]
    shared_gate_up, shared_down = experts.shared_gate_up, experts.shared_down
    if not extra or shared_gate_up is None or shared_down is None:
        shared_gate_up, shared_down = experts.gate_up, experts.down
    single = tokens == 1
    count, lists = (routing.experts, routing.experts) if single else lists_of(routing, number)[:2]
    tile = tile_for(tokens * chosen, number, hidden.itemsize)
    tiles = triton.cdiv(tokens, tile.rows)
    active = hidden.new_empty(tokens, chosen + extra, width)
    shape = {
        "SIZE": size, "WIDTH": width, "EXPERTS": number, "CHOSEN": chosen, "EXTRA": extra, "ROWS": tile.rows,
        "COLUMNS": tile.columns, "BLOCK": BLOCK, "CAST": hidden.device.type == "cpu", "SINGLE": single,
        "num_warps": tile.warps, "num_stages": tile.stages, **overlap(hidden),
    }  # fmt: skip
    grid = chosen + extra if single else (number + extra) * tiles
    fp8_gate_up_kernel[(triton.cdiv(width, tile.columns), grid)](
        hidden, *experts.gate_up, *shared_gate_up, lists, count, active, tokens, tiles, **shape
    )
    fp8_down_kernel[(triton.cdiv(size, tile.columns), grid)](
        active, *experts.down, *shared_down, lists, count, routing.weights.contiguous(), out, tokens, tiles,
        PARTS=out.shape[1], **shape,
    )  # fmt: skip


def shared_mlp(hidden: Tensor, gate_up: Fp8Weight, down: Fp8Weight) -> Tensor:
    """The shared experts as the one MLP that they are, ``[T, size]``."""
    rows, blocks = len(gate_up.codes) // 2, len(gate_up.scales) // 2
    if rows % BLOCK == 0:
        both = fp8_linear(hidden, *gate_up)
    else:
        both = hidden.new_empty(len(hidden), 2 * rows)
        both[:, :rows] = fp8_linear(hidden, gate_up.codes[:rows], gate_up.scales[:blocks])
        both[:, rows:] = fp8_linear(hidden, gate_up.codes[rows:], gate_up.scales[blocks:])
    return fp8_linear(silu_mul(both), *down)
