# SPDX-License-Identifier: Apache-2.0
"""Which keys running processes take up, and a configuration with other values of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic import ValidationError

from twinpool.config.base import is_reloadable
from twinpool.config.load import explain
from twinpool.config.model import TwinpoolConfig, fields, sections
from twinpool.errors import ConfigError

APPLIED: Final = "applied"
START: Final = "start"
DEFAULT: Final = "default"

Values = Mapping[str, object]
"""SECTION.KEY to value."""


def reloadable() -> list[str]:
    """The keys that running processes take up, in the order of the sections."""
    return [f"{section}.{name}" for section, name, field in fields() if is_reloadable(field)]


def check_reloadable(keys: Iterable[str]) -> None:
    """Raises ConfigError that names each key which is unknown or needs a restart, and why."""
    known, allowed = [f"{section}.{name}" for section, name, _ in fields()], set(reloadable())
    faults = []
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            faults.append((key, f"{key[:128]}: there is no such key; nearest: {near[0]}"))
        elif key not in allowed:
            faults.append((key, f"{key}: is read at the start of a process alone, so it needs a restart"))
    if faults:
        raise ConfigError("; ".join(text for _, text in faults), key=faults[0][0])


def overlay(base: TwinpoolConfig, values: Values) -> TwinpoolConfig:
    """``base`` with other values of some keys, checked as a whole. Raises ConfigError that names each key at fault."""
    check_reloadable(values)
    merged: dict[str, dict[str, object]] = {
        section: {name: getattr(getattr(base, section), name) for name in kind.model_fields}
        for section, kind in sections().items()
    }
    for key, value in values.items():
        section, _, name = key.partition(".")
        merged[section][name] = value
    try:
        return TwinpoolConfig.model_validate(merged)
    except ValidationError as error:
        raise explain(error, dict.fromkeys(values, APPLIED)) from None


def value_at(config: TwinpoolConfig, key: str) -> Any:
    """The value of SECTION.KEY."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def source_of(base: TwinpoolConfig, values: Values, key: str) -> str:
    """Where the value of a key comes from: "applied" if it is one of ``values``, "start" (flags, environment, file) or "default"."""
    if key in values:
        return APPLIED
    section, _, name = key.partition(".")
    default = sections()[section].model_fields[name].get_default(call_default_factory=True)
    return DEFAULT if value_at(base, key) == default else START
