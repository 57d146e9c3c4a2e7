# SPDX-License-Identifier: Apache-2.0
"""A trace file as it is to be run: read, cut, spread, sped up."""

from dataclasses import dataclass
from pathlib import Path

from twinpool.control.replay.formats import read_trace
from twinpool.control.replay.trace import Trace


@dataclass(frozen=True)
class Selection:
    """What to take of a trace, in the order of these fields."""

    sessions: int | None = None
    """Whole sessions, chosen at random."""
    spread: float | None = None
    """Seconds within which the sessions start, for recordings that start all of them at 0."""
    think_limit: float = 60.0
    """With ``spread``: longest pause in seconds."""
    requests: int | None = None
    """The first requests by arrival."""
    speed: float = 1.0
    """Arrivals and pauses are divided by it."""
    seed: int = 0


def load_trace(path: Path, format: str, selection: Selection) -> Trace:
    """Reads a trace and applies a selection. Raises TraceError."""
    trace = read_trace(path, format)
    if selection.sessions is not None:
        trace = trace.sessions(selection.sessions, selection.seed)
    if selection.spread is not None:
        trace = trace.spread(selection.spread, selection.think_limit, selection.seed)
    if selection.requests is not None:
        trace = trace.head(selection.requests)
    return trace.faster(selection.speed)
