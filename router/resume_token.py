# SPDX-License-Identifier: Apache-2.0
"""Resume tokens: opaque to clients, made and read by any router of the cluster that has its key.

A token is a version byte, the ticket, and HMAC-SHA256 over both. It grants the rest of one answer to whoever shows it with
the right tenant, so it is not logged.
"""

import hashlib
import hmac
import secrets
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from twinpool.errors import ConfigError, TwinpoolError
from twinpool.store import Keys, Store
from twinpool.v1.resume_pb2 import ResumeTicket
from twinpool.v1.router_pb2 import HandOverRequest

KEY_BYTES: Final = 32
MIN_KEY_BYTES: Final = 16
MAX_TOKEN_BYTES: Final = 1024

_VERSION: Final = b"\x01"
_MAC_BYTES: Final = 32
_KEYS_MAX: Final = 4


class TokenSeal:
    """Seals and opens tokens. Starts with a key of its own, until it is told the cluster's."""

    def __init__(self) -> None:
        self._keys = [secrets.token_bytes(KEY_BYTES)]

    @property
    def key(self) -> bytes:
        """What seals now."""
        return self._keys[0]

    def use(self, key: bytes) -> None:
        """Seals with the cluster's key from now on. What was sealed before stays readable here."""
        if key != self._keys[0]:
            self._keys = [key, *self._keys][:_KEYS_MAX]

    def seal(self, ticket: ResumeTicket) -> bytes:
        """The token for a client."""
        body = _VERSION + ticket.SerializeToString()
        return body + _mac(self._keys[0], body)

    def sign(self, request: HandOverRequest) -> None:
        """Shows that a router of this cluster asks."""
        request.ClearField("seal")
        request.seal = _mac(self._keys[0], request.SerializeToString(deterministic=True))

    def check(self, request: HandOverRequest) -> None:
        """Raises PERMISSION_DENIED unless a router of this cluster asks."""
        plain = HandOverRequest()
        plain.CopyFrom(request)
        plain.ClearField("seal")
        body = plain.SerializeToString(deterministic=True)
        if not any([hmac.compare_digest(request.seal, _mac(key, body)) for key in self._keys]):
            raise TwinpoolError("PERMISSION_DENIED", "only a router of this cluster may ask for an answer")

    def open(self, token: bytes, tenant: str) -> ResumeTicket:
        """What a token says. Raises RESUME_TOKEN_INVALID, or PERMISSION_DENIED if it is another tenant's."""
        body, mac = token[:-_MAC_BYTES], token[-_MAC_BYTES:]
        # Each key, so that the time does not tell which one fits.
        good = [hmac.compare_digest(mac, _mac(key, body)) for key in self._keys]
        if len(token) > MAX_TOKEN_BYTES or body[:1] != _VERSION or not any(good):
            raise TwinpoolError("RESUME_TOKEN_INVALID", field="token")
        try:
            ticket = ResumeTicket.FromString(body[1:])
        except DecodeError:
            raise TwinpoolError("RESUME_TOKEN_INVALID", field="token") from None
        if ticket.tenant != tenant:
            raise TwinpoolError(
                "PERMISSION_DENIED", "the resume token belongs to another tenant", field="tenant"
            )
        return ticket


def key_digest(tenant: str, key: str) -> bytes:
    """How routers and workers name an idempotency key of a tenant; empty for none."""
    if not key:
        return b""
    return hashlib.sha256(b"%d:%s%s" % (len(tenant), tenant.encode(), key.encode())).digest()[:16]


def cluster_key(store: Store, cluster: str, own: bytes) -> bytes:
    """The cluster's key in etcd, which is ``own`` if there was none. Blocks; raises what the store raises."""
    name = Keys(cluster).resume_key
    store.create(name, own)
    item = store.get(name)
    if item is None or len(item.value) < MIN_KEY_BYTES:
        raise TwinpoolError("STORE_CORRUPT", f"the value of {name!r} is no key")
    return item.value


def key_of_file(path: str) -> bytes:
    """The key in a file. Raises ConfigError."""
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"router.resume_key_file: cannot read {path}: {error.strerror}", key="router.resume_key_file"
        ) from None
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(
            f"router.resume_key_file: {path} has {len(key)} bytes; the limit is at least {MIN_KEY_BYTES}",
            key="router.resume_key_file",
        )
    return key


def _mac(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, body, "sha256")
