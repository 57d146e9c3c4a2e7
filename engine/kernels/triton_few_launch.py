# SPDX-License-Identifier: Apache-2.0
"""Launches a layer's latent attention in decode steps of few tokens: norm, projections, queries, attention, values, output."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.kernels import triton_fused, triton_small_launch
from twinpool.engine.kernels.operations import MlaLayer, MlaPagedAttention
from twinpool.engine.kernels.triton_few import product_few, queries_few
from twinpool.engine.kernels.triton_launch import overlap


class FewTiles(NamedTuple):
    """Outputs, inner size and warps of a program of a dense product, for up to 16 tokens and for more; values of a head of a
    program; latent columns and tokens of a program of the absorbed queries."""

    dense: tuple[int, int, int] = (32, 1024, 4)
    wide: tuple[int, int, int] = (64, 512, 8)
    values: int = 32
    latent: int = 128
    rows: int = 16


TILES = FewTiles()
LIBRARY = 16
"""Tokens beyond which the library's product of the normed tokens takes less time."""
SINGLE = 1
"""Tokens up to which the kernels of ``triton_small_launch`` take less time. Measured on an H200: see docs/kernels.md."""


def product(
    x: Tensor, weight: Tensor, out: Tensor, *, columns: int, inner: int, warps: int
) -> None:
    """``x [T, batch, n]`` times ``weight [batch, outputs, n]`` -> the parts ``out [splits, T, batch, outputs]``, as many as
    ``inner`` goes into ``n``. ``columns`` and ``inner`` of a program are powers of two. Raises ValueError for other strides
    than the kernel takes: rows of ``x`` and ``out`` and matrices of ``weight`` are contiguous."""
    tokens, batch, size = x.shape
    outputs = weight.shape[1]
    if weight.stride()[1:] != (size, 1) or x.stride(2) != 1 or out.stride(3) != 1:
        raise ValueError(f"strides {weight.stride()}, {x.stride()}, {out.stride()}")
    product_few[(triton.cdiv(outputs, columns), len(out), batch)](
        x, weight, out, tokens, x.stride(0), x.stride(1), weight.stride(0), out.stride(1), out.stride(0), out.stride(2),
        SIZE=size, OUTPUTS=outputs, ROWS=max(triton.next_power_of_2(tokens), 16), COLUMNS=columns, INNER=inner,
        CAST=x.device.type == "cpu", num_warps=warps, **overlap(x),
    )  # fmt: skip


def _parts(x: Tensor, weight: Tensor, tiles: FewTiles) -> Tensor:
    """``x [T, n] @ weight [outputs, n].T`` in parts, ``float32[T, splits, outputs]``."""
    columns, inner, warps = tiles.dense if len(x) <= LIBRARY else tiles.wide
    splits = triton.cdiv(x.shape[1], inner)
    out = torch.empty(len(x), splits, len(weight), dtype=torch.float32, device=x.device)
    target = out.transpose(0, 1)[:, :, None]
    product(x[:, None], weight[None], target, columns=columns, inner=inner, warps=warps)
    return out


def _queries(
    both: Tensor, layer: MlaLayer, cos: Tensor, sin: Tensor, pages: Tensor, batch: AttentionBatch,
    tiles: FewTiles,
) -> Tensor:  # fmt: skip
    """Absorbed and rotated queries ``[T, heads, latent + rope]`` of projections in parts; stores the cache rows."""
    tokens, parts, _ = both.shape
    heads, _, latent = layer.up.shape
    out = torch.empty(tokens, heads, latent + layer.rope, dtype=layer.up.dtype, device=both.device)
    half = layer.rope // 2
    runs = triton.cdiv(latent, tiles.latent)
    queries_few[(tokens + heads * runs * triton.cdiv(tokens, tiles.rows),)](
        both, layer.up, layer.kv_norm, cos, sin, batch.slots, pages, out, tokens, layer.kv_eps, pages.stride(0),
        layer.up.stride(0), both.stride(0), both.stride(1), HEADS=heads, NOPE=layer.nope,
        NOPE_PAD=max(triton.next_power_of_2(layer.nope), 16), HALF=half, HALF_PAD=triton.next_power_of_2(half),
        LATENT=latent, LATENT_PAD=triton.next_power_of_2(latent), COLUMNS=tiles.latent, RUNS=runs, PAGE=batch.block_tokens,
        PARTS=parts, ROWS=tiles.rows, CAST=both.device.type == "cpu", num_warps=4,
        **overlap(both),
    )  # fmt: skip
    return out


def mla_small(
    hidden: Tensor,
    delta: Tensor | None,
    layer: MlaLayer,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    batch: AttentionBatch,
    attention: MlaPagedAttention,
    tiles: FewTiles = TILES,
) -> tuple[Tensor, Tensor]:
    """See ``operations.MlaSmall``: what attention adds is in parts, ``float32[T, parts, size]``."""
    if len(hidden) <= SINGLE:
        return triton_small_launch.mla_small(hidden, delta, layer, cos, sin, pages, batch)
    hidden, normed = triton_fused.add_norm(hidden, delta, layer.norm, layer.norm_eps)
    own = len(hidden) <= LIBRARY
    both = _parts(normed, layer.down, tiles) if own else F.linear(normed, layer.down)[:, None]
    query = _queries(both, layer, cos, sin, pages, batch, tiles)
    tokens, heads, _ = query.shape
    latent = layer.up.shape[2]
    found = attention(query, pages, batch, latent_dim=latent, scale=layer.scale).output
    value = layer.up[:, layer.nope :]
    values = hidden.new_empty(1, tokens, heads, value.shape[1])
    whole = max(triton.next_power_of_2(latent), 16)
    product(found, value, values, columns=tiles.values, inner=whole, warps=4)
    return hidden, _parts(values.view(tokens, -1), layer.output, tiles)
