# SPDX-License-Identifier: Apache-2.0
"""Draws the next token of each row of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinpool.engine.sampling import filters
from twinpool.engine.sampling.draw import SequenceDraw
from twinpool.engine.sampling.grammar import Masks
from twinpool.engine.sampling.logprobs import TokenLogprobs, token_logprobs
from twinpool.engine.sampling.penalties import add_bias, apply_penalties, mask_stop_ids
from twinpool.engine.sampling.philox import uniforms


@dataclass(frozen=True, slots=True)
class Sample:
    """What was drawn for ``m`` rows."""

    tokens: NDArray[np.int32]
    """``[m]``; 0 in a failed row."""
    logprobs: list[TokenLogprobs | None] | None
    """One entry a row; None if no row wants any."""
    failed: NDArray[np.bool_]
    """``[m]``: rows whose logits hold NaN or +inf, or nothing that can be drawn. Their token means nothing."""


def sample(
    logits: Tensor, draws: Sequence[SequenceDraw], masks: Masks | None = None, best: Tensor | None = None
) -> Sample:
    """Draws one token for each row of ``logits[m, vocab]`` by the draw state of the same index.

    A row's token depends on its logits and its draw state alone, not on the batch. No argument is changed. ``masks``: what
    the grammars of the draws allow, if any of them has one. ``best int32[2, m]``: the rows' greedy choice, if it is known
    (``operations.Greedy``).
    """
    found = best if best is not None and all(draw.plain for draw in draws) else None
    if found is None:
        logits = logits.float()
        tokens, healthy = _draw(logits, draws, masks)
        found = torch.stack((tokens, healthy.to(tokens.dtype)))
    chosen, finite = found.cpu().numpy().astype(np.int32)  # the one wait for the device
    failed = finite == 0
    wanted = [i for i, d in enumerate(draws) if d.params.logprobs is not None and not failed[i]]
    logprobs = _logprobs(logits.float(), found[0].to(torch.int64), draws, wanted) if wanted else None
    return Sample(np.where(failed, np.int32(0), chosen), logprobs, failed)


def _logprobs(
    logits: Tensor, drawn: Tensor, draws: Sequence[SequenceDraw], wanted: list[int]
) -> list[TokenLogprobs | None]:
    index = torch.tensor(wanted, dtype=torch.int64, device=logits.device)
    found = token_logprobs(logits[index], drawn[index], [draws[i].params.logprobs or 0 for i in wanted])
    out: list[TokenLogprobs | None] = [None] * len(draws)
    for i, entry in zip(wanted, found, strict=True):
        out[i] = entry
    return out


def _draw(logits: Tensor, draws: Sequence[SequenceDraw], masks: Masks | None) -> tuple[Tensor, Tensor]:
    """Tokens ``int64[m]`` and whether each row could be drawn."""
    if all(draw.plain for draw in draws):
        return _arg_max(logits)
    if any(draw.changes_logits for draw in draws):
        logits = logits.clone()
        add_bias(logits, draws)
        apply_penalties(logits, draws)
        mask_stop_ids(logits, draws)
        if masks is not None:
            masks.apply(logits)
    # NaN is the maximum of any row that holds it, so one look at the maximum finds all that is unhealthy.
    tokens, healthy = _arg_max(logits)
    rows = [i for i, draw in enumerate(draws) if not draw.params.greedy]
    if rows:
        index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
        index = index[healthy[index]]
        if len(index):
            chosen = [draws[i] for i in index.tolist()]
            tokens[index] = _random(logits if len(index) == len(logits) else logits[index], chosen)
    return tokens, healthy


def _arg_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    tokens = logits.argmax(-1)  # the first of equals
    return tokens, logits.gather(1, tokens[:, None])[:, 0].isfinite()


def _random(logits: Tensor, draws: Sequence[SequenceDraw]) -> Tensor:
    params = [draw.params for draw in draws]
    device = logits.device

    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    settings = filters.FilterSettings(
        temperature=column([p.temperature for p in params], torch.float64),
        top_k=column([p.top_k for p in params], torch.int64),
        top_p=column([p.top_p for p in params], torch.float64),
        min_p=column([p.min_p for p in params], torch.float64),
    )
    uniform = uniforms(
        np.array([p.seed for p in params], np.uint64),
        np.array([draw.choice for draw in draws], np.uint64),
        np.array([draw.position for draw in draws], np.uint64),
    )
    return filters.draw(filters.weights(logits, settings), torch.from_numpy(uniform).to(device))
