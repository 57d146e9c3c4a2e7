# SPDX-License-Identifier: Apache-2.0
"""How to split a number of workers between prefill and decode: every ratio is simulated."""

import dataclasses
from collections.abc import Callable, Sequence

from twinpool.control.replay.trace import Trace
from twinpool.control.simulate.results import Figures, simulate
from twinpool.control.simulate.setup import Setup


def sweep(
    trace: Trace,
    setup: Setup,
    policy: str,
    workers: int,
    progress: Callable[[int, int], None] = lambda prefill, decode: None,
) -> list[Figures]:
    """The figures of each split of ``workers``, fewest prefill workers first. ``progress`` is told of each before it is run.
    Raises ValueError for fewer than two workers."""
    if workers < 2:
        raise ValueError(f"{workers} workers can't be split; allowed: at least 2")
    rows = []
    for prefill in range(1, workers):
        decode = workers - prefill
        progress(prefill, decode)
        run = simulate(trace, dataclasses.replace(setup, prefill=prefill, decode=decode), policy)
        rows.append({"prefill": prefill, "decode": decode} | run.figures)
    return rows


def best(rows: Sequence[Figures]) -> Figures:
    """The split with the best goodput; among equals the one that more requests are in time with."""

    def key(row: Figures) -> tuple[float, float]:
        goodput, attainment = row["goodput_per_second"], row["attainment"]
        assert isinstance(goodput, float)
        assert isinstance(attainment, float)
        return goodput, attainment

    return max(rows, key=key)
