# SPDX-License-Identifier: Apache-2.0
"""How far a choice was told, exactly: in what a client has of it, whatever messages that came in.

What a model writes is told in pieces, and where they are cut depends on how fast it writes and its client reads. What is told as
a whole does not. So a position counts in what was told: each character of content, reasoning and arguments, the beginning of
a call and its being malformed, in their order. A checksum over all that tells a turn that goes on from another one.
"""

import zlib
from collections.abc import Sequence
from dataclasses import replace

from twinpool.config import RouterSection
from twinpool.errors import TwinpoolError
from twinpool.router.utf8 import refuse_unknown_fields
from twinpool.text.calls import CallArguments, CallEnded, CallStarted, Content, Event, Reasoning
from twinpool.v1.chat_pb2 import ChatPosition


class Told:
    """One choice. ``had``: what its client has of it already, which is left out."""

    def __init__(self, index: int, had: ChatPosition) -> None:
        self._index = index
        self._had = had
        self._kind = ""
        self._told = 0
        self._sum = 0

    @property
    def mark(self) -> tuple[int, int]:
        """How much was told, and its checksum."""
        return self._told, self._sum

    def new(self, event: Event) -> Event | None:
        """What of an event the client does not have; None: nothing. Raises INVALID_RESUME if what it has is not of this turn."""
        kind, text = _written(event)
        known = min(len(text), max(0, self._had.told - self._told))
        if known:
            self._count(kind, text[:known])
            if self._told == self._had.told and self._sum != self._had.checksum:
                raise self._refusal("parts from this turn")
        if known == len(text):
            return None
        self._count(kind, text[known:])
        if known and isinstance(event, (Content, Reasoning, CallArguments)):
            return replace(event, text=text[known:])
        # The others count as one: what is not known of them is all of them.
        return event

    def finish(self) -> None:
        """The choice has ended. Raises INVALID_RESUME if its client has more of it."""
        if self._told < self._had.told:
            raise self._refusal("is behind the end of this turn")

    def _count(self, kind: str, text: str) -> None:
        if kind != self._kind:
            self._kind = kind
            self._sum = zlib.crc32(kind.encode(), self._sum)
        self._told += len(text)
        self._sum = zlib.crc32(text.encode(), self._sum)

    def _refusal(self, text: str) -> TwinpoolError:
        return TwinpoolError("INVALID_RESUME", f"positions[{self._index}] {text}", field="positions")


def check_positions(positions: Sequence[ChatPosition], limits: RouterSection) -> None:
    """Raises INVALID_RESUME for more than there can be."""
    if len(positions) > limits.max_choices:
        raise TwinpoolError(
            "INVALID_RESUME",
            f"positions has {len(positions)} entries; the limit is {limits.max_choices}",
            field="positions",
        )
    for index, position in enumerate(positions):
        refuse_unknown_fields(position, f"positions[{index}]")


def _written(event: Event) -> tuple[str, str]:
    """What kind of thing is told, and what counts of it."""
    match event:
        case Content(text, malformed):
            return "malformed" if malformed else "content", text
        case Reasoning(text):
            return "reasoning", text
        case CallStarted(index, name):
            return f"call {index} {name}", "("
        case CallArguments(index, text):
            return f"arguments {index}", text
        case CallEnded(index, malformed):
            return f"end {index}", ")" if malformed else ""
