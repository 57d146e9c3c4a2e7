# SPDX-License-Identifier: Apache-2.0
"""Dynamo's additive cost (lib/kv-router selector.rs, and the page "Routing Concepts" of its documentation, v1.2 to v1.6).

cost = overlap weight x prefill blocks + decode blocks, the least wins, ties go to the smaller tree. Prefill blocks are
the uncached prompt tokens in flight on the worker plus those of the request; decode blocks are the blocks of what
runs there. The router of prefill workers does not track decode blocks, and the router of decode workers ignores overlap
(weight 0), so each pool minimises one term. Prefixes are known exactly, by events; the weight is 1. The optional router
queue ("router-queue-threshold") is off, as it is by default since v1.4.
"""

from twinpool.control.simulate.job import Job
from twinpool.control.simulate.policies.base import Indexed, Known


class Additive(Indexed):
    """Queued work plus own uncached tokens; fewest active blocks for decode."""

    def choose_prefill(self, job: Job, known: list[Known]) -> Known:
        """See Dispatcher."""
        request, size = job.request, self.block_tokens

        def cost(each: Known) -> tuple[float, int]:
            uncached = request.input_length - self.held(job, each.worker) * size
            return (each.tokens + uncached) / size, each.worker.cache.held

        return min(known, key=lambda each: (*cost(each), each.order))

    def choose_decode(self, job: Job, known: list[Known]) -> Known:
        """See Dispatcher."""
        return min(known, key=lambda each: (each.blocks, each.order))
