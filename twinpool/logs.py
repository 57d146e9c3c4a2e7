# SPDX-License-Identifier: Apache-2.0
"""Structured logs on stderr: one snake_case event a line, JSON unless a person is watching.

Prompts, token ids and secrets are never logged, only their lengths.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

LEVELS = ("debug", "info", "warning", "error")

# Field names whose values would leak what a user wrote, or a secret. A log call that passes one
# is a mistake; the value is replaced, so that the mistake stays harmless.
_PRIVATE = frozenset(
    {
        "prompt",
        "text",
        "messages",
        "content",
        "token_ids",
        "tokens",
        "stop_strings",
        "password",
        "secret",
        "api_key",
    }
)

_STDLIB_MIN_LEVEL = {"grpc": logging.WARNING, "etcd3": logging.WARNING, "ray": logging.WARNING}


def _redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    for name in _PRIVATE.intersection(event):
        value = event[name]
        # A number under such a name is a count, not content.
        if not isinstance(value, (int, float)):
            event[name] = f"<{len(value)} withheld>" if hasattr(value, "__len__") else "<withheld>"
    return event


def setup(level: str = "info", json: bool | None = None, stream: TextIO | None = None) -> None:
    """Sends structlog and standard logging through one formatter to ``stream`` (default: stderr).

    ``json`` None means: JSON unless the stream is a terminal. Calling it again replaces the earlier setup.
    Raises ValueError for an unknown level.
    """
    if level not in LEVELS:
        raise ValueError(f"log level {level!r} is not one of {', '.join(LEVELS)}")
    out = sys.stderr if stream is None else stream
    as_json = (not out.isatty()) if json is None else json
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        _redact,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        # A test that calls setup() twice must not keep loggers of the first setup.
        cache_logger_on_first_use=False,
    )
    render: list[Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if as_json
        else [
            structlog.dev.ConsoleRenderer(
                colors=out.isatty(),
                # The default prints local variables, and with them what a user wrote.
                exception_formatter=structlog.dev.plain_traceback,
            )
        ]
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    logging.getLogger().handlers[:] = [handler]
    for name in _STDLIB_MIN_LEVEL:
        adopt(name)
    set_level(level)


def adopt(library: str) -> None:
    """Takes the handlers of a library's logger away, so that what it logs goes the same way as all else.

    Ray puts one up when it is imported: whoever imports it after :func:`setup` calls this then.
    """
    logger = logging.getLogger(library)
    logger.handlers.clear()
    logger.propagate = True


def set_level(level: str) -> None:
    """The least level that is written from now on, one of ``LEVELS``."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    for name, minimum in _STDLIB_MIN_LEVEL.items():
        logging.getLogger(name).setLevel(max(minimum, root.level))


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """The module's logger: ``get_logger(__name__)``. Works before :func:`setup` with structlog's defaults."""
    return structlog.stdlib.get_logger(name)


def bind_context(**fields: Any) -> None:
    """Adds fields (request_id, worker ...) to all events of this task or thread until :func:`clear_context`."""
    structlog.contextvars.bind_contextvars(**fields)


def clear_context() -> None:
    """Forgets what :func:`bind_context` added."""
    structlog.contextvars.clear_contextvars()
