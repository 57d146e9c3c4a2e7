# SPDX-License-Identifier: Apache-2.0
"""Launches latent attention and routing of decode steps of very few tokens."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.kernels.operations import MlaLayer, RouterSpec, Routing
from twinpool.engine.kernels.triton_launch import LOG2_E, overlap
from twinpool.engine.kernels.triton_moe import choose, new_lists
from twinpool.engine.kernels.triton_small import (
    absorb_kernel,
    attend_kernel,
    output_kernel,
    project_kernel,
    scores_small,
    value_kernel,
)


@dataclass(frozen=True, slots=True)
class SmallTiles:
    """Outputs of a program of the dense products and its warps; latent columns of a program; tokens of a tile of attention,
    its splits and warps; experts of a program of the router."""

    rows: int = 16
    warps: int = 8
    columns: int = 64
    tile: int = 32
    splits: int = 132
    attend_warps: int = 8
    experts: int = 2


TILES = SmallTiles()
"""Measured on an H200: see docs/kernels.md."""


def _split(
    query: Tensor, pages: Tensor, batch: AttentionBatch, latent: int, scale: float, tiles: SmallTiles
) -> tuple[Tensor, Tensor]:
    """Attention of one token a sequence over each split of its context: parts ``float32[T, splits, heads, latent]`` and
    their LSE to base 2."""
    tokens, heads, width = query.shape
    rope = width - latent
    splits = max(tiles.splits // tokens, 1)
    part = torch.empty(tokens, splits, heads, latent, dtype=torch.float32, device=query.device)
    part_lse = torch.empty(tokens, splits, heads, dtype=torch.float32, device=query.device)
    rows = 16
    attend_kernel[(splits, tokens, triton.cdiv(heads, rows))](
        query, pages, batch.block_table, batch.context, part, part_lse, scale * LOG2_E,
        batch.block_table.stride(0), pages.stride(0), HEADS=heads, ROWS=rows,
        LATENT=latent, LATENT_PAD=max(triton.next_power_of_2(latent), 16), ROPE=rope,
        ROPE_PAD=max(triton.next_power_of_2(rope), 16), PAGE=batch.block_tokens, TILE=tiles.tile, SPLITS=splits,
        CAST=query.device.type == "cpu", num_warps=tiles.attend_warps, **overlap(query),
    )  # fmt: skip
    return part, part_lse


def mla_small(
    hidden: Tensor,
    delta: Tensor | None,
    layer: MlaLayer,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    batch: AttentionBatch,
    tiles: SmallTiles = TILES,
) -> tuple[Tensor, Tensor]:
    """See ``operations.MlaSmall``."""
    tokens, size = hidden.shape
    heads, both, latent = layer.up.shape
    value, width = both - layer.nope, latent + layer.rope
    pdl = overlap(hidden)
    parts = 0 if delta is None else delta.numel() // hidden.numel()
    total = hidden if delta is None else torch.empty_like(hidden)
    down = hidden.new_empty(tokens, len(layer.down))
    project_kernel[(triton.cdiv(len(layer.down), tiles.rows),)](
        hidden, hidden if delta is None else delta, layer.norm, layer.down, total, down, layer.norm_eps,
        OUTPUTS=len(layer.down), SIZE=size, BLOCK=triton.next_power_of_2(size), TOKENS=tokens, PARTS=parts,
        ROWS=tiles.rows, num_warps=tiles.warps, **pdl,
    )  # fmt: skip
    query = hidden.new_empty(tokens, heads, width)
    half = layer.rope // 2
    absorb_kernel[(heads + 1, triton.cdiv(latent, tiles.columns))](
        down, layer.up, layer.kv_norm, cos, sin, batch.slots, pages, query, layer.kv_eps, pages.stride(0),
        layer.up.stride(0), down.stride(0), HEADS=heads, NOPE=layer.nope, NOPE_PAD=triton.next_power_of_2(layer.nope),
        HALF=half, HALF_PAD=triton.next_power_of_2(half), LATENT=latent, LATENT_PAD=triton.next_power_of_2(latent),
        COLUMNS=tiles.columns, PAGE=batch.block_tokens, TOKENS=tokens, num_warps=4, **pdl,
    )  # fmt: skip
    part, part_lse = _split(query, pages, batch, latent, layer.scale, tiles)
    splits = part.shape[1]
    runs = triton.cdiv(latent, tiles.columns)
    values = torch.empty(runs, tokens, heads * value, dtype=torch.float32, device=hidden.device)
    value_kernel[(heads, runs)](
        part, part_lse, layer.up[:, layer.nope :], values, layer.up.stride(0), HEADS=heads, LATENT=latent, VALUE=value,
        VALUE_PAD=triton.next_power_of_2(value), COLUMNS=tiles.columns, SPLITS=splits,
        SPLITS_PAD=triton.next_power_of_2(splits), TOKENS=tokens, num_warps=8, **pdl,
    )  # fmt: skip
    attended = torch.empty_like(hidden)
    output_kernel[(triton.cdiv(size, tiles.rows),)](
        values, layer.output, attended, OUTPUTS=size, SIZE=heads * value,
        BLOCK=triton.next_power_of_2(heads * value), TOKENS=tokens, RUNS=runs, ROWS=tiles.rows,
        num_warps=tiles.warps, **pdl,
    )  # fmt: skip
    return total, attended


def route_small(
    hidden: Tensor,
    delta: Tensor,
    norm: Tensor,
    eps: float,
    router: Tensor,
    spec: RouterSpec,
    tiles: SmallTiles = TILES,
) -> tuple[Tensor, Tensor, Routing]:
    """See ``operations.RouteSmall``."""
    tokens, size = hidden.shape
    number = len(router)
    total, normed = torch.empty_like(hidden), torch.empty_like(hidden)
    logits = torch.empty(1, tokens, number, dtype=torch.float32, device=hidden.device)
    lists, zero = new_lists(logits, spec)
    if len(zero) > size:
        zero.zero_()
    scores_small[(triton.cdiv(number, tiles.experts),)](
        hidden, delta, norm, router, total, normed, logits, zero, eps, len(zero), EXPERTS=number, SIZE=size,
        BLOCK=triton.next_power_of_2(size), TOKENS=tokens, ROWS=tiles.experts, num_warps=4, **overlap(hidden),
    )  # fmt: skip
    return total, normed, choose(logits, spec, lists)
