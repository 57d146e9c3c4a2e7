# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Latent attention of a prefill with keys and values expanded from the latent: causal, over a cached prefix or none.

Keys and values of a run of heads come out of one product each; the rotary part of a key is the same for all heads and
is read from the cache rows. The kernel is the usual one of online softmax: a program has a tile of queries of one head
and walks the keys that its last query sees; only the tiles on the diagonal are masked.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.kernels import torch_prefill
from twinpool.engine.kernels.operations import AttentionResult
from twinpool.engine.kernels.triton_launch import LOG2_E, device_of
from twinpool.engine.kv.formats import Fp8LatentRows

EXPANDED_BYTES = 1 << 30
"""Expanded keys and values held at once; heads are processed in runs that fit."""

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _times(left, right, acc, CAST: tl.constexpr):
    """``acc + left @ right``; the interpreter has no products of bfloat16."""
    if CAST:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit
def _tile(
    q_plain, q_rotary, KEYS, ROTARY, VALUES, begin, context, last, acc, peak, total, scale,
    plain, rotary, value, key_stride, row_stride, value_stride,
    NOPE: tl.constexpr, ROPE: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, MASK: tl.constexpr,
    CAST: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over ``TOKENS`` keys from ``begin``."""
    token = begin + tl.arange(0, TOKENS)
    there = token < context
    keys = tl.load(
        KEYS + token[None, :].to(tl.int64) * key_stride + plain[:, None], mask=there[None, :] & (plain < NOPE)[:, None], other=0.0
    )
    turned = tl.load(
        ROTARY + token[None, :].to(tl.int64) * row_stride + rotary[:, None],
        mask=there[None, :] & (rotary < ROPE)[:, None], other=0.0,
    )  # fmt: skip
    scores = tl.zeros([q_plain.shape[0], TOKENS], tl.float32)
    scores = _times(q_plain, keys, scores, CAST)
    scores = _times(q_rotary, turned, scores, CAST)
    if MASK:
        scores = tl.where(token[None, :] <= last[:, None], scores, float("-inf"))
    highest = tl.maximum(peak, tl.max(scores, 1) * scale)
    # A row that has seen nothing yet: -inf - -inf would be NaN.
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    old = tl.exp2(peak - anchor)
    weights = tl.exp2(scores * scale - anchor[:, None])
    total = total * old + tl.sum(weights, 1)
    held = tl.load(
        VALUES + token[:, None].to(tl.int64) * value_stride + value[None, :], mask=there[:, None] & (value < DIM)[None, :],
        other=0.0,
    )  # fmt: skip
    acc = _times(weights.to(held.dtype), held, acc * old[:, None], CAST)
    return acc, highest, total


@triton.jit(do_not_specialize=["count", "context"])
def prefill_kernel(
    QUERY, KEYS, ROWS, VALUES, OUT, LSE, count, context, scale,
    query_stride, query_head, key_stride, key_head, row_stride, value_stride, value_head, out_stride, out_head, lse_stride,
    LATENT: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, DIM: tl.constexpr,
    NOPE_PAD: tl.constexpr, ROPE_PAD: tl.constexpr, DIM_PAD: tl.constexpr,
    QUERIES: tl.constexpr, TOKENS: tl.constexpr, WITH_LSE: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Program (tile of queries, the longest first; head). The last of ``count`` queries sees all of ``context``."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    row = tile * QUERIES + tl.arange(0, QUERIES)
    real = row < count
    plain, rotary, value = tl.arange(0, NOPE_PAD), tl.arange(0, ROPE_PAD), tl.arange(0, DIM_PAD)
    lines = QUERY + row[:, None].to(tl.int64) * query_stride + head * query_head
    q_plain = tl.load(lines + plain[None, :], mask=real[:, None] & (plain < NOPE)[None, :], other=0.0)
    q_rotary = tl.load(lines + NOPE + rotary[None, :], mask=real[:, None] & (rotary < ROPE)[None, :], other=0.0)
    last = context - count + row
    acc = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    end = tl.minimum(context - count + (tile + 1) * QUERIES, context)
    whole = (context - count + tile * QUERIES + 1) // TOKENS * TOKENS
    keys, values = KEYS + head * key_head, VALUES + head * value_head
    for begin in range(0, whole, TOKENS):
        acc, peak, total = _tile(
            q_plain, q_rotary, keys, ROWS + LATENT, values, begin, context, last, acc, peak, total, scale,
            plain, rotary, value, key_stride, row_stride, value_stride, NOPE, ROPE, DIM, TOKENS, False, CAST,
        )  # fmt: skip
    for begin in range(whole, end, TOKENS):
        acc, peak, total = _tile(
            q_plain, q_rotary, keys, ROWS + LATENT, values, begin, context, last, acc, peak, total, scale,
            plain, rotary, value, key_stride, row_stride, value_stride, NOPE, ROPE, DIM, TOKENS, True, CAST,
        )  # fmt: skip
    seen = real & (total > 0)
    result = tl.where(seen[:, None], acc / tl.where(seen, total, 1.0)[:, None], 0.0)
    target = OUT + row[:, None].to(tl.int64) * out_stride + head * out_head + value[None, :]
    tl.store(target, result.to(OUT.dtype.element_ty), mask=real[:, None] & (value < DIM)[None, :])
    if WITH_LSE:
        sums = (peak + tl.log2(tl.where(seen, total, 1.0))) * LN2
        tl.store(LSE + row.to(tl.int64) * lse_stride + head, sums, mask=real)


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries and keys of a step of the inner loop, the warps of a program and the depth of its pipeline."""

    queries: int
    tokens: int
    warps: int
    stages: int


TILES = {
    "cpu": Tile(16, 16, 4, 1),
    "large": Tile(128, 128, 8, 2),
    "narrow": Tile(64, 64, 4, 2),
    "wide": Tile(64, 32, 4, 2),
}
"""For the interpreter, for types of 2 bytes (``large`` where a program may have 213 KB of shared memory), for larger ones."""
_LARGE_SHARED = 220 << 10


def _tile_of(query: Tensor) -> Tile:
    if query.device.type == "cpu":
        return TILES["cpu"]
    if query.itemsize > 2:
        return TILES["wide"]
    return TILES["large" if device_of(query).shared >= _LARGE_SHARED else "narrow"]


class Attend(Protocol):
    """Fills ``output [q, heads, v]`` and ``lse [q, heads]`` for ``query [q, heads, nope + rope]``, ``keys [context, heads,
    nope]``, ``values [context, heads, v]`` and the cache rows ``[context, latent + rope]``; ``q <= context``."""

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        rows: Tensor,
        values: Tensor,
        output: Tensor,
        lse: Tensor | None,
        *,
        scale: float,
    ) -> None: ...


