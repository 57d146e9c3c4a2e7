# SPDX-License-Identifier: Apache-2.0
"""Where readers put what they have read."""

import json

from twinpool.text.calls.events import CallArguments, CallEnded, CallStarted, Content, Event
from twinpool.text.calls.source import MalformedError, Source


class Emitter:
    """Collects events and knows which call is open.

    Until a call has its name nothing is told of it, so that its text can still be given back; later its arguments are told
    as they come, and what turns out to be malformed can only be said to be so.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._calls = 0
        self._open: list[str] | None = None

    def take(self) -> list[Event]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events

    def add(self, event: Event) -> None:
        """Tells of anything but a call."""
        self._events.append(event)

    def opens(self, source: Source) -> None:
        """A call may begin here, if it has not begun with its marker: keep its text."""
        if source.mark < 0:
            source.mark = source.at

    def start(self, source: Source, name: object) -> None:
        """The open call has a name. Raises MalformedError if that is none."""
        if not isinstance(name, str) or not name:
            raise MalformedError
        source.mark = -1
        self._open = []
        self._events.append(CallStarted(self._calls, name))
        self._calls += 1

    def arguments(self, piece: str) -> None:
        """A piece of the open call's arguments."""
        if piece and self._open is not None:
            self._open.append(piece)
            self._events.append(CallArguments(self._calls - 1, piece))

    def end(self) -> None:
        """The open call is complete."""
        if self._open is None:
            return
        if not self._open:
            self.arguments("{}")
        text, self._open = "".join(self._open), None
        self._events.append(CallEnded(self._calls - 1, malformed=not _is_object(text)))

    def give_up(self, source: Source) -> None:
        """What was being read is malformed. What can be given back becomes text."""
        if self._open is not None:
            self._open = None
            self._events.append(CallEnded(self._calls - 1, malformed=True))
        if source.mark >= 0:
            if text := source.text[source.mark : source.at]:
                self._events.append(Content(text, malformed=True))
            source.mark = -1


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
