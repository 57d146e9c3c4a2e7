# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Small steps of a layer as one launch each: residual and norm, what precedes latent attention, the gate of an MLP.

Each has a torch twin in ``torch_fused`` that says what it computes. Values are float32 inside and rounded once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.kernels.operations import MlaStep
from twinpool.engine.kernels.triton_launch import overlap


@triton.jit
def add_norm_kernel(
    HIDDEN, DELTA, WEIGHT, SUM, NORMED, eps, parts,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token). ``parts`` runs of ``SIZE`` values of DELTA are added to the token's hidden state."""
    if PDL:
        # In this order: the product that follows may hold its weights while all of this still waits.
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    value = tl.load(HIDDEN + token * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        for part in range(parts):
            value += tl.load(DELTA + (token * parts + part) * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(SUM.dtype.element_ty)
        tl.store(SUM + token * SIZE + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    norm = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    weight = tl.load(WEIGHT + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(NORMED + token * SIZE + column, (value * norm * weight).to(NORMED.dtype.element_ty), mask=inside)


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``operations.AddNorm``."""
    hidden = hidden.contiguous()
    tokens, size = hidden.shape
    normed = torch.empty_like(hidden)
    total = hidden if delta is None else torch.empty_like(hidden)
    added = hidden if delta is None else delta.contiguous()
    block = triton.next_power_of_2(size)
    add_norm_kernel[(tokens,)](
        hidden, added, weight, total, normed, eps, 1 if added.dim() == 2 else added.shape[1],
        SIZE=size, BLOCK=block, ADD=delta is not None, num_warps=min(max(block // 256, 1), 8), **overlap(hidden),
    )  # fmt: skip
    return total, normed


@triton.jit
def mla_rows_kernel(
    QUERY, KV, WEIGHT, COS, SIN, SLOTS, PAGES, OUT,
    eps, query_stride, kv_stride, page_stride,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, NOPE: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, PAGE: tl.constexpr, IN_PLACE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token): its rotated queries, and its cache row, normed and rotated, in the pool; none for slot -1."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF_PAD)
    real = pair < HALF
    angle = token * 2 * HALF + pair
    cos = tl.load(COS + angle, mask=real, other=0.0).to(tl.float32)
    # The first half of the table is negated: see rotary.RotaryTables.
    sin = tl.load(SIN + angle + HALF, mask=real, other=0.0).to(tl.float32)
    head = tl.arange(0, HEADS_PAD)
    wide = (head < HEADS)[:, None] & real[None, :]
    place = QUERY + token * query_stride + head[:, None] * (NOPE + 2 * HALF) + NOPE + pair[None, :]
    low = tl.load(place, mask=wide, other=0.0).to(tl.float32)
    high = tl.load(place + HALF, mask=wide, other=0.0).to(tl.float32)
    target = OUT + (token * HEADS + head[:, None]) * (LATENT + 2 * HALF) + LATENT + pair[None, :]
    kind = OUT.dtype.element_ty
    first = (low * cos[None, :] - high * sin[None, :]).to(kind)
    second = (high * cos[None, :] + low * sin[None, :]).to(kind)
    tl.store(target, first, mask=wide)
    tl.store(target + HALF, second, mask=wide)
    if IN_PLACE:
        tl.store(place, first, mask=wide)
        tl.store(place + HALF, second, mask=wide)
    slot = tl.load(SLOTS + token)
    row = KV + token * kv_stride
    column = tl.arange(0, LATENT_PAD)
    inside = column < LATENT
    latent = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    norm = tl.rsqrt(tl.sum(latent * latent, 0) / LATENT + eps)
    weight = tl.load(WEIGHT + column, mask=inside, other=0.0).to(tl.float32)
    left = tl.load(row + LATENT + pair, mask=real, other=0.0).to(tl.float32)
    right = tl.load(row + LATENT + HALF + pair, mask=real, other=0.0).to(tl.float32)
    there = PAGES + (slot // PAGE) * page_stride + (slot % PAGE) * (LATENT + 2 * HALF)
    tl.store(there + column, (latent * norm * weight).to(kind), mask=inside & (slot >= 0))
    tl.store(there + LATENT + pair, (left * cos - right * sin).to(kind), mask=real & (slot >= 0))
    tl.store(there + LATENT + HALF + pair, (right * cos + left * sin).to(kind), mask=real & (slot >= 0))


def mla_rows(step: MlaStep, pages: Tensor, batch: AttentionBatch) -> Tensor:
    """See ``operations.MlaRows``."""
    query, kv = step.query, step.kv
    tokens, heads, size = query.shape
    latent, rope = step.weight.shape[0], kv.shape[1] - step.weight.shape[0]
    if query.stride()[1:] != (size, 1) or kv.stride(1) != 1 or pages.stride(1) != latent + rope:
        raise ValueError(f"queries of strides {query.stride()}, KV of {kv.stride()}, pages of {pages.stride()}")
    out = query.new_empty(tokens, heads, latent + rope)
    mla_rows_kernel[(tokens,)](
        query, kv, step.weight, step.cos, step.sin, batch.slots, pages, out,
        step.eps, query.stride(0), kv.stride(0), pages.stride(0),
        HEADS=heads, HEADS_PAD=triton.next_power_of_2(heads), NOPE=size - rope, HALF=rope // 2,
        HALF_PAD=triton.next_power_of_2(rope // 2), LATENT=latent, LATENT_PAD=triton.next_power_of_2(latent),
        PAGE=batch.block_tokens, IN_PLACE=step.in_place, num_warps=4, **overlap(query),
    )  # fmt: skip
    return out


@triton.jit
def silu_mul_kernel(BOTH, OUT, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (token, run of columns) over rows ``[gate | up]`` of ``2 * size`` values."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(BOTH + token * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(BOTH + token * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + token * size + column, (gate / (1.0 + tl.exp(-gate)) * up).to(OUT.dtype.element_ty), mask=inside)


def silu_mul(both: Tensor) -> Tensor:
    """See ``operations.SiluMul``."""
    both = both.contiguous()
    tokens, size = both.shape[0], both.shape[1] // 2
    out = both.new_empty(tokens, size)
    grid = (tokens, triton.cdiv(size, 1024))
    silu_mul_kernel[grid](both, out, size, BLOCK=1024, num_warps=4, **overlap(both))
    return out
