# SPDX-License-Identifier: Apache-2.0
"""Tensors of the protocol: typed or raw bytes, in both directions."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from twinpool.errors import TwinpoolError
from twinpool.router.utf8 import refuse_unknown_fields
from twinpool.router.validate import shown
from twinpool.v1.kserve import open_inference_pb2 as kserve

_CONTENTS: Final = {
    "BOOL": "bool_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field of the typed elements of each datatype that is used here."""

_RAW: Final = {
    "BOOL": "?",
    "INT32": "<i4",
    "INT64": "<i8",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "FP32": "<f4",
    "FP64": "<f8",
}
"""How raw elements are laid out; those of BYTES stand each behind its length."""

_LENGTH: Final = struct.Struct("<I")
_MAX_NAME_CHARS: Final = 64

Input = kserve.ModelInferRequest.InferInputTensor


@dataclass(frozen=True, slots=True)
class InputSpec:
    """What an input may look like: its datatypes, and one element or any number of them, as [n] or [1, n]."""

    datatypes: tuple[str, ...]
    many: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """An output tensor; ``values`` are its elements in row-major order."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Sequence[Any]


def path(kind: str, name: str) -> str:
    """The dotted path of something that a client has named, short enough for a message."""
    return f"{kind}.{name if len(name) <= _MAX_NAME_CHARS else f'{name[:_MAX_NAME_CHARS]}…'}"


def elements(tensor: Input, raw: bytes | None, spec: InputSpec) -> list[Any]:
    """The elements of an input as Python values. ``raw``: where the request holds them as bytes.

    Raises INVALID_ARGUMENT for a datatype, a shape or contents that are not those of ``spec``, UNSUPPORTED_FIELD for parameters.
    """
    field = path("inputs", tensor.name)
    refuse_unknown_fields(tensor, field)
    for name in tensor.parameters:
        # Shared memory, or something else that would change what the contents mean.
        own = path(f"{field}.parameters", name)
        raise TwinpoolError("UNSUPPORTED_FIELD", f"{own} is not supported", field=own)
    if tensor.datatype not in spec.datatypes:
        raise TwinpoolError(
            "INVALID_ARGUMENT",
            f"{field}.datatype is {shown(tensor.datatype)}; the limit is {' or '.join(spec.datatypes)}",
            field=f"{field}.datatype",
        )
    shape = list(tensor.shape)
    if not _fits(shape, spec):
        allowed = "[n] or [1, n]" if spec.many else "[1] or [1, 1]"
        text = str(shape) if len(shape) <= 4 else f"one of {len(shape)} dimensions"
        raise TwinpoolError(
            "INVALID_ARGUMENT",
            f"{field}.shape is {text}; the limit is {allowed}",
            field=f"{field}.shape",
        )
    found = _typed(tensor, field) if raw is None else _raw(tensor, field, raw)
    if len(found) != math.prod(shape):
        raise TwinpoolError(
            "INVALID_ARGUMENT",
            f"{field} has {len(found)} elements; the limit is those of its shape, {math.prod(shape)}",
            field=field,
        )
    return found


def text_of(value: bytes, field: str) -> str:
    """An element of BYTES as text. Raises INVALID_TEXT."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise TwinpoolError("INVALID_TEXT", f"{field} is not valid UTF-8", field=field) from None


def write(response: kserve.ModelInferResponse, outputs: Sequence[Output], raw: bool) -> None:
    """Adds tensors to a response, as bytes or typed."""
    for output in outputs:
        tensor = response.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
        if raw:
            response.raw_output_contents.append(_packed(output))
        else:
            getattr(tensor.contents, _CONTENTS[output.datatype]).extend(output.values)


def _fits(shape: list[int], spec: InputSpec) -> bool:
    if not 1 <= len(shape) <= 2 or (len(shape) == 2 and shape[0] != 1):
        return False
    return shape[-1] >= 0 if spec.many else shape[-1] == 1


def _typed(tensor: Input, field: str) -> list[Any]:
    refuse_unknown_fields(tensor.contents, f"{field}.contents")
    wanted = _CONTENTS[tensor.datatype]
    for held, _ in tensor.contents.ListFields():
        if held.name != wanted:
            own = f"{field}.contents.{held.name}"
            raise TwinpoolError(
                "INVALID_ARGUMENT", f"{own} is set; the limit is {wanted} for {tensor.datatype}", field=own
            )
    return list(getattr(tensor.contents, wanted))


def _raw(tensor: Input, field: str, raw: bytes) -> list[Any]:
    if tensor.HasField("contents"):
        raise TwinpoolError(
            "INVALID_ARGUMENT",
            f"{field}.contents is set; the limit is none, since the request has raw_input_contents",
            field=f"{field}.contents",
        )
    if tensor.datatype == "BYTES":
        return _unpacked(raw, field)
    kind = np.dtype(_RAW[tensor.datatype])
    if len(raw) % kind.itemsize:
        raise TwinpoolError(
            "INVALID_ARGUMENT",
            f"the raw contents of {field} have {len(raw)} bytes; the limit is a multiple of {kind.itemsize}",
            field=field,
        )
    found: list[Any] = np.frombuffer(raw, kind).tolist()
    return found


def _unpacked(raw: bytes, field: str) -> list[bytes]:
    found: list[bytes] = []
    at = 0
    while at < len(raw):
        size = _LENGTH.unpack_from(raw, at)[0] if at + _LENGTH.size <= len(raw) else len(raw)
        at += _LENGTH.size
        if at + size > len(raw):
            raise TwinpoolError(
                "INVALID_ARGUMENT",
                f"the raw contents of {field} end within element {len(found)}",
                field=field,
            )
        found.append(raw[at : at + size])
        at += size
    return found


def _packed(output: Output) -> bytes:
    if output.datatype == "BYTES":
        return b"".join(_LENGTH.pack(len(value)) + value for value in output.values)
    return np.asarray(output.values, dtype=_RAW[output.datatype]).tobytes()
