# SPDX-License-Identifier: Apache-2.0
"""A worker's numbered stream of KV events, with all that others may ask of it: pure but for the time in a batch."""

import time
from collections.abc import Callable
from typing import Final, TypeAlias

from twinpool.config import KvEventsConfig
from twinpool.ids import WorkerKey
from twinpool.kv_events import digest, join, wire
from twinpool.worker.kv_events.ring import ReplayRing
from twinpool.worker.kv_events.segment_log import Position, SegmentLog
from twinpool.worker.kv_events.shadow import Change, RawEvent, Shadow

HASHES_A_BATCH: Final = 4096
"""Most hashes of a batch: about 75 KB. A burst becomes several batches."""

Numbered: TypeAlias = tuple[int, bytes]


class EventStream:
    """Not thread-safe. Set, numbers, ring and segments move together."""

    def __init__(
        self,
        config: KvEventsConfig,
        worker: WorkerKey,
        block_tokens: int,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._incarnation = worker.incarnation
        self._block_tokens = block_tokens
        self._wall_clock = wall_clock
        self._shadow = Shadow()
        self._ring = ReplayRing(config.replay_batches, config.replay_bytes)
        self.log = SegmentLog(worker.incarnation, self._shadow.hashes)
        # Of the set as told so far.
        self._blocks = 0
        self._digest = 0
        self._snapshot: tuple[int, list[bytes]] | None = None
        self._ts = 0.0

    @property
    def position(self) -> Position:
        """Where the stream and the set stand."""
        return Position(self._ring.next, self._blocks, self._digest)

    def tell(self, events: list[RawEvent]) -> list[Numbered]:
        """What to publish for events of the block manager: payloads with their numbers, perhaps none."""
        changes = [change for event in events for change in self._shadow.apply(event)]
        return [self._tell(batch) for batch in batches_of(changes)]

    def alive(self) -> Numbered:
        """A sign of life: the number that comes next."""
        return self._ring.next, self._encode([])

    def replay(self, start: int) -> list[Numbered]:
        """All batches from ``start`` on that are still there."""
        return list(self._ring.since(start))

    def snapshot(self) -> list[Numbered]:
        """The whole set; encoded once, however many ask while it stays the same."""
        sequence = self._ring.next
        if self._snapshot is None or self._snapshot[0] != sequence:
            batches = batches_of(self._shadow.chains()) or [[]]
            messages = [self._encode(batch, cleared=at == 0) for at, batch in enumerate(batches)]
            self._snapshot = (sequence, messages)
        return [(sequence, payload) for payload in self._snapshot[1]]

    def _tell(self, changes: list[Change]) -> Numbered:
        """Numbers a batch and notes it for those who miss it."""
        for change in changes:
            self._blocks += len(change.hashes) if change.stored else -len(change.hashes)
            self._digest ^= digest(join(change.hashes))
        payload = self._encode(changes)
        sequence = self._ring.append(payload)
        for change in changes:
            self.log.changed(self.position, change.hashes, stored=change.stored)
        return sequence, payload

    def _encode(self, changes: list[Change], *, cleared: bool = False) -> bytes:
        events: list[wire.BlockStored | wire.BlockRemoved | wire.AllBlocksCleared] = (
            [wire.AllBlocksCleared()] if cleared else []
        )
        for change in changes:
            if change.stored:
                events.append(wire.stored(change.hashes, change.parent, self._block_tokens))
            else:
                events.append(wire.removed(change.hashes))
        # A clock that is set back must not make a later batch look like an earlier one.
        self._ts = max(self._ts, self._wall_clock())
        batch = wire.KVEventBatch(
            ts=self._ts,
            events=events,
            incarnation=self._incarnation,
            blocks=self._blocks,
            digest=self._digest,
        )
        return wire.encode(batch)


def batches_of(changes: list[Change]) -> list[list[Change]]:
    """``changes`` in batches of at most ``HASHES_A_BATCH`` hashes, in their order; a long one is split."""
    batches: list[list[Change]] = []
    room = 0
    for change in changes:
        parent, at = change.parent, 0
        while at < len(change.hashes):
            if not room:
                batches.append([])
                room = HASHES_A_BATCH
            piece = change.hashes[at : at + room]
            batches[-1].append(Change(change.stored, piece, parent))
            at += len(piece)
            room -= len(piece)
            parent = piece[-1] if change.stored else None
    return batches
