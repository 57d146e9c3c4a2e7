# SPDX-License-Identifier: Apache-2.0
"""The draw state of one choice. It is portable: prompt, outputs, choice and parameters rebuild it anywhere."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from twinpool.engine.sampling.grammar import GrammarState
from twinpool.engine.sampling.params import DrawParams, Finish
from twinpool.engine.sampling.scoring import PromptScoring

_EMPTY = np.zeros(0, np.int32)


class _Seen:
    """Tokens that the penalties look at, with how often each is in the output. Appending costs O(1)."""

    def __init__(self, prompt: NDArray[np.int32]) -> None:
        unique = np.unique(prompt)
        self._slot = {int(token): i for i, token in enumerate(unique)}
        self._ids = np.zeros(max(64, 2 * len(unique)), np.int64)
        self._ids[: len(unique)] = unique
        self._counts = np.zeros(len(self._ids), np.float32)

    def add(self, token: int) -> None:
        slot = self._slot.setdefault(token, len(self._slot))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        self._counts[slot] += 1

    def view(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        size = len(self._slot)
        return self._ids[:size], self._counts[:size]


class SequenceDraw:
    """Parameters and history of one choice.

    ``ModelRunner.step`` appends what it draws; nobody else appends to a draw that a runner steps.
    """

    __slots__ = ("_outputs", "_seen", "choice", "grammar", "params", "scoring", "siblings")

    def __init__(
        self,
        params: DrawParams,
        prompt: NDArray[np.int32] = _EMPTY,
        *,
        choice: int = 0,
        outputs: Iterable[int] = (),
        siblings: tuple["SequenceDraw", ...] = (),
        grammar: GrammarState | None = None,
        scoring: PromptScoring | None = None,
    ) -> None:
        """``outputs`` are the tokens that the choice has already, in order: drawn here before, or elsewhere.

        ``siblings`` are other choices that draw from the *same* logits (the first tokens of n choices over one
        prefill); their draws come back beside this one's. ``grammar``: a new state of what the output must follow.
        ``scoring``: the prompt, if its own log-probabilities are wanted as it is computed.
        """
        self.params = params
        self.choice = choice
        self.siblings = siblings
        self.scoring = scoring
        self._outputs: list[int] = []
        # The prompt counts for the repetition penalty alone.
        self._seen = (
            _Seen(prompt if params.repetition_penalty != 1.0 else _EMPTY) if params.penalised else None
        )
        # Only what is drawn from now on is given to the grammar token by token.
        self.grammar: GrammarState | None = None
        for token in outputs:
            self.append(int(token))
        if grammar is not None:
            grammar.extend(self._outputs)
            self.grammar = grammar

    @property
    def position(self) -> int:
        """Position in the output of the token that is drawn next."""
        return len(self._outputs)

    @property
    def outputs(self) -> list[int]:
        """The output so far. A copy."""
        return self._outputs.copy()

    @property
    def masks_stop(self) -> bool:
        """Whether stop ids are masked in the next draw."""
        return len(self._outputs) < self.params.min_tokens and bool(self.params.stop_token_ids)

    @property
    def plain(self) -> bool:
        """Whether the next token is the arg max of the raw logits."""
        return self.params.greedy and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Whether the next token is drawn from other logits than the model's."""
        return (
            self._seen is not None
            or self.grammar is not None
            or self.masks_stop
            or bool(self.params.logit_bias)
        )

    def append(self, token: int) -> None:
        """Takes a token into the history."""
        self._outputs.append(token)
        if self._seen is not None:
            self._seen.add(token)
        if self.grammar is not None:
            self.grammar.append(token)

    def seen(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ids that penalties change and their counts in the output. Views; empty without penalties."""
        return (
            self._seen.view() if self._seen is not None else (np.zeros(0, np.int64), np.zeros(0, np.float32))
        )

    def finish(self) -> Finish | None:
        """Whether the last token of the output ends the choice, and why."""
        if not self._outputs:
            return None
        if self._outputs[-1] in self.params.stop_token_ids and len(self._outputs) >= self.params.min_tokens:
            return Finish.STOP
        if len(self._outputs) >= self.params.max_tokens:
            return Finish.LENGTH
        return None
