# SPDX-License-Identifier: Apache-2.0
"""What a model writes, as reasoning, content and calls: every format, every cut, and whatever else it may write."""

import json
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    find_format,
    format_of_template,
)
from twinpool.text.calls import registry as calls_registry
from twinpool.text.calls.formats import BUILT_IN, HERMES

HERMES_CALL = (
    '<tool_call>\n{"name": "look", "arguments": {"at": "}{\\"", "n": [1, {"x": null}]}}\n</tool_call>'
)
LOOK = ("look", {"at": '}{"', "n": [1, {"x": None}]})
DEEPSEEK_3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{}\n```<｜tool▁call▁end｜>\n"
    '<｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{"a": "```"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
DEEPSEEK_31 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    '<｜tool▁call▁begin｜>find<｜tool▁sep｜>{"a": "```"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
PAIR = [("look", {}), ("find", {"a": "```"})]


@dataclass
class Whole:
    """An answer put together from its events."""

    content: str = ""
    reasoning: str = ""
    malformed: str = ""
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    ended: dict[int, bool] = field(default_factory=dict)

    @property
    def calls(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(text)) for name, text in zip(self.names, self.arguments, strict=True)]

    def add(self, event: Event) -> None:
        match event:
            case Content(text, malformed):
                assert text
                self.content += text
                self.malformed += text if malformed else ""
            case Reasoning(text):
                assert text
                self.reasoning += text
            case CallStarted(index, name):
                assert index == len(self.names), "calls are numbered in order"
                self.names.append(name)
                self.arguments.append("")
            case CallArguments(index, text):
                assert text
                assert index == len(self.names) - 1
                assert index not in self.ended
                self.arguments[index] += text
            case CallEnded(index, malformed):
                assert index not in self.ended, "a call ends once"
                self.ended[index] = malformed


def read(text: str, calls: str = "", thinking: Thinking | None = None, cuts: int = 1) -> Whole:
    """Reads a text in pieces of so many characters."""
    parser = AnswerParser(find_format(calls) if calls else None, thinking)
    whole = Whole()
    for at in range(0, len(text), cuts):
        for event in parser.push(text[at : at + cuts]):
            whole.add(event)
    for event in parser.finish():
        whole.add(event)
    assert list(whole.ended) == list(range(len(whole.names))), "every call ends"
    return whole


@pytest.mark.parametrize("cuts", [1, 3, 1000])
@pytest.mark.parametrize(
    ("calls", "text", "expected", "content"),
    [
        ("hermes", HERMES_CALL, [LOOK], ""),
        ("hermes", f"Let me see.\n\n{HERMES_CALL}\n{HERMES_CALL}\n", [LOOK, LOOK], "Let me see."),
        ("hermes", f"{HERMES_CALL}\nDone.", [LOOK], "Done."),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", {"a": 1})], ""),
        ("hermes", '<tool_call>{"name": "f", "id": [1], "arguments": "{\\"a\\": 1}"}', [("f", {"a": 1})], ""),
        ("hermes", '<tool_call>{"name": "f"}', [("f", {})], ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", {})], ""),
        ("hermes", "a < b <tool", [], "a < b <tool"),
        ("deepseek", DEEPSEEK_3, PAIR, ""),
        ("deepseek", f"Now.\n{DEEPSEEK_31}", PAIR, "Now."),
        ("llama3_json", '{"name": "look", "parameters": {}}', [("look", {})], ""),
        ("llama3_json", '\n<|python_tag|>{"name": "a", "parameters": {"b": 1}}', [("a", {"b": 1})], ""),
        (
            "llama3_json",
            '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}',
            [("a", {}), ("b", {})],
            "",
        ),
        ("llama3_json", 'It is {"name": "a", "parameters": {}}', [], 'It is {"name": "a", "parameters": {}}'),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b"}]',
            [("a", {}), ("b", {})],
            "",
        ),
        (
            "mistral",
            'So: [TOOL_CALLS] [{"arguments": {"c": 2}, "name": "a", "id": "x"}]',
            [("a", {"c": 2})],
            "So:",
        ),
        (
            "mistral",
            '[TOOL_CALLS]a[ARGS]{"c": [2]}[TOOL_CALLS]b[CALL_ID]x1[ARGS]{}',
            [("a", {"c": [2]}), ("b", {})],
            "",
        ),
        ("mistral", '[TOOL_CALLS]a{"c": 2}', [("a", {"c": 2})], ""),
        ("", HERMES_CALL, [], HERMES_CALL),
    ],
)
def test_formats(calls: str, text: str, expected: list[Any], content: str, cuts: int) -> None:
    whole = read(text, calls, cuts=cuts)
    assert whole.calls == expected
    assert whole.content == content
    assert not whole.malformed
    assert not any(whole.ended.values())


@pytest.mark.parametrize("cuts", [1, 1000])
@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ("hermes", "<tool_call>look at this</tool_call> please"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5}</tool_call>'),
        ("hermes", '<tool_call>{"name": ""}</tool_call>'),
        ("hermes", '<tool_call>{"na'),
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>{name: f}</tool_call>"),
        ("deepseek", "<｜tool▁call▁begin｜>never ends " + "x" * 300),
        ("deepseek", "<｜tool▁call▁begin｜><｜tool▁sep｜>{}"),
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS] none today"),
        ("mistral", "[TOOL_CALLS][1, 2]"),
    ],
)
def test_what_is_no_call_is_given_back_as_it_is(calls: str, text: str, cuts: int) -> None:
    whole = read(text, calls, cuts=cuts)
    assert whole.names == []
    assert whole.content == text
    assert whole.malformed
    assert text.startswith(whole.malformed)


