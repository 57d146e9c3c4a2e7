# SPDX-License-Identifier: Apache-2.0
"""What the store speaks: items, snapshots, leases, and the calls that every implementation has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Item:
    """A key with its value, as of one revision."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease_id: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All items below a prefix at one revision.

    ``cluster_id`` and ``revision`` tell whether two snapshots are of the same history: a wiped etcd starts again at
    revision 1, often under the same id.
    """

    items: Mapping[str, Item]
    revision: int
    cluster_id: int

    def precedes(self, other: Snapshot) -> bool:
        """Whether ``other`` can be a later state of the same history."""
        return self.cluster_id == other.cluster_id and self.revision <= other.revision


@dataclass(frozen=True, slots=True)
class Lease:
    """A granted lease. ``ttl_seconds`` may be more than was asked for."""

    id: int
    ttl_seconds: int


class LeaseLostError(Exception):
    """The lease has expired or was revoked: grant another and put the keys again."""

    def __init__(self, lease_id: int) -> None:
        super().__init__(f"lease {lease_id:016x} is gone")
        self.lease_id = lease_id


class Store(Protocol):
    """etcd as Twinpool uses it: blocking calls, safe from any thread.

    Every call ends within the store's timeout. Each raises TwinpoolError STORE_UNAVAILABLE when etcd cannot be
    reached, and PERMISSION_DENIED or UNAUTHENTICATED when it refuses.
    """

    def get(self, key: str) -> Item | None:
        """The item at ``key``, or None."""
        ...

    def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        """Writes and returns the new revision. Raises LeaseLostError if the lease is gone."""
        ...

    def create(self, key: str, value: bytes, lease_id: int = 0) -> bool:
        """Writes only if there is no such key; whether it did. Raises LeaseLostError."""
        ...

    def replace(self, key: str, value: bytes, mod_revision: int, lease_id: int = 0) -> bool:
        """Writes only if the key was last written at ``mod_revision``; whether it did. Raises LeaseLostError."""
        ...

    def delete(self, key: str) -> bool:
        """Deletes; whether there was one."""
        ...

    def delete_if(self, key: str, create_revision: int) -> bool:
        """Deletes only the key that was created at ``create_revision``; whether it did."""
        ...

    def delete_prefix(self, prefix: str) -> int:
        """Deletes all below ``prefix``, which ends with "/"; how many there were."""
        ...

    def list_prefix(self, prefix: str) -> Snapshot:
        """All below ``prefix``, which ends with "/", at one revision."""
        ...

    def grant(self, ttl_seconds: int) -> Lease:
        """A new lease."""
        ...

    def keep_alive(self, lease_id: int) -> int:
        """Renews; the seconds it now has. Raises LeaseLostError."""
        ...

    def revoke(self, lease_id: int) -> None:
        """Ends the lease and deletes its keys. A lease that is gone already is no error."""
        ...

    def close(self) -> None:
        """Ends the connections. Calls after it raise STORE_UNAVAILABLE."""
        ...

    def watch_call(self, prefix: str, start_revision: int, requests: Iterator[Any]) -> Any:
        """A raw watch stream, for :class:`twinpool.store.watch.PrefixWatch`; see there for what it must survive."""
        ...

    def fail_endpoint(self) -> None:
        """Told by a watch whose stream broke: the next call tries another member first."""
        ...
