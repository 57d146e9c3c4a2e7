# SPDX-License-Identifier: Apache-2.0
"""Latency percentiles and goodput of many requests, the same for a replay and for a simulation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Objectives:
    """What a user is promised, in seconds; infinity: nothing."""

    ttft: float = float("inf")
    """Time to first token."""
    itl: float = float("inf")
    """Mean time between the tokens of an answer, the pause of the hand-off included."""


@dataclass(slots=True)
class Timing:
    """When a request came, spoke first and ended, in seconds; ``end`` is negative if it was not served to its end."""

    arrival: float
    first: float = -1.0
    end: float = -1.0
    output_tokens: int = 0


def latency_figures(timings: Sequence[Timing], objectives: Objectives) -> dict[str, object]:
    """Percentiles of time to first token, mean inter-token latency and whole time of the served requests; goodput: requests
    a second that met both objectives, between the first arrival and the last end."""
    served = [timing for timing in timings if timing.end >= 0]
    arrival = np.array([timing.arrival for timing in served])
    first = np.array([timing.first for timing in served])
    end = np.array([timing.end for timing in served])
    tokens = np.array([timing.output_tokens for timing in served])
    ttft = first - arrival
    itl = np.where(tokens > 1, (end - first) / np.maximum(tokens - 1, 1), 0.0)
    seconds = float(end.max() - min(timing.arrival for timing in timings)) if served else 0.0
    in_time = ttft <= objectives.ttft
    met = int(np.count_nonzero(in_time & (itl <= objectives.itl)))
    return {
        "requests": len(timings),
        "served": len(served),
        "seconds": seconds,
        "ttft_seconds": spread(ttft),
        "itl_seconds": spread(itl[tokens > 1]),
        "e2e_seconds": spread(end - arrival),
        "output_tokens_per_second": float(tokens.sum()) / seconds if seconds else 0.0,
        "met_ttft": int(np.count_nonzero(in_time)),
        "met_objectives": met,
        "attainment": met / len(timings) if timings else 0.0,
        "goodput_per_second": met / seconds if seconds else 0.0,
    }


def spread(values: NDArray[np.float64]) -> dict[str, float]:
    """Mean, percentiles and maximum; empty if there are no values."""
    if not len(values):
        return {}
    found = {f"p{share}": float(np.percentile(values, share)) for share in PERCENTILES}
    return {"mean": float(values.mean())} | found | {"max": float(values.max())}


def weighted_spread(values: Sequence[float], weights: Sequence[float]) -> dict[str, float]:
    """As ``spread``, of values that each count ``weight`` times."""
    if not values:
        return {}
    array, counts = np.array(values), np.array(weights)
    order = np.argsort(array)
    array, total = array[order], np.cumsum(counts[order])
    at = [min(int(np.searchsorted(total, total[-1] * share / 100)), len(array) - 1) for share in PERCENTILES]
    found = {f"p{share}": float(array[place]) for share, place in zip(PERCENTILES, at, strict=True)}
    return {"mean": float(np.average(array, weights=counts[order]))} | found | {"max": float(array[-1])}
