# SPDX-License-Identifier: Apache-2.0
"""Changes to the logits that depend on the tokens before."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from twinpool.engine.sampling.draw import SequenceDraw


def apply_penalties(logits: Tensor, draws: Sequence[SequenceDraw]) -> None:
    """Repetition, then frequency and presence penalties, in place on ``logits[m, vocab]`` (float32)."""
    rows = [i for i, draw in enumerate(draws) if draw.params.penalised]
    seen = [draws[i].seen() for i in rows]
    sizes = np.array([len(ids) for ids, _ in seen], np.int64)
    if not sizes.sum():
        return
    device = logits.device

    def spread(values: Sequence[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, np.float32), sizes)).to(device)

    params = [draws[i].params for i in rows]
    row = torch.from_numpy(np.repeat(np.asarray(rows, np.int64), sizes)).to(device)
    ids = torch.from_numpy(np.concatenate([ids for ids, _ in seen])).to(device)
    counts = torch.from_numpy(np.concatenate([counts for _, counts in seen])).to(device)
    repetition = spread([p.repetition_penalty for p in params])
    values = logits[row, ids]
    values = torch.where(values < 0, values * repetition, values / repetition)
    values -= counts * spread([p.frequency_penalty for p in params])
    values -= (counts > 0) * spread([p.presence_penalty for p in params])
    logits[row, ids] = values


def add_bias(logits: Tensor, draws: Sequence[SequenceDraw]) -> None:
    """Adds what each draw wants to be added, in place on ``logits[m, vocab]``."""
    entries = [(i, token, bias) for i, draw in enumerate(draws) for token, bias in draw.params.logit_bias]
    if entries:
        rows, ids, values = zip(*entries, strict=True)
        device = logits.device
        index = (torch.tensor(rows, device=device), torch.tensor(ids, device=device))
        logits.index_put_(index, torch.tensor(values, dtype=logits.dtype, device=device), accumulate=True)


def mask_stop_ids(logits: Tensor, draws: Sequence[SequenceDraw]) -> None:
    """Makes stop ids impossible where ``min_tokens`` is not reached, in place."""
    pairs = [
        (i, token) for i, draw in enumerate(draws) if draw.masks_stop for token in draw.params.stop_token_ids
    ]
    if pairs:
        index = torch.tensor(pairs, dtype=torch.int64, device=logits.device)
        logits[index[:, 0], index[:, 1]] = -torch.inf
