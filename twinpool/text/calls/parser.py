# SPDX-License-Identifier: Apache-2.0
"""Splits a model's answer, as it is written, into reasoning, content and calls of tools."""

from dataclasses import dataclass
from typing import Final

from twinpool.text.calls.emitter import Emitter
from twinpool.text.calls.events import Content, Event, Reasoning
from twinpool.text.calls.formats import Format
from twinpool.text.calls.json_text import WHITESPACE, held_back
from twinpool.text.calls.source import MalformedError, Reading, Source

THINK_BEGIN: Final = "<think>"
THINK_END: Final = "</think>"


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model marks its reasoning. ``open``: whether the prompt has already begun it."""

    open: bool = False
    begin: str = THINK_BEGIN
    end: str = THINK_END


class AnswerParser:
    """Takes the text of one choice in pieces. What it tells does not depend on how the text was cut, up to the cut of the
    events themselves.

    White space beside a marker belongs to nothing: what stands before the first call or around reasoning is trimmed, and so is
    what stands between two calls. Whatever a model writes, this raises nothing.
    """

    def __init__(self, calls: Format | None = None, thinking: Thinking | None = None) -> None:
        self._calls = calls
        self._thinking = thinking
        self._source = Source()
        self._out = Emitter()
        self._reading: Reading[None] = self._read()

    def push(self, text: str) -> list[Event]:
        """The events that this piece settles."""
        self._source.push(text)
        next(self._reading, None)
        return self._out.take()

    def finish(self) -> list[Event]:
        """The end of the answer: what was held back."""
        self._source.ended = True
        next(self._reading, None)
        return self._out.take()

    # --- inside ---------------------------------------------------------------------------

    def _read(self) -> Reading[None]:
        source = self._source
        if self._thinking is not None:
            yield from self._reasoning(self._thinking)
        calls = self._calls
        if calls is not None and calls.at_start and (yield from self._begins(calls.at_start)):
            yield from self._call(calls, "")
        outside = () if calls is None else (*calls.begin, *calls.silent)
        while marker := (yield from self._text(outside, Content)):
            if calls is not None and marker in calls.begin:
                yield from self._call(calls, marker)
            else:
                yield from source.space()

    def _begins(self, text: str) -> Reading[bool]:
        """Whether ``text`` comes first, white space aside; it is not passed over."""
        source = self._source
        source.mark = source.at
        yield from source.space()
        found = yield from source.accept(text)
        if found:
            source.at -= len(text)
        else:
            source.at = source.mark
        source.mark = -1
        return found

    def _call(self, calls: Format, marker: str) -> Reading[None]:
        source = self._source
        source.mark = source.at - len(marker)
        try:
            yield from calls.reader(source, self._out)
        except MalformedError:
            self._out.give_up(source)
            return
        source.mark = -1
        yield from source.space()

    def _text(self, markers: tuple[str, ...], kind: type[Content] | type[Reasoning]) -> Reading[str]:
        """Tells of text up to a marker, which is passed over and returned; "" at the end of the answer."""
        source = self._source
        while True:
            found = [(at, marker) for marker in markers if (at := source.text.find(marker, source.at)) >= 0]
            at, marker = min(found, default=(len(source.text), ""))
            safe = at
            if not marker and not source.ended:
                safe -= held_back(source.left, markers)
            text = source.text[source.at : safe]
            if markers and (marker or not source.ended):
                # White space before a marker belongs to nothing, so it waits for what comes.
                text = text.rstrip(WHITESPACE)
            if text:
                source.at += len(text)
                self._out.add(kind(text))
            if marker:
                source.at = at + len(marker)
                return marker
            if source.ended:
                source.at = len(source.text)
                return ""
            yield

    def _reasoning(self, thinking: Thinking) -> Reading[None]:
        if not thinking.open and not (yield from self._begins(thinking.begin)):
            return
        yield from self._source.space()
        yield from self._source.accept(thinking.begin)
        yield from self._source.space()
        yield from self._text((thinking.end,), Reasoning)
        yield from self._source.space()
