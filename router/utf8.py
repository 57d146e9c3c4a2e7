# SPDX-License-Identifier: Apache-2.0
"""Requests that protobuf cannot parse, told apart: text that is not UTF-8, or no message at all.

gRPC answers a failed parse with INTERNAL and no hint. The server therefore takes requests through ``lenient``, which
hands the raw bytes to the handler, and only then is the faulty field looked for: the slow way costs nothing for a good
request.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
from google.protobuf.descriptor import FieldDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from twinpool.errors import TwinpoolError

_VARINT: Final = 0
_FIXED64: Final = 1
_BYTES: Final = 2
_FIXED32: Final = 5
_MAX_DEPTH: Final = 16

_Request = TypeVar("_Request", bound=Message)


@dataclass(frozen=True, slots=True)
class Unparsed:
    """The bytes of a request that its message class refused."""

    raw: bytes
    kind: type[Message]

    def error(self) -> TwinpoolError:
        """What is wrong with it, naming the field where one is at fault."""
        try:
            field = _invalid_text(self.raw, self.kind.DESCRIPTOR, "", 0)
        except _MalformedError:
            field = None
        if field is None:
            return TwinpoolError(
                "INVALID_ARGUMENT",
                f"the request of {len(self.raw)} bytes is not a valid {self.kind.DESCRIPTOR.name} message",
            )
        return TwinpoolError("INVALID_TEXT", f"{field} is not valid UTF-8", field=field)


def lenient(kind: type[_Request]) -> Callable[[bytes], _Request | Unparsed]:
    """A request deserialiser for gRPC that never raises."""

    def parse(raw: bytes) -> _Request | Unparsed:
        try:
            return kind.FromString(raw)
        except DecodeError:
            return Unparsed(raw, kind)

    return parse


def add_leniently(service: ServiceDescriptor, servicer: object, server: grpc.aio.Server) -> None:
    """Adds a service, each method of which takes its request through ``lenient``."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        taken, given = (
            "stream" if many else "unary" for many in (method.client_streaming, method.server_streaming)
        )
        handlers[method.name] = getattr(grpc, f"{taken}_{given}_rpc_method_handler")(
            getattr(servicer, method.name),
            request_deserializer=lenient(GetMessageClass(method.input_type)),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def refuse_unknown_fields(message: Message, path: str = "") -> None:
    """Raises INVALID_ARGUMENT for a field that this version does not know.

    Ignoring it would answer a request other than the one that was sent: whoever asks for a grammar must not get free
    text from a router that is one version behind.
    """
    unknown = UnknownFieldSet(message)
    if len(unknown):
        where = path or "the request"
        raise TwinpoolError(
            "INVALID_ARGUMENT",
            f"{where} has field number {unknown[0].field_number}, which this router does not know",
            field=path or None,
        )


class _MalformedError(Exception):
    """The bytes are no protobuf message."""


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(raw) and shift < 64:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise _MalformedError


def _skip(raw: bytes, at: int, wire_type: int) -> tuple[bytes, int]:
    """The payload of a length-delimited field (else empty) and where the next field starts."""
    if wire_type == _VARINT:
        return b"", _varint(raw, at)[1]
    if wire_type == _FIXED64:
        size = 8
    elif wire_type == _FIXED32:
        size = 4
    elif wire_type == _BYTES:
        size, at = _varint(raw, at)
    else:
        raise _MalformedError
    if at + size > len(raw):
        raise _MalformedError
    return (raw[at : at + size] if wire_type == _BYTES else b""), at + size


def _invalid_text(raw: bytes, descriptor: Any, path: str, depth: int) -> str | None:
    """Dotted path of the first string field that is not UTF-8, or None."""
    if depth > _MAX_DEPTH:
        raise _MalformedError
    at = 0
    seen: dict[int, int] = {}
    while at < len(raw):
        tag, at = _varint(raw, at)
        payload, at = _skip(raw, at, tag & 7)
        field = descriptor.fields_by_number.get(tag >> 3)
        if field is None or tag & 7 != _BYTES:
            continue
        index = seen.get(field.number, 0)
        seen[field.number] = index + 1
        name = f"{path}{field.name}[{index}]" if field.is_repeated else f"{path}{field.name}"
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                payload.decode("utf-8")
            except UnicodeDecodeError:
                return name
        elif field.message_type is not None:
            found = _invalid_text(payload, field.message_type, f"{name}.", depth + 1)
            if found is not None:
                return found
    return None


def parsed(request: Any) -> Any:
    """The message, if it could be parsed. Raises what says why it could not."""
    if isinstance(request, Unparsed):
        raise request.error()
    return request
