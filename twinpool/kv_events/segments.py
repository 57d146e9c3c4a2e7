# SPDX-License-Identifier: Apache-2.0
"""Reads what a worker caches from its segments in etcd. See ``LocalitySegment`` in the protocol."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from twinpool.kv_events.hashes import HASH_BYTES, digest, join, split
from twinpool.kv_events.wire import SEQUENCE_MAX
from twinpool.v1.locality_pb2 import LocalitySegment


@dataclass(frozen=True, slots=True)
class CacheState:
    """A worker's whole set as of a number of its event stream: all batches before ``next_sequence`` are in it.

    ``hashes``: in the KV pool, 16 bytes each, in no particular order; ``host_hashes``: in host memory.
    """

    hashes: bytes
    next_sequence: int
    host_hashes: bytes = b""

    @property
    def blocks(self) -> int:
        """Copies in the set."""
        return (len(self.hashes) + len(self.host_hashes)) // HASH_BYTES

    @property
    def digest(self) -> int:
        """The set's digest."""
        return digest(self.hashes) ^ digest(self.host_hashes, host=True)


def read_state(values: Iterable[bytes], incarnation: int) -> CacheState | None:
    """The newest state that the segments of one incarnation tell; None if no generation is complete or none is sound.

    Values that can't be read count as missing: a reader falls back to an older state, and then to the worker itself.
    """
    generations: dict[int, list[LocalitySegment]] = {}
    for value in values:
        segment = _parse(value, incarnation)
        if segment is not None:
            generations.setdefault(segment.generation, []).append(segment)
    for number in sorted(generations, reverse=True):
        state = _fold(generations[number])
        if state is not None:
            return state
    return None


def _parse(value: bytes, incarnation: int) -> LocalitySegment | None:
    try:
        segment = LocalitySegment.FromString(value)
    except DecodeError:
        return None
    lists = (segment.stored, segment.removed, segment.host_stored, segment.host_removed)
    sound = (
        segment.incarnation == incarnation
        and segment.next_sequence <= SEQUENCE_MAX
        and not any(len(raw) % HASH_BYTES for raw in lists)
    )
    return segment if sound else None


def _fold(segments: list[LocalitySegment]) -> CacheState | None:
    """A generation's bases, then its deltas as far as they join without a gap."""
    bases = {segment.part: segment for segment in segments if segment.parts}
    if not bases:
        return None
    first = next(iter(bases.values()))
    # What a value says of itself may be anything: a number is not counted up to before as much is there.
    if len(bases) != first.parts or set(bases) != set(range(first.parts)):
        return None
    state = CacheState(
        join(bases[part].stored for part in range(first.parts)),
        first.next_sequence,
        join(bases[part].host_stored for part in range(first.parts)),
    )
    if (state.blocks, state.digest) != (first.blocks, first.digest):
        return None
    deltas = sorted((segment for segment in segments if not segment.parts), key=lambda delta: delta.part)
    return _apply(state, deltas)


def _apply(state: CacheState, deltas: list[LocalitySegment]) -> CacheState:
    if not deltas:
        return state
    held, host = dict.fromkeys(split(state.hashes)), dict.fromkeys(split(state.host_hashes))
    good, sequence = state, state.next_sequence
    for delta in deltas:
        if delta.from_sequence != sequence:
            break
        for tier, gone, new in (
            (held, delta.removed, delta.stored),
            (host, delta.host_removed, delta.host_stored),
        ):
            for name in split(gone):
                tier.pop(name, None)
            tier.update(dict.fromkeys(split(new)))
        sequence = delta.next_sequence
    found = CacheState(join(held), sequence, join(host))
    last = next((delta for delta in reversed(deltas) if delta.next_sequence == sequence), None)
    if last is not None and (found.blocks, found.digest) != (last.blocks, last.digest):
        # Something in between is not what was written: the base alone is known to be good.
        return good
    return found
