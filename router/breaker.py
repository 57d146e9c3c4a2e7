# SPDX-License-Identifier: Apache-2.0
"""A circuit breaker for each worker: one that fails what it is given gets nothing for a while, then one request to prove itself.

    CLOSED --``breaker_failures`` in a row--> OPEN --its time is over--> HALF_OPEN --success--> CLOSED
                                               ^------------- failure, twice the time ----------'

A broken stream is the quarantine's matter (``placement``): it is noticed at once and ends when the worker can be reached again. The
breaker is for a worker that can be reached and fails: its steps raise, its transfers do not arrive, it does not answer
reservations, or its stream breaks again and again.

Some failures do not say which of the two workers of an attempt is at fault. They count against both, and one that only ever failed
with the same peer needs twice as many. The last worker of a role that still takes work is never taken out: whatever it does is
better than nobody.
"""

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from twinpool import metrics
from twinpool.config import RouterSection
from twinpool.ids import WorkerKey
from twinpool.logs import get_logger

LONGEST_OPEN: Final = 16
"""At most so many times ``breaker_open_seconds``."""

log = get_logger(__name__)


class BreakerState(enum.Enum):
    """Whether a worker is given work."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class _Breaker:
    failures: int = 0
    peers: set[WorkerKey | None] = field(default_factory=set)
    # None: closed.
    until: float | None = None
    trips: int = 0
    # Since when it is half open: a proof that nobody hears of is asked for again.
    asked_at: float | None = None


class Breakers:
    """One a router. On the event loop alone."""

    def __init__(
        self,
        config: RouterSection,
        hold: Callable[[WorkerKey, float, bool], None],
        replaceable: Callable[[WorkerKey], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``hold(worker, seconds, probation)`` gives a worker no work for so long, and then one placement if it is on
        ``probation``. ``replaceable``: whether another worker does the same work."""
        self._config = config
        self._hold = hold
        self._replaceable = replaceable
        self._clock = clock
        self._breakers: dict[WorkerKey, _Breaker] = {}

    def state(self, key: WorkerKey) -> BreakerState:
        """Of one worker; CLOSED for those that are not known."""
        found = self._breakers.get(key)
        if found is None or found.until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < found.until else BreakerState.HALF_OPEN

    @property
    def not_closed(self) -> int:
        """Workers whose breaker is open or half open."""
        return sum(not self.closed(key) for key in self._breakers)

    def closed(self, key: WorkerKey) -> bool:
        """Whether it gets all the work that it has room for."""
        return self.state(key) is BreakerState.CLOSED

    def hold_seconds(self, key: WorkerKey) -> float | None:
        """How long the worker still gets no work before it is on probation; None: its breaker is closed."""
        found = self._breakers.get(key)
        return None if found is None or found.until is None else max(0.0, found.until - self._clock())

    def succeeded(self, *keys: WorkerKey) -> None:
        """An attempt has passed these workers as it should."""
        for key in keys:
            found = self._breakers.pop(key, None)
            if found is not None and found.until is not None:
                log.info("breaker_closed", worker=str(key), trips=found.trips)
                self._hold(key, 0.0, False)

    def failed(self, key: WorkerKey, peer: WorkerKey | None = None) -> None:
        """The worker failed something; ``peer``: the worker that may be at fault as well."""
        if not self._config.breaker_failures:
            return
        found = self._breakers.setdefault(key, _Breaker())
        state = self.state(key)
        if state is BreakerState.OPEN:
            return  # what was placed before
        found.failures += 1
        found.peers.add(peer)
        alone = None not in found.peers and len(found.peers) == 1
        enough = found.failures >= self._config.breaker_failures * (2 if alone else 1)
        if (state is BreakerState.HALF_OPEN or enough) and self._replaceable(key):
            self._open(key, found)

    def pardon(self, key: WorkerKey) -> None:
        """What the worker failed is forgotten: it has another role."""
        found = self._breakers.pop(key, None)
        if found is not None and found.until is not None:
            self._hold(key, 0.0, False)

    def forget(self, key: WorkerKey) -> None:
        """The worker is gone."""
        self._breakers.pop(key, None)

    def watch(self) -> None:
        """Called now and then: a worker whose proof was never heard of (its client left) is given another one."""
        now = self._clock()
        for key, found in self._breakers.items():
            if self.state(key) is not BreakerState.HALF_OPEN:
                continue
            if found.asked_at is None:
                found.asked_at = now
            elif now - found.asked_at >= self._config.breaker_open_seconds:
                found.asked_at = now
                self._hold(key, 0.0, True)
        states = [self.state(key) for key in self._breakers]
        for state in (BreakerState.OPEN, BreakerState.HALF_OPEN):
            metrics.ROUTER_BREAKERS.labels(state.value).set(states.count(state))

    def _open(self, key: WorkerKey, found: _Breaker) -> None:
        seconds = self._config.breaker_open_seconds * min(LONGEST_OPEN, 2**found.trips)
        log.warning("breaker_opened", worker=str(key), failures=found.failures, seconds=seconds)
        metrics.ROUTER_BREAKER_TRIPS.inc()
        found.until = self._clock() + seconds
        found.trips += 1
        found.failures = 0
        found.asked_at = None
        found.peers.clear()
        self._hold(key, seconds, True)
