# SPDX-License-Identifier: Apache-2.0
"""What every configuration section shares, and the types of its fields."""

from __future__ import annotations

import json
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_settings import NoDecode

from twinpool.ids import is_name

RELOADABLE: Final[JsonDict] = {"reloadable": True}
"""Marks a key that running processes take up: ``json_schema_extra=RELOADABLE``. A test shows of each that they do."""


def is_reloadable(field: FieldInfo) -> bool:
    """Whether running processes take the key up."""
    return field.json_schema_extra == RELOADABLE


class Section(BaseModel):
    """A frozen group of keys that refuses unknown ones and values of the wrong kind."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, str_strip_whitespace=True
    )


def split_list(value: object) -> object:
    """An environment variable holds a list as "a,b" or as JSON."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.startswith("["):
        return json.loads(text)
    return [part.strip() for part in text.split(",") if part.strip()]


def _name(value: str) -> str:
    if not is_name(value):
        raise ValueError("must be a lower-case DNS label: a-z, 0-9 and '-', at most 63 characters")
    return value


def _optional_name(value: str) -> str:
    return _name(value) if value else value


def _endpoint(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{value!r} is not host:port (no scheme; [::1]:2379 for IPv6)")
    if "/" in host or ("]" in host) != (host.startswith("[")):
        raise ValueError(f"{value!r} is not host:port (no scheme; [::1]:2379 for IPv6)")
    return value


Name = Annotated[str, AfterValidator(_name)]
OptionalName = Annotated[str, AfterValidator(_optional_name)]
Endpoint = Annotated[str, AfterValidator(_endpoint)]
Texts = Annotated[tuple[str, ...], BeforeValidator(split_list), NoDecode]
Endpoints = Annotated[tuple[Endpoint, ...], BeforeValidator(split_list), NoDecode]
Names = Annotated[tuple[Name, ...], BeforeValidator(split_list), NoDecode, Field(max_length=64)]
