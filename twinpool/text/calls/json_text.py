# SPDX-License-Identifier: Apache-2.0
"""JSON that arrives in pieces: where a value ends, before all of it is here."""

import re
from typing import Final

WHITESPACE: Final = " \t\n\r"

_STRING = re.compile(r'["\\]')
_NESTED = re.compile(r'["{}\[\]]')
_LITERAL = re.compile(r"[\s,:{}\[\]\"]")


class ValueScanner:
    """Finds the end of one JSON value. It counts brackets and knows strings; whether what is between is valid is not its matter.

    The cost of a character is constant, however the text is cut.
    """

    __slots__ = ("_depth", "_escaped", "_kind")

    def __init__(self) -> None:
        self._kind = ""  # "s": in a string; "n": in an object or array; "l": in a number, true, false or null
        self._depth = 0
        self._escaped = False

    def feed(self, text: str, start: int) -> int:
        """Reads ``text`` from ``start`` (the value's first character in the first call). The position behind the value, or -1
        if it goes on behind ``text``."""
        at = start
        while at < len(text):
            if self._kind == "":
                at, done = self._begin(text, at)
                if done:
                    return at
            elif self._escaped:
                self._escaped = False
                at += 1
            elif self._kind == "l":
                found = _LITERAL.search(text, at)
                return -1 if found is None else found.start()
            else:
                found = (_STRING if self._kind == "s" else _NESTED).search(text, at)
                if found is None:
                    return -1
                at = found.end()
                if self._step(found.group()):
                    return at
        return -1

    def _begin(self, text: str, at: int) -> tuple[int, bool]:
        first = text[at]
        if first == '"':
            self._kind = "s"
            return at + 1, False
        if first in "{[":
            self._kind = "n"
            self._depth = 1
            return at + 1, False
        self._kind = "l"
        # A character that no value begins with is a value of no length: the caller finds it invalid.
        return at, _LITERAL.match(first) is not None

    def _step(self, character: str) -> bool:
        """Whether the value ends with ``character``."""
        if self._kind == "s":
            if character == "\\":
                self._escaped = True
                return False
            self._kind = "n"
            return self._depth == 0
        if character == '"':
            self._kind = "s"
            return False
        self._depth += 1 if character in "{[" else -1
        return self._depth == 0


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """How many characters at the end of ``text`` may be the beginning of one of ``markers``."""
    longest = min(len(text), max(map(len, markers), default=1) - 1)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0
