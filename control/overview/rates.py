# SPDX-License-Identifier: Apache-2.0
"""Rates of workers, made of the totals that they tell: no clock but the workers' own."""

from collections import deque
from dataclasses import dataclass
from typing import Final

from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2

RATE_SECONDS: Final = 10.0
"""Rates are means over at most so long, where the worker was asked often enough."""

SWING_SECONDS: Final = 300.0
"""So far back the greatest and the smallest utilization of a role are looked for."""

_START: Final = worker_pb2.InspectResponse()
# What every worker would have said at its start.


@dataclass(slots=True)
class Heard:
    """What a worker said last, and when on the control process's monotonic clock."""

    counts: worker_pb2.InspectResponse
    at: float


class WorkerHistory:
    """One incarnation of one worker."""

    def __init__(self) -> None:
        self._answers: deque[worker_pb2.InspectResponse] = deque([_START])
        self.heard: Heard | None = None

    def hear(self, counts: worker_pb2.InspectResponse, now: float) -> None:
        """An answer has come."""
        self.heard = Heard(counts, now)
        last = self._answers[-1]
        if uptime(counts) <= uptime(last):
            return  # two askers, overtaken
        self._answers.append(counts)
        # The newest answer that is old enough stays: the rates cover at least that long.
        while len(self._answers) > 2 and uptime(counts) - uptime(self._answers[1]) >= RATE_SECONDS:
            self._answers.popleft()

    def tell(self, status: pb.WorkerStatus) -> None:
        """Fills in the rates."""
        first, last = self._answers[0], self._answers[-1]
        seconds = uptime(last) - uptime(first)
        if seconds <= 0:
            return
        status.window.FromNanoseconds(int(seconds * 1e9))
        busy = (last.busy.ToNanoseconds() - first.busy.ToNanoseconds()) / 1e9
        # A step is counted at its end, so one that began before can make the time look more than full.
        status.utilization = min(1.0, max(0.0, busy / seconds))
        status.prompt_tokens_per_second = (last.prompt_tokens - first.prompt_tokens) / seconds
        status.generation_tokens_per_second = (last.generation_tokens - first.generation_tokens) / seconds
        if (queried := last.query_tokens - first.query_tokens) > 0:
            status.hit_rate = (last.hit_tokens - first.hit_tokens) / queried


class RoleHistory:
    """The mean utilization of a pool's workers of one role."""

    def __init__(self) -> None:
        self._means: deque[tuple[float, float]] = deque()

    def swing(self, now: float, mean: float) -> float:
        """The greatest minus the smallest mean of the last ``SWING_SECONDS``, this one included."""
        self._means.append((now, mean))
        while self._means[0][0] < now - SWING_SECONDS:
            self._means.popleft()
        means = [mean for _, mean in self._means]
        return max(means) - min(means)


def uptime(counts: worker_pb2.InspectResponse) -> float:
    """Seconds since the worker's start when it was asked."""
    return counts.uptime.ToNanoseconds() / 1e9
