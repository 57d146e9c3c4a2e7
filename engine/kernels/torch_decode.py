# SPDX-License-Identifier: Apache-2.0
"""Attention of single-token queries in torch: sequences of similar length share batched products."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.kv.formats import Fp8LatentRows

_MAX_PADDING = 0.25
"""Largest share of padded pages in a group: more costs more than the calls that it saves."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences gathered and multiplied together. ``length`` = pages x block_tokens, the padded context."""

    rows: Tensor | None  # int64[b] query rows; None: all, in order
    pages: Tensor  # int64[b * pages each] block ids; padding repeats the sequence's first page
    blank: (
        Tensor | None
    )  # int64[m] gathered rows, flat over the group, that hold no valid KV in a partly valid page
    hidden: Tensor | None  # bool[b, 1, length] positions outside the context
    empty: Tensor | None  # bool[b] sequences without any KV
    size: int
    length: int


def decode_groups(batch: AttentionBatch) -> list[DecodeGroup]:
    """Groups of a batch in which every sequence has one query token; cached on the batch."""
    return batch.derived("decode_groups", lambda: _make_groups(batch))


def _make_groups(batch: AttentionBatch) -> list[DecodeGroup]:
    tokens = batch.block_tokens
    pages = np.maximum(-(-batch.host_context // tokens), 1)
    if pages.max() * len(pages) <= pages.sum() * (1 + _MAX_PADDING):
        return [_make_group(batch, np.arange(len(pages)), int(pages.max()), whole=True)]
    groups: list[DecodeGroup] = []
    order = np.argsort(pages, kind="stable")
    first = 0
    while first < len(order):
        last, used = first, 0
        while last < len(order):
            used += int(pages[order[last]])
            if int(pages[order[last]]) * (last + 1 - first) > used * (1 + _MAX_PADDING):
                break
            last += 1
        members = np.sort(order[first:last])
        groups.append(_make_group(batch, members, int(pages[members].max()), whole=False))
        first = last
    return groups


def _make_group(batch: AttentionBatch, members: NDArray[np.int64], pages: int, *, whole: bool) -> DecodeGroup:
    device = batch.context.device
    context = batch.host_context[members].astype(np.int64)
    length = pages * batch.block_tokens
    table = batch.host_block_table[members, :pages].astype(np.int64)
    if table.shape[1] < pages:  # only when every context is 0 and the table has no column
        table = np.zeros((len(members), pages), np.int64)
    used = -(-context // batch.block_tokens)
    # A page past the end repeats the first one. That is finite if it is full, so that only the last, partly valid
    # page needs blanking; where the first page is itself the last one, so do its repetitions.
    table = np.where(np.arange(pages)[None, :] < used[:, None], table, np.maximum(table[:, :1], 0))
    position = np.arange(length)[None, :]
    outside = position >= context[:, None]
    ends = np.where(context < batch.block_tokens, length, used * batch.block_tokens)
    blank = np.flatnonzero(outside & (position < ends[:, None]))

    def tensor(array: NDArray[np.int64] | NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return DecodeGroup(
        rows=None if whole else tensor(members.astype(np.int64)),
        pages=tensor(table.reshape(-1)),
        blank=tensor(blank) if len(blank) else None,
        hidden=tensor(outside[:, None, :]) if outside.any() else None,
        empty=tensor(context == 0) if (context == 0).any() else None,
        size=len(members),
        length=length,
    )


def gather(pages: Tensor, group: DecodeGroup, dtype: torch.dtype, packed: Fp8LatentRows | None) -> Tensor:
    """The group's KV rows, ``dtype[size, length, width]``, with nothing but finite values in masked places."""
    rows = pages.index_select(0, group.pages).view(group.size * group.length, pages.shape[-1])
    if packed is not None:
        rows = packed.unpack(rows, dtype)
    if group.blank is not None:
        # Masked weights are 0, yet 0 x NaN is NaN: what is not part of a context must not be multiplied.
        rows.index_fill_(0, group.blank, 0.0)
    return rows.view(group.size, group.length, -1).to(dtype)


def attend_group(
    query: Tensor, keys: Tensor, values: Tensor, group: DecodeGroup, *, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """``query [b, g, r, dk]`` (scaled), ``keys [b, length, g, dk]``, ``values [b, length, g, dv]`` ->
    output ``[b, g, r, dv]`` and LSE ``[b, g, r]``."""
    scores = _product(query, keys.transpose(1, 3))  # [g, b, r, length]
    if group.hidden is not None:
        scores.masked_fill_(group.hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    if group.empty is not None:
        weights.masked_fill_(group.empty[:, None, None], 0.0)  # softmax of nothing is NaN
    output = _product(weights.transpose(0, 1), values)
    lse = torch.logsumexp(scores, dim=-1).transpose(0, 1) if with_lse else None
    return output.transpose(0, 1), lse


def _product(left: Tensor, right: Tensor) -> Tensor:
    """``left [b, g, r, n] x right [b, n, g, m]`` -> ``[g, b, r, m]`` without copying the strided operand."""
    size, groups, rows, _ = left.shape
    result = left.new_empty(groups, size, rows, right.shape[-1])
    if size == 1:
        torch.bmm(left[0], right[0].transpose(0, 1), out=result[:, 0])
        return result
    for index in range(groups):
        torch.bmm(left[:, index], right[:, :, index], out=result[index])
    return result
