# SPDX-License-Identifier: Apache-2.0
"""What a worker has done since its start, as plain numbers: Inspect tells them, and whoever asks twice has a rate."""

from collections import deque
from dataclasses import dataclass
from typing import Final

WINDOW_SECONDS: Final = 10.0
"""Utilization is a mean over so long: some hundred steps, and short enough to follow a burst."""

SWING_SECONDS: Final = 300.0
"""So far back the greatest and the smallest utilization are looked for."""

SAMPLE_SECONDS: Final = 1.0
"""Time between two samples of it."""


@dataclass(slots=True)
class Totals:
    """Owned by the step thread. ``busy_seconds``: time in steps."""

    busy_seconds: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0


class Utilization:
    """Share of the time that was spent in steps, as a mean over ``WINDOW_SECONDS``, and how far it swings."""

    def __init__(self, now: float) -> None:
        self._busy: deque[tuple[float, float]] = deque([(now, 0.0)])
        self._means: deque[tuple[float, float]] = deque()
        self.mean = 0.0
        """0 to 1."""

    @property
    def swing(self) -> float:
        """The greatest mean minus the smallest of the last ``SWING_SECONDS``; 0 before a whole window has passed."""
        means = [mean for _, mean in self._means]
        return max(means) - min(means) if means else 0.0

    def sample(self, now: float, busy_seconds: float) -> bool:
        """Takes a sample if one is due. ``busy_seconds``: since the start. Whether it did."""
        last, _ = self._busy[-1]
        if now < last + SAMPLE_SECONDS:
            return False
        self._busy.append((now, busy_seconds))
        while len(self._busy) > 2 and self._busy[1][0] <= now - WINDOW_SECONDS:
            self._busy.popleft()
        began, before = self._busy[0]
        # A step is counted at its end, so one that began before the window can make it look more than full.
        self.mean = min(1.0, max(0.0, (busy_seconds - before) / (now - began)))
        if now - began >= WINDOW_SECONDS:
            self._means.append((now, self.mean))
        while self._means and self._means[0][0] < now - SWING_SECONDS:
            self._means.popleft()
        return True
