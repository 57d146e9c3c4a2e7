# SPDX-License-Identifier: Apache-2.0
"""Round robin: each pool's workers in turn."""

from twinpool.control.simulate.job import Job
from twinpool.control.simulate.policies.base import Dispatcher, Known
from twinpool.control.simulate.setup import Setup


class RoundRobin(Dispatcher):
    """Looks at nothing."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._turns = [0, 0]

    def choose_prefill(self, job: Job, known: list[Known]) -> Known:
        """See Dispatcher."""
        return self._next(0, known)

    def choose_decode(self, job: Job, known: list[Known]) -> Known:
        """See Dispatcher."""
        return self._next(1, known)

    def _next(self, pool: int, known: list[Known]) -> Known:
        self._turns[pool] += 1
        return known[self._turns[pool] % len(known)]
