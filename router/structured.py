# SPDX-License-Identifier: Apache-2.0
"""The form that a client wants an answer to have, as a grammar that workers draw by.

It is compiled here first, without a tokenizer and in another thread than the loop's, so that what is impossible or too large is
refused with the reason before any work starts.
"""

import json
import threading
from collections import OrderedDict
from typing import Any, Final

from llguidance import LLMatcher

from twinpool.config.router import RouterSection
from twinpool.errors import TwinpoolError
from twinpool.router.utf8 import refuse_unknown_fields
from twinpool.v1 import inference_pb2 as pb

MAX_CHECKED: Final = 1024
"""Grammars that are known to be good, the last ones used."""

# White space that is left open would let a model write it for ever. This is how JSON stands in what models were trained on.
JSON_STYLE: Final[Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_MAX_SHOWN_CHARS: Final = 300


def grammar_of(wanted: pb.StructuredOutput) -> str:
    """The grammar as llguidance reads it. Raises INVALID_GRAMMAR for what is no schema or no choice."""
    refuse_unknown_fields(wanted, "structured")
    form = wanted.WhichOneof("form")
    if form == "json_schema":
        return json_grammar(wanted.json_schema, "structured.json_schema")
    if form == "regex":
        return LLMatcher.grammar_from_regex(wanted.regex)
    if form == "lark":
        return LLMatcher.grammar_from_lark(wanted.lark)
    if form == "choices":
        if not wanted.choices.texts or not all(wanted.choices.texts):
            raise _refusal("structured.choices.texts", "holds no text, or an empty one")
        rule = " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choices.texts)
        return LLMatcher.grammar_from_lark(f"start: {rule}")
    raise _refusal("structured", "names no form; the limit is one of json_schema, regex, lark, choices")


def json_grammar(schema: str, field: str) -> str:
    """The grammar of JSON under a schema."""
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _refusal(field, "is not a JSON object")
    return LLMatcher.grammar_from_json_schema(value, overrides=JSON_STYLE)


class GrammarCheck:
    """Finds out whether grammars can be compiled, once each. From any thread."""

    def __init__(self, limits: RouterSection) -> None:
        self._limits = limits
        self._good: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, grammar: str, field: str = "structured") -> None:
        """Raises INVALID_GRAMMAR with the reason. May take a second for a large one."""
        size = len(grammar.encode())
        if size > self._limits.max_grammar_bytes:
            raise _refusal(
                field, f"makes a grammar of {size} bytes; the limit is {self._limits.max_grammar_bytes}"
            )
        with self._lock:
            if grammar in self._good:
                self._good.move_to_end(grammar)
                return
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
        if failed:
            text = " ".join(messages[0].split())
            raise _refusal(field, f"cannot be compiled: {text[:_MAX_SHOWN_CHARS]}")
        with self._lock:
            self._good[grammar] = None
            if len(self._good) > MAX_CHECKED:
                self._good.popitem(last=False)


def check_together(request: pb.GenerateRequest) -> None:
    """Raises for stop conditions that contradict a form: an answer ends where its form is complete."""
    for name, given in (("min_tokens", request.stop.min_tokens), ("ignore_eos", request.stop.ignore_eos)):
        if given:
            raise TwinpoolError(
                "INVALID_STOP",
                f"stop.{name} cannot be used with structured: the answer ends where its form is complete",
                field=f"stop.{name}",
            )


def _refusal(field: str, text: str) -> TwinpoolError:
    return TwinpoolError("INVALID_GRAMMAR", f"{field} {text}", field=field)
