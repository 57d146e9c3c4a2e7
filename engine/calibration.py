# SPDX-License-Identifier: Apache-2.0
"""Measures at a worker's start what its prefill and its decode steps take, so that placement need not guess at first."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final, NamedTuple, Protocol

import numpy as np

from twinpool.engine.sampling import DrawParams, SequenceDraw
from twinpool.engine.step import PlanArrays, PlanLimits
from twinpool.engine.warmup import decode_plan, prefill_plan
from twinpool.logs import get_logger

RUNS: Final = 3
"""Timed runs of each plan, of which the median counts."""

STEP_CONTEXT_TOKENS: Final = 4096
"""Most tokens that the sequences of a measured step have together: shows the slope, and is soon put back."""

PREFILL_ORDER: Final = (1, 0, 2)
STEP_ORDER: Final = (0, 1, 2)
"""Which coefficient (base, unit, context) takes what too few measurements leave open, first to last: prefill grows with
its size, a step is mostly its base."""

log = get_logger(__name__)


class CostModel(NamedTuple):
    """Seconds of some work: ``base + unit * x1 + context * x2``. None is negative."""

    base_seconds: float
    unit_seconds: float
    context_seconds: float

    def predict(self, x1: float, x2: float) -> float:
        return self.base_seconds + self.unit_seconds * x1 + self.context_seconds * x2


class Calibration(NamedTuple):
    """``prefill``: of a prompt, over (uncached tokens, uncached tokens times the mean number of tokens before each).
    ``step``: of a decode step, over (sequences, tokens of all of them). None: not measured."""

    prefill: CostModel | None = None
    step: CostModel | None = None


class Measured(NamedTuple):
    """One measurement; ``x1`` and ``x2`` as in ``Calibration``."""

    x1: float
    x2: float
    seconds: float


class _Point(NamedTuple):
    """A plan to measure. ``work``: at most so much larger than another plan's is its time, as their ratio."""

    x1: float
    x2: float
    work: float
    plan: PlanArrays


class Stepper(Protocol):
    """What is measured: a ``ModelRunner``."""

    @property
    def limits(self) -> PlanLimits: ...
    @property
    def lazy(self) -> bool: ...
    def scratch(self, plan: PlanArrays) -> AbstractContextManager[None]: ...
    def step(self, plan: PlanArrays, draws: Sequence[SequenceDraw]) -> object: ...


