# SPDX-License-Identifier: Apache-2.0
"""Claim: a pool that rebalances itself serves at least 1.3 times as many requests in time as the best fixed split when the load
turns from prefill-heavy to decode-heavy and back, loses next to nothing under a steady load, and does not swing.

Public traces run through the simulator with the policy of the control process (see docs/simulator.md). Eight workers; each
fixed split of them in the same run. The load step starts from the even split; the steady load is the conversation trace, started
from its best split and from the even one. Goodput: requests a second that met both objectives, from the first arrival to the
last end. Needs the traces: --traces DIRECTORY, or TWINPOOL_TRACES.
"""

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from bench._common import arguments, report
from bench._load_step import CONVERSATION, DECODE_HEAVY, PREFILL_HEAVY, Phase, load_step
from twinpool.config import RebalanceSection
from twinpool.control.rebalance.history import reversals
from twinpool.control.replay.figures import Objectives
from twinpool.control.replay.load import Selection, load_trace
from twinpool.control.replay.trace import Trace
from twinpool.control.simulate.model import PRESETS
from twinpool.control.simulate.results import Run, simulate
from twinpool.control.simulate.setup import Setup

WORKERS = 8
BLOCK_TOKENS = 512
PHASE_SECONDS = 600.0
PREFILL_RATE, DECODE_RATE = 12.0, 32.0
STEP_OBJECTIVES = Objectives(3.0, 0.03)
STEADY_OBJECTIVES = Objectives(10.0, 0.1)
STEADY_SPEED = 0.5

Splits = Mapping[str, float]


def main() -> None:
    """Entry point."""
    args = arguments(
        __doc__ or "",
        ("--traces", {"default": os.environ.get("TWINPOOL_TRACES", ""), "help": "directory of the traces"}),
    )
    if not args.traces:
        print("no traces: give --traces DIRECTORY or set TWINPOOL_TRACES", file=sys.stderr)
        sys.exit(0 if args.quick else 2)
    directory = Path(args.traces)
    figures: dict[str, object] = {}
    ratios: dict[str, float] = {}
    _load_step(directory, args.quick, figures, ratios)
    _steady(directory, args.quick, figures, ratios)
    report(
        "rebalancing: a pool that flips its workers against fixed splits", figures, ratios, as_json=args.json
    )


def _load_step(directory: Path, quick: bool, figures: dict[str, object], ratios: dict[str, float]) -> None:
    seconds = PHASE_SECONDS / 3 if quick else PHASE_SECONDS
    trace = load_step(
        directory,
        [
            Phase(PREFILL_HEAVY, seconds, PREFILL_RATE),
            Phase(DECODE_HEAVY, seconds, DECODE_RATE),
            Phase(PREFILL_HEAVY, seconds, PREFILL_RATE),
        ],
    )
    setup = _setup(trace, STEP_OBJECTIVES)
    fixed = _fixed("step", trace, setup, (2, 4, 6) if quick else range(1, WORKERS), figures)
    auto = _auto("step.auto", trace, setup, WORKERS // 2, figures)
    ratios["step: auto over the best fixed split"] = auto / max(fixed.values())
    ratios["step: auto over the even split"] = auto / fixed[_name(WORKERS // 2)]


def _steady(directory: Path, quick: bool, figures: dict[str, object], ratios: dict[str, float]) -> None:
    selection = Selection(requests=2000 if quick else None, speed=STEADY_SPEED)
    trace = load_trace(directory / CONVERSATION, "auto", selection)
    setup = _setup(trace, STEADY_OBJECTIVES)
    fixed = _fixed("steady", trace, setup, (4, 6, 7) if quick else range(1, WORKERS), figures)
    best = max(fixed, key=lambda name: fixed[name])
    started = int(best.partition(":")[0])
    auto = _auto("steady.auto_from_best", trace, setup, started, figures)
    ratios["steady: auto over the best fixed split, from it"] = auto / fixed[best]
    even = _auto("steady.auto_from_even", trace, setup, WORKERS // 2, figures)
    ratios["steady: auto over the best fixed split, from the even one"] = even / fixed[best]


def _setup(trace: Trace, objectives: Objectives) -> Setup:
    return Setup(
        model=PRESETS["h200-v3"],
        block_tokens=BLOCK_TOKENS,
        objectives=objectives,
        core={"prefix_fetch": 1.0},
        max_new_tokens=max(request.output_length for request in trace.requests),
    )


def _name(prefill: int) -> str:
    return f"{prefill}:{WORKERS - prefill}"


def _run(
    name: str, trace: Trace, setup: Setup, prefill: int, figures: dict[str, object]
) -> tuple[Run, float]:
    run = simulate(trace, dataclasses.replace(setup, prefill=prefill, decode=WORKERS - prefill), "ours")
    goodput, share = run.figures["goodput_per_second"], run.figures["attainment"]
    assert isinstance(goodput, float)
    figures[f"{name}.goodput_per_s"] = goodput
    figures[f"{name}.in_time"] = share
    print(f"{name}: {goodput:.2f}/s in time", file=sys.stderr, flush=True)
    return run, goodput


def _fixed(
    name: str, trace: Trace, setup: Setup, splits: "range | tuple[int, ...]", figures: dict[str, object]
) -> dict[str, float]:
    return {
        _name(prefill): _run(f"{name}.{_name(prefill)}", trace, setup, prefill, figures)[1]
        for prefill in splits
    }


def _auto(name: str, trace: Trace, setup: Setup, prefill: int, figures: dict[str, object]) -> float:
    settings = RebalanceSection(
        auto=True, ttft_seconds=setup.objectives.ttft, itl_seconds=setup.objectives.itl
    )
    run, goodput = _run(name, trace, dataclasses.replace(setup, rebalance=settings), prefill, figures)
    assert run.cluster.rebalancer is not None
    moves = run.cluster.rebalancer.history.moves
    figures[f"{name}.flips"] = len(moves)
    within = [
        reversals(moves, move.began - settings.reversal_seconds) - reversals(moves, move.began)
        for move in moves
    ]
    figures[f"{name}.reversals"] = reversals(moves)
    figures[f"{name}.most_reversals_in_a_window"] = max(within, default=0)
    return goodput


if __name__ == "__main__":
    main()
