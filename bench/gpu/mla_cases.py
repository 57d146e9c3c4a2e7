# SPDX-License-Identifier: Apache-2.0
"""Paged MLA problems on a GPU, and their solution in a higher precision by the definition."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinpool.engine.batch import AttentionBatch

LATENT, WIDTH, PAGE = 512, 576, 64
SCALE = 192**-0.5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
READ_BYTES_PER_SECOND, MATRIX_FLOP_PER_SECOND = 4597e9, 784e12
"""Ceilings measured on one H200: best read of device memory, bf16 matrix product."""


@dataclass
class Problem:
    """``shapes`` are (query tokens, context); pages lie at random in ``pages [blocks, 64, 576]``."""

    shapes: list[tuple[int, int]]
    heads: int
    query: Tensor
    pages: Tensor
    batch: AttentionBatch

    @property
    def floor_us(self) -> float:
        """The larger of bytes over the read rate and operations over the matrix rate."""
        context = sum(length for _, length in self.shapes)
        rows = self.query.shape[0] * self.heads
        size = self.query.itemsize
        read = context * WIDTH * size + rows * (WIDTH + LATENT) * size
        work = sum(2 * tokens * self.heads * length * (WIDTH + LATENT) for tokens, length in self.shapes)
        return max(read / READ_BYTES_PER_SECOND, work / MATRIX_FLOP_PER_SECOND) * 1e6


def make_problem(
    shapes: list[tuple[int, int]],
    heads: int,
    pages: Tensor,
    order: NDArray[np.int64],
    *,
    decodes: int,
    seed: int,
) -> Problem:
    """Lays the sequences over the pages ``order`` names, in that order."""
    counts = [-(-context // PAGE) for _, context in shapes]
    table = np.full((len(shapes), max(counts) + 1), -1, np.int32)
    used = 0
    for index, count in enumerate(counts):
        table[index, :count] = order[used : used + count]
        used += count
    q_start = np.cumsum([0] + [tokens for tokens, _ in shapes]).astype(np.int32)
    generator = torch.Generator(pages.device).manual_seed(seed)
    query = torch.randn(
        int(q_start[-1]), heads, WIDTH, generator=generator, device=pages.device, dtype=torch.float32
    ).to(pages.dtype)
    batch = AttentionBatch.build(
        q_start=q_start,
        context=np.array([context for _, context in shapes], np.int32),
        block_table=table,
        slots=np.zeros(int(q_start[-1]), np.int64),
        block_tokens=PAGE,
        num_decodes=decodes,
        device=pages.device,
    )
    return Problem(shapes, heads, query, pages, batch)


def make_poisoned(
    shapes: list[tuple[int, int]], heads: int, dtype: torch.dtype, *, decodes: int, seed: int
) -> Problem:
    """A small problem in layer 1 of a pool of three; whatever is no KV of a sequence is NaN."""
    counts = [-(-context // PAGE) for _, context in shapes]
    pool = torch.full((sum(counts) + 3, 3, PAGE, WIDTH), float("nan"), device=DEVICE, dtype=dtype)
    order = np.random.default_rng(seed).permutation(pool.shape[0])
    found = make_problem(shapes, heads, pool[:, 1], order, decodes=decodes, seed=seed)
    generator = torch.Generator(DEVICE).manual_seed(seed + 1)
    for index, (_, context) in enumerate(shapes):
        for part in range(counts[index]):
            size = min(PAGE, context - part * PAGE)
            content = torch.randn(size, WIDTH, generator=generator, device=DEVICE).to(dtype)
            pool[int(found.batch.host_block_table[index, part]), 1, :size] = content
    return found


def solve(problem: Problem, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output ``[T, heads, 512]`` and natural LSE ``[T, heads]`` in ``dtype``."""
    outputs, sums = [], []
    for index, (count, context) in enumerate(problem.shapes):
        start = int(problem.batch.host_q_start[index])
        query = problem.query[start : start + count].to(dtype)
        blocks = problem.batch.block_table[index, : -(-context // PAGE)].long()
        rows = problem.pages[blocks].reshape(-1, WIDTH)[:context].to(dtype)
        scores = (query.reshape(-1, WIDTH) @ rows.T * SCALE).view(count, problem.heads, context)
        if count > 1 or context == 0:
            place = torch.arange(context, device=query.device)
            future = place[None, :] > torch.arange(context - count, context, device=query.device)[:, None]
            scores.masked_fill_(future[:, None, :], float("-inf"))
        sums.append(torch.logsumexp(scores, -1))
        weights = torch.exp(scores - sums[-1][..., None]).nan_to_num(0.0)
        outputs.append(
            (weights.view(count * problem.heads, context) @ rows[:, :LATENT]).view(
                count, problem.heads, LATENT
            )
        )
    return torch.cat(outputs), torch.cat(sums)


def error_of(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm; infinite if anything is not finite."""
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    size = float(expected.double().norm())
    return float((found.double() - expected.double()).norm()) / max(size, 1e-30)
