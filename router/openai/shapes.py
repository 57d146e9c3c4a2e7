# SPDX-License-Identifier: Apache-2.0
"""From events of an answer to the objects of OpenAI's API."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from twinpool.v1 import chat_pb2 as chat
from twinpool.v1 import inference_pb2 as pb

FINISH: Final = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}

TokenBytes = Callable[[int], bytes]
"""The bytes that a token adds to the text."""

Json = dict[str, Any]


def usage(found: pb.Usage) -> Json:
    """Counts of tokens."""
    return {
        "prompt_tokens": found.prompt_tokens,
        "completion_tokens": found.completion_tokens,
        "total_tokens": found.prompt_tokens + found.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": max(found.cached_tokens, found.decode_cached_tokens),
        },
    }


def chat_logprobs(positions: Iterable[pb.PositionLogprobs], token_bytes: TokenBytes) -> list[Json]:
    """Log-probabilities as a chat has them."""

    def one(token: pb.TokenLogprob) -> Json:
        data = token_bytes(token.token_id)
        return {
            "token": data.decode(errors="replace"),
            "logprob": token.logprob,
            "bytes": list(data),
        }

    return [
        {**one(position.chosen), "top_logprobs": [one(token) for token in position.top]}
        for position in positions
    ]


@dataclass
class Head:
    """What all objects of one answer have in common."""

    id: str
    kind: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def object(self, choices: Sequence[Json], suffix: str = "", **more: Any) -> Json:
        """An object with these choices. ``suffix``: what the name of its kind ends with."""
        return {
            "id": self.id,
            "object": self.kind + suffix,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
            **more,
        }


class ChatShape:
    """One chat completion, whole or in chunks."""

    def __init__(self, token_bytes: TokenBytes, *, logprobs: bool) -> None:
        self._token_bytes = token_bytes
        self._logprobs = logprobs
        self._head = Head("", "chat.completion", "")
        self._messages: list[Json] = []
        self._positions: list[list[Json]] = []
        self._usage = pb.Usage()
        self._finished: list[Json] = []

    # --- in chunks ------------------------------------------------------------------------

    def chunks(self, response: chat.ChatResponse, n: int) -> list[Json]:
        """The chunks that tell of an event."""
        kind = response.WhichOneof("event")
        if kind == "started":
            self._head = Head(
                f"chatcmpl-{response.started.request_id}", "chat.completion", response.started.model
            )
            return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(n)]
        if kind == "finished":
            self._usage = response.finished.usage
            return [
                self._chunk(ended.index, {}, FINISH.get(ended.reason)) for ended in response.finished.choices
            ]
        delta = response.delta
        return [self._chunk(delta.index, _delta(delta), positions=delta.logprobs)]

    def usage_chunk(self) -> Json:
        """The chunk behind the last one, for who asked for it."""
        return self._head.object([], ".chunk", usage=usage(self._usage))

    def _chunk(
        self,
        index: int,
        delta: Json,
        finish: str | None = None,
        positions: Sequence[pb.PositionLogprobs] = (),
    ) -> Json:
        logprobs = {"content": chat_logprobs(positions, self._token_bytes)} if positions else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._head.object([choice], ".chunk")

    # --- whole ----------------------------------------------------------------------------

    def add(self, response: chat.ChatResponse, n: int) -> None:
        """Gathers an event."""
        kind = response.WhichOneof("event")
        if kind == "started":
            self._head = Head(
                f"chatcmpl-{response.started.request_id}", "chat.completion", response.started.model
            )
            self._messages = [{"role": "assistant", "content": ""} for _ in range(n)]
            self._positions = [[] for _ in range(n)]
        elif kind == "finished":
            self._usage = response.finished.usage
            self._finished = [
                {"index": ended.index, "finish_reason": FINISH.get(ended.reason)}
                for ended in response.finished.choices
            ]
        else:
            delta = response.delta
            _gather(self._messages[delta.index], delta)
            self._positions[delta.index] += chat_logprobs(delta.logprobs, self._token_bytes)

    def whole(self) -> Json:
        """The object, once the last event was added."""
        choices = []
        for ended in self._finished:
            index = ended["index"]
            message = dict(self._messages[index])
            if "tool_calls" in message and not message["content"]:
                message["content"] = None
            logprobs = {"content": self._positions[index]} if self._logprobs else None
            choices.append({**ended, "message": message, "logprobs": logprobs})
        return self._head.object(choices, usage=usage(self._usage))


def _delta(delta: chat.ChatDelta) -> Json:
    out: Json = {}
    if delta.content:
        out["content"] = delta.content
    if delta.reasoning:
        out["reasoning_content"] = delta.reasoning
    if delta.malformed:
        out["malformed_tool_call"] = True
    if delta.tool_calls:
        out["tool_calls"] = [_call(call) for call in delta.tool_calls]
    return out


def _call(call: chat.ToolCallDelta) -> Json:
    function: Json = {"arguments": call.arguments_json}
    out: Json = {"index": call.index, "function": function}
    if call.name:
        function["name"] = call.name
        out |= {"id": call.id, "type": "function"}
    return out


def _gather(message: Json, delta: chat.ChatDelta) -> None:
    message["content"] += delta.content
    if delta.reasoning:
        message["reasoning_content"] = message.get("reasoning_content", "") + delta.reasoning
    for call in delta.tool_calls:
        calls = message.setdefault("tool_calls", [])
        if call.index == len(calls):
            calls.append(
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
            )
        calls[call.index]["function"]["arguments"] += call.arguments_json
