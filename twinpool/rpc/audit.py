# SPDX-License-Identifier: Apache-2.0
"""The audit log: who made which administrative call, on what, and how it ended. A line of JSON each, never a prompt or a key.

A call that changes something has two lines: one before it starts, without which it is not made, and one when it has ended. A call
that only looks has the last one alone. What cannot be written to the file goes to the log.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Literal, Self
from urllib.parse import unquote

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from twinpool import metrics
from twinpool.errors import ConfigError, TwinpoolError, as_twinpool_error
from twinpool.logs import get_logger
from twinpool.rpc.caller import Caller
from twinpool.rpc.keys import digest_of
from twinpool.rpc.roles import short_name

log = get_logger(__name__)

CHARS_MAX: Final = 128
"""Longest text in a line that a caller may choose; what is longer is cut."""

NAMES_MAX: Final = 8
"""Most names of a certificate in a line."""

_FINGERPRINT_CHARS: Final = len("sha256:") + 16
_FILE_MODE: Final = 0o600
_REFUSALS: Final = ("UNAUTHENTICATED", "PERMISSION_DENIED")
_SERVICES: Final = ("ControlService", "RouterService", "WorkerService")
"""Of their other methods refusals are written alone."""

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Audited:
    """What is written of a method: the request's fields that name its target, and those that hold no user's text."""

    changes: bool
    target: str = ""
    arguments: tuple[str, ...] = ()


METHODS: Final = {
    "ControlService/DrainWorker": Audited(True, "worker", ("timeout",)),
    "ControlService/RestartWorker": Audited(True, "worker", ("timeout",)),
    "ControlService/FlipWorker": Audited(True, "worker", ("role", "timeout", "force")),
    "ControlService/ScalePool": Audited(True, "pool", ("prefill", "decode", "timeout", "force")),
    "ControlService/CordonWorker": Audited(True, "worker"),
    "ControlService/UncordonWorker": Audited(True, "worker"),
    "ControlService/RebalancePool": Audited(
        True, "pool", ("prefill", "decode", "auto", "dry_run", "timeout")
    ),
    "ControlService/ApplyConfig": Audited(True, "", ("values", "reset", "dry_run", "generation")),
    "ControlService/ListRequests": Audited(False, "router", ("state", "pool")),
    "RouterService/InspectRouter": Audited(False),
    "RouterService/LookupPrefix": Audited(False, "tenant", ("model", "adapter")),
    "RouterService/TraceRequest": Audited(False, "request_id"),
    "RouterService/FetchRecording": Audited(False),
    "WorkerService/Drain": Audited(True, "worker", ("timeout",)),
    "WorkerService/ChangeRole": Audited(True, "worker", ("role", "epoch", "timeout")),
    "WorkerService/Cordon": Audited(True, "worker", ("cordoned",)),
}
"""The methods that change the cluster or look into what others have asked."""

_OTHER: Final = Audited(False)


class AuditLog:
    """One a process."""

    def __init__(self, path: str, process: str) -> None:
        """``path`` is appended to; "": the log. ``process``: the name in each line. Raises ConfigError."""
        self._path = path
        self._process = process
        self._file = -1
        self._torn = False
        if path:
            try:
                self._follow()
            except OSError as error:
                raise ConfigError(
                    f"audit.file: cannot append to {path}: {error.strerror}", key="audit.file"
                ) from None

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def watches(self, method: str) -> bool:
        """Whether calls of ``method``, by gRPC's full name, may have to be written down."""
        name = short_name(method)
        return name in METHODS or name.partition("/")[0] in _SERVICES

    def call(self, method: str, request: Any, context: Context) -> Call:
        """A call of a method that it watches. To be entered once."""
        return _AuditedCall(self, short_name(method), request, context)

    def write(self, line: dict[str, object]) -> None:
        """Appends a line. Raises OSError."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "process": self._process} | line
        if not self._path:
            log.info("audit", **line)
            return
        try:
            self._append(line)
        except OSError as error:
            metrics.AUDIT_WRITE_FAILURES.inc()
            log.error("audit_write_failed", file=self._path, error=error.strerror)
            log.info("audit", **line)
            raise

    def _append(self, line: dict[str, object]) -> None:
        self._follow()
        # One write with O_APPEND: lines of several processes do not mix.
        data = b"\n" * self._torn + json.dumps(line).encode() + b"\n"
        written = os.write(self._file, data)
        self._torn = written < len(data)
        if self._torn:
            raise OSError(0, "only a part of the line was written")

    def _follow(self) -> None:
        """Opens the file, anew if another one or none has taken its place."""
        if self._file >= 0:
            try:
                if os.path.samestat(os.stat(self._path), os.fstat(self._file)):
                    return
            except FileNotFoundError:
                pass
            self.close()
        # Without O_NONBLOCK a pipe that nobody reads would stop the process.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        self._file, self._torn = os.open(self._path, flags, _FILE_MODE), False


class Call:
    """A call of which nothing is written."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Its end."""

    def admitted(self) -> None:
        """The caller may make it, and it is about to start. Raises AUDIT_UNAVAILABLE."""

    def answered(self, answer: Any) -> None:
        """What it is answered with."""


