# SPDX-License-Identifier: Apache-2.0
"""Percentiles of times of the last minute, to 5 %.

Times are counted in buckets that are 5 % apart, twelve sets of them for 5 s each: a time costs a logarithm and an entry of a
dictionary, under a microsecond, and the sketches of several processes add up.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Final

from google.protobuf.duration_pb2 import Duration

from twinpool.v1 import telemetry_pb2 as pb

WINDOW_SECONDS: Final = 60.0
SLOT_SECONDS: Final = 5.0
"""The window moves by so much."""

SMALLEST_SECONDS: Final = 1e-5
BUCKETS_MAX: Final = 500
"""Up to 5 days."""

_SLOTS: Final = round(WINDOW_SECONDS / SLOT_SECONDS)
_GROWTH: Final = math.log(1.05)


class Sketch:
    """Times of the last minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slots: deque[tuple[int, dict[int, int]]] = deque(maxlen=_SLOTS)

    def add(self, seconds: float) -> None:
        """Counts a time."""
        slot = int(self._clock() / SLOT_SECONDS)
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, {}))
        counts = self._slots[-1][1]
        bucket = int(math.log(seconds / SMALLEST_SECONDS) / _GROWTH) if seconds > SMALLEST_SECONDS else 0
        if bucket > BUCKETS_MAX:
            bucket = BUCKETS_MAX
        counts[bucket] = counts.get(bucket, 0) + 1

    def message(self) -> pb.LatencySketch:
        """As it is told."""
        oldest = int(self._clock() / SLOT_SECONDS) - _SLOTS
        total: Counter[int] = Counter()
        for slot, counts in self._slots:
            if slot > oldest:
                total.update(counts)
        buckets = sorted(total)
        return pb.LatencySketch(buckets=buckets, counts=[total[bucket] for bucket in buckets])


def summary(sketches: Iterable[pb.LatencySketch]) -> pb.LatencySummary:
    """Percentiles of all the times in ``sketches`` together."""
    counts: Counter[int] = Counter()
    for sketch in sketches:
        counts.update(dict(zip(sketch.buckets, sketch.counts, strict=False)))
    found = pb.LatencySummary(count=sum(counts.values()))
    for field, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        left = math.ceil(found.count * share)
        for bucket in sorted(counts):
            left -= counts[bucket]
            if left <= 0:
                getattr(found, field).CopyFrom(_middle(bucket))
                break
    return found


def _middle(bucket: int) -> Duration:
    """The time that stands for a bucket."""
    message = Duration()
    message.FromNanoseconds(int(SMALLEST_SECONDS * math.exp((bucket + 0.5) * _GROWTH) * 1e9))
    return message
