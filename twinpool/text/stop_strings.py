# SPDX-License-Identifier: Apache-2.0
"""Finds stop strings in a text that arrives in pieces."""

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopStringHit:
    """Which stop string matched."""

    index: int
    """Its position in the list given to the matcher."""
    value: str


def _failure_table(pattern: str) -> list[int]:
    """Knuth-Morris-Pratt: for each prefix, the length of its longest proper border."""
    table = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        table[i] = length
    return table


class StopStringMatcher:
    """Passes text through, holding back only what may still become a stop string.

    The match that *ends* first wins, and of those that end together the longest: so the outcome does not depend on how
    the text was cut into pieces. The match and all that follows it are not passed on. Work per character is constant.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string, which would match everywhere."""
        if any(not value for value in stop_strings):
            raise ValueError("stop strings must not be empty")
        self._patterns = tuple(stop_strings)
        self._tables = [_failure_table(value) for value in stop_strings]
        self._states = [0] * len(self._patterns)
        first = "".join(sorted({value[0] for value in self._patterns}))
        self._first = re.compile(f"[{re.escape(first)}]") if first else None
        self._held = ""
        self.hit: StopStringHit | None = None

    @property
    def held(self) -> str:
        """Text that is held back because it is the beginning of a stop string."""
        return self._held

    def push(self, piece: str) -> str:
        """Takes the next piece and returns what is now known to be text. After a hit: always ``""``."""
        if self.hit is not None:
            return ""
        if self._first is None:
            return piece
        start = 0
        if not self._held:
            # Nothing is pending: skip to the first character that could begin a stop string.
            found = self._first.search(piece)
            if found is None:
                return piece
            start = found.start()
        text = self._held + piece
        for position in range(len(self._held) + start, len(text)):
            matched = self._advance(text[position])
            if matched is not None:
                self._held = ""
                self.hit = StopStringHit(matched, self._patterns[matched])
                return text[: position + 1 - len(self._patterns[matched])]
        keep = max(self._states)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The end of the text: returns what was held back."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._patterns)
        return held

    def _advance(self, character: str) -> int | None:
        """Moves every automaton by one character; the index of the longest pattern that it completes."""
        matched: int | None = None
        for i, pattern in enumerate(self._patterns):
            state, table = self._states[i], self._tables[i]
            while state and pattern[state] != character:
                state = table[state - 1]
            if pattern[state] == character:
                state += 1
            self._states[i] = state
            if state == len(pattern) and (matched is None or state > len(self._patterns[matched])):
                matched = i
        return matched