def calibrate(
    runner: Stepper,
    *,
    budget_seconds: float,
    max_chunk_tokens: int,
    max_num_seqs: int,
    cancelled: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """Runs prefill chunks and decode steps of growing sizes, by turns, for at most ``budget_seconds`` (0: none).

    A plan that is not expected to fit in what is left is not begun, so only the first of a kind may exceed it. Call it
    after the warm-up and before anything uses the pool, whose blocks are put back as they were.
    """
    deadline = clock() + budget_seconds
    measured: dict[str, list[Measured]] = {"prefill": [], "step": []}
    points = {
        "step": step_points(runner.limits, max_num_seqs),
        "prefill": prefill_points(runner.limits, max_chunk_tokens),
    }
    last: dict[str, tuple[float, float]] = {}
    for pair in itertools.zip_longest(*points.values()):
        for kind, point in zip(points, pair, strict=True):
            if point is None or cancelled():
                continue
            seconds, work = last.get(kind, (0.0, point.work))
            expected = seconds * point.work / work
            times = _time(runner, point.plan, expected, deadline, clock)
            if times:
                taken = statistics.median(times)
                measured[kind].append(Measured(point.x1, point.x2, taken))
                last[kind] = (taken, point.work)
    chunk = fit(measured["prefill"], PREFILL_ORDER)
    prefill = None if chunk is None else of_prompts(chunk, max_chunk_tokens)
    result = Calibration(prefill, fit(measured["step"], STEP_ORDER))
    if budget_seconds:
        log.info(
            "worker_calibrated",
            seconds=round(clock() - deadline + budget_seconds, 3),
            measured={kind: len(rows) for kind, rows in measured.items()},
            **{kind: model and model._asdict() for kind, model in result._asdict().items()},
        )
    return result


def prefill_points(limits: PlanLimits, max_chunk_tokens: int) -> list[_Point]:
    """Chunks of one prompt: three sizes alone, two after as many cached tokens as fit."""
    room = min(limits.num_blocks * limits.block_tokens, limits.max_positions)
    chunk = max(1, min(max_chunk_tokens, room))
    sizes = sorted({max(1, chunk // part) for part in (8, 2, 1)})
    cached = min(chunk, room - chunk) // limits.block_tokens * limits.block_tokens
    shapes = [(tokens, 0) for tokens in sizes]
    if cached:
        shapes += [(tokens, cached) for tokens in sizes[-2:]]
    return [
        _Point(tokens, tokens * (before + tokens / 2), tokens, prefill_plan(limits, tokens, before))
        for tokens, before in sorted(shapes)
    ]


def step_points(limits: PlanLimits, max_num_seqs: int) -> list[_Point]:
    """Decodes of one, a few and the most sequences, each with a short and a long context."""
    most = max(1, min(max_num_seqs, limits.num_blocks))
    points = []
    for sequences in sorted({1, min(4, most), most}):
        room = min(limits.num_blocks // sequences * limits.block_tokens, limits.max_positions)
        long = min(room, max(limits.block_tokens, STEP_CONTEXT_TOKENS // sequences))
        for context in sorted({min(limits.block_tokens, long), long}):
            plan = decode_plan(limits, sequences, context - 1)
            points.append(_Point(sequences, sequences * context, sequences, plan))
    return points


def of_prompts(chunk: CostModel, chunk_tokens: int) -> CostModel:
    """What prompts take that are computed in chunks, from what a chunk takes: each chunk has its base, and there is half a
    chunk more than the tokens would fill, on average over all lengths."""
    base, unit, context = chunk
    return CostModel(base / 2, unit + base / chunk_tokens, context)


def fit(measured: Sequence[Measured], order: Sequence[int]) -> CostModel | None:
    """Least squares of the relative error with no coefficient below 0; None without a measurement.

    Exact: the best solution is the plain one over the coefficients that it leaves above 0 (Lawson and Hanson, Solving
    Least Squares Problems, 1974, ch. 23), and of three there are few subsets. Where measurements leave open which
    coefficient takes what, fewer are used, those first in ``order`` before others.
    """
    if not measured:
        return None
    rows = np.array([(1.0, x1, x2) for x1, x2, _ in measured])
    seconds = np.array([row.seconds for row in measured])
    scale = np.maximum(rows.max(axis=0), 1.0)
    matrix = rows / scale / seconds[:, None]
    best, least = np.zeros(3), np.inf
    for count in (1, 2, 3):
        for columns in itertools.combinations(order, count):
            part = matrix[:, columns]
            solution, _, rank, _ = np.linalg.lstsq(part, np.ones(len(part)), rcond=None)
            if rank < count or (solution < 0).any():
                continue
            error = float(np.sum((part @ solution - 1.0) ** 2))
            if error < least - 1e-12:
                best, least = np.zeros(3), error
                best[list(columns)] = solution
    return CostModel(*(best / scale).tolist())


def _time(
    runner: Stepper, plan: PlanArrays, expected: float, deadline: float, clock: Callable[[], float]
) -> list[float]:
    """Seconds of up to ``RUNS`` runs, fewer if the next one, as long as the last one or as ``expected``, would end too late."""
    times: list[float] = []
    if clock() + expected >= deadline:
        return times
    with runner.scratch(plan):
        for run in range(RUNS + runner.lazy):
            if clock() + expected >= deadline:
                break
            draws = [SequenceDraw(DrawParams()) for _ in range(len(plan.seq))]
            started = clock()
            runner.step(plan, draws)
            seconds = clock() - started
            if run >= runner.lazy:
                times.append(seconds)
                expected = seconds
    return times
