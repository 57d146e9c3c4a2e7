# SPDX-License-Identifier: Apache-2.0
"""Errors of the table as OpenAI's API shows them, and pydantic's as errors of the table."""

import json
import math
from typing import Any, Final

import grpc
from pydantic import ValidationError

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
# Violations that say no more than that a key is not known.
_UNKNOWN: Final = {"extra_forbidden", "none_required"}
# Names of types stand for the alternatives of a field; those of models are capitalised.
_TYPES: Final = {"bool", "float", "int", "none", "str"}


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


def refusal(error: ValidationError) -> TwinpoolError:
    """The first fault of a body. Names the field; never quotes the value, which may be a prompt."""
    # Of a field that may have several forms, pydantic lists what is wrong for each: the deepest fault is the likeliest meant. What
    # follows from an unknown kind of thing is less telling than the kind.
    faults = error.errors(include_url=False, include_input=False)
    fault = max(faults, key=lambda fault: (len(fault["loc"]), fault["type"] == "literal_error"))
    field = _path(fault["loc"])
    if fault["type"] in _UNKNOWN:
        return TwinpoolError("UNSUPPORTED_FIELD", f"{field} is not supported", field=field)
    return TwinpoolError("INVALID_ARGUMENT", f"{field}: {fault['msg']}", field=field)


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and not part[0].isupper() and part not in _TYPES:
            path += f".{part}" if path else part
    return path or "the body"


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body, in UTF-8. Raises INVALID_ARGUMENT, or INVALID_TEXT for half a character."""
    try:
        text = raw.decode("utf-8-sig")
        value = json.loads(text)
        if "\\u" in text:
            # An escape may name half of a surrogate pair, which is no text.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise TwinpoolError(
            "INVALID_TEXT", "a string of the body holds half of a surrogate pair", field="the body"
        ) from None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise TwinpoolError("INVALID_ARGUMENT", "the body is not a JSON object", field="the body")
    return value
