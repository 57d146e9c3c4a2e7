# SPDX-License-Identifier: Apache-2.0
"""Answers that must follow a grammar: which tokens may come next, by llguidance (https://github.com/guidance-ai/llguidance).

A grammar travels as text, the form that llguidance reads. A worker compiles it once and copies the result for each choice. The
state of a choice follows from its output alone, so a choice that goes on elsewhere has the state that it would have had.
Masks of a step are computed in threads of their own while the model runs.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray
from torch import Tensor

MAX_COMPILED: Final = 256
"""Compiled grammars that are kept, the last ones used."""

_WORD_BITS: Final = 32


class GrammarError(ValueError):
    """A grammar that cannot be compiled. The message is for who sent it."""


class GrammarState:
    """What may come next in one choice."""

    __slots__ = ("matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    def append(self, token: int) -> None:
        """Takes a token. One that the grammar does not allow leaves nothing that may come next."""
        self.matcher.consume_token(token)

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes tokens that were drawn elsewhere."""
        taken = self.matcher.try_consume_tokens(list(tokens))
        if taken < len(tokens):
            self.matcher.consume_token(tokens[taken])


class Grammars:
    """Compiles grammars for one tokenizer. All methods may be called from any thread."""

    def __init__(
        self, tokenizer: Callable[[], str], *, vocab_size: int, end_ids: Iterable[int], threads: int = 1
    ) -> None:
        """``tokenizer`` gives the content of tokenizer.json; it is read when the first grammar comes, which takes about a second.
        ``vocab_size`` is the model's, ``end_ids`` are the ids that end an answer."""
        self._read = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = sorted(end_ids)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._executor = LLExecutor(threads)
        # The executor's caller waits; so that is not the thread that runs the model.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def close(self) -> None:
        """Ends the threads."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def prepare(self) -> None:
        """Reads the tokenizer now. Raises ValueError for one that grammars cannot be used with."""
        with self._lock:
            self._prepared()

    def _prepared(self) -> LLTokenizer:
        if self._tokenizer is None:
            self._tokenizer = LLTokenizer(
                self._read(), n_vocab=self._vocab_size, eos_token=self._end_ids or None
            )
        return self._tokenizer

    def compile(self, grammar: str) -> None:
        """Compiles ``grammar`` if it is not known. Raises GrammarError. May take a second: not for a loop that must turn."""
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(self._read(), n_vocab=self._vocab_size, eos_token=self._end_ids)
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
            if matcher.is_error():
                raise GrammarError(matcher.get_error())
            self._compiled[grammar] = matcher
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)

    def state(self, grammar: str) -> GrammarState:
        """A new state. Raises GrammarError."""
        self.compile(grammar)
        with self._lock:
            return GrammarState(self._compiled[grammar].deep_copy())

    def masks(self, states: Sequence[GrammarState | None]) -> "Masks | None":
        """Begins to compute what may come next in the choices that have a state; None if none has. No state may change until
        the masks were applied."""
        rows = [row for row, state in enumerate(states) if state is not None]
        if not rows:
            return None
        matchers = [(state.matcher, at) for at, state in enumerate(filter(None, states))]
        return Masks(rows, self._thread.submit(self._fill, matchers))

    def _fill(self, matchers: list[tuple[LLMatcher, int]]) -> NDArray[np.int32]:
        mask = allocate_token_bitmask(len(matchers), self._vocab_size)
        fill_next_token_bitmask_par(self._executor, matchers, mask)
        for matcher, at in matchers:
            if matcher.is_error():
                mask[at] = 0
        return mask


class Masks:
    """Masks of one step, perhaps not computed yet."""

    def __init__(self, rows: Sequence[int], mask: "Future[NDArray[np.int32]]") -> None:
        self._rows = rows
        self._mask = mask

    def wait(self) -> NDArray[np.int32]:
        """The masks, packed: a bit a token, a row a choice that has a grammar."""
        return self._mask.result()

    def apply(self, logits: Tensor) -> None:
        """Makes impossible what may not come, in place on ``logits[m, vocab]``; a row where nothing may come has no finite
        logit."""
        words = torch.from_numpy(self.wait()).to(logits.device, non_blocking=True)
        bits = torch.arange(_WORD_BITS, dtype=torch.int32, device=logits.device)
        allowed = ((words[:, :, None] >> bits) & 1).view(len(self._rows), -1)[:, : logits.shape[1]]
        if len(self._rows) == len(logits):
            logits.masked_fill_(allowed == 0, -torch.inf)
            return
        rows = torch.tensor(self._rows, dtype=torch.int64, device=logits.device)
        logits[rows] = logits[rows].masked_fill(allowed == 0, -torch.inf)
