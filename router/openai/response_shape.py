# SPDX-License-Identifier: Apache-2.0
"""From events of a turn to the objects and events of ``/v1/responses``.

An answer is a list of items: what the model thought, what it said, what it called. One item is open at a time; another kind of text
closes it.
"""

import time
from typing import Any

from twinpool.router.openai.response_request import ResponseRequest
from twinpool.v1 import chat_pb2 as chat
from twinpool.v1 import inference_pb2 as pb

Json = dict[str, Any]


class ResponseShape:
    """One response, whole and as events."""

    def __init__(self, asked: ResponseRequest) -> None:
        self._asked = asked
        self._id = ""
        self._model = asked.model
        self._created = int(time.time())
        self._items: list[Json] = []
        self._open: Json | None = None
        self._sequence = 0
        self._status = "in_progress"
        self._reason: str | None = None
        self._usage: Json | None = None

    def events(self, response: chat.ChatResponse) -> list[Json]:
        """The events that tell of an event of the turn."""
        kind = response.WhichOneof("event")
        if kind == "started":
            self._id, self._model = response.started.request_id, response.started.model
            return [
                self._event("response.created", response=self.whole()),
                self._event("response.in_progress", response=self.whole()),
            ]
        if kind == "finished":
            return self._finish(response.finished)
        return self._delta(response.delta)

    def whole(self) -> Json:
        """The object as it stands."""
        asked = self._asked
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "model": self._model,
            "output": [dict(item) for item in self._items],
            "usage": self._usage,
            "error": None,
            "incomplete_details": {"reason": self._reason} if self._reason else None,
            "instructions": asked.instructions,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "max_output_tokens": asked.max_output_tokens,
            "tool_choice": asked.tool_choice if isinstance(asked.tool_choice, str) else "auto",
            "tools": [tool.model_dump() for tool in asked.tools or ()],
        }

    # --- inside ---------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> Json:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _delta(self, delta: chat.ChatDelta) -> list[Json]:
        out: list[Json] = []
        for kind, text in (("reasoning", delta.reasoning), ("message", delta.content)):
            if text:
                out += self._text(kind, text)
        for call in delta.tool_calls:
            out += self._call(call)
        return out

    def _text(self, kind: str, text: str) -> list[Json]:
        out = [] if self._open is not None and self._open["type"] == kind else self._begin_text(kind)
        assert self._open is not None
        self._open["content"][0]["text"] += text
        name = "output_text" if kind == "message" else "reasoning_text"
        more: Json = {"logprobs": []} if kind == "message" else {}
        return [
            *out,
            self._event(f"response.{name}.delta", **self._place(), content_index=0, delta=text, **more),
        ]

    def _begin_text(self, kind: str) -> list[Json]:
        if kind == "message":
            part: Json = {"type": "output_text", "text": "", "annotations": []}
            item: Json = {"type": kind, "role": "assistant", "status": "in_progress", "content": [part]}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"type": kind, "summary": [], "status": "in_progress", "content": [part]}
        out = self._begin({"message": "msg", "reasoning": "rs"}[kind], item)
        return [
            *out,
            self._event("response.content_part.added", **self._place(), content_index=0, part=dict(part)),
        ]

    def _call(self, call: chat.ToolCallDelta) -> list[Json]:
        out: list[Json] = []
        if call.name:
            item: Json = {
                "type": "function_call", "call_id": call.id, "name": call.name, "arguments": "", "status": "in_progress",
            }  # fmt: skip
            out += self._begin("fc", item)
        if call.arguments_json and self._open is not None:
            self._open["arguments"] += call.arguments_json
            out.append(
                self._event(
                    "response.function_call_arguments.delta", **self._place(), delta=call.arguments_json
                )
            )
        return out

    def _begin(self, prefix: str, item: Json) -> list[Json]:
        out = self._close()
        self._open = {"id": f"{prefix}_{self._id}_{len(self._items)}", **item}
        self._items.append(self._open)
        shown = {**self._open, "content": []} if "content" in item else dict(self._open)
        return [
            *out,
            self._event("response.output_item.added", output_index=len(self._items) - 1, item=shown),
        ]

    def _place(self) -> Json:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._items) - 1}

    def _close(self, status: str = "completed") -> list[Json]:
        item = self._open
        if item is None:
            return []
        item["status"] = status
        out: list[Json] = []
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            out.append(self._event("response.function_call_arguments.done", **self._place(), **done))
        else:
            part = dict(item["content"][0])
            name = "output_text" if item["type"] == "message" else "reasoning_text"
            more: Json = {"logprobs": []} if item["type"] == "message" else {}
            where = {**self._place(), "content_index": 0}
            out.append(self._event(f"response.{name}.done", **where, text=part["text"], **more))
            out.append(self._event("response.content_part.done", **where, part=part))
        out.append(
            self._event("response.output_item.done", output_index=len(self._items) - 1, item=dict(item))
        )
        self._open = None
        return out

    def _finish(self, finished: pb.GenerateFinished) -> list[Json]:
        cut = any(choice.reason == pb.FINISH_REASON_LENGTH for choice in finished.choices)
        self._status = "incomplete" if cut else "completed"
        self._reason = "max_output_tokens" if cut else None
        out = self._close(self._status)
        used = finished.usage
        self._usage = {
            "input_tokens": used.prompt_tokens,
            "input_tokens_details": {"cached_tokens": max(used.cached_tokens, used.decode_cached_tokens)},
            "output_tokens": used.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used.prompt_tokens + used.completion_tokens,
        }
        return [*out, self._event(f"response.{self._status}", response=self.whole())]
