# SPDX-License-Identifier: Apache-2.0
"""What a row of the table of errors says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import grpc

C: Final = grpc.StatusCode


@dataclass(frozen=True, slots=True)
class ErrorSpec:
    """One kind of error.

    ``retryable``: the same request may succeed later, or elsewhere, without a change by the user.
    ``message``: default text, used when the raiser has nothing more exact to say.
    """

    reason: str
    code: grpc.StatusCode
    retryable: bool
    message: str
    user_action: str
