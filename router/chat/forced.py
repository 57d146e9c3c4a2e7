# SPDX-License-Identifier: Apache-2.0
"""The grammar of a call that must be made: how an answer goes on behind the call's beginning."""

import json
from collections.abc import Sequence

from llguidance import LLMatcher

from twinpool.router.structured import JSON_STYLE
from twinpool.text.calls import Format
from twinpool.v1 import inference_pb2 as pb


def forced_grammar(calls: Format, tools: Sequence[pb.Tool], named: bool) -> str:
    """What follows ``calls.opening(...)``: the rest of one call of one of ``tools``, whose arguments are valid under its schema.

    ``named``: the opening holds the only tool's name already. The answer ends with the call.
    """
    rules, starts = [], []
    for index, tool in enumerate(tools):
        schema = json.loads(tool.parameters_json) if tool.parameters_json else {}
        # Whatever else a schema says, arguments are an object.
        schema = {"type": "object", **schema, "x-guidance": JSON_STYLE}
        rules.append(f"arguments_{index}: %json {json.dumps(schema)}")
        before = calls.before_arguments if named else tool.name + calls.after_name + calls.before_arguments
        starts.append(f"{_quoted(before)}arguments_{index}{_quoted(calls.after_arguments)}")
    return LLMatcher.grammar_from_lark("\n".join([f"start: {' | '.join(starts)}", *rules]))


def _quoted(text: str) -> str:
    """A text as a part of a rule; nothing for none."""
    return f" {json.dumps(text, ensure_ascii=False)} " if text else ""
