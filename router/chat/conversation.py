# SPDX-License-Identifier: Apache-2.0
"""A conversation with its tools, checked, and as the model's chat template wants it."""

import json
import re
from collections.abc import Iterable
from typing import Any, Final, NoReturn

from twinpool.config.router import RouterSection
from twinpool.errors import TwinpoolError
from twinpool.router.utf8 import refuse_unknown_fields
from twinpool.router.validate import shown
from twinpool.text import ChatTemplateError, Tokenizer
from twinpool.v1 import inference_pb2 as pb

ROLES: Final = ("system", "user", "assistant", "tool")
# What the APIs that agents speak allow, and every template can print.
_TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def check_conversation(chat: pb.ChatMessages, limits: RouterSection) -> None:
    """Raises for a conversation that no template should see."""
    refuse_unknown_fields(chat, "chat")
    if not chat.messages:
        raise TwinpoolError(
            "EMPTY_PROMPT", "chat.messages is empty; the limit is at least 1 message", field="chat.messages"
        )
    if len(chat.messages) > limits.max_chat_messages:
        _refuse(
            "chat.messages",
            f"has {len(chat.messages)} messages; the limit is {limits.max_chat_messages}",
        )
    for index, message in enumerate(chat.messages):
        _check_message(f"chat.messages[{index}]", message)
    _check_tools(chat.tools, limits)
    if chat.variables_json:
        _json_object("chat.variables_json", chat.variables_json)
    if chat.continue_final_message and not chat.messages[-1].content:
        _refuse("chat.continue_final_message", "needs a last message with content")
    chars = sum(map(len, _texts(chat)))
    if chars > limits.max_prompt_chars:
        raise TwinpoolError(
            "PROMPT_TOO_LONG",
            f"chat has {chars} characters; the limit is {limits.max_prompt_chars}",
            field="chat.messages",
            metadata={"limit": limits.max_prompt_chars},
        )


def render(chat: pb.ChatMessages, tokenizer: Tokenizer) -> str:
    """The prompt's text. Raises INVALID_CHAT or INVALID_TOOLS for what the model's template refuses."""
    try:
        template = tokenizer.chat(bool(chat.tools))
        if chat.tools and not template.conventions.shows_tools:
            raise TwinpoolError(
                "INVALID_TOOLS",
                "chat.tools has tools; the limit is none, since the model's chat template does not show any",
                field="chat.tools",
            )
        return template.render(
            [_message(message) for message in chat.messages],
            add_generation_prompt=not chat.omit_generation_prompt,
            tools=[_tool(tool) for tool in chat.tools],
            documents=[{"title": document.title, "text": document.text} for document in chat.documents],
            variables=json.loads(chat.variables_json) if chat.variables_json else None,
            continue_final_message=chat.continue_final_message,
        )
    except ChatTemplateError as error:
        raise TwinpoolError("INVALID_CHAT", f"chat.messages: {error}", field="chat.messages") from error


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("name", "tool_call_id"):
        if value := getattr(message, name):
            plain[name] = value
    if message.reasoning:
        plain["reasoning_content"] = message.reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_json or "{}"},
            }
            for call in message.tool_calls
        ]
    return plain


def _tool(tool: pb.Tool) -> dict[str, Any]:
    parameters = json.loads(tool.parameters_json) if tool.parameters_json else _NO_PARAMETERS
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


_NO_PARAMETERS: Final = {"type": "object", "properties": {}}


def _check_message(field: str, message: pb.ChatMessage) -> None:
    refuse_unknown_fields(message, field)
    if message.role not in ROLES:
        _refuse(f"{field}.role", f"is {shown(message.role)}; the limit is one of {', '.join(ROLES)}")
    if message.tool_calls and message.role != "assistant":
        _refuse(f"{field}.tool_calls", f"belong to an assistant's turn; its role is {message.role}")
    if message.tool_call_id and message.role != "tool":
        _refuse(f"{field}.tool_call_id", f"belongs to a tool's turn; its role is {message.role}")
    for index, call in enumerate(message.tool_calls):
        refuse_unknown_fields(call, f"{field}.tool_calls[{index}]")
        if not call.name:
            _refuse(f"{field}.tool_calls[{index}].name", "is empty")
        if call.arguments_json:
            _json_object(f"{field}.tool_calls[{index}].arguments_json", call.arguments_json)


def _check_tools(tools: Iterable[pb.Tool], limits: RouterSection) -> None:
    names: set[str] = set()
    for index, tool in enumerate(tools):
        field = f"chat.tools[{index}]"
        refuse_unknown_fields(tool, field)
        if index >= limits.max_tools:
            _refuse("chat.tools", f"has more than {limits.max_tools} tools", "INVALID_TOOLS")
        if not _TOOL_NAME.fullmatch(tool.name):
            text = f"is {shown(tool.name)}; the limit is 1 to 128 characters of A-Z a-z 0-9 _ . -"
            _refuse(f"{field}.name", text, "INVALID_TOOLS")
        if tool.name in names:
            _refuse(f"{field}.name", f"is {tool.name!r}; another tool has this name", "INVALID_TOOLS")
        names.add(tool.name)
        if tool.parameters_json:
            _json_object(f"{field}.parameters_json", tool.parameters_json, "INVALID_TOOLS")


def _json_object(field: str, text: str, reason: str = "INVALID_CHAT") -> None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        _refuse(field, "is not a JSON object", reason)


def _texts(chat: pb.ChatMessages) -> Iterable[str]:
    yield chat.variables_json
    for tool in chat.tools:
        yield from (tool.description, tool.parameters_json)
    for document in chat.documents:
        yield from (document.title, document.text)
    for message in chat.messages:
        yield from (message.content, message.reasoning)
        for call in message.tool_calls:
            yield call.arguments_json


def _refuse(field: str, text: str, reason: str = "INVALID_CHAT") -> NoReturn:
    raise TwinpoolError(reason, f"{field} {text}", field=field)
