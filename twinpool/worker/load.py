# SPDX-License-Identifier: Apache-2.0
"""Tells routers how loaded the worker is: when it changes, and not more often than is useful."""

from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Final

from google.protobuf.duration_pb2 import Duration

from twinpool._core import BlockManager, StepScheduler
from twinpool.v1 import worker_pb2 as pb

MIN_INTERVAL_SECONDS: Final = 0.05
"""At most 20 reports a second, whatever is configured: routers count their own requests at once, and the
report only corrects them."""

STEP_WINDOW: Final = 32
"""Steps whose median duration is reported: long enough to be steady, short enough to follow a change."""


def duration(seconds: float) -> Duration:
    """A protobuf Duration of ``seconds``, never negative."""
    message = Duration()
    message.FromNanoseconds(max(0, int(seconds * 1e9)))
    return message


class LoadReporter:
    """Owned by the step thread."""

    def __init__(
        self,
        scheduler: StepScheduler,
        blocks: BlockManager,
        send: Callable[[int, pb.SessionResponse], None],
        interval_seconds: float,
    ) -> None:
        """``interval_seconds`` is the least time between two reports to a router."""
        self._scheduler = scheduler
        self._blocks = blocks
        self._send = send
        self._interval = max(MIN_INTERVAL_SECONDS, interval_seconds)
        self._steps: deque[float] = deque(maxlen=STEP_WINDOW)
        self._sessions: set[int] = set()
        self._new: set[int] = set()
        self._sent: tuple[int, ...] = ()
        self._sent_at = float("-inf")

    def open(self, session: int) -> None:
        """The session gets a first report on the next tick, whatever the rate limit."""
        self._new.add(session)

    def close(self, session: int) -> None:
        """No report goes to the session any more."""
        self._new.discard(session)
        self._sessions.discard(session)

    def step_took(self, seconds: float) -> None:
        """Records a step's duration."""
        self._steps.append(seconds)

    def forget_steps(self) -> None:
        """Steps take another time from now on: those of the other role say nothing."""
        self._steps.clear()

    def step_seconds(self) -> float:
        """Median of the last steps; 0 before the first."""
        return median(self._steps) if self._steps else 0.0

    def tick(self, now: float) -> None:
        """Sends what is due."""
        counts = self._counts()
        if self._new:
            self._report(self._new, counts)
            if not self._sessions:
                self._sent = counts
            self._sessions |= self._new
            self._new = set()
            self._sent_at = now
        elif counts != self._sent and now >= self._sent_at + self._interval:
            self._report(self._sessions, counts)
            self._sent, self._sent_at = counts, now

    def next_wake(self) -> float | None:
        """When a report that the rate limit holds back is due; None if there is none."""
        if not self._sessions or self._counts() == self._sent:
            return None
        return self._sent_at + self._interval

    def _counts(self) -> tuple[int, ...]:
        # The step time is left out: it differs a little in every step, which is no news.
        return (
            self._scheduler.running,
            self._scheduler.waiting + self._scheduler.reserved,
            self._scheduler.waiting_tokens,
            self._blocks.available_blocks,
            self._blocks.cached_blocks,
            self._blocks.prefix_pinned_blocks,
        )

    def _report(self, sessions: set[int], counts: tuple[int, ...]) -> None:
        running, waiting, waiting_tokens, available, cached, prefix_pinned = counts
        report = pb.LoadReport(
            running_requests=running,
            waiting_requests=waiting,
            waiting_prefill_tokens=waiting_tokens,
            available_blocks=available,
            total_blocks=self._blocks.num_blocks,
            cached_blocks=cached,
            step_time=duration(self.step_seconds()),
            prefix_pinned_blocks=prefix_pinned,
        )
        for session in sessions:
            self._send(session, pb.SessionResponse(load=report))