class _AuditedCall(Call):
    def __init__(self, audit: AuditLog, name: str, request: Any, context: Context) -> None:
        self._log = audit
        self._listed = name in METHODS
        self._audited = METHODS.get(name, _OTHER)
        self._began = time.monotonic()
        self._operation = ""
        self._facts: dict[str, object] = {
            "id": secrets.token_hex(8),
            "method": name,
            "who": _who(context),
            "target": _shown(request, self._audited.target),
            "arguments": {
                field: shown for field in self._audited.arguments if (shown := _shown(request, field)) != ""
            },
        }

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = _ended(error)
        if not self._listed and (ended is None or ended.reason not in _REFUSALS):
            return
        try:
            self._write(
                "end",
                code="OK" if ended is None else ended.code.name,
                reason="" if ended is None else ended.reason,
                seconds=round(time.monotonic() - self._began, 6),
                operation=self._operation,
            )
        except OSError:
            # It has happened: the log says so, and who called hears how it ended.
            return

    def admitted(self) -> None:
        if not self._audited.changes:
            return
        try:
            self._write("begin")
        except OSError as error:
            raise TwinpoolError(
                "AUDIT_UNAVAILABLE", f"the call was not made: the audit log has an error: {error.strerror}"
            ) from None

    def answered(self, answer: Any) -> None:
        operation = getattr(answer, "operation", None)
        self._operation = str(getattr(operation, "id", ""))

    def _write(self, stage: Literal["begin", "end"], **facts: object) -> None:
        self._log.write({"stage": stage, **self._facts, **facts})


def _ended(error: BaseException | None) -> TwinpoolError | None:
    if error is None:
        return None
    # A generator that is closed: its reader has gone.
    return TwinpoolError("CANCELLED") if isinstance(error, GeneratorExit) else as_twinpool_error(error)


def _who(context: Context) -> dict[str, object]:
    caller = Caller.of(context)
    return {
        "key": digest_of(caller.key)[:_FINGERPRINT_CHARS] if caller.key else "",
        "names": [name[:CHARS_MAX] for name in caller.identities[:NAMES_MAX]],
        "peer": unquote(context.peer()),
    }


def _shown(request: Any, field: str) -> str | float:
    """A field of a request; "" if it is not set. A worker is shown as its name and incarnation, a duration in seconds, a value of
    an enumeration by its name, several in a row."""
    value: Any = getattr(request, field, "")
    if isinstance(value, str):
        return value[:CHARS_MAX]
    if isinstance(value, Sequence):
        parts = (each if isinstance(each, str) else f"{each.key}={each.value}" for each in value)
        return ", ".join(parts)[:CHARS_MAX]
    about = request.DESCRIPTOR.fields_by_name[field]
    if about.has_presence and not request.HasField(field):
        return ""
    if isinstance(value, int):
        known = about.enum_type.values_by_number.get(value) if about.enum_type is not None else None
        return value if known is None else str(known.name)
    if isinstance(value, float):
        return value
    return (
        value.ToNanoseconds() / 1e9
        if isinstance(value, Duration)
        else f"{value.name}/{value.incarnation}"[:CHARS_MAX]
    )
