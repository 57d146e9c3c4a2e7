# SPDX-License-Identifier: Apache-2.0
"""Launches latent attention over packed rows; rows that the kernels can't address are left to torch."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.kernels import torch_fp8, triton_prefill
from twinpool.engine.kernels.operations import AttentionResult, MlaStep
from twinpool.engine.kernels.triton_fp8 import GROUP, mla_rows_fp8_kernel, mla_split_fp8
from twinpool.engine.kernels.triton_launch import (
    LOG2_E,
    Device,
    device_of,
    most_rows,
    overlap,
    parts_of,
    schedule_of,
)
from twinpool.engine.kernels.triton_merge import merge
from twinpool.engine.kv.formats import Fp8LatentRows

MAX_RUNS = 4
"""Runs of 128 latent values that the kernel keeps sums of."""
_LARGE_SHARED = 140 << 10


@dataclass(frozen=True, slots=True)
class Packed:
    """A pool of packed rows as its three types, and how it is laid out."""

    codes: Tensor
    scales: Tensor
    rotary: Tensor
    form: Fp8LatentRows
    runs: int
    wide: int

    @classmethod
    def of(cls, pages: Tensor, form: Fp8LatentRows) -> "Packed | None":
        """None if scales or rotary columns are not aligned, rows not contiguous, or there are too many runs."""
        runs = triton.cdiv(form.latent_dim, GROUP.value)
        strides = pages.stride(0) % 4 or pages.stride(1) != pages.shape[2] or pages.stride(2) != 1
        if runs > MAX_RUNS or form.latent_dim % 4 or form.row_bytes % 4 or pages.data_ptr() % 4 or strides:
            return None
        wide = GROUP.value if runs > 1 else max(triton.next_power_of_2(form.latent_dim), 16)
        views = (torch.float8_e4m3fn, torch.float32, torch.bfloat16)
        codes, scales, rotary = (pages.view(kind) for kind in views)
        return cls(codes, scales, rotary, form, runs, wide)


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows and tokens of a step, pipeline depth and warps."""

    rows: int
    tokens: int
    stages: int
    warps: int


def tile_of(rows: int, device: Device, interpreted: bool) -> Tile:
    """For ``rows`` query rows of a sequence. Tiles of 64 take 129 KB of shared memory."""
    size = min(64 if device.shared > _LARGE_SHARED else 16, max(16, triton.next_power_of_2(rows)))
    if interpreted:
        return Tile(size, 16, 1, 4)
    return Tile(size, 32, 2, 8) if size > 32 else Tile(size, 32, 3, 4)


