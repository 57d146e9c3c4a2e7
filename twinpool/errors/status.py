# SPDX-License-Identifier: Apache-2.0
"""TwinpoolError to ``google.rpc.Status`` and back."""

from __future__ import annotations

import contextlib
from typing import Any, Final, NoReturn, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from twinpool.errors.core import DOMAIN, TwinpoolError
from twinpool.errors.table import TABLE

_DETAILS_KEY: Final = "grpc-status-details-bin"

# gRPC peers drop metadata above 8 KiB by default, and with it the whole status. The message travels
# twice (grpc-message and details, percent-encoded once), so both parts stay well below.
_MAX_MESSAGE_CHARS: Final = 512
_MAX_VALUE_CHARS: Final = 128
_MAX_METADATA: Final = 12

_REASON_OF_CODE: Final = {
    grpc.StatusCode.CANCELLED: "CANCELLED",
    grpc.StatusCode.DEADLINE_EXCEEDED: "DEADLINE_EXCEEDED",
    grpc.StatusCode.INVALID_ARGUMENT: "INVALID_ARGUMENT",
    # Without details it comes from gRPC itself, which uses this code for its message size limit.
    grpc.StatusCode.RESOURCE_EXHAUSTED: "MESSAGE_TOO_LARGE",
    grpc.StatusCode.UNAVAILABLE: "SERVER_UNREACHABLE",
    grpc.StatusCode.UNAUTHENTICATED: "UNAUTHENTICATED",
    grpc.StatusCode.PERMISSION_DENIED: "PERMISSION_DENIED",
    grpc.StatusCode.UNIMPLEMENTED: "UNIMPLEMENTED",
}

_Detail = TypeVar("_Detail", bound=Message)


def _clip(text: str, limit: int) -> str:
    # A lone surrogate cannot be put into a protobuf string.
    clean = text.encode("utf-8", "replace").decode("utf-8")
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def to_status(error: TwinpoolError) -> Status:
    """The wire form: code, message, ErrorInfo; RetryInfo and BadRequest where they apply."""
    code: int = error.code.value[0]
    message = _clip(error.message, _MAX_MESSAGE_CHARS)
    status = Status(code=code, message=message)
    metadata = {
        _clip(key, _MAX_VALUE_CHARS): _clip(value, _MAX_VALUE_CHARS)
        for key, value in list(error.metadata.items())[:_MAX_METADATA]
    }
    status.details.add().Pack(ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))
    if error.retry_after is not None:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_after * 1e9))
        status.details.add().Pack(RetryInfo(retry_delay=delay))
    if error.field:
        violation = BadRequest.FieldViolation(field=_clip(error.field, _MAX_VALUE_CHARS), description=message)
        status.details.add().Pack(BadRequest(field_violations=[violation]))
    return status


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: TwinpoolError) -> NoReturn:
    """Ends the call with the error's status and details. Never returns."""
    status = to_status(error)
    await context.abort(error.code, status.message, ((_DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("context.abort returned")


def from_rpc_error(error: grpc.RpcError) -> TwinpoolError:
    """What a server said, or what gRPC itself found, as a TwinpoolError. Works for sync and aio calls.

    A reason that this version does not know keeps its message and gets the row of its status code.
    """
    code = error.code() if isinstance(error, (grpc.Call, grpc.aio.AioRpcError)) else grpc.StatusCode.UNKNOWN
    text = (error.details() if isinstance(error, (grpc.Call, grpc.aio.AioRpcError)) else str(error)) or ""
    fallback = _REASON_OF_CODE.get(code, "INTERNAL")
    status = _details(error)
    if status is None:
        return TwinpoolError(fallback, text, metadata={"grpc_code": code.name})
    info = _find(status, ErrorInfo)
    retry = _find(status, RetryInfo)
    bad = _find(status, BadRequest)
    known = info is not None and info.domain == DOMAIN and info.reason in TABLE
    metadata = dict(info.metadata) if info is not None else {}
    if info is not None and not known:
        metadata |= {"grpc_code": code.name, "reason": info.reason}
    return TwinpoolError(
        info.reason if known and info is not None else fallback,
        status.message or text,
        retry_after=retry.retry_delay.ToNanoseconds() / 1e9 if retry is not None else None,
        metadata=metadata,
        field=bad.field_violations[0].field if bad is not None and bad.field_violations else None,
    )


def _details(error: grpc.RpcError) -> Status | None:
    if not isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):
        return None
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            with contextlib.suppress(DecodeError):
                return Status.FromString(value)
    return None


def _find(status: Status, kind: type[_Detail]) -> _Detail | None:
    for detail in status.details:
        if detail.Is(cast(Any, kind.DESCRIPTOR)):
            found = kind()
            detail.Unpack(found)
            return found
    return None
