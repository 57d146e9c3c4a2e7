# SPDX-License-Identifier: Apache-2.0
"""Calls of tools and reasoning in the text that a model writes."""

from twinpool.text.calls.events import CallArguments, CallEnded, CallStarted, Content, Event, Reasoning
from twinpool.text.calls.formats import Format
from twinpool.text.calls.parser import THINK_BEGIN, THINK_END, AnswerParser, Thinking
from twinpool.text.calls.registry import find_format, format_of_template, formats

__all__ = [
    "THINK_BEGIN",
    "THINK_END",
    "AnswerParser",
    "CallArguments",
    "CallEnded",
    "CallStarted",
    "Content",
    "Event",
    "Format",
    "Reasoning",
    "Thinking",
    "find_format",
    "format_of_template",
    "formats",
]
