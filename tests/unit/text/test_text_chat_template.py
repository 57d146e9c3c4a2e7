# SPDX-License-Identifier: Apache-2.0
"""The template's environment: helpers, refusals, and the sandbox."""

from datetime import datetime

import pytest

from twinpool.text import ChatTemplateError, TokenizerLoadError
from twinpool.text.chat_template import ChatTemplate

USER = [{"role": "user", "content": "hello"}]


def render(source: str, **special: str) -> str:
    return ChatTemplate(source, special, now=lambda: datetime(2026, 11, 30, 7, 5)).render(USER)


def test_helpers() -> None:
    assert render("{{ strftime_now('%d %b %Y %H:%M') }}") == "30 Nov 2026 07:05"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ [1, 2] | tojson(separators=(',', ':')) }}") == "[1,2]"
    assert render("{{ bos_token }}{{ eos_token }}", bos_token="<s>") == "<s>"
    assert render("{{ dict(a=1).a }}{{ dict.fromkeys(['x'], 2).x }}") == "12"
    assert render("{% set ns = namespace(self=1, a=2) %}{% set ns.a = 3 %}{{ ns.self }}{{ ns.a }}") == "13"
    assert render("a\n  {% generation %}\n{{ messages[0].content }}{% endgeneration %}\n") == "a\nhello"


@pytest.mark.parametrize(("keep", "expected"), [(False, "FalseFalse"), (True, "TrueTrue")])
def test_a_field_that_is_none_is_absent_unless_it_is_wanted(keep: bool, expected: str) -> None:
    template = ChatTemplate("{{ 'tool_calls' in messages[0] }}{{ messages[0].tool_calls is none }}", {})
    assert template.render([{"role": "user", "content": "x", "tool_calls": None}], keep_none=keep) == expected


def test_variables_go_before_special_tokens() -> None:
    template = ChatTemplate("{{ bos_token }}{{ thinking }}", {"bos_token": "<s>"})
    assert template.render(USER, variables={"bos_token": "B", "thinking": True}) == "BTrue"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].missing.deeper }}", "refused"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[9].role }}", "refused"),
    ],
)
def test_refusals(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(source)


def test_an_empty_conversation_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="empty"):
        ChatTemplate("x", {}).render([])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({'role': 'system', 'content': 'x'}) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{% set ns = namespace(_private=1) %}",
        "{% set ns = namespace(a=1) %}{% set ns.__class__ = 2 %}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ dict.__call__.__globals__.keys() }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


def test_a_broken_template_is_an_error_at_load() -> None:
    with pytest.raises(TokenizerLoadError, match="line 3"):
        ChatTemplate("a\nb\n{% endfor %}", {})
