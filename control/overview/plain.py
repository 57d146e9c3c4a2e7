# SPDX-License-Identifier: Apache-2.0
"""Messages as plain data for people and scripts: seconds, names and hexadecimal instead of protobuf's own forms."""

from typing import Any, Final

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

Plain = dict[str, Any]

_SECONDS: Final = frozenset({"google.protobuf.Duration", "google.protobuf.Timestamp"})
_LEFT_OUT: Final = frozenset({"twinpool.v1.LatencySketch"})
"""What only programs of ours add up."""


def plain(message: Message) -> Plain:
    """All fields by name: durations and moments in seconds (since the epoch), enums in lower case without their prefix, bytes and
    incarnations in hexadecimal. What has presence and is not set is None."""
    return {
        field.name: _value(message, field)
        for field in message.DESCRIPTOR.fields
        if field.message_type is None or field.message_type.full_name not in _LEFT_OUT
    }


def _value(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.is_repeated:
        return [_one(field, one) for one in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _one(field, value)


def _one(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return value.ToNanoseconds() / 1e9 if field.message_type.full_name in _SECONDS else plain(value)
    if field.enum_type is not None:
        return _enum(field.enum_type, value)
    if field.type == FieldDescriptor.TYPE_FIXED64:
        return f"{value:016x}"
    return value.hex() if isinstance(value, bytes) else value


def _enum(kind: EnumDescriptor, number: int) -> str:
    prefix = "".join(f"_{letter}" if letter.isupper() else letter for letter in kind.name).upper()[1:] + "_"
    known = kind.values_by_number.get(number)
    return known.name.removeprefix(prefix).lower() if known is not None else str(number)
