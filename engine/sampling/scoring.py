# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of a prompt's own tokens, from the logits of the positions before them.

The logits of a prompt are never there as a whole: those of ``ROWS_AT_ONCE`` positions are made, reduced and dropped.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinpool.engine.sampling.logprobs import scores

ROWS_AT_ONCE: Final = 128
"""Positions whose logits are in memory together, at 20 bytes a position and vocabulary entry with what is made of them: some
330 MB for a vocabulary of 128 K."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of ``m`` positions of a prompt that follow one another. Natural logarithms, before temperature, penalties and filters."""

    first: int
    """Position of the first of them in the prompt, at least 1."""
    token_ids: NDArray[np.int32]
    """``[m]``: the prompt's own."""
    logprobs: NDArray[np.float32]
    """``[m]``."""
    top_ids: NDArray[np.int32]
    """``[m, k]``, likeliest first, of equals the lower id first."""
    top_logprobs: NDArray[np.float32]
    """``[m, k]``."""

    @property
    def finite(self) -> bool:
        """Whether all of them are numbers."""
        return bool(np.isfinite(self.logprobs).all() and np.isfinite(self.top_logprobs).all())


class PromptScoring:
    """Which positions of one prompt are wanted, and from where on. Its runner alone moves it on."""

    __slots__ = ("count", "next", "tokens")

    def __init__(self, tokens: NDArray[np.int32], count: int) -> None:
        """``tokens int32[n]``: the prompt; ``count``: alternatives a position."""
        self.tokens = tokens
        self.count = count
        self.next = 1
        """The first position that has not been scored; nothing comes before the token at 0."""

    def due(self, begin: int, end: int) -> range:
        """Of a step that computes the positions ``begin`` to ``end`` (exclusive), those whose logits are wanted: each gives
        the log-probability of the position behind it. What was scored before is not wanted again, so a prompt that lost its
        blocks is told once."""
        return range(max(begin, self.next - 1), min(end, len(self.tokens) - 1))

    def score(self, hidden: Tensor, first: int, logits: Callable[[Tensor], Tensor]) -> PromptLogprobs:
        """From ``hidden [m, hidden]`` of the positions ``first`` on; ``logits`` is the model's head, called with at most
        ``ROWS_AT_ONCE`` rows."""
        tokens = self.tokens[first + 1 : first + 1 + len(hidden)]
        targets = torch.from_numpy(tokens.astype(np.int64)).to(hidden.device)
        parts = [
            scores(logits(hidden[at : at + ROWS_AT_ONCE]), targets[at : at + ROWS_AT_ONCE], self.count)
            for at in range(0, len(hidden), ROWS_AT_ONCE)
        ]
        chosen, values, ids = (np.concatenate(part) for part in zip(*parts, strict=True))
        return PromptLogprobs(
            first + 1,
            tokens,
            chosen.astype(np.float32),
            ids.astype(np.int32),
            values.astype(np.float32),
        )
