# SPDX-License-Identifier: Apache-2.0
"""Watches the loops of a worker from a thread of its own, so that it sees each of them stand still.

A loop is a number that rises while the loop gets on. How long one stands still is counted in the watchdog's own rounds, each
worth at most two periods: when the whole process is stopped and goes on (SIGSTOP, a paused machine), nobody has hung.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from twinpool.logs import get_logger

PERIOD_SECONDS_MAX: Final = 1.0
"""Longest time between two looks."""

LOOKS_A_HANG: Final = 8
"""Looks within the time that a loop may stand still: how exact that time is kept."""

log = get_logger(__name__)


class Stillness:
    """Pure: how long each number has not changed."""

    def __init__(self, period_seconds: float) -> None:
        self._longest_round = 2 * period_seconds
        self._seen: dict[str, int] = {}
        self._still: dict[str, float] = {}
        self._looked_at: float | None = None

    def look(self, now: float, beats: Mapping[str, int]) -> dict[str, float]:
        """Seconds that each number has been the same, as far as this object could watch it."""
        passed = 0.0 if self._looked_at is None else min(now - self._looked_at, self._longest_round)
        self._looked_at = now
        for name, beat in beats.items():
            same = self._seen.get(name) == beat
            self._still[name] = self._still.get(name, 0.0) + passed if same else 0.0
            self._seen[name] = beat
        return dict(self._still)


class EventLoopBeat:
    """Rises while an event loop runs what it is given."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._beat = 0
        self._asked = False

    def __call__(self) -> int:
        """The number; asks the loop to raise it. From any thread. Raises RuntimeError once the loop is closed."""
        if not self._asked:
            self._asked = True
            self._loop.call_soon_threadsafe(self._answer)
        return self._beat

    def _answer(self) -> None:
        self._beat += 1
        self._asked = False


class Watchdog:
    """The thread. ``still`` names the loops that stand still; ``on_given_up`` is called on the thread, once, with one that has
    for ``give_up_seconds`` (0: never)."""

    def __init__(
        self,
        loops: Mapping[str, Callable[[], int]],
        *,
        hang_seconds: float,
        give_up_seconds: float,
        on_given_up: Callable[[str], None],
    ) -> None:
        self.period_seconds = min(PERIOD_SECONDS_MAX, hang_seconds / LOOKS_A_HANG)
        self._loops = loops
        self._hang_seconds = hang_seconds
        self._give_up_seconds = give_up_seconds
        self._on_given_up = on_given_up
        self._stopping = threading.Event()
        self._still: frozenset[str] = frozenset()
        self._thread = threading.Thread(target=self._run, name="twinpool-watchdog", daemon=True)

    @property
    def still(self) -> frozenset[str]:
        """Names of the loops that have stood still for ``hang_seconds``."""
        return self._still

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        stillness = Stillness(self.period_seconds)
        given_up = False
        while not self._stopping.wait(self.period_seconds):
            try:
                beats = {name: beat() for name, beat in self._loops.items()}
            except RuntimeError:
                return  # the event loop is closed: the worker has ended
            seconds = stillness.look(time.monotonic(), beats)
            still = frozenset(name for name, age in seconds.items() if age >= self._hang_seconds)
            for name in still - self._still:
                log.error("loop_stands_still", loop=name, seconds=round(seconds[name], 1))
            for name in self._still - still:
                log.warning("loop_goes_on", loop=name)
            self._still = still
            if self._give_up_seconds and not given_up:
                lost = [name for name, age in seconds.items() if age >= self._give_up_seconds]
                if lost:
                    given_up = True
                    self._on_given_up(lost[0])
