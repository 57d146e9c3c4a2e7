# SPDX-License-Identifier: Apache-2.0
"""The text side of one choice: tokens in, text that may be sent out, and the stop strings in between."""

from collections.abc import Sequence
from dataclasses import dataclass

from twinpool.text.detokenizer import Detokenizer
from twinpool.text.stop_strings import StopStringHit, StopStringMatcher


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a push added."""

    text: str
    """New text that may be sent."""
    tokens: int
    """How many of the pushed tokens belong to the answer: all of them, or up to the one that completed a stop string."""
    stop: StopStringHit | None
    """The stop string that was completed, if one was. What is pushed later belongs to nothing."""


class TextStream:
    """Detokenises one choice and ends it at its first stop string.

    Stop strings are not looked for in the text of the first ``min_tokens`` tokens.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_strings: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        """``include_stop``: the stop string that ends the choice is part of the text. Raises ValueError for an empty one."""
        self._detokenizer = detokenizer
        self._matcher = StopStringMatcher(stop_strings) if stop_strings else None
        self._unmatched = min_tokens
        self._include_stop = include_stop
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens that belong to the answer so far."""
        return self._tokens

    @property
    def stop(self) -> StopStringHit | None:
        """The stop string that ended the choice, if one did."""
        return self._matcher.hit if self._matcher is not None else None

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Takes the next tokens. Raises UnknownTokenError."""
        if self._matcher is None:
            self._tokens += len(token_ids)
            return TextDelta(self._detokenizer.push(token_ids), len(token_ids), None)
        if self.stop is not None:
            return TextDelta("", 0, None)
        out: list[str] = []
        # One token at a time, because the token that completes a stop string must be known.
        for count, token_id in enumerate(token_ids, start=1):
            self._tokens += 1
            text = self._detokenizer.push((token_id,))
            if self._tokens <= self._unmatched:
                out.append(text)
                continue
            out.append(self._matcher.push(text))
            if hit := self._matcher.hit:
                return TextDelta("".join(out) + self._ending(hit), count, hit)
        return TextDelta("".join(out), len(token_ids), None)

    def finish(self) -> TextDelta:
        """The end of the choice: returns what was held back. Its last characters may still complete a stop string."""
        if self._matcher is None:
            return TextDelta(self._detokenizer.flush(), 0, None)
        if self.stop is not None:
            return TextDelta("", 0, None)
        text = self._matcher.push(self._detokenizer.flush())
        if hit := self._matcher.hit:
            return TextDelta(text + self._ending(hit), 0, hit)
        return TextDelta(text + self._matcher.flush(), 0, None)

    def _ending(self, hit: StopStringHit) -> str:
        return hit.value if self._include_stop else ""
