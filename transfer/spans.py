# SPDX-License-Identifier: Apache-2.0
"""Which entries of a generation table to read for a set of blocks.

A descriptor costs microseconds whatever its size (measured over shared memory: 256 single entries 252 us, one
descriptor over the whole range 12 us), so near entries are read together with what lies between them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twinpool._core import cover_blocks
from twinpool.transfer.base import Blocks

MERGE_GAP = 512
"""Entries (4 KiB of them) that may be read in vain to save a descriptor."""

_FIRST = np.zeros(1, np.int64)


def cover(blocks: Blocks, gap: int = MERGE_GAP) -> tuple[Blocks, NDArray[np.integer]]:
    """Entries that cover ``blocks``, ascending, and where in them each block is.

    Neighbours that are at most ``gap`` apart are joined into one run. ``entries[positions[i]] == blocks[i]``.
    """
    if len(blocks) == 1:
        return blocks, _FIRST
    return cover_blocks(blocks, gap)


def count_runs(remote: Blocks, local: Blocks) -> int:
    """Descriptors that a read of ``remote[i]`` into ``local[i]`` takes when neighbours on both sides are joined."""
    if len(remote) <= 1:
        return len(remote)
    return 1 + int(np.count_nonzero((np.diff(remote) != 1) | (np.diff(local) != 1)))


class Landing:
    """First-fit allocator of runs of entries in a fixed array. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._taken: list[tuple[int, int]] = []  # [start, end), ascending, never touching wrongly

    def take(self, count: int) -> int | None:
        """Start of ``count`` free entries, or None if there is no such run now."""
        start = 0
        for index, (low, high) in enumerate(self._taken):
            if low - start >= count:
                self._taken.insert(index, (start, start + count))
                return start
            start = high
        if self._capacity - start < count:
            return None
        self._taken.append((start, start + count))
        return start

    def give(self, start: int) -> None:
        """Frees the run that begins at ``start``. Raises KeyError if none does."""
        for index, (low, _) in enumerate(self._taken):
            if low == start:
                del self._taken[index]
                return
        raise KeyError(start)

    @property
    def free(self) -> int:
        """Entries that are not taken."""
        return self._capacity - sum(high - low for low, high in self._taken)
