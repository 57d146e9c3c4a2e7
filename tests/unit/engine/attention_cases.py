# SPDX-License-Identifier: Apache-2.0
"""Ragged attention problems over a poisoned pool, and their solution in float64 by the definition."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.kv.pool import KVPool


@dataclass
class Case:
    """``shapes`` are (query tokens, KV length); ``rows[i]`` is sequence i's KV in order."""

    shapes: list[tuple[int, int]]
    batch: AttentionBatch
    pages: Tensor
    query: Tensor
    rows: list[Tensor]

    def queries(self, index: int) -> Tensor:
        start, end = self.batch.host_q_start[index : index + 2]
        return self.query[int(start) : int(end)]


def make_case(
    shapes: list[tuple[int, int]],
    *,
    heads: int,
    query_dim: int,
    width: int,
    block_tokens: int = 8,
    decodes: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """The first ``decodes`` shapes must have one query. Every byte of the pool that is not a KV row is poison."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-context // block_tokens) for _, context in shapes]
    pool = KVPool(sum(counts) + 3, 2, block_tokens, width, dtype)
    pool.poison(range(pool.num_blocks))
    free = list(np.random.default_rng(seed).permutation(pool.num_blocks))
    table = np.full((len(shapes), max([1, *counts]) + 1), -1, np.int32)
    pages = pool.layer(1)
    rows: list[Tensor] = []
    for index, (_, context) in enumerate(shapes):
        content = torch.randn(context, width, generator=generator).to(dtype)
        for part in range(counts[index]):
            block = int(free.pop())
            table[index, part] = block
            piece = content[part * block_tokens : (part + 1) * block_tokens]
            pages[block, : len(piece)] = piece
        rows.append(content)
    q_start = np.cumsum([0] + [count for count, _ in shapes]).astype(np.int32)
    query = torch.randn(int(q_start[-1]), heads, query_dim, generator=generator).to(dtype)
    batch = AttentionBatch.build(
        q_start=q_start,
        context=np.array([context for _, context in shapes], np.int32),
        block_table=table,
        slots=np.zeros(int(q_start[-1]), np.int64),
        block_tokens=block_tokens,
        num_decodes=decodes,
    )
    return Case(shapes, batch, pages, query, rows)


def solve(case: Case, keys: list[Tensor], values: list[Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """``keys[i] [context, heads, dk]``, ``values[i] [context, heads, dv]`` -> output and LSE in float64."""
    outputs, sums = [], []
    for index, (count, context) in enumerate(case.shapes):
        scores = torch.einsum("qhd,khd->qhk", case.queries(index).double(), keys[index].double()) * scale
        future = torch.arange(context)[None, :] > torch.arange(context - count, context)[:, None]
        scores.masked_fill_(future[:, None, :], float("-inf"))
        sums.append(torch.logsumexp(scores, -1))
        # The softmax of nothing is NaN by definition, and 0 by contract.
        weights = torch.exp(scores - sums[-1][..., None]).nan_to_num(0.0)
        outputs.append(torch.einsum("qhk,khd->qhd", weights, values[index].double()))
    return torch.cat(outputs), torch.cat(sums)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest error of a row relative to the row's largest value; a row of zeros must be met exactly."""
    difference = (found.double() - expected).abs().amax(-1)
    size = expected.abs().amax(-1)
    assert torch.isfinite(found).all()
    assert not difference[size == 0].any()
    rest = size > 0
    return float((difference[rest] / size[rest]).max()) if rest.any() else 0.0
