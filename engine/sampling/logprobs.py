# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of drawn tokens and of their likeliest alternatives."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities before temperature, penalties and filters."""

    token_id: int
    logprob: float
    top_ids: NDArray[np.int32]
    """``[k]``, likeliest first, of equals the lower id first."""
    top_logprobs: NDArray[np.float32]
    """``[k]``."""


def token_logprobs(logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """``logits[m, vocab]``, drawn ``tokens int64[m]``, alternatives wanted per row."""
    chosen, values, ids = scores(logits, tokens, max(counts))
    return [
        TokenLogprobs(token, logprob, ids[i, :count].astype(np.int32), values[i, :count].astype(np.float32))
        for i, (token, logprob, count) in enumerate(
            zip(tokens.tolist(), chosen.tolist(), counts, strict=True)
        )
    ]


def scores(
    logits: Tensor, tokens: Tensor, count: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Log-probabilities ``[m]`` of ``tokens int64[m]``, and ``[m, k]`` of the ``count`` likeliest (or the whole vocabulary) with
    their ids, of ``logits[m, vocab]``."""
    wide = logits.double()
    normaliser = wide.logsumexp(-1)
    chosen = (wide.gather(1, tokens[:, None])[:, 0] - normaliser).cpu().numpy()
    values, ids = _top(wide, min(count, logits.shape[1]))
    values -= normaliser.cpu().numpy()[:, None]
    return chosen, values, ids


def _top(values: Tensor, count: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The ``count`` highest of each row and their ids, by value, then by id."""
    if count == 0:
        empty = np.zeros((len(values), 0))
        return empty, empty.astype(np.int64)
    # topk may pick any of equals; one more shows whether equals were left out.
    more = min(count + 1, values.shape[1])
    top = values.topk(more, dim=-1)
    found, ids = top.values.cpu().numpy(), top.indices.cpu().numpy()
    for row in np.flatnonzero(found[:, count - 1] == found[:, more - 1]) if more > count else ():
        tied = (values[row] >= found[row, count - 1]).nonzero()[:, 0]
        best = tied[torch.argsort(values[row, tied], descending=True, stable=True)[:more]]
        ids[row], found[row] = best.cpu().numpy(), values[row, best].cpu().numpy()
    order = np.lexsort((ids, -found), axis=-1)[:, :count]
    return np.take_along_axis(found, order, -1), np.take_along_axis(ids, order, -1)
