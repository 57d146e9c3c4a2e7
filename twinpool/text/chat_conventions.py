# SPDX-License-Identifier: Apache-2.0
"""What a chat template expects of calls of tools. Templates differ, and do not say; so each is tried once.

Some print the arguments of a call as they are and need a string, others need an object. Some look at whether the content of a
message with calls is None, others join it to text. And some never show the tools at all.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from twinpool.text.chat_template import ChatTemplate, Message
from twinpool.text.errors import ChatTemplateError

# Words that no template holds by itself. The id has the only length that Mistral's templates accept.
_NAME: Final = "qzprobe_name"
_KEY: Final = "qzprobe_key"
_RESULT: Final = "qzprobe_result"
_ID: Final = "qzprobeid"


@dataclass(frozen=True, slots=True)
class ChatConventions:
    """What was found out about a template."""

    shows_tools: bool
    """Whether the tools of a request reach the prompt."""
    shows_calls: bool
    """Whether the calls of earlier turns and their results do."""
    arguments_as_text: bool = False
    """Arguments as JSON text; else as an object."""
    empty_content: str | None = None
    """What stands for the content of a message that only calls."""
    keep_none: bool = False
    """Whether the template must see that as None; else the field is left out."""

    @classmethod
    def of(cls, template: ChatTemplate) -> "ChatConventions":
        """Tries the template."""
        tools = [_tool()]
        shows_tools = _NAME in _rendered(template, [_user()], tools)
        for as_text, (empty, keep) in product((False, True), ((None, False), (None, True), ("", False))):
            form = cls(shows_tools, True, as_text, empty, keep)
            if form._works(template, tools if shows_tools else None):
                return form
        return cls(shows_tools, False)

    def message(self, message: Message) -> dict[str, Any]:
        """A message as the template wants it. ``tool_calls`` hold their arguments as JSON text."""
        plain = dict(message)
        calls = plain.get("tool_calls")
        if not calls:
            return plain
        if not plain.get("content"):
            plain["content"] = self.empty_content
        plain["tool_calls"] = [self._call(call) for call in calls]
        return plain

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        if not self.arguments_as_text:
            function["arguments"] = json.loads(function["arguments"])
        return {**call, "function": function}

    def _works(self, template: ChatTemplate, tools: list[dict[str, Any]] | None) -> bool:
        text = _rendered(
            template, [self.message(message) for message in _conversation()], tools, self.keep_none
        )
        shown = all(word in text for word in (_NAME, _RESULT, f'"{_KEY}"'))
        # An object where text is wanted may be printed as Python prints it, and text where an object is wanted is quoted twice.
        return shown and f'\\"{_KEY}' not in text and "None" not in text


def _user() -> Message:
    return {"role": "user", "content": "x"}


def _tool() -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": _NAME,
            "description": "x",
            "parameters": {"type": "object", "properties": {}},
        },
    }


def _conversation() -> list[Message]:
    call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": f'{{"{_KEY}": 1}}'}}
    return [
        _user(),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": _NAME, "tool_call_id": _ID, "content": _RESULT},
    ]


def _rendered(
    template: ChatTemplate,
    messages: list[Any],
    tools: list[dict[str, Any]] | None,
    keep_none: bool = False,
) -> str:
    try:
        return template.render(messages, tools=tools, keep_none=keep_none)
    except ChatTemplateError:
        return ""
