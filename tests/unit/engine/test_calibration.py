# SPDX-License-Identifier: Apache-2.0
"""What a worker measures of itself at its start: the fit, the plans, the budget; the pool is as it was."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from twinpool.engine.calibration import (
    PREFILL_ORDER,
    RUNS,
    STEP_ORDER,
    Calibration,
    CostModel,
    Measured,
    calibrate,
    fit,
    of_prompts,
    prefill_points,
    step_points,
)
from twinpool.engine.kv.pool import KVPool
from twinpool.engine.loader import load_model
from twinpool.engine.runner import ModelRunner
from twinpool.engine.sampling import SequenceDraw
from twinpool.engine.step import PlanArrays, PlanLimits, check_plan
from twinpool.engine.tiny import write_tiny

BLOCK = 16
LIMITS = PlanLimits(num_blocks=600, block_tokens=BLOCK, vocab_size=512, max_positions=4096)
PREFILL = CostModel(3e-3, 2e-4, 1.5e-8)
STEP = CostModel(8e-3, 4e-4, 2e-7)
CHUNK = 512


class Machine:
    """Takes as long as its models say, times ``noise``; time passes in nothing else."""

    def __init__(
        self, limits: PlanLimits = LIMITS, *, slower: float = 1.0, cold: float = 0.0, noise: float = 0.0
    ) -> None:
        self.limits, self.lazy = limits, cold > 0
        self.now, self.plans, self.held = 100.0, [], 0  # type: float, list[PlanArrays], int
        self._slower, self._cold, self._noise = slower, cold, noise
        self._random = np.random.default_rng(5)
        self._seen: set[tuple[int, ...]] = set()

    @contextlib.contextmanager
    def scratch(self, plan: PlanArrays) -> Iterator[None]:
        self.held += 1
        yield
        self.held -= 1

    def step(self, plan: PlanArrays, draws: Sequence[SequenceDraw]) -> None:
        assert self.held == 1
        assert len(draws) == len(plan.seq)
        check_plan(plan, self.limits)
        self.plans.append(plan)
        tokens, context = len(plan.token_ids), int(plan.context.sum())
        costs, x2 = (STEP, context) if plan.num_decodes else (PREFILL, tokens * (context - tokens / 2))
        seconds = costs.predict(tokens, x2)
        shape = (plan.num_decodes, tokens, context)
        self.now += self._slower * seconds * (1 + self._noise * self._random.standard_normal())
        if shape not in self._seen:
            self._seen.add(shape)
            self.now += self._cold

    def measure(self, budget: float, **options: object) -> Calibration:
        return calibrate(
            self,
            budget_seconds=budget,
            max_chunk_tokens=CHUNK,
            max_num_seqs=64,
            clock=lambda: self.now,
            **options,  # type: ignore[arg-type]
        )


@pytest.mark.parametrize("truth", [PREFILL, STEP, CostModel(0.0, 1e-3, 0.0), CostModel(2e-3, 0.0, 1e-6)])
def test_the_fit_finds_what_was_there(truth: CostModel) -> None:
    random = np.random.default_rng(3)
    rows = [(x1, x1 * (context + x1 / 2)) for x1 in (8, 64, 256, 512) for context in (0, 512, 2048)]
    exact = fit([Measured(x1, x2, truth.predict(x1, x2)) for x1, x2 in rows], PREFILL_ORDER)
    assert exact == pytest.approx(truth, rel=1e-6, abs=1e-12)
    noisy = fit(
        [Measured(x1, x2, truth.predict(x1, x2) * random.uniform(0.97, 1.03)) for x1, x2 in rows * 5],
        PREFILL_ORDER,
    )
    assert noisy is not None
    assert min(noisy) >= 0
    for x1, x2 in rows:
        assert noisy.predict(x1, x2) == pytest.approx(truth.predict(x1, x2), rel=0.04)


def test_no_coefficient_is_negative() -> None:
    # Plain least squares would have a base below 0.
    found = fit([Measured(10, 0, 0.5), Measured(20, 0, 2.0), Measured(30, 0, 3.5)], PREFILL_ORDER)
    assert found is not None
    assert found.base_seconds == 0
    assert found.unit_seconds > 0
    # And here every slope.
    found = fit([Measured(1, 100, 0.3), Measured(4, 900, 0.2), Measured(8, 4000, 0.1)], STEP_ORDER)
    assert found is not None
    assert found[1:] == (0, 0)
    assert 0.1 < found.base_seconds < 0.3


def test_few_measurements_say_what_they_can() -> None:
    assert fit([], STEP_ORDER) is None
    assert fit([Measured(1, 16, 0.3)], STEP_ORDER) == pytest.approx((0.3, 0, 0))
    assert fit([Measured(64, 2048, 0.64)], PREFILL_ORDER) == pytest.approx((0, 0.01, 0))
    # Base and unit cannot be told apart: the context's share can.
    assert fit([Measured(1, 0, 0.3), Measured(1, 1000, 0.4)], STEP_ORDER) == pytest.approx((0.3, 0, 1e-4))


def test_a_machine_is_measured_within_noise() -> None:
    prefill, step = Machine(noise=0.02).measure(60)
    assert prefill is not None
    assert step is not None
    for tokens, cached in [(CHUNK - 1, 0), (300, 200), (3 * CHUNK, 512), (7 * CHUNK + 1, 0)]:
        x2 = tokens * (cached + tokens / 2)
        # Chunk by chunk; a straight line is half a base off where a chunk ends.
        taken = PREFILL.predict(tokens, x2) + (-(-tokens // CHUNK) - 1) * PREFILL.base_seconds
        assert prefill.predict(tokens, x2) == pytest.approx(taken, rel=0.06, abs=0.5 * PREFILL.base_seconds)
    for sequences, context in [(1, 300), (8, 2000), (64, 4000)]:
        assert step.predict(sequences, context) == pytest.approx(STEP.predict(sequences, context), rel=0.06)


def test_what_only_first_runs_pay_for_does_not_count() -> None:
    prefill, step = Machine(cold=0.5).measure(60)
    assert prefill == pytest.approx(of_prompts(PREFILL, CHUNK), rel=1e-6)
    assert step == pytest.approx(STEP, rel=1e-6)


@pytest.mark.parametrize("slower", [1.0, 10.0, 100.0, 1000.0])
def test_the_budget_holds(slower: float) -> None:
    machine = Machine(slower=slower)
    prefill, step = machine.measure(1.0)
    # Only what nobody could foresee, the first run of a kind, may end after it.
    first = slower * max(STEP.predict(1, BLOCK), PREFILL.predict(64, 64 * 32))
    assert machine.now - 100.0 <= 1.0 + first
    assert step is not None
    assert step.predict(1, BLOCK) == pytest.approx(slower * STEP.predict(1, BLOCK), rel=0.01)
    if slower < 100:
        assert prefill is not None
        taken = of_prompts(PREFILL, CHUNK).predict(64, 2048)
        assert prefill.predict(64, 2048) == pytest.approx(slower * taken, rel=0.2)


def test_off_or_cancelled_nothing_runs() -> None:
    for machine, found in [
        ((off := Machine()), off.measure(0)),
        ((cancelled := Machine()), cancelled.measure(60, cancelled=lambda: True)),
    ]:
        assert found == Calibration(None, None)
        assert machine.plans == []


@pytest.mark.parametrize(
    "limits", [LIMITS, PlanLimits(1, BLOCK, 300, 4096), PlanLimits(3, 4, 300, 7), PlanLimits(40, 1, 2, 40)]
)
def test_plans_fit_any_pool(limits: PlanLimits) -> None:
    points = prefill_points(limits, 512) + step_points(limits, 64)
    assert len(points) >= 2
    for point in points:
        check_plan(point.plan, limits)
    machine = Machine(limits)
    machine.measure(600)
    assert len(machine.plans) == RUNS * len(points)


def test_the_pool_is_as_it_was(tmp_path: Path) -> None:
    model = load_model(write_tiny(tmp_path, "llama", layers=2, hidden=32, vocab=300))
    rows = model.kv_rows
    pool = KVPool(24, model.kv_layout.layers, BLOCK, rows.columns, rows.dtype)
    pool.poison([3, 23])
    before, generations = pool.tensor.clone().view(torch.uint8), pool.generations.copy()
    runner = ModelRunner(model, pool, validate=True)
    found = calibrate(runner, budget_seconds=30, max_chunk_tokens=64, max_num_seqs=8)
    for cost in found:
        assert cost is not None
        assert sum(cost) > 0
    assert torch.equal(pool.tensor.view(torch.uint8), before)
    assert (pool.generations == generations).all()
