# SPDX-License-Identifier: Apache-2.0
"""How the tokens of a request are drawn, and what its draw state is."""

import enum
import math
from dataclasses import dataclass, field
from typing import Final

MAX_LOGPROBS: Final = 20
"""Most alternatives that are reported for a position."""


MAX_BIAS: Final = 100.0
"""Most that is added to a logit, or taken from it."""


class DrawParamsError(ValueError):
    """A value outside its range. The message names field, value and range."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"{name} {value!r} is out of range: {allowed}")
        self.name = name


class Finish(enum.Enum):
    """Why a choice ends by what was drawn. Stop strings are not known here."""

    STOP = "stop"
    LENGTH = "length"


def _check(name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    ok = math.isfinite(value) and value <= high and (value > low if above else value >= low)
    if not ok:
        raise DrawParamsError(name, value, f"{'above' if above else 'from'} {low:g} to {high:g}")


@dataclass(frozen=True, slots=True)
class DrawParams:
    """The same for all choices of a request. Order of effects: logit_bias, penalties, masks of min_tokens and grammar, then for
    greedy the arg max (lowest id of equals), else temperature, top_k, top_p, min_p and one draw by the inverse of the
    cumulated distribution in order of ids. Log-probabilities are of the raw logits.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest (of equals the lower ids); 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest likeliest whose mass, after top_k, reaches p."""
    min_p: float = 0.0
    """Drop what is less likely than min_p times the likeliest."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that is in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time that a token is in the output."""
    repetition_penalty: float = 1.0
    """Divides the positive, multiplies the negative logits of tokens in prompt or output."""
    seed: int = 0
    """64 bits; the request's own, whatever the choice: the choice's index is a word of its own in the counter."""
    max_tokens: int = 1
    """Tokens after which a choice ends."""
    min_tokens: int = 0
    """Stop ids can't be drawn before this many tokens."""
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    """Ids that end a choice: the model's own (unless they are to be ignored) and the request's."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens, each once, and what is added to their logits."""
    grammar: str = ""
    """What the output must follow, as llguidance reads it; "": anything."""
    logprobs: int | None = None
    """Alternatives to report for each token, 0 to 20; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for each position of the prompt but the first, by whoever computes it."""

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_k", self.top_k, 0, 2**31 - 1)
        _check("top_p", self.top_p, 0.0, 1.0, above=True)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check("repetition_penalty", self.repetition_penalty, 0.0, 10.0, above=True)
        if not 0 <= self.seed < 2**64:
            raise DrawParamsError("seed", self.seed, "from 0 to 2^64 - 1")
        _check("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise DrawParamsError("min_tokens", self.min_tokens, f"from 0 to max_tokens ({self.max_tokens})")
        if len({token for token, _ in self.logit_bias}) != len(self.logit_bias):
            raise DrawParamsError("logit_bias", len(self.logit_bias), "each token once")
        for _, bias in self.logit_bias:
            _check("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise DrawParamsError(name, count, f"from 0 to {MAX_LOGPROBS}")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises DrawParamsError if an id is outside the vocabulary or the stop ids are all of it."""
        for name, tokens in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", [token for token, _ in self.logit_bias]),
        ):
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise DrawParamsError(name, token, f"from 0 to {vocab_size - 1}")
        if self.min_tokens and len(self.stop_token_ids) >= vocab_size:
            raise DrawParamsError(
                "stop_token_ids", len(self.stop_token_ids), "min_tokens leaves nothing to draw"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
