# SPDX-License-Identifier: Apache-2.0
"""Records of workers and routers: their keys, and whether one from etcd can be trusted to make sense."""

from __future__ import annotations

from typing import Final, TypeVar

from google.protobuf.message import DecodeError

from twinpool.ids import is_name
from twinpool.store import Keys
from twinpool.v1.control_pb2 import (
    WORKER_STATE_READY,
    WORKER_STATE_UNSPECIFIED,
    RouterRecord,
    WorkerRecord,
)
from twinpool.v1.worker_pb2 import ROLE_UNSPECIFIED

Record = WorkerRecord | RouterRecord
R = TypeVar("R", bound=Record)

_MAX_TEXT_CHARS: Final = 4096
_MAX_COUNT: Final = (1 << 31) - 1


class RecordError(ValueError):
    """A key or value in etcd that is no usable record. ``cause`` is one of "key", "decode", "content"."""

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text)
        self.cause = cause


def name_of(record: Record) -> str:
    """The stable name."""
    return record.worker.name if isinstance(record, WorkerRecord) else record.name


def incarnation(record: Record) -> int:
    """The incarnation."""
    return record.worker.incarnation if isinstance(record, WorkerRecord) else record.incarnation


def incarnation_of(value: bytes, kind: type[Record]) -> int:
    """The incarnation in a stored record; 0 if it cannot be read."""
    try:
        return incarnation(kind.FromString(value))
    except DecodeError:
        return 0


def key_of(keys: Keys, record: Record) -> str:
    """Where the record belongs."""
    if isinstance(record, WorkerRecord):
        return keys.worker(record.pool, record.worker.name)
    return keys.router(record.name)


def takes_work(record: WorkerRecord) -> bool:
    """Whether the worker says that new work may be placed there."""
    return record.state == WORKER_STATE_READY and not record.cordoned


def problem_of(record: Record) -> str:
    """What is wrong with the record, as a phrase; "" if nothing is."""
    if not is_name(name_of(record)):
        return "its name is not a lower-case DNS label"
    if incarnation(record) == 0:
        return "it has no incarnation"
    if not _is_address(record.endpoint):
        return f"its endpoint {record.endpoint[:80]!r} is not host:port"
    if record.metrics_endpoint and not _is_address(record.metrics_endpoint):
        return f"its metrics endpoint {record.metrics_endpoint[:80]!r} is not host:port"
    return _worker_problem(record) if isinstance(record, WorkerRecord) else ""


def _worker_problem(record: WorkerRecord) -> str:
    if not is_name(record.pool):
        return "its pool is not a lower-case DNS label"
    if record.role == ROLE_UNSPECIFIED:
        return "it has no role"
    if record.state == WORKER_STATE_UNSPECIFIED:
        return "it has no state"
    for field in ("num_blocks", "block_tokens", "max_num_seqs"):
        if not 0 < getattr(record, field) <= _MAX_COUNT:
            return f"its {field} is {getattr(record, field)}, not 1 to {_MAX_COUNT}"
    for field in ("fingerprint", "model", "family", "model_path"):
        if len(getattr(record, field)) > _MAX_TEXT_CHARS:
            return f"its {field} is longer than {_MAX_TEXT_CHARS} characters"
    return ""


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return (
        bool(host and colon)
        # First: Python refuses to read numbers of thousands of digits.
        and len(text) < 300
        and port.isascii()
        and port.isdigit()
        and 0 < int(port) < 65536
    )


def parse(keys: Keys, kind: type[R], key: str, value: bytes) -> R:
    """The record at a key. Raises RecordError for anything that its owner would not have written there."""
    try:
        record: R = kind.FromString(value)  # type: ignore[assignment]
    except DecodeError:
        raise RecordError("decode", f"the value of {key!r} is not a {kind.DESCRIPTOR.name}") from None
    if problem := problem_of(record):
        raise RecordError("content", f"the record at {key!r} is not usable: {problem}")
    if key_of(keys, record) != key:
        raise RecordError("key", f"the record at {key!r} belongs at {key_of(keys, record)!r}")
    return record
