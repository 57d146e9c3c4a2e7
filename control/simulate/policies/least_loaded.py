# SPDX-License-Identifier: Apache-2.0
"""Least loaded: the prefill worker with the fewest requests in flight, by number and then in turn; the same for decode."""

from twinpool.control.simulate.job import Job
from twinpool.control.simulate.policies.base import Dispatcher, Known
from twinpool.control.simulate.setup import Setup


class LeastLoaded(Dispatcher):
    """Knows loads, not prefixes."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._turn = 0

    def choose_prefill(self, job: Job, known: list[Known]) -> Known:
        """See Dispatcher."""
        self._turn += 1
        count = len(known)
        return min(known, key=lambda each: (each.requests, (each.order + self._turn) % count))
