# SPDX-License-Identifier: Apache-2.0
"""When to try again, where, and how often: a budget, pauses with jitter, and a breaker for each endpoint."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from twinpool.errors import TwinpoolError

_TRANSPORT: Final = frozenset({"UNAVAILABLE", "CANCELLED", "INTERNAL", "UNKNOWN"})
_PASSING: Final = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED}
)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How a client retries. Times in seconds.

    ``grace_seconds``: how long an answer waits for its client on the routers. ``tries``: how often in a row something may fail
    without a new token. ``ratio`` and ``min_per_second``: the budget, see ``RetryBudget``.
    """

    grace_seconds: float = 60.0
    tries: int = 10
    first_pause_seconds: float = 0.05
    longest_pause_seconds: float = 2.0
    ratio: float = 0.2
    min_per_second: float = 10.0

    def pause(self, failures: int, asked: float | None) -> float:
        """Before the next try, after so many failures in a row. ``asked``: what the server asked for."""
        ceiling = min(self.longest_pause_seconds, self.first_pause_seconds * 2.0 ** min(failures - 1, 16))
        return max(random.uniform(ceiling / 2, ceiling), asked or 0.0)


class RetryBudget:
    """Retries are at most a share of the requests of the last seconds, and a few more: where everything fails, a client does not
    multiply its load. (The scheme of Finagle's RetryBudget.)"""

    _WINDOW_SECONDS: Final = 10.0

    def __init__(
        self, ratio: float, min_per_second: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ratio = ratio
        self._reserve = min_per_second * self._WINDOW_SECONDS
        self._clock = clock
        self._requests: deque[float] = deque()
        self._retries: deque[float] = deque()

    def request(self) -> None:
        """A request is sent for the first time."""
        self._requests.append(self._clock())

    def retry(self) -> bool:
        """Takes one retry; False if there is none left."""
        now = self._clock()
        for events in (self._requests, self._retries):
            while events and now - events[0] > self._WINDOW_SECONDS:
                events.popleft()
        if len(self._retries) + 1 > self._reserve + self._ratio * len(self._requests):
            return False
        self._retries.append(now)
        return True


class Breakers:
    """Which endpoint to try next: in turns, without those that have just failed. When an endpoint's pause is over, one call
    probes it; the pause doubles while that fails."""

    _FIRST_SECONDS: Final = 0.2
    _LONGEST_SECONDS: Final = 5.0

    def __init__(self, endpoints: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        if not endpoints:
            raise ValueError("a client needs at least one endpoint")
        self._endpoints = list(dict.fromkeys(endpoints))
        self._clock = clock
        self._next = random.randrange(len(self._endpoints))
        self._failures: dict[str, int] = {}
        self._open_until: dict[str, float] = {}

    def pick(self, avoid: str = "") -> str:
        """The next endpoint, another one than ``avoid`` where any may be tried. If all have just failed, the one that is due
        first."""
        now, count = self._clock(), len(self._endpoints)
        turns = [self._endpoints[(self._next + step) % count] for step in range(count)]
        ready = [one for one in turns if self._open_until.get(one, 0.0) <= now]
        chosen = next((one for one in ready if one != avoid), ready[0] if ready else "")
        if not chosen:
            chosen = min(turns, key=lambda one: self._open_until[one])
        self._next = (self._endpoints.index(chosen) + 1) % count
        if chosen in self._open_until:
            # Half open: nobody else tries it before this call has told how it is.
            self._open_until[chosen] = now + self._wait(chosen)
        return chosen

    def worked(self, endpoint: str) -> None:
        """It answered."""
        self._failures.pop(endpoint, None)
        self._open_until.pop(endpoint, None)

    def failed(self, endpoint: str) -> None:
        """It could not be reached, or the connection broke."""
        self._failures[endpoint] = self._failures.get(endpoint, 0) + 1
        self._open_until[endpoint] = self._clock() + self._wait(endpoint)

    def _wait(self, endpoint: str) -> float:
        ceiling = min(
            self._LONGEST_SECONDS, self._FIRST_SECONDS * 2.0 ** min(self._failures.get(endpoint, 1) - 1, 16)
        )
        return random.uniform(ceiling / 2, ceiling)


def lost(error: TwinpoolError) -> bool:
    """Whether the connection broke, or was never made: no server of ours said it."""
    return error.metadata.get("grpc_code") in _TRANSPORT


def may_pass(error: TwinpoolError) -> bool:
    """Whether the same call may succeed later or elsewhere. A deadline that passed does not come back."""
    return lost(error) or (error.retryable and error.code in _PASSING)
