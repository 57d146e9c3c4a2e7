# SPDX-License-Identifier: Apache-2.0
"""What a cache without limits, shared by all workers, would have hit: the bound of every placement."""

from collections.abc import Iterable

from twinpool.control.replay.blocks import Hashes

_BYTES = 16


class InfiniteCache:
    """Blocks by hash, never evicted. Prompts are looked up one by one, in order."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def hits(self, hashes: Hashes, usable: int) -> int:
        """Leading blocks of a prompt that were seen before, at most ``usable``; the prompt's blocks are seen from now on."""
        raw, seen = hashes.tobytes(), self._seen
        # A block is seen only with all before it: the number of seen ones is found by bisection.
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if raw[middle * _BYTES : (middle + 1) * _BYTES] in seen:
                low = middle + 1
            else:
                high = middle
        seen.update(raw[at : at + _BYTES] for at in range(low * _BYTES, len(raw), _BYTES))
        return min(low, usable)


def infinite_hits(prompts: Iterable[tuple[Hashes, int]]) -> int:
    """Blocks that an infinite cache hits over prompts of (hashes, usable blocks)."""
    cache = InfiniteCache()
    return sum(cache.hits(hashes, usable) for hashes, usable in prompts)
