# SPDX-License-Identifier: Apache-2.0
"""Changes of messages and of JSON at random, with a liking for the ends of every range."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from tests.fuzz.target import mutate_bytes

F = FieldDescriptor
_UNSIGNED = (0, 1, 2, 15, 16, 17, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 63, (1 << 64) - 1)
_SIGNED = (-(1 << 63), -(1 << 31), -1, 0, 1, 16, (1 << 31) - 1, (1 << 63) - 1)
_REALS = (0.0, -0.0, -1.0, 0.5, 1.0, 1e30, 3e38, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    "",
    "a",
    "-",
    "x" * 200,
    "\x00",
    "é" * 70,
    "a/b",
    "../..",
    "127.0.0.1:1",
    "h:" + "9" * 5000,
    "{{ 7 }}",
)
_BLOBS = (b"", b"\0", b"\xff" * 16, b"\0" * 64, bytes(range(15)))


def _value(field: Any, source: random.Random) -> Any:
    kind = field.type
    if kind in (F.TYPE_STRING,):
        return source.choice(_TEXTS)
    if kind == F.TYPE_BYTES:
        return source.choice((*_BLOBS, source.randbytes(source.randrange(40))))
    if kind == F.TYPE_BOOL:
        return source.random() < 0.5
    if kind in (F.TYPE_DOUBLE, F.TYPE_FLOAT):
        return source.choice(_REALS)
    if kind == F.TYPE_ENUM:
        return source.choice((0, 1, 2, 7, 1000, -1))
    bits = 32 if kind in (F.TYPE_UINT32, F.TYPE_FIXED32, F.TYPE_INT32, F.TYPE_SINT32, F.TYPE_SFIXED32) else 64
    unsigned = kind in (F.TYPE_UINT32, F.TYPE_FIXED32, F.TYPE_UINT64, F.TYPE_FIXED64)
    low, high = (0, (1 << bits) - 1) if unsigned else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    return source.choice([value for value in (_UNSIGNED if unsigned else _SIGNED) if low <= value <= high])


def shake(message: Message, source: random.Random, depth: int = 0) -> None:
    """Changes one field of ``message``, or of a message in it."""
    if not message.DESCRIPTOR.fields:
        return
    field = source.choice(list(message.DESCRIPTOR.fields))
    present = [known for known, _ in message.ListFields()]
    if present and source.random() < 0.6:
        field = source.choice(present)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        message.ClearField(field.name)
        return
    if source.random() < 0.1:
        message.ClearField(field.name)
    elif field.is_repeated:
        _shake_list(getattr(message, field.name), field, source, depth)
    elif field.message_type is not None:
        inner = getattr(message, field.name)
        inner.SetInParent()
        if depth < 6 and inner.DESCRIPTOR.fields:
            shake(inner, source, depth + 1)
    else:
        setattr(message, field.name, _value(field, source))


def _shake_list(values: Any, field: Any, source: random.Random, depth: int) -> None:
    kind = source.randrange(5)
    if field.message_type is not None:
        if not values or kind == 0:
            values.add()
        elif kind == 1:
            del values[source.randrange(len(values))]
        elif kind == 2:
            values.add().CopyFrom(source.choice(list(values)))
        if values and depth < 6 and values[0].DESCRIPTOR.fields:
            shake(source.choice(list(values)), source, depth + 1)
    elif not values or kind == 0:
        values.append(_value(field, source))
    elif kind == 1:
        del values[source.randrange(len(values))]
    elif kind == 2:
        values.extend(list(values) * source.choice((1, 3, 40)))
        del values[2000:]
    else:
        values[source.randrange(len(values))] = _value(field, source)


def message_mutator(kinds: Sequence[type[Message]]) -> Callable[[bytes, random.Random], bytes]:
    """For inputs whose first byte says which of ``kinds`` the rest is."""

    def mutate(data: bytes, source: random.Random) -> bytes:
        which = data[0] % len(kinds) if data else 0
        try:
            message = kinds[which].FromString(data[1:])
        except DecodeError:
            return mutate_bytes(data, source)
        for _ in range(source.randrange(1, 4)):
            shake(message, source)
        return bytes([which]) + message.SerializeToString()

    return mutate


def frames(data: bytes) -> list[bytes]:
    """An input that is several: each with two bytes of length before it. What does not fit is cut."""
    found, at = [], 0
    while at + 2 <= len(data) and len(found) < 64:
        size = int.from_bytes(data[at : at + 2], "little")
        found.append(data[at + 2 : at + 2 + size])
        at += 2 + size
    return found


def packed(parts: Sequence[bytes]) -> bytes:
    """The inverse of ``frames``."""
    return b"".join(len(part).to_bytes(2, "little") + part for part in parts if len(part) < 1 << 16)


def frames_mutator(
    inner: Callable[[bytes, random.Random], bytes],
) -> Callable[[bytes, random.Random], bytes]:
    """For inputs of several frames: changes one, leaves one out, doubles one, or swaps two."""

    def mutate(data: bytes, source: random.Random) -> bytes:
        parts = frames(data)
        if not parts:
            return mutate_bytes(data, source)
        at, other, kind = source.randrange(len(parts)), source.randrange(len(parts)), source.randrange(8)
        if kind == 0:
            del parts[at]
        elif kind == 1:
            parts.insert(other, parts[at])
        elif kind == 2:
            parts[at], parts[other] = parts[other], parts[at]
        else:
            parts[at] = inner(parts[at], source)
        return packed(parts)

    return mutate


_JSON = (
    None, True, False, 0, 1, -1, 3, 2.5, 1e308, 10**30, 1 << 62, "", "x", "float32", "\ud800", [], {}, [1], [[[]]],
    {"a": 1}, {"type": "x"}, "y" * 300, float("inf"), float("nan"),
)  # fmt: skip


def shake_json(value: Any, source: random.Random) -> Any:
    """A copy with one part changed."""
    if isinstance(value, dict) and value and source.random() < 0.9:
        key = source.choice(list(value))
        kind = source.randrange(10)
        if kind == 0:
            return {name: item for name, item in value.items() if name != key}
        if kind == 1:
            return value | {source.choice(("", "x", "0", key + "_")): value[key]}
        return value | {key: shake_json(value[key], source)}
    if isinstance(value, list) and value and source.random() < 0.8:
        at = source.randrange(len(value))
        kind = source.randrange(6)
        if kind == 0:
            return value[:at] + value[at + 1 :]
        if kind == 1:
            return value + value[at : at + 1]
        return [shake_json(item, source) if index == at else item for index, item in enumerate(value)]
    if isinstance(value, int) and not isinstance(value, bool) and source.random() < 0.5:
        return source.choice((value + 1, value - 1, -value, value * 2, value * 10**9, 0))
    return source.choice(_JSON)


def json_mutator(data: bytes, source: random.Random) -> bytes:
    """For inputs that are JSON."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_bytes(data, source)
    for _ in range(source.randrange(1, 3)):
        value = shake_json(value, source)
    return json.dumps(value).encode()
