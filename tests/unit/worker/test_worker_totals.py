# SPDX-License-Identifier: Apache-2.0
"""How busy a worker is: a mean over ten seconds, how far it swings, and under which role that is shown."""

from typing import Any

import pytest
from prometheus_client import REGISTRY

from twinpool import metrics
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker.meters import Meters
from twinpool.worker.totals import SWING_SECONDS, WINDOW_SECONDS, Totals, Utilization


def test_utilization_is_a_mean_of_the_last_seconds() -> None:
    found = Utilization(0.0)
    for second in range(1, 41):
        assert found.sample(float(second), 0.25 * second)
    assert found.mean == pytest.approx(0.25)
    busy = 10.0
    for second in range(41, 41 + int(WINDOW_SECONDS)):
        busy += 1.0
        found.sample(float(second), busy)
    assert found.mean == pytest.approx(1.0)
    assert found.swing == pytest.approx(0.75)


def test_samples_are_a_second_apart() -> None:
    found = Utilization(0.0)
    assert not found.sample(0.9, 0.9)
    assert found.mean == 0
    assert found.sample(1.0, 0.5)
    assert not found.sample(1.5, 1.0)
    assert found.mean == pytest.approx(0.5)


def test_a_step_that_began_before_counts_for_no_more_than_all_the_time() -> None:
    found = Utilization(0.0)
    for second in range(1, 20):
        found.sample(float(second), 0.0)
    found.sample(20.0, 15.0)
    assert found.mean == 1.0


def test_the_swing_forgets() -> None:
    found = Utilization(0.0)
    busy = 0.0
    for second in range(1, 2 * int(SWING_SECONDS) + 30):
        busy += 0.9 if second < 60 else 0.1
        found.sample(float(second), busy)
    assert found.mean == pytest.approx(0.1)
    assert found.swing == pytest.approx(0.0, abs=0.01)


def test_the_first_seconds_are_no_swing() -> None:
    found = Utilization(0.0)
    found.sample(1.0, 1.0)
    found.sample(2.0, 1.0)
    assert found.swing == 0


class Parts:
    """What the meters look at."""

    def __init__(self) -> None:
        self.now = 0.0
        self.totals = Totals()
        self.limits: Any = self
        self.scheduler = self.blocks = self.pulls = self.offers = self
        self.block_tokens = self.num_blocks = 16
        self.running = self.waiting = self.reserved = self.waiting_tokens = 0
        self.available_blocks = self.free_blocks = self.cached_blocks = self.held_blocks = (
            self.pinned_blocks
        ) = 1
        self.quarantined_blocks = self.prefix_pinned_blocks = self.prefix_pins = self.open = self.draining = 0

    def clock(self) -> float:
        return self.now


def shown(role: str) -> float | None:
    return REGISTRY.get_sample_value("twinpool_worker_utilization_ratio", {"role": role})


def test_a_worker_that_changes_its_role_leaves_no_series_of_the_old_one() -> None:
    # Workers of other tests in this process have shown theirs.
    metrics.WORKER_UTILIZATION.clear()
    parts: Any = Parts()
    meters = Meters(parts)
    for _ in range(12):
        parts.now += 1.0
        parts.totals.busy_seconds += 0.5
        meters.tick(parts.now, pb.ROLE_PREFILL)
    assert shown("prefill") == pytest.approx(0.5)
    assert shown("decode") is None
    parts.now += 1.0
    meters.tick(parts.now, pb.ROLE_DECODE)
    assert shown("prefill") is None
    assert shown("decode") is not None
