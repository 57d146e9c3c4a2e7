# SPDX-License-Identifier: Apache-2.0
"""The set of blocks that can be found on this worker, as the rest of the cluster shall know it.

A block can be found only if all blocks before it can: a lookup goes along the chain. The block manager may hold a block
whose ancestor is gone (two sequences computed the same prefix, and the published copy of the ancestor was evicted while
the other sequence went on). Such an *orphan* is not announced until its ancestors are there again, so the announced set
is closed: whoever holds block k of a prompt in it, holds all before it.
"""

from typing import NamedTuple

from twinpool.kv_events.hashes import join, split


class RawEvent(NamedTuple):
    """An event of the block manager. ``hashes``: 16 bytes each. Stored: ``parent`` is the hash before the first, and
    ``rooted`` says that this is no block but the namespace. Removed: ``parent`` is None."""

    hashes: bytes
    parent: bytes | None
    rooted: bool


class Change(NamedTuple):
    """A change of the announced set. Stored: each hash is the parent of the next; ``parent`` None: the first has none."""

    stored: bool
    hashes: list[bytes]
    parent: bytes | None


class Shadow:
    """Not thread-safe."""

    def __init__(self) -> None:
        # Announced: hash -> the hash before it. Insertion order is such that a parent comes before its children.
        self._parents: dict[bytes, bytes | None] = {}
        self._orphans: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, set[bytes]] = {}
        # Announced blocks that were orphans: the block manager may evict the parents of these, and only of these.
        self._loose: dict[bytes, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, name: bytes) -> bool:
        return name in self._parents

    @property
    def orphans(self) -> int:
        """Blocks that are there and can't be found."""
        return len(self._orphans)

    def hashes(self) -> bytes:
        """The announced set, 16 bytes each."""
        return join(self._parents)

    def chains(self) -> list[Change]:
        """The announced set as changes from nothing, in an order in which no parent is unknown."""
        found: list[Change] = []
        last: bytes | None = None
        for name, parent in self._parents.items():
            if found and parent is not None and parent == last:
                found[-1].hashes.append(name)
            else:
                found.append(Change(True, [name], parent))
            last = name
        return found

    def apply(self, event: RawEvent) -> list[Change]:
        """What an event of the block manager changes in the announced set, in order."""
        changes: list[Change] = []
        if event.parent is None:
            self._remove(split(event.hashes), changes)
        else:
            before: bytes | None = None if event.rooted else event.parent
            for name in split(event.hashes):
                self._store(name, before, changes)
                before = name
        return changes

    # --- stored

    def _store(self, name: bytes, parent: bytes | None, changes: list[Change]) -> None:
        if name in self._parents or name in self._orphans:
            return
        if parent is not None and parent not in self._parents:
            self._orphans[name] = parent
            self._waiting.setdefault(parent, set()).add(name)
            return
        self._announce(name, parent, changes)
        # Whatever waited for it, and what waited for that.
        ready = [name]
        while ready:
            before = ready.pop()
            for child in self._waiting.pop(before, ()):
                del self._orphans[child]
                self._loose.setdefault(before, set()).add(child)
                self._announce(child, before, changes)
                ready.append(child)

    def _announce(self, name: bytes, parent: bytes | None, changes: list[Change]) -> None:
        self._parents[name] = parent
        last = changes[-1] if changes else None
        if last is not None and last.stored and parent is not None and last.hashes[-1] == parent:
            last.hashes.append(name)
        else:
            changes.append(Change(True, [name], parent))

    # --- removed

    def _remove(self, names: list[bytes], changes: list[Change]) -> None:
        gone: list[bytes] = []
        for name in names:
            waited_for = self._orphans.pop(name, None)
            if waited_for is not None:
                self._forget(self._waiting, waited_for, name)
                continue
            if name not in self._parents:
                continue
            self._withdraw(name, gone)
            loose = self._loose.pop(name, None)
            if loose:
                self._orphan(loose, gone)
        if gone:
            changes.append(Change(False, gone, None))

    def _withdraw(self, name: bytes, gone: list[bytes]) -> bytes | None:
        parent = self._parents.pop(name)
        if parent is not None:
            self._forget(self._loose, parent, name)
        gone.append(name)
        return parent

    def _orphan(self, roots: set[bytes], gone: list[bytes]) -> None:
        """Blocks whose parent is gone while they are still there, with all that hangs on them. Rare, so it may take a
        pass over the set."""
        children: dict[bytes, list[bytes]] = {}
        for name, parent in self._parents.items():
            if parent is not None:
                children.setdefault(parent, []).append(name)
        left = list(roots)
        while left:
            name = left.pop()
            parent = self._withdraw(name, gone)
            assert parent is not None
            self._orphans[name] = parent
            self._waiting.setdefault(parent, set()).add(name)
            left += children.get(name, ())
            self._loose.pop(name, None)

    @staticmethod
    def _forget(sets: dict[bytes, set[bytes]], key: bytes, name: bytes) -> None:
        members = sets.get(key)
        if members is not None:
            members.discard(name)
            if not members:
                del sets[key]
