# SPDX-License-Identifier: Apache-2.0
"""What a conversation may contain, and what becomes of it."""

from collections.abc import Callable

import pytest

from tests.support.published import published
from twinpool.config import RouterSection
from twinpool.errors import TwinpoolError
from twinpool.router.chat.conversation import check_conversation, render
from twinpool.text import Tokenizer
from twinpool.v1 import inference_pb2 as pb

LIMITS = RouterSection(max_tools=3, max_prompt_chars=2000)
SCHEMA = '{"type": "object", "properties": {"town": {"type": "string"}}}'


def conversation(change: Callable[[pb.ChatMessages], object] = lambda chat: None) -> pb.ChatMessages:
    """A user's question, a call, its result."""
    call = pb.ToolCall(id="call00001", name="weather", arguments_json='{"town": "Bern"}')
    chat = pb.ChatMessages(
        messages=[
            pb.ChatMessage(role="user", content="Does it rain?"),
            pb.ChatMessage(role="assistant", tool_calls=[call]),
            pb.ChatMessage(role="tool", content="No.", tool_call_id="call00001", name="weather"),
        ],
        tools=[pb.Tool(name="weather", description="Says what the weather is.", parameters_json=SCHEMA)],
    )
    change(chat)
    return chat


def continue_nothing(chat: pb.ChatMessages) -> None:
    chat.continue_final_message = True
    chat.messages.add(role="assistant")


def test_a_conversation_with_calls_is_accepted_and_shown() -> None:
    chat = conversation()
    check_conversation(chat, LIMITS)
    text = render(chat, Tokenizer.from_pretrained(published("qwen3")))
    for part in ("Does it rain?", '{"name": "weather", "arguments": {"town": "Bern"}}', "No.", "Says what"):
        assert part in text
    assert text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        (lambda chat: setattr(chat.messages[0], "role", "robot"), "chat.messages[0].role", "INVALID_CHAT"),
        (lambda chat: setattr(chat.messages[1], "role", "user"), "chat.messages[1].tool_calls", "INVALID_CHAT"),
        (lambda chat: setattr(chat.messages[2], "role", "user"), "chat.messages[2].tool_call_id", "INVALID_CHAT"),
        (
            lambda chat: setattr(chat.messages[1].tool_calls[0], "arguments_json", "[1]"),
            "chat.messages[1].tool_calls[0].arguments_json",
            "INVALID_CHAT",
        ),
        (
            lambda chat: setattr(chat.messages[1].tool_calls[0], "arguments_json", "[" * 100_000),
            "chat.messages[1].tool_calls[0].arguments_json",
            "INVALID_CHAT",
        ),
        (
            lambda chat: setattr(chat.messages[1].tool_calls[0], "name", ""),
            "chat.messages[1].tool_calls[0].name",
            "INVALID_CHAT",
        ),
        (lambda chat: setattr(chat.tools[0], "name", "a b"), "chat.tools[0].name", "INVALID_TOOLS"),
        (lambda chat: setattr(chat.tools[0], "parameters_json", "{"), "chat.tools[0].parameters_json", "INVALID_TOOLS"),
        (lambda chat: chat.tools.add(name="weather"), "chat.tools[1].name", "INVALID_TOOLS"),
        (lambda chat: chat.tools.extend(pb.Tool(name=n) for n in "abc"), "chat.tools", "INVALID_TOOLS"),
        (lambda chat: setattr(chat, "variables_json", "5"), "chat.variables_json", "INVALID_CHAT"),
        (lambda chat: setattr(chat.tools[0], "description", "x" * 3000), "chat.messages", "PROMPT_TOO_LONG"),
        (
            continue_nothing,
            "chat.continue_final_message",
            "INVALID_CHAT",
        ),
    ],
)  # fmt: skip
def test_refusals_name_the_field(
    change: Callable[[pb.ChatMessages], object], field: str, reason: str
) -> None:
    with pytest.raises(TwinpoolError) as caught:
        check_conversation(conversation(change), LIMITS)
    assert (caught.value.reason, caught.value.field) == (reason, field)
    assert caught.value.message.startswith(field.removesuffix(".messages"))


def test_a_model_that_cannot_see_tools_is_not_asked_to_use_them() -> None:
    tokenizer = Tokenizer.from_pretrained(published("llama3_1"))
    with pytest.raises(TwinpoolError) as caught:
        render(conversation(), tokenizer)
    assert caught.value.reason == "INVALID_TOOLS"
    chat = conversation(lambda chat: chat.ClearField("tools"))
    with pytest.raises(TwinpoolError) as caught:
        render(chat, tokenizer)
    assert caught.value.reason == "INVALID_CHAT", "what was called before cannot be shown either"


def test_variables_and_continued_messages_reach_the_template() -> None:
    tokenizer = Tokenizer.from_pretrained(published("qwen3"))
    quiet = conversation(lambda chat: setattr(chat, "variables_json", '{"enable_thinking": false}'))
    assert render(quiet, tokenizer).endswith("<think>\n\n</think>\n\n")
    chat = pb.ChatMessages(
        messages=[
            pb.ChatMessage(role="user", content="a"),
            pb.ChatMessage(role="assistant", content="It is"),
        ],
        continue_final_message=True,
    )
    assert render(chat, tokenizer).endswith("It is")
