# SPDX-License-Identifier: Apache-2.0
"""Telemetry from counters: rates, capacities by cost models, what waits for whom."""

from dataclasses import replace

import pytest

from tests.unit.control.rebalancing import SETTINGS
from twinpool.control.rebalance.capacity import (
    Cost,
    WorkerLimits,
    Workload,
    batch,
    decode_capacity,
    prefill_capacity,
)
from twinpool.control.rebalance.telemetry import Role, Telemetry
from twinpool.control.rebalance.window import Sample, Window, WorkerSample

PREFILL_COST, STEP_COST = Cost(0.01, 1e-4, 0.0), Cost(0.02, 1e-4, 1e-8)
NO_LIMIT = float("inf")


def worker(name: str, role: Role, **changes: object) -> WorkerSample:
    made = WorkerSample(
        name,
        1,
        role,
        "ready",
        available_blocks=1000,
        total_blocks=1000,
        block_tokens=64,
        max_num_seqs=256,
        prefill_cost=PREFILL_COST,
        step_cost=STEP_COST,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def watch(*samples: Sample, drain: float = NO_LIMIT) -> Telemetry:
    window = Window("default", SETTINGS, drain)
    found = [window.add(sample) for sample in samples]
    return found[-1]


def two(at: float, **counters: int) -> Sample:
    return Sample(at, (worker("p", "prefill"), worker("d", "decode")), **counters)


def test_capacity_is_what_the_objective_and_the_memory_allow() -> None:
    load = Workload(prompt_tokens=1000, uncached_tokens=500, output_tokens=200)
    each = 1e-4 + 1e-8 * 1100
    assert batch(STEP_COST, WorkerLimits(10**9, 10**6), load, 0.05) == pytest.approx(0.03 / each)
    assert batch(STEP_COST, WorkerLimits(12_000, 10**6), load, 0.05) == pytest.approx(10)
    assert batch(STEP_COST, WorkerLimits(10**9, 7), load, 0.05) == 7
    assert batch(STEP_COST, WorkerLimits(10**9, 7), load, 0.001) == 1
    assert prefill_capacity(PREFILL_COST, load) == pytest.approx(500 / 0.06)
    assert decode_capacity(STEP_COST, WorkerLimits(10**9, 7), load, 0.05) == pytest.approx(
        7 / (0.02 + 7 * each)
    )


def test_arrivals_are_rates_of_the_window() -> None:
    seen = watch(
        two(0.0),
        two(
            10.0,
            requests=20,
            prompt_tokens=20_000,
            prefilled_tokens=10_000,
            cached_tokens=4_000,
            finished=10,
            output_tokens=3_000,
        ),
    )
    assert seen.seconds == 10.0
    assert seen.prefill_tokens_per_second == pytest.approx(2000 * 0.6)
    assert seen.decode_tokens_per_second == pytest.approx(2 * 300)
    assert seen.load["prefill"].arriving == pytest.approx(1200 / seen.capacity["prefill"])
    assert seen.load["decode"].arriving == pytest.approx(600 / seen.capacity["decode"])
    assert seen.load["prefill"].backlog == 0.0


def test_old_samples_leave_and_a_counter_that_goes_back_begins_anew() -> None:
    samples = [two(at, requests=int(at), prompt_tokens=int(at) * 100) for at in (0.0, 20.0, 40.0, 60.0)]
    assert watch(*samples).seconds == 40.0
    assert watch(*samples, two(65.0, requests=3, prompt_tokens=100)).seconds == 0.0


def test_a_queue_is_the_burden_of_the_role_that_keeps_it_waiting() -> None:
    """A decode worker with room leaves the queue to prefill; one without takes it upon itself."""
    before, queue = two(0.0), {"queued": 50, "queued_tokens": 500_000}
    seen = watch(before, two(10.0, **queue))
    assert seen.load["prefill"].backlog > 0.5
    assert seen.load["decode"].backlog == 0.0
    assert seen.queue_growth == 5.0
    assert seen.ttft > 10.0
    full = (worker("p", "prefill"), worker("d", "decode", available_blocks=20))
    seen = watch(before, replace(two(10.0, **queue), workers=full))
    assert seen.load["prefill"].backlog == 0.0
    assert seen.load["decode"].backlog > 0.05


def test_what_decode_workers_hold_is_load_whatever_arrives() -> None:
    holding = (worker("p", "prefill"), worker("d", "decode", running=200, step_seconds=0.04))
    seen = watch(replace(two(0.0), workers=holding), replace(two(10.0), workers=holding))
    assert seen.itl == pytest.approx(0.04)
    assert seen.load["decode"].demand == pytest.approx(
        200 / batch(STEP_COST, WorkerLimits(64_000, 256), Workload(1024, 1024, 128), SETTINGS.itl_seconds)
    )
    slow = (worker("p", "prefill"), worker("d", "decode", running=2, step_seconds=0.3))
    seen = watch(replace(two(0.0), workers=slow), replace(two(10.0), workers=slow))
    assert seen.load["decode"].demand == pytest.approx(0.3 / SETTINGS.itl_seconds)


def test_busy_shares_begin_with_the_role() -> None:
    first = Sample(0.0, (worker("w", "decode", busy_seconds=0.0), worker("d", "decode")))
    second = Sample(10.0, (worker("w", "prefill", busy_seconds=4.0), worker("d", "decode")))
    third = Sample(20.0, (worker("w", "prefill", busy_seconds=9.0), worker("d", "decode")))
    assert watch(first, second).workers[0].busy == 0.0
    seen = watch(first, second, third)
    assert seen.workers[0].busy == pytest.approx(0.5)
    assert seen.load["prefill"].held == pytest.approx(0.5)


def test_drains_last_as_long_as_answers_and_no_longer_than_they_may() -> None:
    workers = (
        worker("p", "prefill", waiting_tokens=30_000),
        worker("d", "decode", running=3, step_seconds=0.05),
        worker("e", "decode"),
    )
    samples = [Sample(0.0, workers), Sample(10.0, workers, finished=2, output_tokens=800)]
    seen = watch(*samples)
    assert [each.drain_seconds for each in seen.workers] == [
        pytest.approx(30_000 / seen.capacity["prefill"]),
        pytest.approx(400 * 0.05),
        0.0,
    ]
    assert [each.drain_seconds for each in watch(*samples, drain=2.0).workers][1] == 2.0


def test_without_cost_models_capacity_is_what_was_done() -> None:
    bare = {"prefill_cost": None, "step_cost": None}
    first = (worker("p", "prefill", **bare), worker("d", "decode", running=10, step_seconds=0.05, **bare))
    second = (worker("p", "prefill", busy_seconds=5.0, **bare), first[1])
    seen = watch(
        Sample(0.0, first), Sample(10.0, second, requests=10, prompt_tokens=10_000, prefilled_tokens=10_000)
    )
    assert seen.capacity["prefill"] == pytest.approx(2000.0)
    assert seen.capacity["decode"] == pytest.approx(10 * 0.1 / 0.05 / 0.1)
