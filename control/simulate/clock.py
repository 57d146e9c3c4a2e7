# SPDX-License-Identifier: Apache-2.0
"""Virtual time: calls ordered by when they are due, then by when they were asked for."""

import heapq
from collections.abc import Callable
from typing import Any

Call = Callable[..., None]


class Clock:
    """Runs calls in the order of their times. ``now`` is seconds since the simulation's start."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls = 0
        self._heap: list[tuple[float, int, Call, tuple[Any, ...]]] = []
        self._next = 0

    def at(self, time: float, call: Call, *arguments: Any) -> None:
        """Calls at ``time``; what is due already is called next."""
        self._next += 1
        heapq.heappush(self._heap, (time, self._next, call, arguments))

    def run(self, until: Callable[[], bool]) -> None:
        """Runs until ``until()`` or until nothing is left to call."""
        heap, pop = self._heap, heapq.heappop
        while heap and not until():
            time, _, call, arguments = pop(heap)
            # A call that was asked for late runs late; time never goes back.
            if time > self.now:
                self.now = time
            self.calls += 1
            call(*arguments)
