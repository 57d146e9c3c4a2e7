# SPDX-License-Identifier: Apache-2.0
"""Finds the entry of a process or a role by name.

The entries live in packages above this one, so they are named by strings and imported when they are wanted: the
command line, Ray actors and the worker never import a sibling.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

from twinpool.config import TwinpoolConfig
from twinpool.errors import ConfigError

PROCESSES: Final[dict[str, str]] = {
    "router": "twinpool.router.main:run",
    "prefill": "twinpool.prefill_worker.main:run",
    "decode": "twinpool.decode_worker.main:run",
    "control": "twinpool.control.main:run",
}
"""Process name to its entry: ``run(config: TwinpoolConfig) -> int``, which blocks and returns the exit status."""

ROLES: Final[dict[str, str]] = {
    "prefill": "twinpool.prefill_worker.role:make_handler",
    "decode": "twinpool.decode_worker.role:make_handler",
}
"""Role name to the factory of its ``twinpool.worker.role.RoleHandler``."""


def resolve(entry: str) -> Callable[..., Any]:
    """The object that "package.module:attribute" names. Raises ImportError or AttributeError if it is not there."""
    module, _, attribute = entry.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found


def _lookup(table: dict[str, str], kind: str, name: str) -> Callable[..., Any]:
    if name not in table:
        raise ConfigError(f"unknown {kind} {name!r}; known: {', '.join(table)}")
    return resolve(table[name])


def process_entry(name: str) -> Callable[[TwinpoolConfig], int]:
    """The entry of a process. Raises ConfigError for an unknown name."""
    return _lookup(PROCESSES, "process", name)


def role_factory(name: str) -> Callable[..., Any]:
    """The factory of a role's handler. Raises ConfigError for an unknown name."""
    return _lookup(ROLES, "role", name)


def run_process(name: str, config: TwinpoolConfig) -> int:
    """Runs a process in the foreground until it stops. Returns its exit status."""
    return process_entry(name)(config)
