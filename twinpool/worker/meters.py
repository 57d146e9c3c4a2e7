# SPDX-License-Identifier: Apache-2.0
"""The worker's metrics of steps and of what it holds."""

from typing import Final

from twinpool import metrics
from twinpool._core import StepPlan
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker.parts import WorkerParts
from twinpool.worker.totals import Utilization

REFRESH_SECONDS: Final = 0.25
"""Gauges are set so often at most: a scraper comes every few seconds, a step every few milliseconds."""


class Meters:
    """Owned by the step thread."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._refreshed_at = float("-inf")
        self._utilization = Utilization(parts.clock())
        self._role = ""
        limits = parts.limits
        metrics.WORKER_CACHE_CONFIG.info(
            {"block_size": str(limits.block_tokens), "num_gpu_blocks": str(limits.num_blocks)}
        )

    def step(self, plan: StepPlan, plan_seconds: float, step_seconds: float, *, ahead: bool) -> None:
        """A step ran; ``ahead``: it was begun before the tokens of the one before were told."""
        tokens, decodes = int(plan.q_start[-1]), plan.num_decodes
        drawn, totals = int(plan.sample.sum()), self._parts.totals
        totals.busy_seconds += step_seconds
        totals.prompt_tokens += tokens - decodes
        totals.generation_tokens += drawn
        metrics.WORKER_STEP_TIME.observe(step_seconds)
        if ahead:
            metrics.WORKER_STEPS_AHEAD.inc()
        metrics.WORKER_PLAN_TIME.observe(plan_seconds)
        metrics.WORKER_STEP_TOKENS.observe(tokens)
        metrics.WORKER_PROMPT_TOKENS.inc(tokens - decodes)
        metrics.WORKER_GENERATION_TOKENS.inc(drawn)
        preempted = len(plan.preempted)
        if preempted:
            metrics.WORKER_PREEMPTIONS.inc(preempted)
        for direction, pairs in (("out", plan.swap_out), ("in", plan.swap_in)):
            if len(pairs):
                metrics.WORKER_SWAPPED_BLOCKS.labels(direction).inc(len(pairs))

    def step_failed(self) -> None:
        """A step raised."""
        metrics.WORKER_STEP_FAILURES.inc()

    def tick(self, now: float, role: "pb.Role.ValueType") -> None:
        """Sets the gauges, unless that was done a moment ago. ``role``: the worker's own at this moment."""
        if now < self._refreshed_at + REFRESH_SECONDS:
            return
        self._refreshed_at = now
        self._show_utilization(now, pb.Role.Name(role).removeprefix("ROLE_").lower())
        scheduler, blocks, pulls = self._parts.scheduler, self._parts.blocks, self._parts.pulls
        metrics.WORKER_REQUESTS_RUNNING.set(scheduler.running)
        metrics.WORKER_REQUESTS_WAITING.set(scheduler.waiting + scheduler.reserved)
        metrics.WORKER_WAITING_PREFILL_TOKENS.set(scheduler.waiting_tokens)
        metrics.WORKER_KV_USAGE.set(1.0 - blocks.available_blocks / blocks.num_blocks)
        for state, count in (
            ("free", blocks.free_blocks),
            ("cached", blocks.cached_blocks),
            ("held", blocks.held_blocks),
            ("pinned", blocks.pinned_blocks),
            ("quarantined", blocks.quarantined_blocks),
            ("prefix_pinned", blocks.prefix_pinned_blocks),
        ):
            metrics.WORKER_BLOCKS.labels(state).set(count)
        metrics.WORKER_PREFIX_PINS.set(blocks.prefix_pins)
        metrics.HANDOFF_OFFERS.set(self._parts.offers.open)
        metrics.HANDOFF_TRANSFERS.set(pulls.waiting + pulls.draining)
        metrics.HANDOFF_QUARANTINED_BLOCKS.set(pulls.quarantined_blocks)

    def _show_utilization(self, now: float, role: str) -> None:
        if self._role not in ("", role):
            # The time before belongs to another role.
            for gauge in (metrics.WORKER_UTILIZATION, metrics.WORKER_UTILIZATION_SWING):
                gauge.remove(self._role)
        if self._utilization.sample(now, self._parts.totals.busy_seconds) or self._role != role:
            metrics.WORKER_UTILIZATION.labels(role).set(self._utilization.mean)
            metrics.WORKER_UTILIZATION_SWING.labels(role).set(self._utilization.swing)
        self._role = role
