# SPDX-License-Identifier: Apache-2.0
"""``POST /v1/responses``: the request. Nothing is kept between two of them, so each brings all that was said before."""

import json
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StrictBool, Tag

from twinpool.router.bodies import Body, Number, Uint32
from twinpool.router.openai.fields import Ignored, JsonFormat, NamedFunction, TextFormat
from twinpool.v1 import chat_pb2 as chat
from twinpool.v1 import inference_pb2 as pb


class TextPart(Body):
    """A part of a message; only text is known."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class MessageItem(Body):
    """Something that was said."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    def fill(self, messages: Any) -> None:
        """Adds it to a conversation."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        messages.add(role="system" if self.role == "developer" else self.role, content=text)


class CallItem(Body):
    """A call that was made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    namespace: None = None

    def fill(self, messages: Any) -> None:
        """Adds it to a conversation: calls of one turn stand together."""
        last = messages[-1] if len(messages) else None
        turn = last if last is not None and last.role == "assistant" else messages.add(role="assistant")
        turn.tool_calls.add(id=self.call_id, name=self.name, arguments_json=self.arguments or "{}")


class OutputItem(Body):
    """What a call has brought."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[TextPart]
    id: str | None = None
    status: str | None = None

    def fill(self, messages: Any) -> None:
        """Adds it to a conversation."""
        output = self.output
        text = output if isinstance(output, str) else "".join(part.text for part in output)
        messages.add(role="tool", tool_call_id=self.call_id, content=text)


class ReasoningItem(Body):
    """What the model thought. Templates leave out what was thought in earlier turns, and so does this."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: None = None
    status: str | None = None

    def fill(self, messages: Any) -> None:
        """Adds nothing."""


def _kind(item: Any) -> str:
    found = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "")
    return found if found in ("function_call", "function_call_output", "reasoning") else "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class FunctionTool(NamedFunction):
    """A tool; only functions are known."""

    type: Literal["function"]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class NamedTool(NamedFunction):
    """A tool by its name."""

    type: Literal["function"]


class SchemaFormat(Body):
    """JSON under a schema."""

    type: Literal["json_schema"]
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: StrictBool | None = None


class Text(Body):
    """The form of the answer."""

    format: TextFormat | JsonFormat | SchemaFormat | None = Field(default=None, discriminator="type")
    verbosity: None = None


class ResponseRequest(Ignored):
    """The body of the request."""

    model: str = ""
    input: str | list[Item]
    instructions: str | None = None
    stream: StrictBool | None = None
    max_output_tokens: Uint32 | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None
    text: Text | None = None
    reasoning: None = None
    include: Annotated[list[str], Field(max_length=0)] | None = None
    store: Literal[False] | None = None
    previous_response_id: None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None

    def request(self) -> chat.ChatRequest:
        """The same request as over gRPC."""
        out = chat.ChatRequest()
        request = out.request
        request.model = self.model
        if self.temperature is not None:
            request.sampling.temperature = self.temperature
        if self.top_p is not None:
            request.sampling.top_p = self.top_p
        if self.max_output_tokens is not None:
            request.stop.max_tokens = self.max_output_tokens
        messages = request.chat.messages
        if self.instructions:
            messages.add(role="system", content=self.instructions)
        if isinstance(self.input, str):
            messages.add(role="user", content=self.input)
        else:
            for item in self.input:
                item.fill(messages)
        request.chat.SetInParent()
        self._fill_form(request)
        self._fill_tools(out)
        return out

    def _fill_form(self, request: pb.GenerateRequest) -> None:
        form = self.text.format if self.text is not None else None
        if isinstance(form, SchemaFormat):
            request.structured.json_schema = json.dumps(form.schema_)
        elif isinstance(form, JsonFormat):
            request.structured.json_schema = '{"type": "object"}'

    def _fill_tools(self, out: chat.ChatRequest) -> None:
        for tool in self.tools or ():
            schema = json.dumps(tool.parameters) if tool.parameters is not None else ""
            out.request.chat.tools.add(
                name=tool.name, description=tool.description or "", parameters_json=schema
            )
        out.single_call = self.parallel_tool_calls is False
        if isinstance(self.tool_choice, NamedTool):
            out.tool_name = self.tool_choice.name
        elif self.tool_choice == "none":
            out.tool_choice = chat.TOOL_CHOICE_MODE_NONE
        elif self.tool_choice == "required":
            out.tool_choice = chat.TOOL_CHOICE_MODE_REQUIRED
