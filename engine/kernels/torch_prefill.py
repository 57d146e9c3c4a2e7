# SPDX-License-Identifier: Apache-2.0
"""Causal attention of many query tokens of one sequence in torch, in tiles of queries."""

import torch
from torch import Tensor

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.kv.formats import Fp8LatentRows

# Scores of a tile should stay in a core's cache: measured on 2 cores at 512-2048 tokens, tiles of 32-64 queries
# take 6 ms where one product over all queries takes 17.
_TILE_SCORES = 256 * 1024
_MIN_TILE, _MAX_TILE = 32, 128


class Prefix:
    """One sequence of a batch: where its queries and its KV lie."""

    __slots__ = ("context", "end", "pages", "skip", "start")

    def __init__(self, batch: AttentionBatch, index: int) -> None:
        tokens = batch.block_tokens
        self.context = int(batch.host_context[index])
        self.end = int(batch.host_q_start[index + 1])
        begin = int(batch.host_q_start[index])
        # Queries before the context began see nothing.
        self.skip = max(self.end - begin - self.context, 0)
        self.start = begin + self.skip
        blocks = -(-self.context // tokens)
        self.pages = batch.block_table[index, :blocks].to(torch.int64)

    def gather(self, pages: Tensor, dtype: torch.dtype, packed: Fp8LatentRows | None) -> Tensor:
        """The sequence's KV rows, ``dtype[context, width]``."""
        rows = pages.index_select(0, self.pages).view(-1, pages.shape[-1])[: self.context]
        return rows.to(dtype) if packed is None else packed.unpack(rows, dtype)


def prefixes(batch: AttentionBatch) -> list[Prefix]:
    """The batch's sequences; cached on it."""
    return batch.derived("prefixes", lambda: [Prefix(batch, index) for index in range(batch.num_sequences)])


def attend_causal(query: Tensor, keys: Tensor, values: Tensor, output: Tensor, lse: Tensor | None) -> None:
    """Fills ``output [q, g, r, dv]`` and ``lse [q, g, r]``.

    ``query [q, g, r, dk]`` (scaled), ``keys [context, g, dk]``, ``values [context, g, dv]``; ``q <= context``, and the
    last query sees everything.
    """
    count, groups, rows, _ = query.shape
    context = keys.shape[0]
    by_group_keys, by_group_values = keys.permute(1, 2, 0), values.transpose(0, 1)
    tile = min(max(_TILE_SCORES // (groups * rows * context), _MIN_TILE), _MAX_TILE)
    future = torch.ones(tile, tile, dtype=torch.bool, device=query.device).triu_(1)
    for first in range(0, count, tile):
        last = min(first + tile, count)
        size, seen = last - first, context - count + last
        part = query[first:last].permute(1, 2, 0, 3).reshape(groups, rows * size, -1)
        scores = torch.bmm(part, by_group_keys[:, :, :seen])
        diagonal = scores.view(groups, rows, size, seen)[..., seen - size :]
        diagonal.masked_fill_(future[:size, :size], float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        product = torch.bmm(weights, by_group_values[:, :seen])
        output[first:last] = product.view(groups, rows, size, -1).permute(2, 0, 1, 3)
        if lse is not None:
            sums = torch.logsumexp(scores, dim=-1)
            lse[first:last] = sums.view(groups, rows, size).permute(2, 0, 1)
