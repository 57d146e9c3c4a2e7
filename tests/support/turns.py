# SPDX-License-Identifier: Apache-2.0
"""What a client has of a turn, however it was cut into events, and streams of turns that a test leaves and resumes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

import grpc
import grpc.aio

from tests.support.waiting import until
from twinpool.cluster_client import ClusterClient
from twinpool.errors import TwinpoolError, from_rpc_error
from twinpool.v1 import chat_pb2 as chat
from twinpool.v1 import inference_pb2 as pb


@dataclass
class ToldCall:
    """A call of a tool as far as it was told."""

    id: str
    name: str
    arguments: str = ""
    malformed: bool = False


@dataclass
class ToldChoice:
    """A choice as far as it was told. ``text`` holds (kind, text) in their order; ``drawn`` the ids that have log-probabilities."""

    text: list[tuple[str, str]] = field(default_factory=list)
    calls: list[ToldCall] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)

    def add(self, delta: chat.ChatDelta) -> None:
        """Takes the next delta. Fails if it is of a call that was not begun."""
        for kind, text in (
            ("reasoning", delta.reasoning),
            ("malformed" if delta.malformed else "content", delta.content),
        ):
            if text and self.text and self.text[-1][0] == kind:
                self.text[-1] = (kind, self.text[-1][1] + text)
            elif text:
                self.text.append((kind, text))
        for call in delta.tool_calls:
            if call.name:
                assert call.index == len(self.calls), "a call was skipped or begun twice"
                self.calls.append(ToldCall(call.id, call.name))
            self.calls[call.index].arguments += call.arguments_json
            self.calls[call.index].malformed |= call.malformed
        self.drawn += [entry.chosen.token_id for entry in delta.logprobs]


def told(events: Iterable[chat.ChatResponse], n: int = 1) -> list[ToldChoice]:
    """What all events together say of each choice."""
    choices = [ToldChoice() for _ in range(n)]
    for event in events:
        if event.HasField("delta"):
            choices[event.delta.index].add(event.delta)
    return choices


def positions(events: Iterable[chat.ChatResponse], n: int = 1) -> list[chat.ChatPosition]:
    """Where a client stands that has these events."""
    newest = [chat.ChatPosition() for _ in range(n)]
    for event in events:
        if event.HasField("delta"):
            newest[event.delta.index] = event.delta.position
    return newest


async def whole_turn(
    client: ClusterClient, message: chat.ChatRequest, at: int = -1, act: Callable[[], object] = lambda: None
) -> tuple[ToldChoice, pb.GenerateFinished]:
    """A whole turn of one choice, without the ids of its calls. ``act`` is called once ``at`` tokens were told."""
    events: list[chat.ChatResponse] = []
    async with contextlib.aclosing(client.chat(message, timeout=240.0)) as stream:
        async for event in stream:
            events.append(event)
            if 0 <= at <= event.delta.position.next_index:
                at, _ = -1, act()
    assert at < 0, "it ended before"
    (choice,) = told(events)
    for call in choice.calls:
        assert call.id
        call.id = ""
    return choice, events[-1].finished


class TurnEvents:
    """A stream of a turn, read in the background. ``leave`` drops it as a client that dies does."""

    def __init__(
        self,
        call: grpc.aio.UnaryStreamCall[chat.ChatRequest, chat.ChatResponse]
        | grpc.aio.UnaryStreamCall[chat.ChatServiceResumeRequest, chat.ChatServiceResumeResponse],
    ) -> None:
        self.events: list[chat.ChatResponse] = []
        self.error: TwinpoolError | None = None
        self._call = call
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for event in self._plain():
                self.events.append(event)
        except grpc.aio.AioRpcError as error:
            self.error = from_rpc_error(error)
        except asyncio.CancelledError:
            self.error = TwinpoolError("CANCELLED")

    async def _plain(self) -> AsyncIterator[chat.ChatResponse]:
        async for event in self._call:
            yield event.response if isinstance(event, chat.ChatServiceResumeResponse) else event

    @property
    def token(self) -> bytes:
        """The resume token."""
        return self.events[0].started.resume_token

    @property
    def reason(self) -> str:
        """Of its error; "" if it ended well."""
        return self.error.reason if self.error is not None else ""

    async def has(self, tokens: int) -> None:
        """Waits until so many tokens were told, over all choices."""
        await until(lambda: self._count() >= tokens or self._task.done())
        assert self._count() >= tokens, f"ended: {self.error}"

    def _count(self) -> int:
        newest = {event.delta.index: event.delta.position.next_index for event in self.events}
        return sum(newest.values())

    async def leave(self) -> None:
        self._call.cancel()
        await self._task

    async def ended(self) -> TurnEvents:
        await self._task
        return self
