# SPDX-License-Identifier: Apache-2.0
"""Readers that expect an attempt before its prefill command has come: the usual order, since the router tells the
prefill worker only after the reader has reserved."""

from __future__ import annotations

from twinpool.transfer.base import AttemptKey

EARLY_MAX = 4096
"""Most attempts that may be expected so."""


class EarlyReaders:
    """Streams by attempt, each with the time until which it waits."""

    def __init__(self) -> None:
        self._streams: dict[AttemptKey, dict[int, float]] = {}

    def add(self, attempt: AttemptKey, stream: int, until: float) -> bool:
        """The stream waits. False if there is no room for another attempt."""
        if attempt not in self._streams and len(self._streams) >= EARLY_MAX:
            return False
        self._streams.setdefault(attempt, {}).setdefault(stream, until)
        return True

    def take(self, attempt: AttemptKey) -> list[int]:
        """The command has come: who waited for it."""
        return list(self._streams.pop(attempt, {}))

    def drop(self, attempt: AttemptKey, stream: int) -> bool:
        """The stream no longer wants it. False if it did not wait."""
        streams = self._streams.get(attempt, {})
        known = streams.pop(stream, None) is not None
        if known and not streams:
            del self._streams[attempt]
        return known

    def drop_stream(self, stream: int) -> None:
        """The stream has ended."""
        for attempt in list(self._streams):
            self.drop(attempt, stream)

    def expire(self, now: float) -> list[tuple[AttemptKey, int]]:
        """Takes out who has waited too long."""
        late = [
            (attempt, stream)
            for attempt, streams in self._streams.items()
            for stream, until in streams.items()
            if until <= now
        ]
        for attempt, stream in late:
            self.drop(attempt, stream)
        return late

    def next_expiry(self) -> float | None:
        """When somebody has waited too long; None if nobody waits."""
        return min((until for streams in self._streams.values() for until in streams.values()), default=None)
