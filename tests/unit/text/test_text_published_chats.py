# SPDX-License-Identifier: Apache-2.0
"""Conversations under the templates of published models: the text and the ids are those of transformers."""

import json
from functools import cache
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.published import DIGESTS, published
from twinpool.text import ChatTemplateError, Tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says what the weather is <now>.",
            "parameters": {
                "type": "object",
                "properties": {"town": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["town"],
            },
        },
    },
    {"type": "function", "function": {"name": "time", "description": "ü", "parameters": {"type": "object"}}},
]
SYSTEM = {"role": "system", "content": "You are terse."}
ASK = {"role": "user", "content": "What is the weather in Zürich? "}
SAY = {"role": "assistant", "content": " It rains.\n"}
THANK = {"role": "user", "content": "Thanks 🙂"}
CONVERSATIONS = [[ASK], [SYSTEM, ASK], [SYSTEM, ASK, SAY, THANK], [ASK, SAY, THANK, SAY, ASK]]


@cache
def both(name: str) -> tuple[Tokenizer, Any]:
    root = published(name)
    return Tokenizer.from_pretrained(root), AutoTokenizer.from_pretrained(root)


def call(name: str, arguments: str, number: int) -> dict[str, Any]:
    return {
        "id": f"call0000{number}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def turns(*calls: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation in which these calls were made and answered."""
    results = [
        {"role": "tool", "content": f'"result {made["id"]}"', "tool_call_id": made["id"]} for made in calls
    ]
    return [ASK, {"role": "assistant", "content": None, "tool_calls": list(calls)}, *results]


CALLS = [
    turns(call("weather", '{"town": "Zürich", "days": 2}', 1)),
    turns(call("weather", '{"town": "Bern"}', 1), call("time", "{}", 2)),
    [*turns(call("time", "{}", 3)), SAY, THANK],
]


@pytest.mark.parametrize("name", DIGESTS)
@pytest.mark.parametrize("prompt", [True, False])
def test_plain_conversations(name: str, prompt: bool) -> None:
    ours, theirs = both(name)
    for messages in CONVERSATIONS:
        text = theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
        assert ours.chat().render(messages, add_generation_prompt=prompt) == text
        ids = theirs.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]
        assert ours.encode_chat(messages, prompt).tolist() == ids


@pytest.mark.parametrize("name", ["qwen3", "mistral_nemo"])
def test_tools(name: str) -> None:
    ours, theirs = both(name)
    for messages in CONVERSATIONS:
        text = theirs.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, tokenize=False)
        assert "weather" in text
        assert ours.chat(with_tools=True).render(messages, tools=TOOLS) == text


@pytest.mark.parametrize("name", ["qwen3", "mistral_nemo"])
@pytest.mark.parametrize("messages", CALLS)
def test_calls_and_their_results(name: str, messages: list[dict[str, Any]]) -> None:
    ours, theirs = both(name)
    # The templates take the arguments as an object, and a content that is there.
    expected = json.loads(json.dumps(messages).replace("null", '""'))
    for function in (made["function"] for message in expected for made in message.get("tool_calls", ())):
        function["arguments"] = json.loads(function["arguments"])
    text = theirs.apply_chat_template(expected, add_generation_prompt=True, tokenize=False)
    assert "call0000" in text
    assert ours.chat().render(messages) == text


def test_calls_for_a_template_that_looks_for_none() -> None:
    # This template fails in transformers, which leaves the content out: it wants to see that there is none.
    text = both("deepseek_v3")[0].chat().render(CALLS[0])
    assert text == (
        "<｜begin▁of▁sentence｜><｜User｜>What is the weather in Zürich? "
        "<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        '```json\n{"town": "Zürich", "days": 2}\n```<｜tool▁call▁end｜>'
        '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>"result call00001"<｜tool▁output▁end｜><｜tool▁outputs▁end｜>'
    )


@pytest.mark.parametrize("name", DIGESTS)
@pytest.mark.parametrize("content", ["It ", "It  is", "\nSo", "a\n\n"])
def test_the_last_message_is_continued(name: str, content: str) -> None:
    ours, theirs = both(name)
    messages = [SYSTEM, ASK, {"role": "assistant", "content": content}]
    text = theirs.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    assert ours.chat().render(messages, continue_final_message=True) == text


def test_template_variables() -> None:
    ours, theirs = both("qwen3")
    for think in (True, False):
        text = theirs.apply_chat_template(
            [ASK], add_generation_prompt=True, tokenize=False, enable_thinking=think
        )
        assert ours.chat().render([ASK], variables={"enable_thinking": think}) == text


@pytest.mark.parametrize("name", ["deepseek_v3", "llama3_1"])
def test_tools_that_a_template_would_leave_out_are_refused(name: str) -> None:
    ours, _ = both(name)
    with pytest.raises(ChatTemplateError, match="does not show tools"):
        ours.chat(with_tools=True).render([ASK], tools=TOOLS)


@pytest.mark.parametrize(
    ("name", "calls", "thinks"),
    [
        ("deepseek_v3", "deepseek", False),
        ("qwen3", "hermes", True),
        ("mistral_nemo", "mistral", False),
        ("llama3_1", None, False),
    ],
)
def test_what_is_known_of_a_model(name: str, calls: str | None, thinks: bool) -> None:
    chat = both(name)[0].chat()
    assert (chat.calls.name if chat.calls else None) == calls
    assert (chat.thinking("...assistant\n") is not None) == thinks
    if thinking := chat.thinking("<think>\n"):
        assert thinking.open


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3", "mistral_nemo"])
def test_marks_of_calls_survive_where_special_tokens_are_skipped(name: str) -> None:
    ours, theirs = both(name)
    calls = ours.chat().calls
    assert calls is not None
    text = "".join(f"{marker} x" for marker in calls.markers)
    ids = ours.encode(text, add_special_tokens=False).tolist()
    end = theirs.eos_token_id
    assert ours.decode([*ids, end], keep=calls.markers) == text
    assert theirs.eos_token not in ours.decode([*ids, end], keep=calls.markers)
