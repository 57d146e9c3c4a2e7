# SPDX-License-Identifier: Apache-2.0
"""A worker's blocks: the real block manager, with the few moves that a worker makes."""

from collections.abc import Callable

import numpy as np

from twinpool._core import BlockManager
from twinpool.control.replay.blocks import Hashes
from twinpool.control.simulate.job import Blocks

_NO_PARENT = bytes(16)

Sink = Callable[[str, Hashes], None]
"""Told of cache events: ("stored" | "removed", hashes)."""


class Cache:
    """The blocks of one worker."""

    def __init__(self, num_blocks: int, block_tokens: int, sink: Sink) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._manager = BlockManager(num_blocks, block_tokens, np.zeros(num_blocks, np.uint64))
        self._sink = sink

    @property
    def available(self) -> int:
        """Blocks that can be had: free ones and those only cached."""
        return self._manager.available_blocks

    @property
    def held(self) -> int:
        """Blocks that sequences hold."""
        return self._manager.held_blocks

    @property
    def cached(self) -> int:
        """Blocks with content that nobody needs now."""
        return self._manager.cached_blocks

    def tell(self, sink: Sink) -> None:
        """From now on events go there."""
        self._sink = sink

    def lookup(self, hashes: Hashes) -> int:
        """Leading blocks that are here."""
        return self._manager.lookup(hashes)

    def take(self, hashes: Hashes, total: int) -> tuple[Blocks, int] | None:
        """The cached prefix of ``hashes`` and new blocks up to ``total`` in all; None and no change if there is no room."""
        # What is cached is available, too, until it is taken: this test never refuses what would fit.
        if total - self._manager.lookup(hashes) > self._manager.available_blocks:
            return None
        prefix = self._manager.acquire_prefix(hashes)
        fresh = self._manager.allocate(max(0, total - len(prefix)))
        if fresh is None:
            self._manager.release(prefix)
            return None
        self.flush()
        return np.concatenate([prefix, fresh]), len(prefix)

    def grow(self) -> Blocks | None:
        """One more block, or None."""
        block = self._manager.allocate(1)
        self.flush()
        return block

    def publish(self, blocks: Blocks, hashes: Hashes, first: int, last: int) -> None:
        """The full blocks ``first`` to ``last`` (exclusive) of a prompt have their content."""
        if last > first:
            parent = hashes[first - 1].tobytes() if first else _NO_PARENT
            self._manager.commit(blocks[first:last], hashes[first:last], parent)
            self.flush()

    def insert(self, hashes: Hashes, first: int, last: int) -> bool:
        """Puts fetched blocks into the cache; False if there is no room or what comes before them is gone."""
        prefix = self._manager.acquire_prefix(hashes[:first])
        fresh = self._manager.allocate(last - first) if len(prefix) == first else None
        if fresh is not None:
            self.publish(np.concatenate([prefix, fresh]), hashes, first, last)
        self._manager.release(prefix if fresh is None else np.concatenate([prefix, fresh]))
        self.flush()
        return fresh is not None

    def hold(self, hashes: Hashes) -> Blocks:
        """Holds a cached prefix for a reader; give it back with ``release``."""
        return self._manager.acquire_prefix(hashes)

    def release(self, blocks: Blocks) -> None:
        """Gives blocks back: published ones stay cached, others are free."""
        if len(blocks):
            self._manager.release(blocks)
            self.flush()

    def flush(self) -> None:
        """Tells what was stored and evicted since the last time."""
        for kind, hashes, _ in self._manager.drain_events():
            self._sink(kind, hashes)

    def check(self) -> None:
        """Raises CoreError if an invariant of the block manager does not hold."""
        self._manager.check()


def concatenate(blocks: Blocks, more: Blocks) -> Blocks:
    """Two block tables as one."""
    return np.concatenate([blocks, more]) if len(blocks) else more
