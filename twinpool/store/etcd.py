# SPDX-License-Identifier: Apache-2.0
"""The store over etcd, through the ``etcd3`` client.

That client fails over between members, but keeps no lease alive, re-opens no watch, never authenticates again and
shuns a failed member for 300 seconds by default. Those four are handled here and in :mod:`twinpool.store.watch`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import etcd3
import grpc
from etcd3.exceptions import (
    ConnectionFailedError,
    ConnectionTimeoutError,
    InternalServerError,
    NoServerAvailableError,
    PreconditionFailedError,
)

from twinpool import metrics
from twinpool.config import ClusterConfig
from twinpool.errors import ConfigError, TwinpoolError
from twinpool.store.keys import check_prefix
from twinpool.store.protocol import pb
from twinpool.store.types import Item, Lease, LeaseLostError, Snapshot

T = TypeVar("T")

MAX_MESSAGE_BYTES: Final = 64 << 20
_PAGE_KEYS: Final = 100
"""Keys a page when a prefix is listed: values are at most 512 KiB, so a page fits in a message."""

_ENDPOINT_RETRY_SECONDS: Final = 0.2
"""A failed member is tried again after this long. A single-member cluster has no other."""

# etcd's server closes connections that ping more than once in 5 s.
_KEEPALIVE_MS: Final = 6000
_KEEPALIVE_TIMEOUT_MS: Final = 2000

_CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    # Also becomes TCP_USER_TIMEOUT: a connection into a black hole ends instead of backing off for minutes.
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    # The keep-alive's own timeout does not end a silent connection; this one does (60 s by default).
    ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # Despite its name this bounds the time of one attempt to connect.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)

_UNREACHABLE = (ConnectionFailedError, ConnectionTimeoutError, InternalServerError)


def connect_store(cluster: ClusterConfig) -> EtcdStore:
    """The store of a cluster's configuration. Opens connections lazily, so etcd need not run yet.

    Raises ConfigError if a TLS or password file cannot be read.
    """
    return EtcdStore(
        cluster.etcd_endpoints,
        timeout_seconds=cluster.etcd_timeout_seconds,
        ca_file=cluster.etcd_ca_file,
        cert_file=cluster.etcd_cert_file,
        key_file=cluster.etcd_key_file,
        user=cluster.etcd_user,
        password=_read(cluster.etcd_password_file, "etcd_password_file").strip() if cluster.etcd_user else "",
    )


def _read(path: str, key: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cluster.{key}: cannot read {path}: {error}", key=f"cluster.{key}") from None


class EtcdStore:
    """:class:`twinpool.store.types.Store` over one etcd cluster."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        timeout_seconds: float = 2.0,
        ca_file: str = "",
        cert_file: str = "",
        key_file: str = "",
        user: str = "",
        password: str = "",
    ) -> None:
        """``endpoints``: host:port each. ``timeout_seconds``: of one call, retries inside it included."""
        self._timeout = timeout_seconds
        self._user, self._password = user, password
        self._closed = threading.Event()
        self._auth_lock = threading.Lock()
        # The token of a call that timed out.
        self._doubted: Any = None
        secured = {}
        if ca_file:
            for key, path in (
                ("etcd_ca_file", ca_file),
                ("etcd_cert_file", cert_file),
                ("etcd_key_file", key_file),
            ):
                if path:
                    _read(path, key)
            make = etcd3.MultiEndpointEtcd3Client.get_secure_creds
            secured = {"creds": make(ca_file, key_file or None, cert_file or None)}
        self._client: Any = etcd3.MultiEndpointEtcd3Client(
            [
                etcd3.Endpoint(
                    *_split(endpoint),
                    secure=bool(ca_file),
                    time_retry=_ENDPOINT_RETRY_SECONDS,
                    opts=_CHANNEL_OPTIONS,
                    **secured,
                )
                for endpoint in endpoints
            ],
            timeout=timeout_seconds,
            failover=True,
        )

    # keys

    def get(self, key: str) -> Item | None:
        """See :class:`Store`."""
        response = self._call("get", lambda client: client.get_response(key))
        return to_item(response.kvs[0]) if response.kvs else None

    def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        """See :class:`Store`."""
        response = self._call("put", lambda client: client.put(key, value, lease=lease_id), lease_id)
        return int(response.header.revision)

    def create(self, key: str, value: bytes, lease_id: int = 0) -> bool:
        """See :class:`Store`."""
        return self._put_if(pb.Compare(key=key.encode(), target=pb.Compare.CREATE), key, value, lease_id)

    def replace(self, key: str, value: bytes, mod_revision: int, lease_id: int = 0) -> bool:
        """See :class:`Store`."""
        compare = pb.Compare(key=key.encode(), target=pb.Compare.MOD, mod_revision=mod_revision)
        return self._put_if(compare, key, value, lease_id)

    def _put_if(self, compare: Any, key: str, value: bytes, lease_id: int) -> bool:
        put = pb.PutRequest(key=key.encode(), value=value, lease=lease_id)
        request = pb.TxnRequest(compare=[compare], success=[pb.RequestOp(request_put=put)])
        return bool(self._call("txn", lambda client: self._txn(client, request), lease_id).succeeded)

    def _txn(self, client: Any, request: Any) -> Any:
        try:
            return client.kvstub.Txn(request, self._timeout, metadata=client.metadata)
        except grpc.RpcError as error:
            client._manage_grpc_errors(error)
            raise

    def delete(self, key: str) -> bool:
        """See :class:`Store`."""
        return bool(self._call("delete", lambda client: client.delete(key)))

    def delete_if(self, key: str, create_revision: int) -> bool:
        """See :class:`Store`."""
        compare = pb.Compare(key=key.encode(), target=pb.Compare.CREATE, create_revision=create_revision)
        drop = pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key.encode()))
        request = pb.TxnRequest(compare=[compare], success=[drop])
        return bool(self._call("txn", lambda client: self._txn(client, request)).succeeded)

    def delete_prefix(self, prefix: str) -> int:
        """See :class:`Store`."""
        check_prefix(prefix)
        return int(self._call("delete", lambda client: client.delete_prefix(prefix)).deleted)

    def list_prefix(self, prefix: str) -> Snapshot:
        """See :class:`Store`. Read page by page at one revision, so no message grows without bound."""
        check_prefix(prefix)
        while True:
            try:
                return self._list(prefix)
            except _Compacted:
                # The revision of the first page was compacted before the last page: begin again.
                continue

    def _list(self, prefix: str) -> Snapshot:
        start, end = prefix.encode(), _range_end(prefix)
        items: dict[str, Item] = {}
        revision = cluster_id = 0
        while True:
            page = self._call("list", _page(start, end, revision))
            revision = revision or int(page.header.revision)
            cluster_id = int(page.header.cluster_id)
            for kv in page.kvs:
                item = to_item(kv)
                items[item.key] = item
            if not page.more:
                return Snapshot(items, revision, cluster_id)
            start = page.kvs[-1].key + b"\0"

    def compact(self, revision: int) -> None:
        """Drops history before ``revision``, as the server's own compaction does."""
        self._call("compact", lambda client: client.compact(revision))

    # leases

    def grant(self, ttl_seconds: int) -> Lease:
        """See :class:`Store`."""
        lease = self._call("grant", lambda client: client.lease(ttl_seconds))
        return Lease(int(lease.id), int(lease.ttl))

    def keep_alive(self, lease_id: int) -> int:
        """See :class:`Store`."""
        responses = self._call("keep_alive", lambda client: list(client.refresh_lease(lease_id)))
        # etcd answers the renewal of a lease that is gone with a TTL of 0, not with an error.
        ttl = int(responses[0].TTL) if responses else 0
        if ttl <= 0:
            raise LeaseLostError(lease_id)
        return ttl

    def revoke(self, lease_id: int) -> None:
        """See :class:`Store`."""
        with contextlib.suppress(LeaseLostError):
            self._call("revoke", lambda client: client.revoke_lease(lease_id), lease_id)

    # life

    def close(self) -> None:
        """See :class:`Store`."""
        self._closed.set()
        self._client.close()

    def watch_call(self, prefix: str, start_revision: int, requests: Iterator[Any]) -> Any:
        """A raw watch stream on one member; ``requests`` follow the one that opens it. Raises STORE_UNAVAILABLE.

        The stream ends with an error when the member loses its leader, so that a watch moves on to another member.
        """
        create = pb.WatchCreateRequest(
            key=prefix.encode(), range_end=_range_end(prefix), start_revision=start_revision
        )

        def all_requests() -> Iterator[Any]:
            yield pb.WatchRequest(create_request=create)
            yield from requests

        def open_stream(client: Any) -> Any:
            metadata = (*(client.metadata or ()), ("hasleader", "true"))
            return pb.WatchStub(client.channel).Watch(all_requests(), metadata=metadata)

        return self._call("watch", open_stream)

    def fail_endpoint(self) -> None:
        """A watch found the present member unusable: the next call tries another one first."""
        self._client.endpoint_in_use.fail()
        self._client._clear_old_stubs()

    def _call(self, operation: str, call: Callable[[Any], T], lease_id: int = 0) -> T:
        """Runs a call of the client within the timeout and turns its errors into ours."""
        deadline = time.monotonic() + self._timeout
        started = time.monotonic()
        try:
            while True:
                try:
                    return self._authenticated(call)
                except NoServerAvailableError:
                    # Nothing was sent: all members failed a moment ago. Wait until one may be tried again.
                    if time.monotonic() + _ENDPOINT_RETRY_SECONDS >= deadline:
                        raise
                    if self._closed.wait(_ENDPOINT_RETRY_SECONDS / 4):
                        raise
        except Exception as error:
            metrics.STORE_FAILURES.labels(operation).inc()
            raise self._translate(error, operation, lease_id) from error
        finally:
            metrics.STORE_CALLS.labels(operation).observe(time.monotonic() - started)

    def _authenticated(self, call: Callable[[Any], T]) -> T:
        """Logs in before the first call, once more when the token has expired, and before the next call after a timeout."""
        if not self._user:
            return call(self._client)
        token = self._client.metadata or self._login(None)
        if token is self._doubted:
            token = self._login(token)
        try:
            return call(self._client)
        except ConnectionTimeoutError:
            # An etcd that was restored or wiped lets a call wait until it has reached the revision of the call's token.
            self._doubted = token
            raise
        except grpc.RpcError as error:
            if _code(error) is not grpc.StatusCode.UNAUTHENTICATED:
                raise
        self._login(token)
        return call(self._client)

    def _login(self, stale: Any) -> Any:
        with self._auth_lock:
            if self._client.metadata is stale or self._client.metadata is None:
                request = pb.AuthenticateRequest(name=self._user, password=self._password)
                try:
                    response = self._client.authstub.Authenticate(request, self._timeout)
                except grpc.RpcError as error:
                    self._client._manage_grpc_errors(error)
                    raise
                self._client.metadata = (("token", response.token),)
            return self._client.metadata

    def _translate(self, error: Exception, operation: str, lease_id: int) -> Exception:
        if self._closed.is_set():
            return TwinpoolError("STORE_UNAVAILABLE", f"the store was closed during {operation}")
        if isinstance(error, (*_UNREACHABLE, NoServerAvailableError)):
            names = ", ".join(self._client.endpoints)
            return TwinpoolError("STORE_UNAVAILABLE", f"etcd at {names} cannot be reached ({operation})")
        if isinstance(error, PreconditionFailedError):
            return TwinpoolError("INTERNAL", f"etcd refused {operation}: failed precondition")
        if not isinstance(error, grpc.RpcError):
            return error
        code, text = _code(error), _text(error)
        if code is grpc.StatusCode.NOT_FOUND and "lease" in text:
            return LeaseLostError(lease_id)
        if code is grpc.StatusCode.OUT_OF_RANGE and "compacted" in text:
            return _Compacted()
        if code is grpc.StatusCode.INVALID_ARGUMENT and "authentication failed" in text:
            return TwinpoolError("UNAUTHENTICATED", f"etcd refused user {self._user!r}")
        reasons = {
            grpc.StatusCode.PERMISSION_DENIED: "PERMISSION_DENIED",
            grpc.StatusCode.UNAUTHENTICATED: "UNAUTHENTICATED",
            # Also a member that is overloaded or still without leader.
            grpc.StatusCode.RESOURCE_EXHAUSTED: "STORE_UNAVAILABLE",
            grpc.StatusCode.CANCELLED: "STORE_UNAVAILABLE",
        }
        return TwinpoolError(reasons.get(code, "INTERNAL"), f"etcd refused {operation}: {code.name}: {text}")


class _Compacted(Exception):
    """The revision asked for is no longer there."""


def _page(start: bytes, end: bytes, revision: int) -> Callable[[Any], Any]:
    def call(client: Any) -> Any:
        return client.get_range_response(
            start, end, sort_order="ascend", limit=_PAGE_KEYS, revision=revision or None
        )

    return call


def _range_end(prefix: str) -> bytes:
    return prefix[:-1].encode() + b"0"  # "0" follows "/"


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host, int(port)


def to_item(kv: Any) -> Item:
    """An item from etcd's message."""
    # A key that is not UTF-8 is not ours, but must not break a listing.
    key = kv.key.decode("utf-8", "surrogateescape")
    return Item(key, kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease)


def _code(error: grpc.RpcError) -> grpc.StatusCode:
    # The stubs do not know that the errors of calls are calls, too.
    call: Any = error
    code: grpc.StatusCode = call.code() if isinstance(call, grpc.Call) else grpc.StatusCode.UNKNOWN
    return code


def _text(error: grpc.RpcError) -> str:
    call: Any = error
    return (call.details() or "") if isinstance(call, grpc.Call) else str(error)
