# SPDX-License-Identifier: Apache-2.0
"""The exception that carries a row of the error table."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import grpc

from twinpool.errors.spec import ErrorSpec
from twinpool.errors.table import TABLE

DOMAIN: Final = "twinpool.dev"
"""``google.rpc.ErrorInfo.domain`` of every error of the table."""


class TwinpoolError(Exception):
    """An error of the table, with what is known of this instance.

    ``reason``: a key of the table (KeyError otherwise: a typo must not become a silent INTERNAL).
    ``message``: names field, value and limit, never prompt text or token ids; None takes the table's text.
    ``retry_after``: seconds after which a retry makes sense; travels as ``RetryInfo``.
    ``metadata``: short facts for machines (limit, worker, attempt ...); travels as ``ErrorInfo.metadata``.
    ``field``: dotted path of the offending request field; travels as a ``BadRequest`` field violation.
    """

    def __init__(
        self,
        reason: str,
        message: str | None = None,
        *,
        retry_after: float | None = None,
        metadata: Mapping[str, object] | None = None,
        field: str | None = None,
    ) -> None:
        self.spec: ErrorSpec = TABLE[reason]
        self.message: str = message or self.spec.message
        self.retry_after = None if retry_after is None else max(0.0, retry_after)
        self.metadata: dict[str, str] = {key: str(value) for key, value in (metadata or {}).items()}
        self.field = field
        super().__init__(self.message)

    @property
    def reason(self) -> str:
        """UPPER_SNAKE name of the kind of error."""
        return self.spec.reason

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status code."""
        return self.spec.code

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later or elsewhere."""
        return self.spec.retryable

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.reason!r}, {self.message!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray carries exceptions by pickle; the default would call __init__ with the message alone.
        state = (self.reason, self.message, self.retry_after, self.metadata, self.field)
        return (_rebuild, (type(self), *state))


def _rebuild(
    kind: type[TwinpoolError],
    reason: str,
    message: str,
    retry_after: float | None,
    metadata: dict[str, str],
    field: str | None,
) -> TwinpoolError:
    error = kind.__new__(kind)
    TwinpoolError.__init__(error, reason, message, retry_after=retry_after, metadata=metadata, field=field)
    return error


class ConfigError(TwinpoolError):
    """A configuration that cannot be used. ``key`` is the dotted key, empty if no single one is at fault."""

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__("CONFIG_INVALID", message, metadata={"key": key} if key else None)

    @property
    def key(self) -> str:
        """The dotted key at fault, or ""."""
        return self.metadata.get("key", "")


class CheckpointError(TwinpoolError):
    """A checkpoint that cannot be loaded. Names the file, and the tensor where one is at fault. ``reason``: CHECKPOINT_INVALID or
    CHECKPOINT_UNREADABLE."""

    def __init__(
        self, message: str, *, file: str = "", tensor: str = "", reason: str = "CHECKPOINT_INVALID"
    ) -> None:
        facts = {"file": file, "tensor": tensor}
        super().__init__(reason, message, metadata={key: value for key, value in facts.items() if value})


def as_twinpool_error(error: BaseException) -> TwinpoolError:
    """The error of the table that stands for any exception; unknown ones become INTERNAL.

    The text of an unknown exception may hold user content, so only its type leaves the process.
    """
    if isinstance(error, TwinpoolError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return TwinpoolError("CANCELLED")
    if isinstance(error, TimeoutError):
        return TwinpoolError("DEADLINE_EXCEEDED")
    return TwinpoolError(
        "INTERNAL", f"internal error: {type(error).__name__}", metadata={"type": type(error).__name__}
    )