def attend(
    query: Tensor,
    keys: Tensor,
    rows: Tensor,
    values: Tensor,
    output: Tensor,
    lse: Tensor | None,
    *,
    scale: float,
    tile: Tile | None = None,
) -> None:
    """See ``Attend``."""
    count, heads, size = query.shape
    nope, dim = keys.shape[2], values.shape[2]
    rope = size - nope
    interpreted = query.device.type == "cpu"
    built = tile or _tile_of(query)
    grid = (triton.cdiv(count, built.queries), heads)
    prefill_kernel[grid](
        query, keys, rows, values, output, output if lse is None else lse, count, len(keys), scale * LOG2_E,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), rows.stride(0), values.stride(0),
        values.stride(1), output.stride(0), output.stride(1), 0 if lse is None else lse.stride(0),
        LATENT=rows.shape[1] - rope, NOPE=nope, ROPE=rope, DIM=dim,
        NOPE_PAD=max(triton.next_power_of_2(nope), 16), ROPE_PAD=max(triton.next_power_of_2(rope), 16),
        DIM_PAD=max(triton.next_power_of_2(dim), 16), QUERIES=built.queries, TOKENS=built.tokens,
        WITH_LSE=lse is not None, CAST=interpreted, num_warps=built.warps, num_stages=built.stages,
    )  # fmt: skip


def expand(
    query: Tensor,
    pages: Tensor,
    batch: AttentionBatch,
    launch: Attend,
    *,
    expand_keys: Tensor,
    expand_values: Tensor,
    scale: float,
    with_lse: bool,
    packed: Fp8LatentRows | None = None,
) -> AttentionResult:
    """``operations.MlaExpandedAttention`` by way of ``launch``, a sequence and a run of heads at a time. Does not wait for
    the device."""
    if query.stride(-1) != 1 or not scale > 0:
        raise ValueError(f"query of strides {query.stride()}, scale {scale}")
    total, heads, _ = query.shape
    nope, dim, latent = expand_keys.shape[1], expand_values.shape[1], expand_keys.shape[2]
    prefixes = torch_prefill.prefixes(batch)
    # Queries that see nothing have 0; mostly there is none.
    seen = sum(prefix.end - prefix.start for prefix in prefixes)
    output = (query.new_empty if seen == total else query.new_zeros)(total, heads, dim)
    lse = query.new_full((total, heads), float("-inf"), dtype=torch.float32) if with_lse else None
    for prefix in prefixes:
        if prefix.start == prefix.end:
            continue
        rows = prefix.gather(pages, query.dtype, packed)
        compressed = rows[:, :latent]
        span = slice(prefix.start, prefix.end)
        run = min(max(EXPANDED_BYTES // (prefix.context * (nope + dim) * query.itemsize), 1), heads)
        for first in range(0, heads, run):
            part = slice(first, min(first + run, heads))
            count = part.stop - part.start
            keys = (compressed @ expand_keys[part].reshape(-1, latent).T).view(-1, count, nope)
            values = (compressed @ expand_values[part].reshape(-1, latent).T).view(-1, count, dim)
            sums = None if lse is None else lse[span, part]
            launch(query[span, part], keys, rows, values, output[span, part], sums, scale=scale)
    return AttentionResult(output, lse)


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
    """See ``operations.MlaExpandedAttention``."""
    return expand(
        query, pages, batch, attend,
        expand_keys=expand_keys, expand_values=expand_values, scale=scale, with_lse=with_lse,
    )  # fmt: skip
