# SPDX-License-Identifier: Apache-2.0
"""The torch backend: the reference of every operation, and what serves on a CPU. See ``operations`` for contracts."""

import torch
from torch import Tensor

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.kernels import torch_decode, torch_prefill
from twinpool.engine.kernels.operations import AttentionResult
from twinpool.engine.kernels.registry import REGISTRY
from twinpool.engine.kv.formats import Fp8LatentRows

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_EXPANDED_BYTES = 64 << 20
"""Expanded keys and values held at once; heads are processed in runs that fit."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@REGISTRY.register("write_kv", backend="torch", dtypes=DTYPES, note="indexed store")
def write_kv(pages: Tensor, rows: Tensor, batch: AttentionBatch, *, latent_dim: int = 0) -> None:
    """See ``operations.WriteKV``."""
    block, offset = batch.derived(
        "slot_parts", lambda: (batch.slots // batch.block_tokens, batch.slots % batch.block_tokens)
    )
    pages.index_put_((block, offset), rows)


def attend(
    query: Tensor,
    pages: Tensor,
    batch: AttentionBatch,
    key_columns: slice,
    value_columns: slice,
    groups: int,
    scale: float,
    with_lse: bool,
    packed: Fp8LatentRows | None = None,
) -> AttentionResult:
    """``query [T, groups * r, dk]``; keys and values are ``groups`` equal runs of columns of the rows, unpacked if the
    pages are ``packed``."""
    total, heads, dim = query.shape
    dtype = accumulation_dtype(query.dtype)
    scaled = (query.to(dtype) * scale).view(total, groups, heads // groups, dim)
    value_dim = (value_columns.stop - value_columns.start) // groups

    def split(rows: Tensor) -> tuple[Tensor, Tensor]:
        shape = (*rows.shape[:-1], groups)
        return rows[..., key_columns].view(*shape, dim), rows[..., value_columns].view(*shape, value_dim)

    decodes, sequences = batch.num_decodes, batch.num_sequences
    running = torch_decode.decode_groups(batch.select(0, decodes)) if decodes else []
    if decodes == sequences and len(running) == 1 and running[0].rows is None:
        # The usual step of a decode worker: no assembling.
        keys, values = split(torch_decode.gather(pages, running[0], dtype, packed))
        whole, sums = torch_decode.attend_group(scaled, keys, values, running[0], with_lse=with_lse)
        flat = None if sums is None else sums.reshape(total, heads)
        return AttentionResult(whole.reshape(total, heads, value_dim).to(query.dtype), flat)

    output = scaled.new_zeros(total, groups, heads // groups, value_dim)
    lse = scaled.new_full((total, groups, heads // groups), float("-inf")) if with_lse else None
    for group in running:
        keys, values = split(torch_decode.gather(pages, group, dtype, packed))
        # Decodes are the first rows, one for each sequence.
        part = scaled[:decodes] if group.rows is None else scaled.index_select(0, group.rows)
        out, sums = torch_decode.attend_group(part, keys, values, group, with_lse=with_lse)
        where = slice(0, decodes) if group.rows is None else group.rows
        output[where] = out
        if lse is not None and sums is not None:
            lse[where] = sums
    if sequences > decodes:
        base = int(batch.host_q_start[decodes])
        for prefix in torch_prefill.prefixes(batch.select(decodes, sequences)):
            if prefix.start == prefix.end:
                continue
            keys, values = split(prefix.gather(pages, dtype, packed))
            span = slice(base + prefix.start, base + prefix.end)
            torch_prefill.attend_causal(
                scaled[span], keys, values, output[span], None if lse is None else lse[span]
            )
    flat_lse = None if lse is None else lse.view(total, heads)
    return AttentionResult(output.view(total, heads, value_dim).to(query.dtype), flat_lse)


@REGISTRY.register("mla_paged_attention", backend="torch", dtypes=DTYPES, note="gather, batched products")
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
    """See ``operations.MlaPagedAttention``."""
    keys, values = slice(score_from, pages.shape[-1]), slice(0, latent_dim)
    return attend(query[..., score_from:], pages, batch, keys, values, 1, scale, with_lse)


@REGISTRY.register("gqa_paged_attention", backend="torch", dtypes=DTYPES, note="gather, batched products")
def gqa_paged_attention(
    query: Tensor,
    pages: Tensor,
    batch: AttentionBatch,
    *,
    kv_heads: int,
    scale: float,
    with_lse: bool = False,
) -> AttentionResult:
    """See ``operations.GqaPagedAttention``."""
    width = pages.shape[-1]
    keys, values = slice(width // 2, width), slice(0, width // 2)
    return attend(query, pages, batch, keys, values, kv_heads, scale, with_lse)


@REGISTRY.register("mla_expanded_attention", backend="torch", dtypes=DTYPES, note="expands runs of heads")
def mla_expanded_attention(
    query: Tensor,
    pages: Tensor,
    batch: AttentionBatch,
    *,
    expand_keys: Tensor,
    expand_values: Tensor,
    scale: float,
    with_lse: bool = False,
    packed: Fp8LatentRows | None = None,
) -> AttentionResult:
    """See ``operations.MlaExpandedAttention``; with ``packed`` for the layout ``fp8_latent``."""
    total, heads, dim = query.shape
    nope, value_dim, latent = expand_keys.shape[1], expand_values.shape[1], expand_keys.shape[2]
    dtype = accumulation_dtype(query.dtype)
    scaled = query.to(dtype) * scale
    up_keys, up_values = expand_keys.to(dtype), expand_values.to(dtype)
    output = scaled.new_zeros(total, heads, value_dim)
    lse = scaled.new_full((total, heads), float("-inf")) if with_lse else None
    for prefix in torch_prefill.prefixes(batch):
        if prefix.start == prefix.end:
            continue
        rows = prefix.gather(pages, dtype, packed)
        compressed, rotary = rows[:, :latent], rows[:, latent:]
        span = slice(prefix.start, prefix.end)
        per_head = prefix.context * (dim + value_dim) * dtype.itemsize
        run = min(max(_EXPANDED_BYTES // per_head, 1), heads)
        for first in range(0, heads, run):
            part = slice(first, min(first + run, heads))
            count = part.stop - part.start
            keys = rows.new_empty(prefix.context, count, dim)
            keys[..., :nope] = (compressed @ up_keys[part].flatten(0, 1).T).view(-1, count, nope)
            keys[..., nope:] = rotary[:, None, :]
            values = (compressed @ up_values[part].flatten(0, 1).T).view(-1, count, value_dim)
            torch_prefill.attend_causal(
                scaled[span, part, None],
                keys,
                values,
                output[span, part, None],
                None if lse is None else lse[span, part, None],
            )
    return AttentionResult(output.to(query.dtype), lse)


@REGISTRY.register("merge_attention", backend="torch", dtypes=DTYPES, note="weights by exp(LSE)")
def merge_attention(outputs: Tensor, lse: Tensor) -> AttentionResult:
    """See ``operations.MergeAttention``."""
    dtype = accumulation_dtype(outputs.dtype)
    sums = lse.to(dtype)
    peak = sums.amax(dim=0)
    # Where every part is empty the peak is -inf, and -inf - -inf would be NaN.
    weights = torch.exp(sums - torch.where(peak.isneginf(), torch.zeros_like(peak), peak))
    total = weights.sum(dim=0)
    used = (weights > 0)[..., None]
    weighted = torch.where(used, outputs.to(dtype) * weights[..., None], 0.0).sum(dim=0)
    merged = torch.where((total > 0)[..., None], weighted / total[..., None], 0.0)
    return AttentionResult(merged.to(outputs.dtype), peak + torch.log(total))
