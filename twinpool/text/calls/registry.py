# SPDX-License-Identifier: Apache-2.0
"""Which format a model writes its calls in: by name, or found in its chat template.

Formats of other packages are entry points of the group ``twinpool.call_formats``, each of them a ``Format``.
"""

from functools import cache
from importlib.metadata import entry_points
from typing import Final

from twinpool.logs import get_logger
from twinpool.text.calls.formats import BUILT_IN, DEEPSEEK, HERMES, LLAMA3, MISTRAL, Format

GROUP: Final = "twinpool.call_formats"

# What a template holds if its model was trained on the format; the first that is found counts.
_SIGNS: Final = (
    ("<｜tool▁call▁begin｜>", DEEPSEEK),
    ("[TOOL_CALLS]", MISTRAL),
    ("<tool_call>", HERMES),
    ("<|python_tag|>", LLAMA3),
    ('"parameters": dictionary', LLAMA3),
)

log = get_logger(__name__)


@cache
def formats() -> dict[str, Format]:
    """All formats by name. A plug-in that fails or takes a name that is in use is logged and left out."""
    known = {format_.name: format_ for format_ in BUILT_IN}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            loaded = entry.load()
        except Exception as error:
            log.error("call_format_failed", plugin=entry.name, error=type(error).__name__)
            continue
        if not isinstance(loaded, Format) or loaded.name in known:
            log.error("call_format_refused", plugin=entry.name)
            continue
        known[loaded.name] = loaded
    return known


def find_format(name: str) -> Format:
    """The format of this name. Raises KeyError."""
    return formats()[name]


def format_of_template(template: str) -> Format | None:
    """The format that a chat template shows; None if it shows none that is known."""
    return next((format_ for sign, format_ in _SIGNS if sign in template), None)
