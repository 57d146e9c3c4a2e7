# SPDX-License-Identifier: Apache-2.0
"""The state of a single-node etcd: versioned keys, leases, history. No I/O, no clock, no lock.

Time is seconds, passed in. The caller serialises all calls.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

MAX_HISTORY = 20_000
"""Revisions kept for watches that resume and for reads in the past; older ones are compacted."""


@dataclass(frozen=True, slots=True)
class Version:
    """One version of one key. ``value`` None: deleted at ``mod``."""

    key: bytes
    value: bytes | None
    create: int
    mod: int
    version: int
    lease: int


@dataclass(frozen=True, slots=True)
class Change:
    """One event of a revision: what the key became and what it was."""

    now: Version
    before: Version | None


@dataclass(slots=True)
class LeaseState:
    """A lease and the keys that end with it."""

    id: int
    ttl: int
    deadline: float
    keys: set[bytes] = field(default_factory=set)


class MvccError(Exception):
    """A call that etcd refuses. ``kind`` is one of "compacted", "future", "lease", "lease_exists"."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def in_range(key: bytes, start: bytes, end: bytes) -> bool:
    """etcd's ranges: no end is one key; an end of NUL is everything from start on."""
    if not end:
        return key == start
    return start <= key and (end == b"\0" or key < end)


class Mvcc:
    """Keys, leases and history. Writes happen in a :meth:`write` block, which is one revision."""

    def __init__(self, max_history: int = MAX_HISTORY) -> None:
        self.revision = 1
        self.compacted = 0
        self.leases: dict[int, LeaseState] = {}
        self._max_history = max_history
        self._keys: list[bytes] = []
        self._versions: dict[bytes, list[Version]] = {}
        self._history: dict[int, list[Change]] = {}
        self._open: list[Change] | None = None

    # reads

    @property
    def seen_revision(self) -> int:
        """The revision that a read sees: inside ``write``, after its first change, the one that is being made."""
        return self.revision + bool(self._open)

    def latest(self, key: bytes) -> Version | None:
        """The key's present version, or None."""
        versions = self._versions.get(key)
        return versions[-1] if versions and versions[-1].value is not None else None

    def range(self, start: bytes, end: bytes, revision: int = 0) -> list[Version]:
        """The live keys of a range in key order, now or as of a revision. Raises MvccError compacted, future."""
        if revision > self.revision:
            raise MvccError("future")
        if 0 < revision < self.compacted:
            raise MvccError("compacted")
        found = []
        for key in self._between(start, end):
            version = self._at(key, revision)
            if version is not None and version.value is not None:
                found.append(version)
        return found

    def _between(self, start: bytes, end: bytes) -> Iterator[bytes]:
        first = bisect.bisect_left(self._keys, start)
        last = (
            first + 1 if not end else len(self._keys) if end == b"\0" else bisect.bisect_left(self._keys, end)
        )
        return (key for key in self._keys[first:last] if in_range(key, start, end))

    def _at(self, key: bytes, revision: int) -> Version | None:
        versions = self._versions[key]
        if revision <= 0:
            return versions[-1]
        index = bisect.bisect_right(versions, revision, key=lambda version: version.mod)
        return versions[index - 1] if index else None

    def changes(self, first: int) -> Iterator[tuple[int, list[Change]]]:
        """The revisions from ``first`` on, oldest first. Raises MvccError compacted if some of them are gone."""
        if first < self.compacted:
            raise MvccError("compacted")
        return (
            (revision, self._history[revision])
            for revision in range(first, self.revision + 1)
            if revision in self._history
        )

    # writes

    def write(self, body: Callable[[], None]) -> list[Change]:
        """Runs ``body``; what it put and deleted becomes one revision. Returns the changes, none if nothing changed."""
        self._open = []
        try:
            body()
            changes = self._open
        finally:
            self._open = None
        if changes:
            self.revision += 1
            self._history[self.revision] = changes
            if len(self._history) > self._max_history:
                self.compact(self.revision - self._max_history // 2)
        return changes

    def put(self, key: bytes, value: bytes, lease: int = 0) -> Version | None:
        """Inside ``write``: puts, and returns the version before. Raises MvccError lease before it changes anything."""
        if lease and lease not in self.leases:
            raise MvccError("lease")
        before = self.latest(key)
        now = self.revision + 1
        self._append(
            Version(
                key,
                value,
                create=before.create if before else now,
                mod=now,
                version=before.version + 1 if before else 1,
                lease=lease,
            ),
            before,
        )
        return before

    def delete(self, start: bytes, end: bytes) -> list[Version]:
        """Inside ``write``: deletes a range and returns what was there."""
        gone = self.range(start, end)
        for before in gone:
            self._append(Version(before.key, None, 0, self.revision + 1, 0, 0), before)
        return gone

    def _append(self, now: Version, before: Version | None) -> None:
        assert self._open is not None, "a change outside of write()"
        versions = self._versions.get(now.key)
        if versions is None:
            bisect.insort(self._keys, now.key)
            versions = self._versions[now.key] = []
        versions.append(now)
        if before is not None and before.lease and before.lease in self.leases:
            self.leases[before.lease].keys.discard(now.key)
        if now.lease:
            self.leases[now.lease].keys.add(now.key)
        self._open.append(Change(now, before))

    def compact(self, revision: int) -> None:
        """Forgets what was superseded before ``revision``. Raises MvccError compacted, future."""
        if revision > self.revision:
            raise MvccError("future")
        if revision <= self.compacted:
            raise MvccError("compacted")
        self.compacted = revision
        for old in [known for known in self._history if known < revision]:
            del self._history[old]
        for key, versions in list(self._versions.items()):
            keep = bisect.bisect_right(versions, revision, key=lambda version: version.mod) - 1
            if keep > 0:
                del versions[:keep]
            if versions[0].value is None and versions[0].mod <= revision:
                del versions[0]
            if not versions:
                del self._versions[key]
                self._keys.pop(bisect.bisect_left(self._keys, key))

    # leases

    def grant(self, now: float, lease: int, ttl: int) -> None:
        """Adds a lease. Raises MvccError lease_exists."""
        if lease in self.leases:
            raise MvccError("lease_exists")
        self.leases[lease] = LeaseState(lease, ttl, now + ttl)

    def renew(self, now: float, lease: int) -> int:
        """Renews a lease; its ttl, or 0 if it is gone."""
        found = self.leases.get(lease)
        if found is None:
            return 0
        found.deadline = now + found.ttl
        return found.ttl

    def revoke(self, lease: int) -> list[Change]:
        """Ends a lease and deletes its keys, all in one revision. Raises MvccError lease."""
        found = self.leases.get(lease)
        if found is None:
            raise MvccError("lease")

        def drop() -> None:
            for key in sorted(found.keys):
                self.delete(key, b"")

        changes = self.write(drop)
        del self.leases[lease]
        return changes

    def expired(self, now: float) -> list[int]:
        """Leases whose time is over."""
        return [lease.id for lease in self.leases.values() if lease.deadline <= now]

    def next_deadline(self) -> float | None:
        """When the next lease ends; None if there is none."""
        return min((lease.deadline for lease in self.leases.values()), default=None)
