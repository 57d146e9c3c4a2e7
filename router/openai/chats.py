# SPDX-License-Identifier: Apache-2.0
"""``POST /v1/chat/completions``: the request."""

import json
from typing import Any, Final, Literal

from pydantic import Field, StrictBool

from twinpool.errors import TwinpoolError
from twinpool.router.bodies import Body, Uint32
from twinpool.router.openai.fields import JsonFormat, NamedTool, Sampled, TextFormat, Tool
from twinpool.v1 import chat_pb2 as chat
from twinpool.v1 import inference_pb2 as pb

_ROLES: Final = {"developer": "system"}


class TextPart(Body):
    """A part of a message's content; only text is known."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """A call that was made."""

    name: str
    arguments: str


class Called(Body):
    """A call that was made, with its id."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[Called] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None

    def fill(self, message: pb.ChatMessage) -> None:
        """Puts all of it into ``message``."""
        message.role = _ROLES.get(self.role, self.role)
        content = self.content if self.content is not None else self.refusal or ""
        message.content = content if isinstance(content, str) else "".join(part.text for part in content)
        message.name = self.name or ""
        message.tool_call_id = self.tool_call_id or ""
        message.reasoning = self.reasoning_content or ""
        for call in self.tool_calls or ():
            message.tool_calls.add(
                id=call.id, name=call.function.name, arguments_json=call.function.arguments or "{}"
            )


class JsonSchema(Body):
    """A schema with its name."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: StrictBool | None = None


class SchemaFormat(Body):
    """JSON under a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class Document(Body):
    """A document for the template."""

    title: str = ""
    text: str


class ChatCompletion(Sampled):
    """The body of the request."""

    messages: list[Message]
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None
    max_completion_tokens: Uint32 | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Uint32 | None = None
    response_format: TextFormat | JsonFormat | SchemaFormat | None = Field(default=None, discriminator="type")
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[Document] | None = None
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    separate_reasoning: StrictBool = True

    def request(self) -> chat.ChatRequest:
        """The same request as over gRPC. Raises for parts that contradict each other."""
        out = chat.ChatRequest()
        request = out.request
        self.fill(request)
        if self.max_completion_tokens is not None:
            request.stop.max_tokens = self.max_completion_tokens
        if self.logprobs:
            request.logprobs = self.top_logprobs or 0
        elif self.top_logprobs:
            raise TwinpoolError(
                "INVALID_LOGPROBS", "top_logprobs needs logprobs to be true", field="top_logprobs"
            )
        request.chat.SetInParent()
        for message in self.messages:
            message.fill(request.chat.messages.add())
        for document in self.documents or ():
            request.chat.documents.add(title=document.title, text=document.text)
        if self.chat_template_kwargs:
            request.chat.variables_json = json.dumps(self.chat_template_kwargs)
        request.chat.continue_final_message = self.continue_final_message
        request.chat.omit_generation_prompt = not self.add_generation_prompt
        if isinstance(self.response_format, SchemaFormat):
            request.structured.json_schema = json.dumps(self.response_format.json_schema.schema_)
        elif isinstance(self.response_format, JsonFormat):
            request.structured.json_schema = '{"type": "object"}'
        self._fill_tools(out)
        out.raw_reasoning = not self.separate_reasoning
        return out

    def _fill_tools(self, out: chat.ChatRequest) -> None:
        for tool in self.tools or ():
            function = tool.function
            schema = json.dumps(function.parameters) if function.parameters is not None else ""
            out.request.chat.tools.add(
                name=function.name, description=function.description or "", parameters_json=schema
            )
        out.single_call = self.parallel_tool_calls is False
        if isinstance(self.tool_choice, NamedTool):
            out.tool_name = self.tool_choice.function.name
        elif self.tool_choice == "none":
            out.tool_choice = chat.TOOL_CHOICE_MODE_NONE
        elif self.tool_choice == "required":
            out.tool_choice = chat.TOOL_CHOICE_MODE_REQUIRED
