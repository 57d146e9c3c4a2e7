# SPDX-License-Identifier: Apache-2.0
"""One worker's part of the index, and whether it can be trusted. No sockets and no clock of its own.

Batches are applied in the order of their numbers, each once. Whatever does not fit says what is *needed*: a replay of the
batches since the last applied one, or, where that can't help, a snapshot. Until then batches are parked, so nothing is
applied out of order and nothing that came meanwhile has to be asked for again.

Every batch carries number and digest of the worker's whole set, so a mirror that went wrong for a reason that nobody
thought of finds out with the next batch.
"""

from typing import Final, Literal, NamedTuple, TypeAlias

from twinpool._core import RouterCore
from twinpool.ids import WorkerKey
from twinpool.kv_events import (
    HASH_BYTES,
    HOST_MEDIUM,
    AllBlocksCleared,
    BlockStored,
    CacheState,
    KVEventBatch,
    digest,
    join,
)
from twinpool.kv_events.hashes import as_array

PARKED_MAX: Final = 4096
"""Most batches that wait for one that is missing."""

_CHUNK_BYTES: Final = 4096 * HASH_BYTES
# The core is locked for so long at most: placements wait meanwhile.

_TIERS: Final = ("device", "host")
# By whether an event is of host memory.

Kind: TypeAlias = Literal["replay", "snapshot"]
Numbered: TypeAlias = tuple[int, KVEventBatch]


class Need(NamedTuple):
    """What a mirror can't do without, and why: "start", "gap", "too_old", "unknown_parent", "sequence_back", "digest",
    "overflow", "silence",
    "incarnation"."""

    kind: Kind
    cause: str


