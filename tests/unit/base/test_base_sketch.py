# SPDX-License-Identifier: Apache-2.0
"""Percentiles of the last minute: near the exact ones, forgotten after it, and additive."""

import math
import random

import pytest

from twinpool.sketch import SLOT_SECONDS, WINDOW_SECONDS, Sketch, summary
from twinpool.v1 import telemetry_pb2 as pb


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def seconds(found: pb.LatencySummary, field: str) -> float:
    return float(getattr(found, field).ToNanoseconds()) / 1e9


@pytest.mark.parametrize("scale", [1e-4, 0.02, 3.0, 500.0])
def test_percentiles_are_within_a_bucket_of_the_exact_ones(scale: float) -> None:
    random.seed(7)
    times = [random.lognormvariate(math.log(scale), 1.0) for _ in range(5000)]
    sketch = Sketch(Clock())
    for one in times:
        sketch.add(one)
    found = summary([sketch.message()])
    times.sort()
    assert found.count == 5000
    for field, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        exact = times[math.ceil(share * len(times)) - 1]
        assert seconds(found, field) == pytest.approx(exact, rel=0.05)


def test_a_minute_is_remembered_and_no_more() -> None:
    clock = Clock()
    sketch = Sketch(clock)
    sketch.add(1.0)
    clock.now += WINDOW_SECONDS - SLOT_SECONDS
    sketch.add(4.0)
    assert summary([sketch.message()]).count == 2
    clock.now += SLOT_SECONDS
    found = summary([sketch.message()])
    assert found.count == 1
    assert seconds(found, "p50") == pytest.approx(4.0, rel=0.05)
    clock.now += 10 * WINDOW_SECONDS
    assert summary([sketch.message()]).count == 0
    sketch.add(2.0)
    assert summary([sketch.message()]).count == 1


def test_sketches_of_several_routers_add_up() -> None:
    one, other, both = Sketch(Clock()), Sketch(Clock()), Sketch(Clock())
    for at in range(1, 200):
        (one if at % 3 else other).add(at / 100)
        both.add(at / 100)
    assert summary([one.message(), other.message()]) == summary([both.message()])


def test_nothing_and_the_impossible_have_a_place() -> None:
    empty = summary([])
    assert empty.count == 0
    assert not empty.HasField("p50")
    sketch = Sketch(Clock())
    for odd in (0.0, -1.0, 1e-9, 1e12):
        sketch.add(odd)
    found = summary([sketch.message()])
    assert found.count == 4
    assert seconds(found, "p50") < 1.1e-5
    assert len(sketch.message().buckets) == 2
