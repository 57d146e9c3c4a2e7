# SPDX-License-Identifier: Apache-2.0
"""What to write next, so that etcd knows what this worker caches: pure, no clock and no etcd.

The set lies there as base segments, written once a generation, and deltas. A delta holds the *net* change since the last
write: however much happens between two writes, it is one value. When the deltas have grown out of proportion, or hold more
than a value may, a new generation begins; the old one is dropped after the new one is complete, so that a reader always
finds a complete one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from twinpool.kv_events.hashes import HASH_BYTES, join
from twinpool.v1.locality_pb2 import LocalitySegment

MAX_VALUE_BYTES: Final = 512 * 1024
"""Most bytes of a value. etcd refuses requests of more than 1.5 MiB."""

_OVERHEAD_BYTES: Final = 256
"""More than all fields but the hashes take."""

HASHES_MAX: Final = (MAX_VALUE_BYTES - _OVERHEAD_BYTES) // HASH_BYTES
"""Most hashes in a value."""

DELTAS_MAX: Final = 128
"""Most deltas of a generation: a reader applies them one by one."""

DELTA_SLACK: Final = 4096
"""Hashes in deltas that are no reason for a new generation, however small the set is."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a worker's set stands: ``next_sequence`` of its events, and the check of the set."""

    next_sequence: int
    blocks: int
    digest: int


@dataclass(frozen=True, slots=True)
class Put:
    """Write a segment."""

    generation: int
    segment: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Drop:
    """Delete all segments of a generation."""

    generation: int


Write = Put | Drop


class SegmentLog:
    """Not thread-safe: its owner holds a lock. A write that ``next_write`` gave out is given out again until ``done``."""

    def __init__(self, incarnation: int, whole_set: Callable[[], bytes]) -> None:
        """``whole_set``: all hashes, 16 bytes each, as of the last call of ``changed``."""
        self._incarnation = incarnation
        self._whole_set = whole_set
        self._position = Position(0, 0, 0)
        self._generation = 0
        self._next_generation = 1
        self._bases: list[Put] = []
        self._stale: list[int] = []
        self._delta: Put | None = None
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self._from = 0
        self._deltas = 0
        self._delta_hashes = 0
        self._base_hashes = 0
        self._overflown = False

    @property
    def pending(self) -> int:
        """Hashes of the net change that no segment holds yet."""
        return len(self._stored) + len(self._removed)

    def changed(self, position: Position, names: list[bytes], *, stored: bool) -> None:
        """Blocks were stored or removed, as told by a batch of events; ``position`` is after the batch."""
        self._position = position
        if self._overflown:
            return
        to, back = (self._stored, self._removed) if stored else (self._removed, self._stored)
        for name in names:
            if name in back:
                del back[name]
            else:
                to[name] = None
        if self.pending > max(HASHES_MAX, position.blocks):
            # Without etcd for long: a whole new set is less to hold and to write than what has changed.
            self._overflown = True
            self._stored.clear()
            self._removed.clear()

    def restart(self) -> None:
        """All that was written is gone, with the lease it was under."""
        self._generation = 0
        self._bases.clear()
        self._stale.clear()
        self._delta = None

    def next_write(self) -> Write | None:
        """What to write now; None if etcd knows all."""
        if self._bases:
            return self._bases[0]
        if self._stale:
            return Drop(self._stale[0])
        if self._delta is not None:
            return self._delta
        if self._generation and not self.pending and not self._overflown:
            return None
        if self._needs_generation():
            self._begin_generation()
            return self._bases[0]
        self._delta = self._make_delta()
        return self._delta

    def done(self, write: Write) -> None:
        """The write has succeeded."""
        if isinstance(write, Drop):
            # Gone already if the log was restarted meanwhile.
            self._stale = [number for number in self._stale if number != write.generation]
        elif write is self._delta:
            self._delta = None
        elif self._bases and write is self._bases[0]:
            del self._bases[0]
            if not self._bases:
                self._end_generation(write.generation)

    # --- inside

    def _needs_generation(self) -> bool:
        return (
            not self._generation
            or self._overflown
            or self.pending > HASHES_MAX
            or self._deltas >= DELTAS_MAX
            or self._delta_hashes + self.pending > self._base_hashes // 2 + DELTA_SLACK
        )

    def _begin_generation(self) -> None:
        raw = self._whole_set()
        size = HASHES_MAX * HASH_BYTES
        pieces = [raw[at : at + size] for at in range(0, len(raw), size)] or [b""]
        number = self._next_generation
        self._next_generation += 1
        self._bases = [
            Put(number, f"base-{part:04d}", self._segment(number, len(pieces), part, stored=piece))
            for part, piece in enumerate(pieces)
        ]
        self._stored.clear()
        self._removed.clear()
        self._overflown = False
        self._from = self._position.next_sequence
        self._deltas = self._delta_hashes = 0
        self._base_hashes = len(raw) // HASH_BYTES

    def _end_generation(self, number: int) -> None:
        if self._generation:
            self._stale.append(self._generation)
        self._generation = number

    def _make_delta(self) -> Put:
        value = self._segment(
            self._generation,
            0,
            self._deltas,
            stored=join(self._stored),
            removed=join(self._removed),
            from_sequence=self._from,
        )
        put = Put(self._generation, f"delta-{self._deltas:04d}", value)
        self._deltas += 1
        self._delta_hashes += self.pending
        self._stored.clear()
        self._removed.clear()
        self._from = self._position.next_sequence
        return put

    def _segment(
        self,
        generation: int,
        parts: int,
        part: int,
        *,
        stored: bytes,
        removed: bytes = b"",
        from_sequence: int = 0,
    ) -> bytes:
        return LocalitySegment(
            incarnation=self._incarnation,
            generation=generation,
            parts=parts,
            part=part,
            from_sequence=from_sequence,
            next_sequence=self._position.next_sequence,
            stored=stored,
            removed=removed,
            blocks=self._position.blocks,
            digest=self._position.digest,
        ).SerializeToString()