class Mirror:
    """Feeds one incarnation of one worker into the core, which must know the worker. Not thread-safe."""

    def __init__(self, core: RouterCore, key: WorkerKey) -> None:
        self._core = core
        self.key = key
        self.need: Need | None = Need("snapshot", "start")
        self.next: int | None = None
        """Number of the batch that is applied next; None: nothing is known of the worker."""
        self.blocks = 0
        self.digest = 0
        self.applied = 0
        self.duplicates = 0
        self.orphans = 0
        self._ts = 0.0
        self._parked: dict[int, KVEventBatch] = {}

    @property
    def parked(self) -> int:
        """Batches that wait for one that is missing."""
        return len(self._parked)

    # --- whole states

    def adopt(self, state: CacheState) -> None:
        """Begins with what lies in etcd. Batches since then are needed."""
        self._replace(state)
        self.need = Need("replay", self.need.cause if self.need is not None else "start")

    def snapshot(self, messages: list[Numbered]) -> None:
        """The answer to a request for a snapshot. One that contradicts itself is asked for again."""
        stored = [event for _, batch in messages for event in batch.events if isinstance(event, BlockStored)]
        device, host = (
            join(
                name
                for event in stored
                if (event.medium == HOST_MEDIUM) is wanted
                for name in event.block_hashes
            )
            for wanted in (False, True)
        )
        told = messages[0][1] if messages else None
        if told is None:
            self.need = Need("snapshot", "start")
            return
        if told.incarnation != self.key.incarnation:
            self.replaced()
            return
        self._replace(CacheState(device, messages[0][0], host))
        self._ts = max(self._ts, told.ts)
        if (self.blocks, self.digest) != (told.blocks, told.digest):
            self.need = Need("snapshot", "digest")
            return
        self.need = None
        self._unpark()

    def replayed(self, batches: list[Numbered]) -> None:
        """The answer to a request for all batches from ``next`` on."""
        if self.next is None:
            return
        before, need = self.next, self.need
        self.need = self._apply_all(batches)
        if self.need is None:
            self._unpark()
        if self.next == before and need is not None and need.cause == "gap":
            # What is missing is not there any more, and nothing newer to tell so.
            self.need = Need("snapshot", "too_old")

    def replaced(self) -> None:
        """Another incarnation speaks where this one did: this one is gone, with all that it held."""
        if self.need is None or self.need.cause != "incarnation":
            self._clear()
            self._parked.clear()
            self.next = None
            self.need = Need("snapshot", "incarnation")

    # --- the stream

    def event(self, sequence: int, batch: KVEventBatch) -> None:
        """A batch came."""
        if self.need is not None or self.next is None:
            self._park(sequence, batch)
        elif sequence < self.next:
            self._behind(batch)
        elif sequence > self.next:
            self._park(sequence, batch)
            self.need = Need("replay", "gap")
        elif self._apply(sequence, batch):
            self._unpark()

    def alive(self, sequence: int, batch: KVEventBatch) -> None:
        """The worker has nothing to tell; its next batch will be ``sequence``."""
        if self.need is not None or self.next is None:
            return
        if sequence > self.next:
            self.need = Need("replay", "gap")
        elif sequence < self.next:
            self._behind(batch)
        else:
            self._check(batch)

    def silent(self) -> None:
        """Nothing came for too long: what the worker says when it is asked counts."""
        if self.need is None:
            self.need = Need("replay", "silence")

    # --- inside

    def _behind(self, batch: KVEventBatch) -> None:
        if batch.ts > self._ts:
            # Newer than what was applied last, and yet before it: the numbering has begun anew.
            self._parked.clear()
            self.need = Need("snapshot", "sequence_back")
        else:
            self.duplicates += 1

    def _park(self, sequence: int, batch: KVEventBatch) -> None:
        if self.next is not None and sequence < self.next:
            self.duplicates += 1
            return
        self._parked[sequence] = batch
        if len(self._parked) > PARKED_MAX:
            self._parked.clear()
            self.need = Need("snapshot", "overflow")

    def _unpark(self) -> None:
        while self.need is None and self._parked:
            assert self.next is not None
            batch = self._parked.pop(self.next, None)
            if batch is not None:
                self._apply(self.next, batch)
                continue
            self._parked = {at: parked for at, parked in self._parked.items() if at > self.next}
            if self._parked:
                self.need = Need("replay", "gap")

    def _apply_all(self, batches: list[Numbered]) -> Need | None:
        """Applies a replay as far as it fits; what is needed after it."""
        for sequence, batch in batches:
            assert self.next is not None
            if batch.incarnation != self.key.incarnation or sequence > self.next:
                # It is no longer there: the worker keeps a bounded number.
                return Need("snapshot", "too_old")
            if sequence == self.next and not self._apply(sequence, batch):
                return self.need
        return None

    def _apply(self, sequence: int, batch: KVEventBatch) -> bool:
        """Whether it fitted; else ``need`` says what does not."""
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._clear()
                continue
            raw, host = join(event.block_hashes), event.medium == HOST_MEDIUM
            if isinstance(event, BlockStored):
                if not self._holds(event.parent_block_hash):
                    self.orphans += 1
                    self._parked[sequence] = batch
                    self.need = Need("snapshot", "unknown_parent")
                    return False
                self._store(raw, host=host)
            else:
                self._core.index_removed(
                    self.key.name, self.key.incarnation, as_array(raw), tier=_TIERS[host]
                )
                self.blocks -= len(event.block_hashes)
            self.digest ^= digest(raw, host=host)
        self.next = sequence + 1
        self.applied += 1
        self._ts = max(self._ts, batch.ts)
        return self._check(batch)

    def _check(self, batch: KVEventBatch) -> bool:
        if (self.blocks, self.digest) != (batch.blocks, batch.digest):
            self.need = Need("snapshot", "digest")
            return False
        return True

    def _holds(self, parent: bytes | None) -> bool:
        if parent is None:
            return True
        holders = self._core.longest_prefix(as_array(parent))
        if any(name == self.key.name for name, _ in holders):
            return True
        # An index at its limit forgets blocks that workers still hold: then the parent says nothing.
        return self._core.stats()["index_evicted"] > 0

    def _replace(self, state: CacheState) -> None:
        self._clear()
        for host, raw in ((False, state.hashes), (True, state.host_hashes)):
            for at in range(0, len(raw), _CHUNK_BYTES):
                self._store(raw[at : at + _CHUNK_BYTES], host=host)
        self.digest = state.digest
        self.next = state.next_sequence

    def _clear(self) -> None:
        self._core.index_cleared(self.key.name, self.key.incarnation)
        self.blocks = self.digest = 0

    def _store(self, raw: bytes, *, host: bool) -> None:
        self._core.index_stored(self.key.name, self.key.incarnation, as_array(raw), tier=_TIERS[host])
        self.blocks += len(raw) // HASH_BYTES
