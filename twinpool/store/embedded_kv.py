# SPDX-License-Identifier: Apache-2.0
"""Requests of etcd's KV service as calls on :class:`Mvcc`. No lock, no network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from twinpool.store.mvcc import Mvcc, Version, in_range
from twinpool.store.protocol import kv_pb2, pb

MAX_TXN_OPS = 128
"""As etcd's default."""


class Refusal(Exception):
    """A request that etcd answers with this status."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def key_value(version: Version, keys_only: bool = False) -> Any:
    """etcd's message of one version; of a tombstone only key and revision."""
    return kv_pb2.KeyValue(
        key=version.key,
        value=b"" if keys_only or version.value is None else version.value,
        create_revision=version.create,
        mod_revision=version.mod,
        version=version.version,
        lease=version.lease,
    )


def _check_key(key: bytes) -> None:
    if not key:
        raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: key is not provided")


_SORT: dict[int, Callable[[Version], Any]] = {
    pb.RangeRequest.KEY: lambda version: version.key,
    pb.RangeRequest.VERSION: lambda version: version.version,
    pb.RangeRequest.CREATE: lambda version: version.create,
    pb.RangeRequest.MOD: lambda version: version.mod,
    pb.RangeRequest.VALUE: lambda version: version.value,
}


def read(state: Mvcc, request: Any) -> Any:
    """Range. Raises Refusal, MvccError."""
    _check_key(request.key)
    found = state.range(request.key, request.range_end, request.revision)
    total = len(found)
    found = [
        version
        for version in found
        if request.min_mod_revision <= version.mod <= (request.max_mod_revision or version.mod)
        and request.min_create_revision <= version.create <= (request.max_create_revision or version.create)
    ]
    if request.sort_order != pb.RangeRequest.NONE or request.sort_target != pb.RangeRequest.KEY:
        found.sort(key=_SORT[request.sort_target], reverse=request.sort_order == pb.RangeRequest.DESCEND)
    response = pb.RangeResponse(count=total)
    if request.count_only:
        return response
    if request.limit and len(found) > request.limit:
        found = found[: request.limit]
        response.more = True
    response.kvs.extend(key_value(version, request.keys_only) for version in found)
    return response


def put(state: Mvcc, request: Any) -> Any:
    """Put, inside ``Mvcc.write``. Raises Refusal, MvccError."""
    _check_key(request.key)
    # In this order, and in a transaction in the other one: as etcd.
    _check_lease(state, request)
    _check_ignored(state, request)
    before = state.latest(request.key)
    value, lease = request.value, request.lease
    if before is not None and before.value is not None:
        value = before.value if request.ignore_value else value
        lease = before.lease if request.ignore_lease else lease
    state.put(request.key, value, lease)
    response = pb.PutResponse()
    if request.prev_kv and before is not None:
        response.prev_kv.CopyFrom(key_value(before))
    return response


def delete(state: Mvcc, request: Any) -> Any:
    """DeleteRange, inside ``Mvcc.write``. Raises Refusal."""
    _check_key(request.key)
    gone = state.delete(request.key, request.range_end)
    response = pb.DeleteRangeResponse(deleted=len(gone))
    if request.prev_kv:
        response.prev_kvs.extend(key_value(version) for version in gone)
    return response


def apply_txn(state: Mvcc, request: Any) -> Any:
    """Txn, inside ``Mvcc.write``: all of it is one revision, or nothing. Raises Refusal, MvccError.

    Everything that can be refused is checked before the first change: a half-applied transaction cannot be taken
    back.
    """
    _check_shape(request)
    path = _choose(state, request)
    return _run(state, request, path)


@dataclass(slots=True)
class _Path:
    """Which branch each transaction takes, decided on the state before the first change, as etcd does."""

    succeeded: bool
    inner: list[_Path]


