# SPDX-License-Identifier: Apache-2.0
"""The last batches, for those who missed some."""

from collections import deque
from collections.abc import Iterator
from itertools import islice


class ReplayRing:
    """Numbered payloads without a gap, bounded by count and by bytes; the oldest goes first."""

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._payloads: deque[bytes] = deque()
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self.size_bytes = 0
        self.first = 0
        """Number of the oldest batch that is still here; ``next`` if there is none."""

    def __len__(self) -> int:
        return len(self._payloads)

    @property
    def next(self) -> int:
        """Number that the next batch gets."""
        return self.first + len(self._payloads)

    def append(self, payload: bytes) -> int:
        """Adds a batch and returns its number."""
        sequence = self.next
        self._payloads.append(payload)
        self.size_bytes += len(payload)
        while self._payloads and (len(self) > self._max_batches or self.size_bytes > self._max_bytes):
            self.size_bytes -= len(self._payloads.popleft())
            self.first += 1
        return sequence

    def since(self, sequence: int) -> Iterator[tuple[int, bytes]]:
        """What is here of ``sequence`` and all after it."""
        start = min(max(sequence, self.first), self.next)
        return enumerate(islice(self._payloads, start - self.first, None), start)
