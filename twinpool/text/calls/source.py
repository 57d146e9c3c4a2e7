# SPDX-License-Identifier: Apache-2.0
"""Text that arrives in pieces, for readers that are written as if all of it were there.

A reader is a generator: it yields when it needs text that has not come, and is resumed when more has, or when none will.
"""

from collections.abc import Callable, Generator
from typing import TypeVar

from twinpool.text.calls.json_text import WHITESPACE, ValueScanner

T = TypeVar("T")

Reading = Generator[None, None, T]
"""A reader that returns a T."""


class MalformedError(Exception):
    """What the model wrote is not in its format."""


class Source:
    """The text that has come and how far it was read."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.mark = -1  # from where on text must be kept, to be given back; -1: nowhere

    def push(self, text: str) -> None:
        """More has come."""
        done = self.at if self.mark < 0 else self.mark
        self.text = self.text[done:] + text
        self.at -= done
        self.mark = min(self.mark, 0)

    @property
    def left(self) -> str:
        """What was not read."""
        return self.text[self.at :]

    def peek(self) -> Reading[str]:
        """The next character; "" at the end."""
        while self.at == len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def space(self) -> Reading[str]:
        """Passes over white space. The next character; "" at the end."""
        while (character := (yield from self.peek())) and character in WHITESPACE:
            self.at += 1
        return character

    def accept(self, marker: str) -> Reading[bool]:
        """Whether ``marker`` comes next; it is then passed over."""
        while not self.text.startswith(marker, self.at):
            if self.ended or not marker.startswith(self.left):
                return False
            yield
        self.at += len(marker)
        return True

    def expect(self, marker: str) -> Reading[None]:
        """Passes over ``marker``. Raises MalformedError if something else comes."""
        if not (yield from self.accept(marker)):
            raise MalformedError

    def until(self, *markers: str, most: int) -> Reading[tuple[str, str]]:
        """The text up to the first of ``markers``, and which; both are passed over. Raises MalformedError if none comes within
        ``most`` characters."""
        while True:
            found = [(at, marker) for marker in markers if (at := self.text.find(marker, self.at)) >= 0]
            if found:
                at, marker = min(found)
                if at - self.at > most:
                    # As where the marker has not come yet: what is given back must not depend on the cut.
                    raise MalformedError
                text = self.text[self.at : at]
                self.at = at + len(marker)
                return text, marker
            if self.ended or len(self.left) > most + max(map(len, markers)):
                raise MalformedError
            yield

    def value(self, each: Callable[[str], None] | None = None) -> Reading[str]:
        """The text of the JSON value that comes next. ``each`` gets its pieces as they come. Raises MalformedError if it does
        not end."""
        scanner, pieces = ValueScanner(), list[str]()
        while True:
            end = scanner.feed(self.text, self.at) if self.at < len(self.text) else -1
            piece = self.text[self.at :] if end < 0 else self.text[self.at : end]
            self.at += len(piece)
            if piece:
                pieces.append(piece)
                if each is not None:
                    each(piece)
            if end >= 0:
                return "".join(pieces)
            if self.ended:
                raise MalformedError
            yield
