# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Products with weights in float8 and one scale for each block of 128 x 128, as DeepSeek's checkpoints hold them.

Few rows: the weights are what has to be read, so codes turn into the type of the activations on chip (exactly) and
nothing else is rounded. Many rows: the activations are packed too, one scale for each 128 values of a row, and the
matrix unit multiplies codes; every 128 columns its sums are scaled and added up in float32, since its own accumulation
of float8 keeps too few bits for longer runs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twinpool.engine.kernels.triton_launch import overlap

BLOCK = 128
"""Rows and columns that share a scale."""
PACK_ROWS = 64
"""Rows from which activations are packed: then the product is bound by the matrix unit."""
TOP = tl.constexpr(448.0)
TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def code_product(a, b, CAST: tl.constexpr):
    """``a @ b``; the matrix unit multiplies codes as they are."""
    # The interpreter multiplies the bit patterns of narrow types.
    if CAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit(do_not_specialize=["rows"])
def fp8_linear_kernel(
    X, CODES, SCALES, BIAS, OUT, rows,
    OUTPUTS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    WITH_BIAS: tl.constexpr, CAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (run of ``COLUMNS`` outputs of one block, run of rows): ``OUT [rows, OUTPUTS]``."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, BLOCK)
    real, wide = row < rows, column < OUTPUTS
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    scales = SCALES + tl.program_id(0) * COLUMNS // BLOCK * blocks
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(blocks):
        at = block * BLOCK + inner
        inside = at < SIZE
        x = tl.load(X + row[:, None].to(tl.int64) * SIZE + at[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        place = column[None, :].to(tl.int64) * SIZE + at[:, None]
        codes = tl.load(CODES + place, mask=inside[:, None] & wide[None, :], other=0.0)
        acc += code_product(x, codes.to(x.dtype), CAST) * tl.load(scales + block)
    if WITH_BIAS:
        acc += tl.load(BIAS + column, mask=wide, other=0.0).to(tl.float32)[None, :]
    target = OUT + row[:, None].to(tl.int64) * OUTPUTS + column[None, :]
    tl.store(target, acc.to(OUT.dtype.element_ty), mask=real[:, None] & wide[None, :])


@triton.jit
def pack_runs(x):
    """``float32[n, BLOCK]`` -> values to be stored as codes, and the scale of each run."""
    scale = tl.maximum(tl.max(tl.abs(x), 1) / TOP, TINY)
    # max drops a NaN, which has to stay one.
    scale = tl.where(tl.max((x != x).to(tl.int32), 1) > 0, float("nan"), scale)
    return tl.minimum(tl.maximum(x / scale[:, None], -TOP), TOP), scale


@triton.jit
def pack_kernel(X, CODES, SCALES, SIZE: tl.constexpr, BLOCKS: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    """Program (row): its codes, and a scale for each ``BLOCK`` values."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PAD)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    codes, scale = pack_runs(tl.load(X + row * SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32))
    tl.store(CODES + row * SIZE + at, codes.to(CODES.dtype.element_ty), mask=at < SIZE)
    tl.store(SCALES + row * BLOCKS + block, scale, mask=block < BLOCKS)


@triton.jit(do_not_specialize=["rows"])
def fp8_product_kernel(
    X, X_SCALES, CODES, SCALES, BIAS, OUT, rows,
    OUTPUTS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    WITH_BIAS: tl.constexpr, CAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``fp8_linear_kernel`` with packed rows and their scales ``X_SCALES [rows, blocks]``."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, BLOCK)
    real, wide = row < rows, column < OUTPUTS
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    scales = SCALES + tl.program_id(0) * COLUMNS // BLOCK * blocks
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(blocks):
        at = block * BLOCK + inner
        inside = at < SIZE
        x = tl.load(X + row[:, None].to(tl.int64) * SIZE + at[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        place = column[None, :].to(tl.int64) * SIZE + at[:, None]
        codes = tl.load(CODES + place, mask=inside[:, None] & wide[None, :], other=0.0)
        own = tl.load(X_SCALES + row.to(tl.int64) * blocks + block, mask=real, other=0.0)
        acc += code_product(x, codes, CAST) * (own * tl.load(scales + block))[:, None]
    if WITH_BIAS:
        acc += tl.load(BIAS + column, mask=wide, other=0.0).to(tl.float32)[None, :]
    target = OUT + row[:, None].to(tl.int64) * OUTPUTS + column[None, :]
    tl.store(target, acc.to(OUT.dtype.element_ty), mask=real[:, None] & wide[None, :])


def pack_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x [n, size]`` -> float8 codes of that shape and scales ``float32[n, blocks]``."""
    rows, size = x.shape
    blocks = triton.cdiv(size, BLOCK)
    codes = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, blocks, dtype=torch.float32, device=x.device)
    pack_kernel[(rows,)](
        x, codes, scales, SIZE=size, BLOCKS=blocks, PAD=triton.next_power_of_2(blocks), BLOCK=BLOCK, num_warps=4,
        **overlap(x),
    )  # fmt: skip
    return codes, scales


def fp8_linear(hidden: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """See ``operations.Fp8Linear``."""
    hidden = hidden.contiguous()
    rows, size = hidden.shape
    outputs = len(codes)
    out = hidden.new_empty(rows, outputs)
    if not rows:
        return out
    interpreted = hidden.device.type == "cpu"
    shape = {
        "OUTPUTS": outputs, "SIZE": size, "BLOCK": BLOCK, "WITH_BIAS": bias is not None, "CAST": interpreted,
        **overlap(hidden),
    }  # fmt: skip
    added = out if bias is None else bias
    if rows < PACK_ROWS:
        columns, tall = 32 if rows <= 16 else 64, max(16, min(64, triton.next_power_of_2(rows)))
        fp8_linear_kernel[(triton.cdiv(outputs, columns), triton.cdiv(rows, tall))](
            hidden, codes, scales, added, out, rows, ROWS=tall, COLUMNS=columns, num_warps=4, num_stages=4, **shape
        )
        return out
    packed, own = pack_rows(hidden)
    tall = 64 if rows < 512 else 128
    fp8_product_kernel[(triton.cdiv(outputs, BLOCK), triton.cdiv(rows, tall))](
        packed, own, codes, scales, added, out, rows, ROWS=tall, COLUMNS=BLOCK,
        num_warps=4 if tall == 64 else 8, num_stages=3, **shape,
    )  # fmt: skip
    return out
