# SPDX-License-Identifier: Apache-2.0
"""What a caller shows of itself: an API key, the names in its client certificate. Nothing else that it says of itself counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio

_BEARER: Final = "bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """What a caller shows of itself."""

    key: str = ""
    identities: tuple[str, ...] = ()

    @classmethod
    def of(cls, context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
        """Of a gRPC call: ``authorization: Bearer KEY`` or ``x-api-key``, and the client's certificate."""
        headers = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        shown = context.auth_context()
        names = (*shown.get("x509_common_name", ()), *shown.get("x509_subject_alternative_name", ()))
        return cls(key_of(headers), tuple(name.decode(errors="replace") for name in names))


def key_of(headers: Mapping[str, str]) -> str:
    """The API key in a call's headers, whose names are in lower case; "" if there is none."""
    given = headers.get("authorization", "")
    if given.lower().startswith(_BEARER):
        return given[len(_BEARER) :].strip()
    return headers.get("x-api-key", "")
