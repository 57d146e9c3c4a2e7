# SPDX-License-Identifier: Apache-2.0
"""SGLang's cache-aware rule (sgl-router, policies/cache_aware.rs and tree.rs, 2025-11).

If the most loaded worker has more than ``balance_abs`` requests more than the least loaded one and more than
``balance_rel`` times as many, the least loaded one is taken. Else the worker with the best match in a tree of the prompts
routed before, if the match is more than ``cache_threshold`` of the prompt; else the one whose tree is smallest. The tree knows
nothing of evictions on the workers; it drops its own oldest entries beyond a size of its own. Defaults are those of
the policy's configuration in the source: 0.5, 32 and 1.1. Its decode policy is least load.

The tree here is of blocks instead of characters, and it is not bounded: that can only help the rule.
"""

from twinpool.control.replay.blocks import Hashes
from twinpool.control.simulate.job import Job
from twinpool.control.simulate.policies.base import Indexed, Known
from twinpool.control.simulate.setup import Setup
from twinpool.control.simulate.worker import Worker


class Threshold(Indexed):
    """Switches between cache affinity and shortest queue."""

    cache_threshold = 0.5
    balance_abs = 32
    balance_rel = 1.1

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._tree_blocks: dict[str, int] = {}

    def worker_up(self, now: float, worker: Worker, num_blocks: int) -> None:
        """See Router."""
        super().worker_up(now, worker, num_blocks)
        self._tree_blocks[worker.name] = 0

    def cache_event(self, worker: Worker, kind: str, hashes: Hashes) -> None:
        """See Router. The rule hears of no events."""

    def choose_prefill(self, job: Job, known: list[Known]) -> Known:
        """See Dispatcher."""
        chosen = self._choose(job, known)
        worker = chosen.worker
        self._tree_blocks[worker.name] += len(job.hashes) - self.held(job, worker)
        self.index.event(worker, "stored", job.hashes)
        return chosen

    def _choose(self, job: Job, known: list[Known]) -> Known:
        loads = [each.requests for each in known]
        if max(loads) - min(loads) > self.balance_abs and max(loads) > self.balance_rel * min(loads):
            return min(known, key=lambda each: (each.requests, each.order))
        best = max(known, key=lambda each: (self.held(job, each.worker), -each.order))
        matched = self.held(job, best.worker) * self.block_tokens
        if matched > self.cache_threshold * job.request.input_length:
            return best
        return min(known, key=lambda each: (self._tree_blocks[each.worker.name], each.order))
