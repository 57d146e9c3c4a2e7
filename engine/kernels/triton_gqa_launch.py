# SPDX-License-Identifier: Apache-2.0
"""Launches grouped-query attention: split kernel and merge for few query tokens, tiles of queries for many."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.kernels.operations import AttentionResult
from twinpool.engine.kernels.triton_gqa import gqa_prefill, gqa_split
from twinpool.engine.kernels.triton_launch import LOG2_E, device_of, most_rows, parts_of, schedule_of
from twinpool.engine.kernels.triton_merge import merge

FEW = 64
"""Query rows of a KV head up to which a sequence is split, not tiled: they fit one tile of the split kernel."""
_SHARED = 96 << 10
"""Bytes that keys and values in flight may take: two programs should fit a processor."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows and keys of a step, pipeline depth and warps."""

    rows: int
    tokens: int
    stages: int
    warps: int


def split_tile(rows: int, dim_pad: int, itemsize: int) -> Tile:
    """For ``rows`` query rows of a KV head."""
    tokens = 64
    while tokens > 16 and 4 * tokens * dim_pad * itemsize > _SHARED:
        tokens //= 2
    stages = max(1, min(4, _SHARED // (2 * tokens * dim_pad * itemsize)))
    return Tile(min(max(triton.next_power_of_2(rows), 16), FEW), tokens, stages, 4)


def prefill_tile(dim_pad: int, itemsize: int, interpreted: bool) -> Tile:
    """The usual tiles of two-byte types; smaller ones for wide heads and types."""
    if interpreted:
        return Tile(16, 16, 1, 4)
    if dim_pad * itemsize > 512:
        return Tile(64, 32, 1, 4)
    return Tile(128, 64, 2, 8) if itemsize == 2 else Tile(64, 32, 2, 4)


def attend(
    query: Tensor, pages: Tensor, batch: AttentionBatch, output: Tensor, lse: Tensor | None, *, kv_heads: int, scale: float
) -> None:
    """Fills ``output [T, heads, dim]`` and ``lse [T, heads]`` of all sequences of ``batch``."""
    heads, dim = query.shape[1:]
    group = heads // kv_heads
    interpreted = query.device.type == "cpu"
    shape = {
        "HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "DIM_PAD": max(triton.next_power_of_2(dim), 16),
        "PAGE": batch.block_tokens, "WITH_LSE": lse is not None, "CAST": interpreted,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }  # fmt: skip
    largest = most_rows(batch, 1)
    if largest * group > FEW:
        tile = prefill_tile(shape["DIM_PAD"], query.itemsize, interpreted)
        gqa_prefill[(triton.cdiv(largest, tile.rows), heads, batch.num_sequences)](
            query, pages, batch.block_table, batch.context, batch.q_start, output, output if lse is None else lse,
            scale * LOG2_E, batch.block_table.stride(0), pages.stride(0), QUERIES=tile.rows, TOKENS=tile.tokens,
            num_warps=tile.warps, num_stages=tile.stages, **shape,
        )  # fmt: skip
        return
    tile = split_tile(largest * group, shape["DIM_PAD"], query.itemsize)
    groups = triton.cdiv(largest * group, tile.rows) * kv_heads
    blocks = max(device_of(query).processors * 2 // groups, 1)
    schedule = schedule_of(batch, blocks)
    rows = largest * heads
    part, part_lse = parts_of(batch, blocks, rows if blocks > 1 else 1, dim)
    gqa_split[(blocks, groups)](
        query, pages, batch.block_table, batch.context, batch.q_start, schedule.plan, output,
        part_lse if lse is None else lse, part, part_lse, scale * LOG2_E, batch.block_table.stride(0), pages.stride(0),
        part.shape[1], TILE=schedule.tile, ROWS=tile.rows, TOKENS=tile.tokens, STAGES=tile.stages,
        num_warps=tile.warps, **shape,
    )  # fmt: skip
    if blocks > 1:
        merge(part, part_lse, schedule, batch.q_start, output, lse, heads=heads, rows=rows, pdl=False)


def check(query: Tensor, pages: Tensor, kv_heads: int, scale: float) -> Tensor:
    """The query, contiguous. Raises ValueError if the kernels can't address the operands."""
    heads, dim = query.shape[1:]
    if pages.stride(2) != 1 or pages.stride(1) != pages.shape[2]:
        raise ValueError(f"a page must be contiguous, not of strides {pages.stride()}")
    if pages.shape[2] != 2 * kv_heads * dim or heads % kv_heads or query.dtype != pages.dtype:
        raise ValueError(
            f"query {list(query.shape)} {query.dtype}, pages {list(pages.shape)} {pages.dtype}, {kv_heads} KV heads"
        )
    if not scale > 0:
        raise ValueError(f"scale must be positive, not {scale}")
    return query.contiguous()


def gqa_paged_attention(
    query: Tensor, pages: Tensor, batch: AttentionBatch, *, kv_heads: int, scale: float, with_lse: bool = False
) -> AttentionResult:
    """See ``operations.GqaPagedAttention``. Does not wait for the device."""
    query = check(query, pages, kv_heads, scale)
    total, heads, _ = query.shape
    output = torch.empty_like(query)
    lse = torch.empty(total, heads, dtype=torch.float32, device=query.device) if with_lse else None
    for first, last in ((0, batch.num_decodes), (batch.num_decodes, batch.num_sequences)):
        if first < last:
            rows = slice(int(batch.host_q_start[first]), int(batch.host_q_start[last]))
            some = batch.select(first, last)
            if some.num_tokens:
                sums = None if lse is None else lse[rows]
                attend(query[rows], pages, some, output[rows], sums, kv_heads=kv_heads, scale=scale)
    return AttentionResult(output, lse)