def _choose(state: Mvcc, request: Any) -> _Path:
    """Decides, and checks the operations of the branches taken."""
    path = _Path(all(_holds(state, compare) for compare in request.compare), [])
    ops = request.success if path.succeeded else request.failure
    for op in ops:
        if op.WhichOneof("request") == "request_put":
            _check_ignored(state, op.request_put)
            _check_lease(state, op.request_put)
    for op in ops:
        if op.WhichOneof("request") == "request_range":
            # Reads it once in vain, for the revision.
            read(state, op.request_range)
    path.inner += [_choose(state, op.request_txn) for op in ops if op.WhichOneof("request") == "request_txn"]
    return path


def _run(state: Mvcc, request: Any, path: _Path) -> Any:
    response = pb.TxnResponse(succeeded=path.succeeded)
    nested = iter(path.inner)
    for op in request.success if path.succeeded else request.failure:
        kind = op.WhichOneof("request")
        answer = response.responses.add()
        if kind == "request_range":
            inner = answer.response_range
            inner.CopyFrom(read(state, op.request_range))
        elif kind == "request_put":
            inner = answer.response_put
            inner.CopyFrom(put(state, op.request_put))
        elif kind == "request_delete_range":
            inner = answer.response_delete_range
            inner.CopyFrom(delete(state, op.request_delete_range))
        else:
            inner = answer.response_txn
            inner.CopyFrom(_run(state, op.request_txn, next(nested)))
        inner.header.revision = state.seen_revision
    return response


def _check_shape(request: Any) -> None:
    """Refuses what etcd refuses without a look at its state, in both branches."""
    if max(len(request.compare), len(request.success), len(request.failure)) > MAX_TXN_OPS:
        raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: too many operations in txn request")
    for compare in request.compare:
        _check_key(compare.key)
    for ops in (request.success, request.failure):
        written: set[bytes] = set()
        for op in ops:
            kind = op.WhichOneof("request")
            if kind is None:
                raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: key not found")
            if kind == "request_txn":
                _check_shape(op.request_txn)
                continue
            _check_key(getattr(op, kind).key)
            if kind == "request_put":
                if op.request_put.key in written:
                    raise _DUPLICATE
                written.add(op.request_put.key)
        for op in ops:
            if op.WhichOneof("request") == "request_delete_range":
                gone = op.request_delete_range
                if any(in_range(key, gone.key, gone.range_end) for key in written):
                    raise _DUPLICATE


def _check_lease(state: Mvcc, request: Any) -> None:
    if request.lease and request.lease not in state.leases:
        raise Refusal(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found")


def _check_ignored(state: Mvcc, request: Any) -> None:
    if (request.ignore_value or request.ignore_lease) and state.latest(request.key) is None:
        raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: key not found")


_DUPLICATE = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: duplicate key given in txn request")

_ABSENT = Version(b"", b"", 0, 0, 0, 0)

_COMPARE_FIELD: dict[int, tuple[str, Callable[[Version], Any]]] = {
    pb.Compare.VERSION: ("version", lambda version: version.version),
    pb.Compare.CREATE: ("create_revision", lambda version: version.create),
    pb.Compare.MOD: ("mod_revision", lambda version: version.mod),
    pb.Compare.VALUE: ("value", lambda version: version.value),
    pb.Compare.LEASE: ("lease", lambda version: version.lease),
}

_COMPARE_RESULT: dict[int, Callable[[Any, Any], bool]] = {
    pb.Compare.EQUAL: lambda found, wanted: bool(found == wanted),
    pb.Compare.NOT_EQUAL: lambda found, wanted: bool(found != wanted),
    pb.Compare.GREATER: lambda found, wanted: bool(found > wanted),
    pb.Compare.LESS: lambda found, wanted: bool(found < wanted),
}


def _holds(state: Mvcc, compare: Any) -> bool:
    field, value_of = _COMPARE_FIELD[compare.target]
    matches = _COMPARE_RESULT[compare.result]
    wanted = getattr(compare, field)
    found = state.range(compare.key, compare.range_end)
    if not found:
        # A key that does not exist has no value, so no comparison of values holds; its numbers are 0.
        return bool(compare.target != pb.Compare.VALUE) and matches(value_of(_ABSENT), wanted)
    return all(matches(value_of(version), wanted) for version in found)
