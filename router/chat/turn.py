# SPDX-License-Identifier: Apache-2.0
"""From the text of an answer to the next turn of a conversation: reasoning, content and calls of tools."""

import hashlib
import secrets
import string
from collections.abc import Callable, Sequence
from typing import Final

from twinpool.router.chat.position import Told
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

TextBefore = Callable[[int, int], str]
"""The text that the first tokens of a choice have settled, by choice and count."""


class ChoiceTurn:
    """One choice of a turn. ``new_id`` makes the id of a call of it."""

    def __init__(
        self,
        index: int,
        parser: AnswerParser,
        new_id: Callable[[int, int], str],
        *,
        single_call: bool,
        resumable: bool,
        had: chat.ChatPosition,
    ) -> None:
        self._index = index
        self._parser = parser
        self._new_id = new_id
        self._single = single_call
        self._resumable = resumable
        self._told = Told(index, had)
        # Tokens that were read, and how many of them the last delta made whole.
        self._next_index = self._whole = 0
        # What the client has comes as text, before the first token that it does not have.
        self._behind = had.next_index
        self.called = False
        """Whether it has called a tool."""

    def begin(self, opening: str) -> list[chat.ChatResponse]:
        """The answer goes on behind ``opening``, which stands in the prompt."""
        return self._responses(self._parser.push(opening), ())

    def push(self, tokens: pb.GenerateTokens, before: TextBefore) -> list[chat.ChatResponse]:
        """More of the text."""
        out = self._catch_up(before)
        self._next_index = tokens.offset + len(tokens.token_ids)
        return out + self._responses(self._parser.push(tokens.text), tokens.logprobs)

    def finish(self, before: TextBefore) -> list[chat.ChatResponse]:
        """The end of the text."""
        out = self._catch_up(before) + self._responses(self._parser.finish(), ())
        self._told.finish()
        return out

    def _catch_up(self, before: TextBefore) -> list[chat.ChatResponse]:
        """Brings the parser to where the client stands: it follows from the text so far, and most of what it says is known."""
        if not self._behind:
            return []
        self._next_index = self._whole = self._behind
        self._behind = 0
        return self._responses(self._parser.push(before(self._index, self._next_index)), ())

    def _responses(
        self, events: Sequence[Event], logprobs: Sequence[pb.PositionLogprobs]
    ) -> list[chat.ChatResponse]:
        """As few messages as there can be: what is malformed is told apart from what is not."""
        out: list[chat.ChatResponse] = []
        for event in events:
            if self._single and getattr(event, "index", 0) > 0:
                continue
            self.called = self.called or isinstance(event, CallStarted)
            mark = self._told.mark
            new = self._told.new(event)
            if new is None:
                continue
            flagged = isinstance(new, Content) and new.malformed
            if not out or (isinstance(new, Content) and out[-1].delta.malformed != flagged):
                if out:
                    # Its tokens are told of as a whole by the last delta.
                    self._place(out[-1].delta, mark)
                out.append(chat.ChatResponse(delta=chat.ChatDelta(index=self._index, malformed=flagged)))
            self._add(new, out[-1].delta)
        if logprobs:
            if not out:
                out.append(chat.ChatResponse(delta=chat.ChatDelta(index=self._index)))
            out[-1].delta.logprobs.extend(logprobs)
        if out:
            self._whole = self._next_index
            self._place(out[-1].delta, self._told.mark)
        return out

    def _place(self, delta: chat.ChatDelta, mark: tuple[int, int]) -> None:
        if self._resumable:
            told, checksum = mark
            delta.position.next_index, delta.position.told, delta.position.checksum = (
                self._whole,
                told,
                checksum,
            )

    def _add(self, event: Event, delta: chat.ChatDelta) -> None:
        match event:
            case Content(text):
                delta.content += text
            case Reasoning(text):
                delta.reasoning += text
            case CallStarted(index, name):
                delta.tool_calls.add(index=index, id=self._new_id(self._index, index), name=name)
            case CallArguments(index, text):
                self._call(delta, index).arguments_json += text
            case CallEnded(index):
                self._call(delta, index).malformed = True

    def _call(self, delta: chat.ChatDelta, index: int) -> chat.ToolCallDelta:
        if not delta.tool_calls or delta.tool_calls[-1].index != index:
            delta.tool_calls.add(index=index)
        return delta.tool_calls[-1]


class CallIds:
    """Ids of calls. Of one ``source`` they are always the same, so that an answer which is told again has the ids that it had."""

    def __init__(self, calls: Format | None, source: bytes) -> None:
        self._length = calls.id_chars if calls is not None else 0
        self._source = source

    def __call__(self, choice: int, call: int) -> str:
        """The id of a call of a choice."""
        made = hashlib.shake_256(b"%d.%d:%s" % (choice, call, self._source)).digest(self._length)
        return "".join(_ID_CHARACTERS[byte % len(_ID_CHARACTERS)] for byte in made)


def nothing_before(choice: int, tokens: int) -> str:
    """Where the tokens begin with the first one."""
    return ""


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
        ids: bytes = b"",
        resumable: bool = False,
        had: Sequence[chat.ChatPosition] = (),
        before: TextBefore = nothing_before,
    ) -> None:
        """``opening``: how the answer begins, where the prompt holds its beginning already. ``ids``: what the ids of calls are made
        from. ``had``: what the client has of each choice; the tokens begin behind it, and ``before`` is the text of those
        that do not come."""
        self._opening = opening
        self._before = before
        self._end = calls.end if calls is not None and single_call else ""
        new_id = CallIds(calls, ids or secrets.token_bytes(16))
        self._choices = [
            ChoiceTurn(
                index,
                AnswerParser(calls, thinking),
                new_id,
                single_call=single_call,
                resumable=resumable,
                had=had[index] if index < len(had) else chat.ChatPosition(),
            )
            for index in range(n)
        ]

    def responses(self, response: pb.GenerateResponse) -> list[chat.ChatResponse]:
        """What the client is told of an event of the answer. Raises INVALID_RESUME if what it has is not of this turn."""
        kind = response.WhichOneof("event")
        if kind == "tokens":
            return self._choices[response.tokens.index].push(response.tokens, self._before)
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
            out += choice.finish(self._before)
        last = chat.ChatResponse(finished=finished)
        for ended in last.finished.choices:
            if ended.reason == pb.FINISH_REASON_STOP and self._choices[ended.index].called:
                ended.reason = pb.FINISH_REASON_TOOL_CALLS
                if ended.stop_string == self._end:
                    ended.ClearField("stop_string")
        return [*out, last]