@pytest.mark.parametrize(
    ("calls", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {bad}}</tool_call>', "{bad}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', '{"a": '),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "[1]"),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{]<｜tool▁call▁end｜>", "{]"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a', '{"a'),
    ],
)
def test_bad_arguments_are_given_as_they_are_and_flagged(calls: str, text: str, arguments: str) -> None:
    whole = read(text, calls, cuts=1)
    assert whole.names == ["f"]
    assert whole.arguments == [arguments]
    assert whole.ended == {0: True}


def test_arguments_are_told_while_they_are_written() -> None:
    parser = AnswerParser(HERMES)
    assert parser.push('<tool_call>\n{"name": "f", "argu') == [CallStarted(0, "f")]
    assert parser.push('ments": {"a": "lo') == [CallArguments(0, '{"a": "lo')]
    assert parser.push("ng") == [CallArguments(0, "ng")]
    assert parser.push('"}}') == [CallArguments(0, '"}'), CallEnded(0)]
    assert parser.push("\n</tool_call>") == []
    assert parser.finish() == []


def test_content_is_told_as_soon_as_it_cannot_be_a_mark() -> None:
    parser = AnswerParser(HERMES)
    assert parser.push("1 <") == [Content("1")]
    assert parser.push("tool") == []
    assert parser.push("box>") == [Content(" <toolbox>")]


@pytest.mark.parametrize("cuts", [1, 2, 1000])
@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nWell, 1 < 2.\n</think>\n\nYes.", False, "Well, 1 < 2.", "Yes."),
        ("Well.\n</think>\n\nYes.", True, "Well.", "Yes."),
        ("<think>Well.</think>Yes.", True, "Well.", "Yes."),
        ("\n<think></think>Yes.", False, "", "Yes."),
        ("Yes. <think>no</think>", False, "", "Yes. <think>no</think>"),
        ("<think>it never ends ", False, "it never ends ", ""),
        (" Yes.", False, "", " Yes."),
    ],
)
def test_reasoning(text: str, opened: bool, reasoning: str, content: str, cuts: int) -> None:
    whole = read(text, thinking=Thinking(open=opened), cuts=cuts)
    assert (whole.reasoning, whole.content) == (reasoning, content)


def test_a_call_behind_reasoning() -> None:
    whole = read(f"<think>\n{HERMES_CALL}?\n</think>\n\n{HERMES_CALL}", "hermes", Thinking())
    assert whole.reasoning == f"{HERMES_CALL}?"
    assert whole.calls == [LOOK]
    assert whole.content == ""


PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    '{"name": "f", ', '"arguments": ', '{"a": 1}', "}", "{", '"', "\\", "[", "]", ",",
    ":", ";", " ", "\n", "```json", "f", "<", "é", "1e5", "nul",
]  # fmt: skip


@given(
    st.lists(st.sampled_from(PIECES), max_size=30).map("".join),
    st.sampled_from(["", *(format_.name for format_ in BUILT_IN)]),
    st.sampled_from([None, Thinking(), Thinking(open=True)]),
    st.integers(1, 7),
)
def test_whatever_is_written_it_does_not_matter_how_it_is_cut(
    text: str, calls: str, thinking: Thinking | None, cuts: int
) -> None:
    assert read(text, calls, thinking, cuts) == read(text, calls, thinking, max(1, len(text)))


@given(
    st.lists(st.tuples(st.text(min_size=1, max_size=8), st.dictionaries(st.text(), st.integers() | st.text())), max_size=3),
    st.sampled_from(["hermes", "llama3_json", "mistral"]),
    st.integers(1, 9),
)  # fmt: skip
def test_calls_come_back_as_they_were(calls: list[tuple[str, dict[str, Any]]], kind: str, cuts: int) -> None:
    objects = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    text = {
        "hermes": "".join(f"<tool_call>{text}</tool_call>" for text in objects),
        "llama3_json": ";".join(objects),
        "mistral": f"[TOOL_CALLS][{','.join(objects)}]",
    }[kind]
    assert read(text, kind, cuts=cuts).calls == calls


def test_the_cost_of_a_character_does_not_grow_with_the_answer() -> None:
    parser = AnswerParser(HERMES)
    parser.push('<tool_call>{"name": "f", "arguments": {"a": "')
    for _ in range(50):
        parser.push("x" * 1000)
        assert len(parser._source.text) <= 1000, "what was told is not kept"


MINE = Format("mine", ("<go>",), HERMES.reader)


def test_formats_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        EntryPoint("a", "tests.unit.text.test_text_calls:missing", calls_registry.GROUP),
        EntryPoint("b", "tests.unit.text.test_text_calls:HERMES", calls_registry.GROUP),
        EntryPoint("c", "tests.unit.text.test_text_calls:MINE", calls_registry.GROUP),
    ]
    monkeypatch.setattr(calls_registry, "entry_points", lambda group: entries)
    calls_registry.formats.cache_clear()
    try:
        assert find_format("mine").begin == MINE.begin
        assert find_format("hermes") is HERMES, "a name that is in use is not taken over"
        assert read('<go>{"name": "f"}', "mine").names == ["f"]
    finally:
        calls_registry.formats.cache_clear()


def test_a_template_that_shows_no_calls() -> None:
    assert format_of_template("{{ messages }}") is None
