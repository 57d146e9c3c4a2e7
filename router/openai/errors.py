# SPDX-License-Identifier: Apache-2.0
"""Errors of the table as OpenAI's API shows them."""

import math
from typing import Any, Final

import grpc

from twinpool.errors import TwinpoolError

_C = grpc.StatusCode
STATUS: Final = {
    _C.INVALID_ARGUMENT: 400,
    _C.FAILED_PRECONDITION: 400,
    _C.OUT_OF_RANGE: 400,
    _C.UNAUTHENTICATED: 401,
    _C.PERMISSION_DENIED: 403,
    _C.NOT_FOUND: 404,
    _C.ALREADY_EXISTS: 409,
    _C.ABORTED: 409,
    _C.RESOURCE_EXHAUSTED: 429,
    _C.CANCELLED: 499,
    _C.UNIMPLEMENTED: 501,
    _C.UNAVAILABLE: 503,
    _C.DEADLINE_EXCEEDED: 504,
}
"""HTTP status of each gRPC code; of all others 500."""

_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


def status_of(error: TwinpoolError) -> int:
    """The HTTP status."""
    return STATUS.get(error.code, 500)


def body_of(error: TwinpoolError) -> dict[str, Any]:
    """The JSON body: ``code`` is the reason of the error table."""
    status = status_of(error)
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.field, "code": error.reason}}


def headers_of(error: TwinpoolError) -> dict[str, str]:
    """When to try again, in the two forms that clients know, and whether to."""
    headers = {"x-should-retry": "true" if error.retryable else "false"}
    if error.retry_after is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after))
        headers["retry-after-ms"] = str(math.ceil(error.retry_after * 1000))
    return headers
