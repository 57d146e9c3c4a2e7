# SPDX-License-Identifier: Apache-2.0
"""Samples from what workers and routers say of themselves, as an overview of the cluster holds it.

Workers count from their start. What a pool was given is what its workers have looked up in their caches, and what waits: in
the routers, and on prefill workers. Routers say what the last minute was like; that is added up over time.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from google.protobuf.duration_pb2 import Duration

from twinpool.control.rebalance.capacity import Cost
from twinpool.control.rebalance.plan import ROLE_NAMES
from twinpool.control.rebalance.window import Sample, WorkerSample
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2

_STATES = {
    pb.WORKER_STATE_STARTING: "starting",
    pb.WORKER_STATE_READY: "ready",
    pb.WORKER_STATE_DRAINING: "draining",
    pb.WORKER_STATE_FLIPPING: "flipping",
}


class Record(Protocol):
    """What a worker has registered."""

    @property
    def worker(self) -> worker_pb2.WorkerId: ...
    @property
    def prefill_cost(self) -> pb.CostModel: ...
    @property
    def step_cost(self) -> pb.CostModel: ...

    pool: str
    role: "worker_pb2.Role.ValueType"
    state: "pb.WorkerState.ValueType"
    epoch: int
    cordoned: bool
    block_tokens: int
    max_num_seqs: int


class Counts(Protocol):
    """What a worker says to Inspect. Counters count since its start."""

    @property
    def busy(self) -> Duration: ...
    @property
    def step_time(self) -> Duration: ...

    total_blocks: int
    free_blocks: int
    cached_blocks: int
    running: int
    waiting: int
    waiting_prefill_tokens: int
    generation_tokens: int
    query_tokens: int
    hit_tokens: int


class WorkerSeen(Protocol):
    """A worker in an overview."""

    @property
    def record(self) -> Record: ...
    @property
    def counts(self) -> Counts: ...

    reachable: bool


class Ended(Protocol):
    """How many requests ended with a reason; empty: well."""

    reason: str
    count: int


class QueueSeen(Protocol):
    """What a router has of a pool."""

    pool: str
    queued_requests: int
    queued_tokens: int
    running_requests: int


class RouterLoad(Protocol):
    """What a router says of itself and of the last minute (``window``)."""

    @property
    def pools(self) -> Iterable[QueueSeen]: ...
    @property
    def window(self) -> Duration: ...
    @property
    def ended(self) -> Iterable[Ended]: ...

    queued_requests: int
    queued_tokens: int
    running_requests: int
    generation_tokens: int


class RouterSeen(Protocol):
    """A router in an overview."""

    @property
    def telemetry(self) -> RouterLoad: ...

    reachable: bool


class Overview(Protocol):
    """The cluster at one moment."""

    @property
    def workers(self) -> Sequence[WorkerSeen]: ...
    @property
    def routers(self) -> Sequence[RouterSeen]: ...


@dataclass(slots=True)
class _Sums:
    """Of one pool: counters that go on where workers start anew, and what routers' minutes add up to."""

    query: int = 0
    hit: int = 0
    generated: int = 0
    finished: float = 0.0
    output: float = 0.0
    ended: float = 0.0
    came: int = 0
    came_tokens: int = 0
    at: float = 0.0
    before: dict[tuple[str, int], tuple[int, int, int]] = field(default_factory=dict)


class OverviewSource:
    """Implements ``ports.Source``."""

    def __init__(self, overview: Callable[[], Awaitable[Overview]]) -> None:
        """``overview``: the whole cluster as it is now."""
        self._overview = overview
        self._sums: dict[str, _Sums] = {}

    async def sample(self, pool: str, at: float) -> Sample | None:
        """See ``ports.Source``."""
        found = await self._overview()
        workers = [one for one in found.workers if one.record.pool == pool and one.record.role in ROLE_NAMES]
        routers = [one.telemetry for one in found.routers if one.reachable]
        if not any(one.reachable for one in workers) or not routers:
            return None
        sums = self._sums.setdefault(pool, _Sums())
        _count_workers(sums, workers)
        share = _share(found.workers, pool)
        _count_routers(sums, routers, share, at)
        queued, queued_tokens, running = (
            round(sum(amounts))
            for amounts in zip(*(_queue(one, pool, share) for one in routers), strict=True)
        )
        waiting = sum(one.counts.waiting_prefill_tokens for one in workers if one.reachable)
        # What ends is known a minute late, and what waits on a worker that is out of reach is not: what has come stays.
        sums.came = max(sums.came, round(sums.ended) + queued + running)
        sums.came_tokens = max(sums.came_tokens, sums.query + queued_tokens + waiting)
        return Sample(
            at,
            tuple(_worker(one) for one in workers),
            requests=sums.came,
            prompt_tokens=sums.came_tokens,
            prefilled_tokens=sums.query,
            cached_tokens=sums.hit,
            finished=round(sums.finished),
            output_tokens=round(sums.output),
            generated_tokens=sums.generated,
            queued=queued,
            queued_tokens=queued_tokens,
        )


