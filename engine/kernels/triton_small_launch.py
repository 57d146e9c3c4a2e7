# SPDX-License-Identifier: Apache-2.0
"""Launches a layer of a decode step of at most ``MOST`` tokens: five launches of latent attention, three of experts."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.kernels.operations import ExpertWeights, RouterSpec
from twinpool.engine.kernels.triton_launch import LOG2_E, overlap
from twinpool.engine.kernels.triton_small import (
    absorb_kernel,
    attend_kernel,
    join_kernel,
    output_kernel,
    project_kernel,
    value_kernel,
)
from twinpool.engine.kernels.triton_small_moe import down_small, gate_up_small, scores_small

MOST = 4
"""Tokens of a step of attention: above, weights are shared by enough tokens for the matrix unit. Experts take one."""


@dataclass(frozen=True, slots=True)
class SmallTiles:
    """Outputs of a program of the dense products and its warps; latent columns of a program; tokens of a tile of attention,
    its splits and warps; columns, steps, pipeline depth and warps of gate and up, and of down; experts of a program of the
    router."""

    rows: int = 16
    warps: int = 8
    columns: int = 64
    tile: int = 32
    splits: int = 132
    attend_warps: int = 8
    up_columns: int = 32
    up_step: int = 128
    up_stages: int = 3
    up_warps: int = 4
    down_columns: int = 64
    down_step: int = 128
    down_stages: int = 3
    down_warps: int = 4
    experts: int = 2


@dataclass(frozen=True, slots=True)
class SmallAttention:
    """What a layer of latent attention multiplies with: ``norm [size]``, ``down [heads (nope + rope) + latent + rope,
    size]``, ``kv_norm [latent]``, ``up [heads, nope + v, latent]``, ``output [size, heads v]``; and its numbers."""

    norm: Tensor
    norm_eps: float
    down: Tensor
    kv_norm: Tensor
    kv_eps: float
    up: Tensor
    output: Tensor
    nope: int
    rope: int
    scale: float


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


def attend(
    query: Tensor,
    pages: Tensor,
    batch: AttentionBatch,
    output: Tensor,
    lse: Tensor | None,
    *,
    scale: float,
    tiles: SmallTiles | None = None,
) -> None:
    """Fills ``output [T, heads, latent]`` and ``lse [T, heads]``; every sequence of ``batch`` has one token."""
    tokens, heads, latent = output.shape
    built = tiles or SmallTiles()
    part, part_lse = _split(query, pages, batch, latent, scale, built)
    splits = part.shape[1]
    join_kernel[(heads, triton.cdiv(latent, built.columns), tokens)](
        part, part_lse, output, output if lse is None else lse, HEADS=heads, LATENT=latent, COLUMNS=built.columns,
        SPLITS=splits, SPLITS_PAD=triton.next_power_of_2(splits), WITH_LSE=lse is not None, num_warps=4,
        **overlap(query),
    )  # fmt: skip


def attention(
    hidden: Tensor,
    delta: Tensor | None,
    layer: SmallAttention,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    batch: AttentionBatch,
    tiles: SmallTiles,
) -> tuple[Tensor, Tensor]:
    """``hidden [T, size]`` and parts still to be added, ``[T, parts, size]`` -> their sum and what attention adds to it.

    Every sequence of ``batch`` has one token. Stores the tokens' cache rows, none for slot -1.
    """
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


def experts(
    hidden: Tensor,
    delta: Tensor,
    norm: Tensor,
    eps: float,
    router: Tensor,
    spec: RouterSpec,
    weights: ExpertWeights,
    tiles: SmallTiles,
) -> tuple[Tensor, Tensor]:
    """``hidden [1, size]`` and ``delta [1, size]`` -> their sum and what the experts add, ``[1, parts, size]``.

    ``spec`` has one group, scores are a softmax.
    """
    tokens, size = hidden.shape
    number, width = len(weights.down), weights.down.shape[2]
    chosen = spec.experts_per_token
    shared_up = weights.gate_up if weights.shared_gate_up is None else weights.shared_gate_up
    shared_down = weights.down if weights.shared_down is None else weights.shared_down
    extra = 0 if weights.shared_down is None else weights.shared_down.shape[1] // width
    pdl = overlap(hidden)
    total, normed = torch.empty_like(hidden), torch.empty_like(hidden)
    logits = torch.empty(tokens, number, dtype=torch.float32, device=hidden.device)
    block = triton.next_power_of_2(size)
    scores_small[(triton.cdiv(number, tiles.experts),)](
        hidden, delta, norm, router, total, normed, logits, eps, EXPERTS=number, SIZE=size, BLOCK=block,
        TOKENS=tokens, ROWS=tiles.experts, num_warps=4, **pdl,
    )  # fmt: skip
    shape = {
        "SIZE": size, "WIDTH": width, "EXPERTS": number, "PAD": triton.next_power_of_2(number), "CHOSEN": chosen,
        "EXTRA": extra, "NORMALIZE": spec.normalize, **pdl,
    }  # fmt: skip
    active = hidden.new_empty(chosen + extra, width)
    gate_up_small[(triton.cdiv(width, tiles.up_columns), chosen + extra)](
        normed, weights.gate_up, shared_up, logits, active, spec.scaling, COLUMNS=tiles.up_columns,
        STEP=tiles.up_step, STAGES=tiles.up_stages, num_warps=tiles.up_warps, **shape,
    )  # fmt: skip
    out = hidden.new_empty(1, chosen + extra, size)
    down_small[(triton.cdiv(size, tiles.down_columns), chosen + extra)](
        active, weights.down, shared_down, logits, out, spec.scaling, COLUMNS=tiles.down_columns,
        STEP=tiles.down_step, STAGES=tiles.down_stages, num_warps=tiles.down_warps, **shape,
    )  # fmt: skip
    return total, out