def attend(
    query: Tensor,
    packed: Packed,
    batch: AttentionBatch,
    output: Tensor,
    lse: Tensor | None,
    *,
    scale: float,
    tile: Tile | None = None,
) -> None:
    """Fills ``output [T, heads, latent]`` and ``lse [T, heads]`` of all sequences of ``batch``."""
    heads = query.shape[1]
    form = packed.form
    interpreted = query.device.type == "cpu"
    largest = most_rows(batch, heads)
    built = tile or tile_of(largest, device_of(query), interpreted)
    groups = triton.cdiv(largest, built.rows)
    blocks = max(device_of(query).processors * (2 if built.rows <= 16 else 1) // groups, 1)
    schedule = schedule_of(batch, blocks)
    part, part_lse = parts_of(batch, blocks, largest if blocks > 1 else 1, form.latent_dim)
    mla_split_fp8[(blocks, groups)](
        query, packed.codes, packed.scales, packed.rotary, batch.block_table, batch.context, batch.q_start,
        schedule.plan, output, part_lse if lse is None else lse, part, part_lse, scale * LOG2_E,
        batch.block_table.stride(0), packed.codes.stride(0), part.shape[1],
        HEADS=heads, LATENT=form.latent_dim, ROPE=form.rope_dim,
        ROPE_PAD=max(triton.next_power_of_2(max(form.rope_dim, 1)), 16), ROW_BYTES=form.row_bytes, RUNS=packed.runs,
        WIDE=packed.wide, PAGE=batch.block_tokens, TILE=schedule.tile, ROWS=built.rows, TOKENS=built.tokens,
        STAGES=built.stages, WITH_LSE=lse is not None, CAST=interpreted,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", num_warps=built.warps,
    )  # fmt: skip
    if blocks > 1:
        merge(part, part_lse, schedule, batch.q_start, output, lse, heads=heads, rows=largest, pdl=False)


def mla_paged_attention(
    query: Tensor,
    pages: Tensor,
    batch: AttentionBatch,
    *,
    latent_dim: int,
    scale: float,
    score_from: int = 0,
    with_lse: bool = False,
) -> AttentionResult:
    """See ``operations.MlaPagedAttention``. Columns before ``score_from`` are multiplied by their zeros."""
    packed = Packed.of(pages, Fp8LatentRows.of_bytes(pages.shape[-1], latent_dim))
    if packed is None:
        return torch_fp8.mla_paged_attention(
            query, pages, batch, latent_dim=latent_dim, scale=scale, score_from=score_from, with_lse=with_lse
        )
    if query.shape[-1] != latent_dim + packed.form.rope_dim or not scale > 0:
        raise ValueError(f"query {list(query.shape)}, rows of {packed.form}, scale {scale}")
    query = query.contiguous()
    total, heads, _ = query.shape
    output = query.new_empty(total, heads, latent_dim)
    lse = torch.empty(total, heads, dtype=torch.float32, device=query.device) if with_lse else None
    for first, last in ((0, batch.num_decodes), (batch.num_decodes, batch.num_sequences)):
        if first < last:
            rows = slice(int(batch.host_q_start[first]), int(batch.host_q_start[last]))
            some = batch.select(first, last)
            if some.num_tokens:
                sums = None if lse is None else lse[rows]
                attend(query[rows], packed, some, output[rows], sums, scale=scale)
    return AttentionResult(output, lse)


def mla_rows(step: MlaStep, pages: Tensor, batch: AttentionBatch) -> Tensor:
    """See ``operations.MlaRows``."""
    query, kv = step.query, step.kv
    tokens, heads, size = query.shape
    latent = step.weight.shape[0]
    rope = kv.shape[1] - latent
    packed = Packed.of(pages, Fp8LatentRows(latent, rope))
    if packed is None:
        return torch_fp8.mla_rows(step, pages, batch)
    if query.stride()[1:] != (size, 1) or kv.stride(1) != 1:
        raise ValueError(f"queries of strides {query.stride()}, KV of {kv.stride()}")
    out = query.new_empty(tokens, heads, latent + rope)
    mla_rows_fp8_kernel[(tokens,)](
        query, kv, step.weight, step.cos, step.sin, batch.slots, packed.codes, packed.scales, packed.rotary, out,
        step.eps, query.stride(0), kv.stride(0), packed.codes.stride(0),
        HEADS=heads, HEADS_PAD=triton.next_power_of_2(heads), NOPE=size - rope, HALF=rope // 2,
        HALF_PAD=triton.next_power_of_2(rope // 2), LATENT=latent, RUNS=packed.runs,
        RUNS_PAD=triton.next_power_of_2(packed.runs), WIDE=packed.wide, ROW_BYTES=packed.form.row_bytes,
        PAGE=batch.block_tokens, num_warps=4, **overlap(query),
    )  # fmt: skip
    if step.in_place:
        query[..., size - rope :] = out[..., latent:]
    return out


def mla_expanded_attention(
    query: Tensor,
    pages: Tensor,
    batch: AttentionBatch,
    *,
    expand_keys: Tensor,
    expand_values: Tensor,
    scale: float,
    with_lse: bool = False,
) -> AttentionResult:
    """See ``operations.MlaExpandedAttention``: unpacks the rows of a sequence, then does as ever."""
    return triton_prefill.expand(
        query, pages, batch, triton_prefill.attend,
        expand_keys=expand_keys, expand_values=expand_values, scale=scale, with_lse=with_lse,
        packed=Fp8LatentRows.of_bytes(pages.shape[-1], expand_keys.shape[2]),
    )  # fmt: skip