def _share(workers: Sequence[WorkerSeen], pool: str) -> float:
    """Of what has ended, routers do not tell pools apart: a pool is taken to have its share of the sequences that workers hold."""
    if all(one.record.pool == pool for one in workers):
        return 1.0
    held = {
        own: sum(
            one.counts.running + one.counts.waiting
            for one in workers
            if one.reachable and (one.record.pool == pool) == own
        )
        for own in (True, False)
    }
    total = held[True] + held[False]
    return held[True] / total if total else 0.0


def _queue(router: RouterLoad, pool: str, share: float) -> tuple[float, float, float]:
    """Requests of a pool that wait on a router, their prompt tokens, and requests that run."""
    own = [each for each in router.pools if each.pool == pool]
    if not own and not list(router.pools):
        # One of a former version, or one without any request.
        return router.queued_requests * share, router.queued_tokens * share, router.running_requests * share
    return (
        sum(each.queued_requests for each in own),
        sum(each.queued_tokens for each in own),
        sum(each.running_requests for each in own),
    )


def _count_workers(sums: _Sums, workers: Sequence[WorkerSeen]) -> None:
    for one in workers:
        if not one.reachable:
            continue
        counts, key = one.counts, (one.record.worker.name, one.record.worker.incarnation)
        now = (counts.query_tokens, counts.hit_tokens, counts.generation_tokens)
        before = sums.before.get(key)
        if before is not None or sums.at:
            query, hit, generated = before or (0, 0, 0)
            sums.query += max(0, now[0] - query)
            sums.hit += max(0, now[1] - hit)
            sums.generated += max(0, now[2] - generated)
        sums.before[key] = now
    # Those of incarnations that are gone are never asked for again.
    here = {(one.record.worker.name, one.record.worker.incarnation) for one in workers}
    sums.before = {key: value for key, value in sums.before.items() if key in here}


def _count_routers(sums: _Sums, routers: Sequence[RouterLoad], share: float, at: float) -> None:
    passed = at - sums.at if sums.at else 0.0
    sums.at = at
    for one in routers:
        window = one.window.ToNanoseconds() / 1e9
        if window <= 0:
            continue
        part = share * passed / window
        sums.ended += part * sum(each.count for each in one.ended)
        sums.finished += part * sum(each.count for each in one.ended if not each.reason)
        sums.output += part * one.generation_tokens


def _worker(seen: WorkerSeen) -> WorkerSample:
    record, counts = seen.record, seen.counts
    state = _STATES.get(record.state, "unready") if seen.reachable else "unready"
    return WorkerSample(
        record.worker.name,
        record.worker.incarnation,
        ROLE_NAMES[record.role],
        state,
        max(1, record.epoch),
        record.cordoned,
        busy_seconds=counts.busy.ToNanoseconds() / 1e9,
        running=counts.running,
        waiting=counts.waiting,
        waiting_tokens=counts.waiting_prefill_tokens,
        available_blocks=counts.free_blocks + counts.cached_blocks,
        cached_blocks=counts.cached_blocks,
        total_blocks=max(1, counts.total_blocks),
        block_tokens=record.block_tokens,
        step_seconds=counts.step_time.ToNanoseconds() / 1e9,
        max_num_seqs=max(1, record.max_num_seqs),
        prefill_cost=_cost(record.prefill_cost),
        step_cost=_cost(record.step_cost),
    )


def _cost(model: pb.CostModel) -> Cost | None:
    if not (model.base_seconds or model.unit_seconds or model.context_seconds):
        return None
    return Cost(model.base_seconds, model.unit_seconds, model.context_seconds)
