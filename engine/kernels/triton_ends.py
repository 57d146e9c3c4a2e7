# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""The two ends of a step in few launches: rotary tables of its positions, and the best token of each row of logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twinpool.engine.kernels.triton_launch import overlap


@triton.jit
def tables_kernel(POSITIONS, FREQUENCIES, COS, SIN, scaling, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    """Program (token)."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF_PAD)
    real = pair < HALF
    angle = tl.load(POSITIONS + token).to(tl.float32) * tl.load(FREQUENCIES + pair, mask=real, other=0.0)
    cos, sin = tl.cos(angle) * scaling, tl.sin(angle) * scaling
    kind = COS.dtype.element_ty
    place = token * 2 * HALF + pair
    tl.store(COS + place, cos.to(kind), mask=real)
    tl.store(COS + place + HALF, cos.to(kind), mask=real)
    tl.store(SIN + place, (-sin).to(kind), mask=real)
    tl.store(SIN + place + HALF, sin.to(kind), mask=real)


def rotary_tables(
    positions: Tensor, frequencies: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See ``operations.RotaryTablesOf``."""
    tokens, half = len(positions), len(frequencies)
    cos, sin = (torch.empty(tokens, 1, 2 * half, dtype=dtype, device=positions.device) for _ in range(2))
    tables_kernel[(tokens,)](
        positions, frequencies, cos, sin, scaling, HALF=half, HALF_PAD=triton.next_power_of_2(half), num_warps=1
    )
    return cos, sin


@triton.jit
def best_kernel(LOGITS, VALUE, INDEX, size, chunks, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (chunk, row): the chunk's greatest value and where it first is; a NaN counts as +inf."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(LOGITS + row * stride + column, mask=column < size, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("inf"))
    place = row * chunks + tl.program_id(0)
    tl.store(VALUE + place, tl.max(value, 0))
    tl.store(INDEX + place, tl.program_id(0) * BLOCK + tl.argmax(value, 0))


@triton.jit
def join_best(VALUE, INDEX, OUT, rows, chunks, PAD: tl.constexpr, PDL: tl.constexpr):
    """Program (row): OUT [2, rows], the token and whether its logit is finite."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, PAD)
    value = tl.load(VALUE + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    first = tl.argmax(value, 0)
    peak = tl.max(value, 0)
    tl.store(OUT + row, tl.load(INDEX + row * chunks + first))
    tl.store(OUT + rows + row, (tl.abs(peak) < float("inf")).to(tl.int32))


BLOCK = 4096


def greedy(logits: Tensor) -> Tensor:
    """See ``operations.Greedy``."""
    rows, size = logits.shape
    chunks = triton.cdiv(size, BLOCK)
    value = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    index = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    out = torch.empty(2, rows, dtype=torch.int32, device=logits.device)
    pdl = overlap(logits)
    best_kernel[(chunks, rows)](
        logits, value, index, size, chunks, logits.stride(0), BLOCK=BLOCK, num_warps=4, **pdl
    )
    join_best[(rows,)](value, index, out, rows, chunks, PAD=triton.next_power_of_2(chunks), num_warps=1, **pdl)
    return out
