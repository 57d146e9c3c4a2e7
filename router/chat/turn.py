# SPDX-License-Identifier: Apache-2.0
"""From the text of an answer to the next turn of a conversation: reasoning, content and calls of tools."""

import secrets
import string
from collections.abc import Sequence
from typing import Final

from twinpool.text.calls import (
    AnswerParser,
    CallArguments,
    CallEnded,
    CallStarted,
    Content,
    Event,
    Format,
    Reasoning,
    Thinking,
)
from twinpool.v1 import chat_pb2 as chat
from twinpool.v1 import inference_pb2 as pb

_ID_CHARACTERS: Final = string.ascii_letters + string.digits


class ChoiceTurn:
    """One choice of a turn."""

    def __init__(self, index: int, parser: AnswerParser, calls: Format | None, *, single_call: bool) -> None:
        self._index = index
        self._parser = parser
        self._calls = calls
        self._single = single_call
        self.called = False
        """Whether it has called a tool."""

    def begin(self, opening: str) -> list[chat.ChatResponse]:
        """The answer goes on behind ``opening``, which stands in the prompt."""
        return self._responses(self._parser.push(opening), ())

    def push(self, tokens: pb.GenerateTokens) -> list[chat.ChatResponse]:
        """More of the text."""
        return self._responses(self._parser.push(tokens.text), tokens.logprobs)

    def finish(self) -> list[chat.ChatResponse]:
        """The end of the text."""
        return self._responses(self._parser.finish(), ())

    def _responses(
        self, events: Sequence[Event], logprobs: Sequence[pb.PositionLogprobs]
    ) -> list[chat.ChatResponse]:
        """As few messages as there can be: what is malformed is told apart from what is not."""
        out: list[chat.ChatResponse] = []
        for event in events:
            if self._single and getattr(event, "index", 0) > 0:
                continue
            flagged = isinstance(event, Content) and event.malformed
            if not out or (isinstance(event, Content) and out[-1].delta.malformed != flagged):
                out.append(chat.ChatResponse(delta=chat.ChatDelta(index=self._index, malformed=flagged)))
            self._add(event, out[-1].delta)
        if logprobs:
            if not out:
                out.append(chat.ChatResponse(delta=chat.ChatDelta(index=self._index)))
            out[-1].delta.logprobs.extend(logprobs)
        return out

    def _add(self, event: Event, delta: chat.ChatDelta) -> None:
        match event:
            case Content(text):
                delta.content += text
            case Reasoning(text):
                delta.reasoning += text
            case CallStarted(index, name):
                self.called = True
                delta.tool_calls.add(index=index, id=self._new_id(), name=name)
            case CallArguments(index, text):
                self._call(delta, index).arguments_json += text
            case CallEnded(index, malformed):
                if malformed:
                    self._call(delta, index).malformed = True

    def _call(self, delta: chat.ChatDelta, index: int) -> chat.ToolCallDelta:
        if not delta.tool_calls or delta.tool_calls[-1].index != index:
            delta.tool_calls.add(index=index)
        return delta.tool_calls[-1]

    def _new_id(self) -> str:
        length = self._calls.id_chars if self._calls is not None else 0
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(length))


class Turn:
    """All choices of one turn."""

    def __init__(
        self,
        n: int,
        calls: Format | None,
        thinking: Thinking | None,
        *,
        opening: str = "",
        single_call: bool = False,
    ) -> None:
        """``opening``: how the answer begins, where the prompt holds its beginning already."""
        self._opening = opening
        self._end = calls.end if calls is not None and single_call else ""
        self._choices = [
            ChoiceTurn(index, AnswerParser(calls, thinking), calls, single_call=single_call)
            for index in range(n)
        ]

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """What ends the turn besides what its client asked for."""
        return (self._end,) if self._end else ()

    def responses(self, response: pb.GenerateResponse) -> list[chat.ChatResponse]:
        """What the client is told of an event of the answer."""
        kind = response.WhichOneof("event")
        if kind == "tokens":
            return self._choices[response.tokens.index].push(response.tokens)
        if kind == "finished":
            return self._finished(response.finished)
        begun = [chat.ChatResponse(started=response.started)]
        if self._opening:
            for choice in self._choices:
                begun += choice.begin(self._opening)
        return begun

    def _finished(self, finished: pb.GenerateFinished) -> list[chat.ChatResponse]:
        out: list[chat.ChatResponse] = []
        for choice in self._choices:
            out += choice.finish()
        last = chat.ChatResponse(finished=finished)
        for ended in last.finished.choices:
            if ended.reason == pb.FINISH_REASON_STOP and self._choices[ended.index].called:
                ended.reason = pb.FINISH_REASON_TOOL_CALLS
                if ended.stop_string == self._end:
                    ended.ClearField("stop_string")
        return [*out, last]
