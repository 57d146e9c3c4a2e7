# SPDX-License-Identifier: Apache-2.0
"""From flags, environment and file to a configuration, and from a configuration to a child's environment."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from twinpool.config.model import TwinpoolConfig, fields, sections
from twinpool.errors import ConfigError

ENV_PREFIX: Final = "TWINPOOL_"
ENV_FILE: Final = "TWINPOOL_CONFIG"
"""Environment variable with the path of the YAML file."""

_MAX_SHOWN_CHARS: Final = 80


def load_config(
    path: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
) -> TwinpoolConfig:
    """Builds the configuration. Precedence: overrides, environment, file, defaults.

    ``path``: YAML file; None takes TWINPOOL_CONFIG if set. ``overrides``: flags, as {"kv.num_blocks": 8} or
    nested; a value of None means "not given". ``env``: None takes ``os.environ``.
    Raises ConfigError that names the key, its source, the value and what is allowed.
    """
    environ = os.environ if env is None else env
    file = path if path is not None else (environ.get(ENV_FILE) or None)
    merged: dict[str, dict[str, object]] = {}
    origin: dict[str, str] = {}
    layers = (
        (_from_file(Path(file)) if file is not None else {}),
        _from_env(environ),
        _from_overrides(overrides or {}),
    )
    for layer in layers:
        for key, (value, source) in layer.items():
            section, name = key.split(".", 1)
            merged.setdefault(section, {})[name] = value
            origin[key] = source
    try:
        return TwinpoolConfig.model_validate(merged)
    except ValidationError as error:
        raise explain(error, origin) from None


_Layer = dict[str, tuple[object, str]]
"""Dotted key to (value, source as text)."""


def _from_file(path: Path) -> _Layer:
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold sections with keys, not a {type(content).__name__}")
    return _flatten(content, f"file {path}")


def _from_env(environ: Mapping[str, str]) -> _Layer:
    layer: _Layer = {}
    for variable, value in environ.items():
        # Single-underscore names (TWINPOOL_CONFIG ...) are not keys of the configuration.
        if variable.startswith(ENV_PREFIX) and "__" in variable:
            key = variable.removeprefix(ENV_PREFIX).lower().replace("__", ".", 1)
            _known(key, f"environment variable {variable}")
            layer[key] = (value, f"environment variable {variable}")
    return layer


def _from_overrides(overrides: Mapping[str, object]) -> _Layer:
    nested: dict[object, object] = {}
    layer: _Layer = {}
    for key, value in overrides.items():
        if "." in key:
            _known(key, "argument")
            if value is not None:
                layer[key] = (value, "argument")
        else:
            nested[key] = value
    return _flatten(nested, "argument") | layer


def _flatten(content: Mapping[Any, object], source: str) -> _Layer:
    layer: _Layer = {}
    for section, values in content.items():
        _known_section(str(section), source)
        if values is None:
            continue
        if not isinstance(values, Mapping):
            raise ConfigError(f"{section}: must hold keys, not {_shown(values)} ({source})", key=str(section))
        for name, value in values.items():
            key = f"{section}.{name}"
            _known(key, source)
            if value is not None:
                layer[key] = (value, source)
    return layer


def _known_section(section: str, source: str) -> None:
    names = list(sections())
    if section not in names:
        near = difflib.get_close_matches(section, names, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"unknown section {section!r} ({source}); nearest: {near!r}; sections: {', '.join(names)}",
            key=section,
        )


def _known(key: str, source: str) -> None:
    section, _, name = key.partition(".")
    _known_section(section, source)
    names = list(sections()[section].model_fields)
    if name not in names:
        everywhere = [f"{found}.{other}" for found, other, _ in fields()]
        # A key in the wrong section is nearer than any look-alike in this one.
        same = [found for found in everywhere if found.split(".")[1] == name]
        near = same or difflib.get_close_matches(key, everywhere, n=1, cutoff=0.0)
        raise ConfigError(
            f"unknown key {key!r} ({source}); nearest: {near[0]!r}; keys of {section}: {', '.join(names)}",
            key=key,
        )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 1] + "…"


def explain(error: ValidationError, origin: Mapping[str, str]) -> ConfigError:
    """All faults in one message: a user who fixes one at a time is a user lost."""
    lines: list[str] = []
    first = ""
    for fault in error.errors(include_url=False):
        key = ".".join(str(part) for part in fault["loc"][:2])
        text = fault["msg"].removeprefix("Value error, ")
        if key:
            source = origin.get(key, "default")
            deep = ".".join(str(part) for part in fault["loc"])
            lines.append(f"{deep} = {_shown(fault['input'])} ({source}): {text}")
        else:
            # A rule between keys: its message starts with the key at fault.
            key = text.partition(":")[0]
            lines.append(text)
        first = first or key
    return ConfigError("; ".join(lines), key=first)


def to_env(config: TwinpoolConfig) -> dict[str, str]:
    """Environment variables that give a child process exactly this configuration.

    Every key is present, so nothing that the child inherits, and no file, can change one.
    """
    return {
        env_name(section, name): _env_value(getattr(getattr(config, section), name))
        for section, name, _ in fields()
    }


def to_yaml(config: TwinpoolConfig) -> str:
    """The configuration as a YAML file that ``load_config`` reads back to an equal one."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text


def env_name(section: str, name: str) -> str:
    """The environment variable of a key: ("kv", "num_blocks") is TWINPOOL_KV__NUM_BLOCKS."""
    return f"{ENV_PREFIX}{section}__{name}".upper()


def _env_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(str(part) for part in value)
    if isinstance(value, dict):
        return json.dumps({key: each.model_dump(mode="json") for key, each in value.items()})
    return str(value)
