# SPDX-License-Identifier: Apache-2.0
"""Workers that end by themselves: how often of late, and when to start one again."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

WINDOW_SECONDS: Final = 600.0
"""Ends that are longer ago no longer count."""

LOOP_CRASHES: Final = 3
"""So many ends in that time are a loop."""

FIRST_WAIT_SECONDS: Final = 1.0
"""Wait before the start after the first end; each further one doubles it."""

LONGEST_WAIT_SECONDS: Final = 300.0
"""Longest such wait."""


@dataclass(slots=True)
class _Ends:
    role: str
    at: deque[float] = field(default_factory=deque)
    cause: str = ""
    restarts: int = 0
    # Not started before; None: it is not waiting for a start.
    due: float | None = None


class CrashBook:
    """By worker. Times are of any clock that only goes forward."""

    def __init__(self) -> None:
        self._ends: dict[str, _Ends] = {}

    def note(self, name: str, role: str, cause: str, now: float) -> int:
        """A worker has ended by itself; how often of late, this one included."""
        ends = self._ends.setdefault(name, _Ends(role))
        ends.role, ends.cause = role, cause
        ends.at.append(now)
        return self.count(name, now)

    def restarted(self, name: str, role: str, restarts: int) -> int:
        """Ray has started a worker anew so often, in all; how often since this was told last."""
        ends = self._ends.setdefault(name, _Ends(role))
        new, ends.restarts = restarts - ends.restarts, restarts
        return max(0, new)

    def count(self, name: str, now: float) -> int:
        """Ends of late."""
        ends = self._ends.get(name)
        if ends is None:
            return 0
        while ends.at and ends.at[0] < now - WINDOW_SECONDS:
            ends.at.popleft()
        return len(ends.at)

    def looping(self, name: str, now: float) -> bool:
        """Whether it has ended too often."""
        return self.count(name, now) >= LOOP_CRASHES

    def hold(self, name: str, now: float) -> float:
        """Keeps the place of a worker that is not run any more until it may start again; the seconds until then."""
        ends = self._ends[name]
        wait = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** (max(1, self.count(name, now)) - 1))
        ends.due = now + wait
        # The next actor under the name counts from 0.
        ends.restarts = 0
        return wait

    def started(self, name: str) -> None:
        """It is run again."""
        if name in self._ends:
            self._ends[name].due = None

    def absent(self) -> dict[str, str]:
        """Those that wait for a start, with their roles."""
        return {name: ends.role for name, ends in self._ends.items() if ends.due is not None}

    def due(self, name: str, now: float) -> bool:
        """Whether it may start again."""
        ends = self._ends.get(name)
        return ends is None or ends.due is None or now >= ends.due

    def cause(self, name: str) -> str:
        """What the last end was about."""
        return self._ends[name].cause if name in self._ends else ""

    def forget(self, name: str) -> None:
        """It was told to leave: what was before says nothing of the next one."""
        self._ends.pop(name, None)
