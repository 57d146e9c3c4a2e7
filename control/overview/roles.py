# SPDX-License-Identifier: Apache-2.0
"""Pools and their roles, summed up from their workers."""

from collections.abc import Callable, Iterable, Sequence

from twinpool.control.overview.rates import RoleHistory
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2

Desired = Callable[[str, "worker_pb2.Role.ValueType"], int | None]

ROLES = (worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE)
_STATES = {
    pb.WORKER_STATE_READY: "ready",
    pb.WORKER_STATE_STARTING: "starting",
    pb.WORKER_STATE_DRAINING: "draining",
    pb.WORKER_STATE_FLIPPING: "flipping",
    pb.WORKER_STATE_UNREADY: "unready",
}


class PoolBook:
    """Remembers how the utilization of each role went."""

    def __init__(self, desired: Desired) -> None:
        """``desired``: workers that are wanted of a pool's role; None: not known."""
        self._desired = desired
        self._histories: dict[tuple[str, int], RoleHistory] = {}

    def pools(self, workers: Iterable[pb.WorkerStatus], now: float) -> list[pb.PoolLoad]:
        """All pools that have a worker, ordered by name."""
        by_pool: dict[str, list[pb.WorkerStatus]] = {}
        for worker in workers:
            by_pool.setdefault(worker.record.pool, []).append(worker)
        self._histories = {key: old for key, old in self._histories.items() if key[0] in by_pool}
        return [
            pb.PoolLoad(pool=pool, roles=[self._role(pool, role, found, now) for role in ROLES])
            for pool, found in sorted(by_pool.items())
        ]

    def _role(
        self, pool: str, role: "worker_pb2.Role.ValueType", found: Sequence[pb.WorkerStatus], now: float
    ) -> pb.RoleStatus:
        status = pb.RoleStatus(role=role)
        if (desired := self._desired(pool, role)) is not None:
            status.desired = desired
        own = [worker for worker in found if worker.record.role == role]
        for worker in own:
            status.registered += 1
            if (name := _STATES.get(worker.record.state)) is not None:
                setattr(status, name, getattr(status, name) + 1)
            status.unreachable += not worker.reachable
        answered = [worker for worker in own if worker.reachable]
        blocks = sum(worker.counts.total_blocks for worker in answered)
        taken = sum(used_blocks(worker.counts) for worker in answered)
        status.kv_usage = taken / blocks if blocks else 0.0
        rated = [worker for worker in answered if worker.HasField("window")]
        for worker in answered:
            status.running += worker.counts.running
            status.waiting += worker.counts.waiting
            status.prompt_tokens_per_second += worker.prompt_tokens_per_second
            status.generation_tokens_per_second += worker.generation_tokens_per_second
        looked_up = [worker for worker in rated if worker.HasField("hit_rate")]
        if looked_up:
            status.hit_rate = sum(worker.hit_rate for worker in looked_up) / len(looked_up)
        if rated:
            status.utilization = sum(worker.utilization for worker in rated) / len(rated)
            history = self._histories.setdefault((pool, role), RoleHistory())
            status.utilization_swing = history.swing(now, status.utilization)
        return status


def used_blocks(counts: worker_pb2.InspectResponse) -> int:
    """Blocks that sequences or pins hold: those that are neither free nor cached only."""
    return max(0, counts.total_blocks - counts.free_blocks - counts.cached_blocks)
