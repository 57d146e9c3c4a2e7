# SPDX-License-Identifier: Apache-2.0
"""How the families of models write calls of tools.

Sources: the chat templates of the models, which show the form that a model was trained on.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from twinpool.text.calls.emitter import Emitter
from twinpool.text.calls.source import MalformedError, Reading, Source

MAX_NAME_CHARS: Final = 256
"""A longer name is no name."""

_ARGUMENTS: Final = ("arguments", "parameters")

Reader = Callable[[Source, Emitter], Reading[None]]
"""Reads what follows a marker, up to the end of what it says. Raises MalformedError."""


@dataclass(frozen=True, slots=True)
class Format:
    """How calls are written."""

    name: str
    begin: tuple[str, ...]
    """Markers that begin a call or several; what stands before them is content."""
    reader: Reader
    silent: tuple[str, ...] = ()
    """Markers that say nothing by themselves."""
    inner: tuple[str, ...] = ()
    """Markers that only mean something within a call."""
    at_start: str = ""
    """What an answer as a whole begins with if it is a call without a marker; "": nothing."""
    before_name: str = ""
    """How an answer begins that is a call, up to the tool's name."""
    after_name: str = ""
    """What follows the name, up to the arguments."""
    before_arguments: str = ""
    """What stands between that and the arguments: it begins a token, so it is not part of a prompt's end."""
    after_arguments: str = ""
    """What makes the call complete behind its arguments."""
    end: str = ""
    """What ends a call and nothing else; "": nothing does."""
    id_chars: int = 24
    """Length of the ids of calls that the model's template accepts."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers. Where they are special tokens, they must not be left out of the text."""
        return (*self.begin, *self.silent, *self.inner)

    def opening(self, name: str = "") -> str:
        """How an answer begins that must be a call: of the tool ``name``, or of any if that is empty."""
        return f"{self.before_name}{name}{self.after_name}" if name else self.before_name


def read_object(source: Source, out: Emitter) -> Reading[None]:
    """One call as an object: ``{"name": ..., "arguments": {...}}``, in any order."""
    out.opens(source)
    yield from source.expect("{")
    named, arguments = False, ""
    while (yield from source.space()) != "}":
        key = _loaded((yield from source.value()))
        yield from source.space()
        yield from source.expect(":")
        first = yield from source.space()
        if key == "name" and not named:
            out.start(source, _loaded((yield from source.value())))
            named = True
            out.arguments(arguments)
        elif key in _ARGUMENTS and not arguments:
            each = out.arguments if named and first == "{" else None
            raw = yield from source.value(each)
            arguments = _plain(raw)
            if named and each is None:
                out.arguments(arguments)
        else:
            yield from source.value()
        if (yield from source.space()) != "}":
            yield from source.expect(",")
    yield from source.expect("}")
    if not named:
        raise MalformedError
    out.end()


def read_tagged(source: Source, out: Emitter) -> Reading[None]:
    """Hermes and Qwen: ``<tool_call>{object}</tool_call>``. Without its closing tag the call counts all the same."""
    yield from source.space()
    yield from read_object(source, out)
    yield from source.space()
    yield from source.accept("</tool_call>")


def read_llama(source: Source, out: Emitter) -> Reading[None]:
    """Llama 3: objects with ``parameters``, and ``;`` between them."""
    if (yield from source.space()) != "{":
        raise MalformedError
    while (yield from source.space()) == "{":
        yield from read_object(source, out)
        yield from source.space()
        yield from source.accept(";")


def read_mistral(source: Source, out: Emitter) -> Reading[None]:
    """Mistral: ``[TOOL_CALLS]`` and an array of objects, or, newer, ``name[ARGS]{...}``, perhaps with ``[CALL_ID]id`` between."""
    if (yield from source.space()) == "[":
        yield from source.expect("[")
        while (yield from source.space()) != "]":
            yield from read_object(source, out)
            if (yield from source.space()) != "]":
                yield from source.expect(",")
        yield from source.expect("]")
        return
    name, marker = yield from source.until("[CALL_ID]", "[ARGS]", "{", most=MAX_NAME_CHARS)
    if marker == "[CALL_ID]":
        yield from source.until("[ARGS]", most=MAX_NAME_CHARS)
    elif marker == "{":
        source.at -= 1
    out.start(source, name.strip())
    yield from source.space()
    yield from source.value(out.arguments)
    out.end()


def read_deepseek(source: Source, out: Emitter) -> Reading[None]:
    """DeepSeek V3 and R1: ``function<sep>name``, a fenced block of JSON; V3.1 and later: ``name<sep>{...}``."""
    head, _ = yield from source.until("<｜tool▁sep｜>", most=MAX_NAME_CHARS)
    if (yield from source.space()) == "{":
        out.start(source, head.strip())
    else:
        name, _ = yield from source.until("\n", most=MAX_NAME_CHARS)
        out.start(source, name.strip())
        yield from source.expect("```json")
        yield from source.space()
    yield from source.value(out.arguments)
    out.end()
    yield from source.space()
    yield from source.accept("```")
    yield from source.space()
    yield from source.accept("<｜tool▁call▁end｜>")


def _loaded(raw: str) -> object:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise MalformedError from None


def _plain(raw: str) -> str:
    """Arguments as an object's text: a model may write none, or the object's text as a string."""
    if raw.startswith("{"):
        return raw
    value = _loaded(raw)
    return (value or "{}") if value is None or isinstance(value, str) else raw


HERMES: Final = Format(
    "hermes",
    ("<tool_call>",),
    read_tagged,
    inner=("</tool_call>",),
    before_name='<tool_call>\n{"name": "',
    after_name='", "arguments":',
    before_arguments=" ",
    after_arguments="}",
    end="</tool_call>",
)
LLAMA3: Final = Format(
    "llama3_json",
    ("<|python_tag|>",),
    read_llama,
    at_start="{",
    before_name='{"name": "',
    after_name='", "parameters":',
    before_arguments=" ",
    after_arguments="}",
)
MISTRAL: Final = Format(
    "mistral",
    ("[TOOL_CALLS]",),
    read_mistral,
    inner=("[ARGS]", "[CALL_ID]"),
    before_name='[TOOL_CALLS][{"name": "',
    after_name='", "arguments":',
    before_arguments=" ",
    after_arguments="}]",
    # Their templates refuse ids of any other length.
    id_chars=9,
)
DEEPSEEK: Final = Format(
    "deepseek",
    ("<｜tool▁call▁begin｜>",),
    read_deepseek,
    silent=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    inner=("<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    before_name="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    after_name="\n```json\n",
    end="<｜tool▁call▁end｜>",
)

BUILT_IN: Final = (HERMES, DEEPSEEK, LLAMA3, MISTRAL)
