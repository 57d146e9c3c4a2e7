# SPDX-License-Identifier: Apache-2.0
"""Temperature, top-k, top-p, min-p and the draw itself, for many rows with settings of their own.

All arithmetic after the logits is float64, and each row is reduced along itself alone: a row's result does not depend on
the other rows of the batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TOP_GUESS = 1024
"""How many of the likeliest a row with top_p alone sorts at first; eight times as many if these do not reach p."""


@dataclass(frozen=True, slots=True)
class FilterSettings:
    """Settings of ``m`` rows, all tensors ``[m]`` on the device of the logits."""

    temperature: Tensor  # float64, above 0
    top_k: Tensor  # int64, 0 keeps all
    top_p: Tensor  # float64
    min_p: Tensor  # float64


def weights(logits: Tensor, settings: FilterSettings) -> Tensor:
    """``logits[m, vocab]`` -> float64 weights ``[m, vocab]``, the likeliest 1, what is filtered out 0."""
    scaled = logits.double()
    scaled -= scaled.amax(-1, keepdim=True)
    scaled /= settings.temperature[:, None]
    weight = scaled.exp()
    keep = _keep_highest(scaled, weight, settings)
    if bool((settings.min_p > 0).any()):
        above = weight >= settings.min_p[:, None]
        keep = above if keep is None else keep & above
    if keep is not None:
        weight *= keep
    return weight


def draw(weight: Tensor, uniform: Tensor) -> Tensor:
    """The token at ``uniform[m]`` (in [0, 1)) of each row's cumulated weights, in order of ids: ``int64[m]``."""
    cumulated = weight.cumsum(-1)
    total = cumulated[:, -1]
    # Rounding may lift u * total to total, where no token lies.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulated, target[:, None], right=True)[:, 0]


def _keep_highest(scaled: Tensor, weight: Tensor, settings: FilterSettings) -> Tensor | None:
    """Mask of what top_k and top_p keep; None if they keep all."""
    vocab = scaled.shape[1]
    limits = torch.where((settings.top_k > 0) & (settings.top_k < vocab), settings.top_k, vocab)
    limited, nucleus = limits < vocab, settings.top_p < 1.0
    rows = (limited | nucleus).nonzero()[:, 0]
    if not len(rows):
        return None
    counts = torch.full_like(limits, vocab)
    threshold = torch.full_like(scaled[:, 0], -torch.inf)
    widest = int(torch.where(limited, limits, 0).max())
    guess = min(vocab, max(widest, TOP_GUESS if bool((nucleus & ~limited).any()) else 1))
    while len(rows):
        settled = _count_kept(scaled, weight, settings, limits, rows, guess, counts, threshold)
        rows, guess = rows[~settled], min(vocab, 8 * guess)
    return _highest(scaled, counts, threshold)


def _count_kept(
    scaled: Tensor,
    weight: Tensor,
    settings: FilterSettings,
    limits: Tensor,
    rows: Tensor,
    width: int,
    counts: Tensor,
    threshold: Tensor,
) -> Tensor:
    """Writes how many tokens of ``rows`` are kept, and the lowest value among them; looks at the ``width`` likeliest.

    Returns which rows are settled: the others keep more than ``width``.
    """
    values = scaled[rows].topk(width, dim=-1).values
    mass = values.exp().cumsum(-1)
    limit = limits[rows]
    # What top_p is a share of: the mass of the top_k tokens, or of all.
    inside = mass.gather(1, limit.clamp(max=width)[:, None] - 1)[:, 0]
    total = torch.where(limit < scaled.shape[1], inside, weight[rows].cumsum(-1)[:, -1])
    # A token is kept while the mass before it is short of p.
    short = mass < (settings.top_p[rows] * total)[:, None]
    count = torch.where(settings.top_p[rows] < 1.0, 1 + short.sum(-1), limit)
    count = torch.minimum(count, limit)
    settled = count <= width
    counts[rows] = count
    threshold[rows] = values.gather(1, count.clamp(max=width)[:, None] - 1)[:, 0]
    return settled


def _highest(scaled: Tensor, counts: Tensor, threshold: Tensor) -> Tensor:
    """Mask of the ``counts`` highest of each row, given the lowest kept value; of equals the lower ids are kept."""
    keep = scaled >= threshold[:, None]
    tied = (keep.sum(-1) > counts).nonzero()[:, 0]
    if len(tied):
        above = scaled[tied] > threshold[tied, None]
        equal = scaled[tied] == threshold[tied, None]
        room = counts[tied] - above.sum(-1)
        keep[tied] = above | (equal & (equal.cumsum(-1) <= room[:, None]))
    return keep
