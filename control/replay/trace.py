# SPDX-License-Identifier: Apache-2.0
"""A recorded workload, whatever file it came from.

A prompt is a sequence of *block ids* of the trace's own granularity. An id names the whole prefix up to and including its
block, as chained hashes do: equal ids mean equal tokens from the prompt's start. Ids are kept as runs ``[first, count]``,
since long prompts are few runs of consecutive numbers.
"""

import dataclasses
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Runs = NDArray[np.int64]  # [n, 2]: first id, count
Ids = NDArray[np.int64]

NO_RUNS: Runs = np.zeros((0, 2), np.int64)


class TraceError(ValueError):
    """A trace file that can't be read; the message names the file, the line and what is wrong."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace. Times are seconds since the trace's start."""

    id: int
    input_length: int
    output_length: int
    arrival: float
    """When it came in the recording."""
    runs: Runs = dataclasses.field(default_factory=lambda: NO_RUNS, compare=False)
    """Block ids of the prompt's full blocks."""
    tail_id: int = -1
    """Id of the last, partial block where the trace has one: never a cache hit, but equal ids are equal tokens."""
    namespace: int = 0
    """Block ids mean the same within a namespace only."""
    session: str = ""
    after: int | None = None
    """In a closed loop: the request whose answer must be complete first."""
    think: float = 0.0
    """In a closed loop: seconds between that answer and this request."""

    @property
    def full_blocks(self) -> int:
        """Full blocks of the prompt."""
        return int(self.runs[:, 1].sum())

    @property
    def listed_blocks(self) -> int:
        """Blocks that the trace lists: what hit rates are shares of."""
        return self.full_blocks + (self.tail_id >= 0)

    def block_ids(self) -> Ids:
        """The ids of the full blocks, one by one."""
        return expand(self.runs)


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their numbers 0, 1, ...; whatever one waits for comes before it."""

    name: str
    block_tokens: int
    """Tokens of a block; 0: the trace says nothing about prefixes."""
    requests: Sequence[Request]

    @property
    def closed(self) -> bool:
        """Whether requests wait for others."""
        return any(request.after is not None for request in self.requests)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last one, as recorded."""
        arrivals = [request.arrival for request in self.requests]
        return max(arrivals) - min(arrivals) if arrivals else 0.0

    def head(self, count: int) -> "Trace":
        """The first requests by arrival, with whatever they wait for."""
        if count >= len(self.requests):
            return self
        chosen = sorted(self.requests, key=lambda request: (request.arrival, request.id))[:count]
        return _renumbered(self, sorted(chosen, key=lambda request: request.id))

    def sessions(self, count: int, seed: int = 0) -> "Trace":
        """A random choice of whole sessions."""
        names = sorted({request.session for request in self.requests})
        if count >= len(names):
            return self
        chosen = set(random.Random(seed).sample(names, count))
        return _renumbered(self, [request for request in self.requests if request.session in chosen])

    def faster(self, speed: float) -> "Trace":
        """Arrivals and think times divided by ``speed``."""
        if speed == 1.0:
            return self
        return dataclasses.replace(
            self,
            requests=[
                dataclasses.replace(r, arrival=r.arrival / speed, think=r.think / speed)
                for r in self.requests
            ],
        )

    def spread(self, seconds: float, think_limit: float, seed: int = 0) -> "Trace":
        """For recordings whose sessions all start at 0: starts them at random within ``seconds`` and cuts pauses
        longer than ``think_limit`` seconds, so that a night's sleep does not become an hour without load."""
        draw = random.Random(seed)
        starts = {name: draw.uniform(0.0, seconds) for name in sorted({r.session for r in self.requests})}
        clock: dict[int, float] = {}
        moved = []
        for request in self.requests:
            think = min(request.think, think_limit)
            if request.after is None:
                arrival = starts[request.session]
            else:
                before = self.requests[request.after]
                gap = request.arrival - before.arrival - request.think
                arrival = clock[request.after] + max(0.0, min(gap, think_limit)) + think
            clock[request.id] = arrival
            moved.append(dataclasses.replace(request, arrival=arrival, think=think))
        return dataclasses.replace(self, requests=moved)


class Release:
    """When each request of a trace may be sent: by its recorded time, or, in a closed loop, a think time after the answer
    that it waits for. A request that can't come any more (its predecessor failed) is dropped with all that follow it."""

    def __init__(self, requests: Sequence[Request], closed: bool) -> None:
        self._waiting: dict[int, list[Request]] = {}
        self.initial: list[Request] = []
        """Requests that wait for no other, by arrival."""
        for request in requests:
            if closed and request.after is not None:
                self._waiting.setdefault(request.after, []).append(request)
            else:
                self.initial.append(request)
        self.initial.sort(key=lambda request: (request.arrival, request.id))

    def ended(self, request: int) -> list[Request]:
        """The requests that waited for this one; each comes ``think`` seconds from now."""
        return self._waiting.pop(request, [])

    def dropped(self, request: int) -> int:
        """This one failed: forgets all that would have followed and returns how many."""
        count = 0
        todo = deque([request])
        while todo:
            for follower in self._waiting.pop(todo.popleft(), []):
                count += 1
                todo.append(follower.id)
        return count


def expand(runs: Runs) -> Ids:
    """The ids of runs, one by one."""
    counts = runs[:, 1]
    total = int(counts.sum())
    starts = np.cumsum(counts) - counts
    ids: Ids = np.arange(total, dtype=np.int64) + np.repeat(runs[:, 0] - starts, counts)
    return ids


def compress(ids: Sequence[int]) -> Runs:
    """Ids as runs."""
    array = np.asarray(ids, np.int64)
    if not len(array):
        return NO_RUNS
    breaks = np.flatnonzero(np.diff(array) != 1) + 1
    starts = np.concatenate([[0], breaks])
    counts = np.diff(np.concatenate([starts, [len(array)]]))
    return np.stack([array[starts], counts], axis=1)


def _renumbered(trace: Trace, requests: Sequence[Request]) -> Trace:
    """A part of a trace, numbered from 0. A request whose predecessor is not in the part starts by itself."""
    numbers = {request.id: number for number, request in enumerate(requests)}
    return dataclasses.replace(
        trace,
        requests=[
            dataclasses.replace(
                request,
                id=numbers[request.id],
                after=None if request.after is None else numbers.get(request.after),
            )
            for request in requests
        ],
    )
