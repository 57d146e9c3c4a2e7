# SPDX-License-Identifier: Apache-2.0
"""Longest prefix wins: the prefill worker that holds most of the prompt, however busy; the fewest requests among equals."""

from twinpool.control.simulate.job import Job
from twinpool.control.simulate.policies.base import Indexed, Known


class LongestPrefix(Indexed):
    """Knows prefixes exactly, by events; loads break ties alone."""

    def choose_prefill(self, job: Job, known: list[Known]) -> Known:
        """See Dispatcher."""
        return min(known, key=lambda each: (-self.held(job, each.worker), each.requests, each.order))
