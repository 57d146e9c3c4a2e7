# SPDX-License-Identifier: Apache-2.0
"""Requests of etcd's KV service as calls on :class:`Mvcc`. No lock, no network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import etcd3.etcdrpc as pb
import grpc
from etcd3.etcdrpc import kv_pb2

from twinpool.store.mvcc import Mvcc, Version

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
    before = state.latest(request.key)
    if (request.ignore_value or request.ignore_lease) and before is None:
        raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: key not found")
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
    """Txn, inside ``Mvcc.write``: all of it is one revision, or nothing. Raises Refusal, MvccError."""
    _check_txn(state, request)
    return _run_txn(state, request)


def _run_txn(state: Mvcc, request: Any) -> Any:
    succeeded = all(_holds(state, compare) for compare in request.compare)
    response = pb.TxnResponse(succeeded=succeeded)
    for op in request.success if succeeded else request.failure:
        kind = op.WhichOneof("request")
        answer = response.responses.add()
        if kind == "request_range":
            answer.response_range.CopyFrom(read(state, op.request_range))
        elif kind == "request_put":
            answer.response_put.CopyFrom(put(state, op.request_put))
        elif kind == "request_delete_range":
            answer.response_delete_range.CopyFrom(delete(state, op.request_delete_range))
        else:
            answer.response_txn.CopyFrom(_run_txn(state, op.request_txn))
    return response


def _check_txn(state: Mvcc, request: Any) -> None:
    """Refuses before the first change, since a half-applied transaction cannot be taken back."""
    for compare in request.compare:
        _check_key(compare.key)
    for ops in (request.success, request.failure):
        if len(ops) > MAX_TXN_OPS or len(request.compare) > MAX_TXN_OPS:
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: too many operations in txn request")
        written: set[bytes] = set()
        for op in ops:
            kind = op.WhichOneof("request")
            if kind == "request_txn":
                _check_txn(state, op.request_txn)
            elif kind == "request_put":
                _check_put(state, op.request_put)
                if op.request_put.key in written:
                    raise Refusal(
                        grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: duplicate key given in txn request"
                    )
                written.add(op.request_put.key)
            elif kind == "request_range":
                # Reads it once in vain: a refused revision must not surface between two changes.
                read(state, op.request_range)
            elif kind == "request_delete_range":
                _check_key(op.request_delete_range.key)
            else:
                raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: key not found")


def _check_put(state: Mvcc, request: Any) -> None:
    _check_key(request.key)
    if request.lease and request.lease not in state.leases:
        raise Refusal(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found")
    if (request.ignore_value or request.ignore_lease) and state.latest(request.key) is None:
        raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: key not found")


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
