# SPDX-License-Identifier: Apache-2.0
"""Telemetry from counters: what routers and workers count, taken every interval, over the last window."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from twinpool.config import RebalanceSection
from twinpool.control.rebalance.capacity import (
    Cost,
    WorkerLimits,
    Workload,
    batch,
    decode_capacity,
    prefill_capacity,
    prompt_seconds,
)
from twinpool.control.rebalance.telemetry import ROLES, Role, RoleLoad, Telemetry, WorkerLoad

_OUTPUT_TOKENS = 128.0
"""What an answer is taken to have until one has ended."""
_PROMPT_TOKENS = 1024.0
"""What a prompt is taken to have until one has come."""
_FULL = 0.9
"""Share of their blocks or sequences in use from which on decode workers keep requests waiting."""
_WAIT_SHARE = 0.5
"""Share of the first token's objective that prompts may wait: more than that in queues is a backlog."""


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """A worker at one time. Counters count since some start; one that goes back has begun anew."""

    name: str
    incarnation: int
    role: Role
    state: str
    epoch: int = 1
    cordoned: bool = False
    busy_seconds: float = 0.0
    """Counter: time in steps."""
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    """Prompt tokens not computed yet."""
    available_blocks: int = 0
    cached_blocks: int = 0
    total_blocks: int = 1
    block_tokens: int = 64
    step_seconds: float = 0.0
    """Of the last steps."""
    max_num_seqs: int = 64
    prefill_cost: Cost | None = None
    step_cost: Cost | None = None

    @property
    def kv_use(self) -> float:
        """Share of its blocks that are neither free nor evictable."""
        return 1.0 - self.available_blocks / self.total_blocks


@dataclass(frozen=True, slots=True)
class Sample:
    """A pool at one time. Counters are over all of its routers."""

    at: float
    workers: tuple[WorkerSample, ...]
    requests: int = 0
    """Counter: requests that came."""
    prompt_tokens: int = 0
    """Counter: their prompt tokens."""
    prefilled_tokens: int = 0
    """Counter: prompt tokens of requests whose prefill is done."""
    cached_tokens: int = 0
    """Counter: of these, those that were found in a cache."""
    finished: int = 0
    """Counter: answers that ended."""
    output_tokens: int = 0
    """Counter: their tokens."""
    generated_tokens: int = 0
    """Counter: tokens drawn, of answers that run, too."""
    queued: int = 0
    queued_tokens: int = 0


class Window:
    """The last samples of a pool."""

    def __init__(self, pool: str, settings: RebalanceSection, drain_limit: float) -> None:
        """``drain_limit``: the most seconds that a worker waits for its requests before it gives them to others."""
        self._pool = pool
        self._settings = settings
        self._drain_limit = drain_limit
        self._samples: deque[Sample] = deque()
        self._workload = Workload(_PROMPT_TOKENS, _PROMPT_TOKENS, _OUTPUT_TOKENS)

    def add(self, sample: Sample) -> Telemetry:
        """Takes a sample in and returns what the window shows now."""
        samples = self._samples
        if samples and _began_anew(samples[-1], sample):
            samples.clear()
        samples.append(sample)
        while len(samples) > 2 and samples[1].at <= sample.at - self._settings.window_seconds:
            samples.popleft()
        self._workload = _workload(samples[0], sample, self._workload)
        return _Measure(
            self._pool, self._settings, self._drain_limit, list(samples), self._workload
        ).telemetry()


def _began_anew(before: Sample, now: Sample) -> bool:
    """Whether a router's counters have gone back: what they were before is not known."""
    return now.requests < before.requests or now.generated_tokens < before.generated_tokens


def _workload(first: Sample, last: Sample, before: Workload) -> Workload:
    """What requests of the window were like; what it does not show is as it was before."""
    requests, finished = last.requests - first.requests, last.finished - first.finished
    prefilled = last.prefilled_tokens - first.prefilled_tokens
    prompt = (last.prompt_tokens - first.prompt_tokens) / requests if requests else before.prompt_tokens
    fresh = before.uncached_tokens / max(1.0, before.prompt_tokens)
    if prefilled:
        fresh = 1.0 - (last.cached_tokens - first.cached_tokens) / prefilled
    output = (last.output_tokens - first.output_tokens) / finished if finished else before.output_tokens
    return Workload(prompt, prompt * max(0.0, min(1.0, fresh)), max(1.0, output))


class _Measure:
    """One evaluation of a window."""

    def __init__(
        self,
        pool: str,
        settings: RebalanceSection,
        drain_limit: float,
        samples: Sequence[Sample],
        workload: Workload,
    ) -> None:
        self._pool, self._settings, self._drain_limit = pool, settings, drain_limit
        self._first, self._last, self._samples = samples[0], samples[-1], samples
        self._workload = workload
        self._seconds = self._last.at - self._first.at
        self._busy = {worker.name: self._busy_share(worker) for worker in self._last.workers}
        self._itl = self._token_seconds()
        self._batch = self._sequences()
        self._capacity: dict[Role, float] = {"prefill": self._prefill(), "decode": self._decode()}

    def telemetry(self) -> Telemetry:
        last, load = self._last, self._workload
        serving = max(1, len(self._of("prefill")))
        waiting = self._waiting_tokens() + self._fresh(last.queued_tokens)
        wait = waiting / (serving * self._capacity["prefill"])
        alone = prompt_seconds(cost, load) if (cost := self._cost("prefill")) else 0.0
        return Telemetry(
            self._pool,
            last.at,
            tuple(self._worker(worker) for worker in last.workers),
            {"prefill": self._prefill_load(), "decode": self._decode_load()},
            last.queued,
            self._rate("queued"),
            wait + alone,
            self._itl,
            self._fresh(self._rate("prompt_tokens")),
            self._arriving_tokens(),
            self._capacity,
            self._seconds,
        )

    # --- the two roles --------------------------------------------------------------------

    def _prefill_load(self) -> RoleLoad:
        settings, capacity = self._settings, self._capacity["prefill"]
        workers = self._of("prefill")
        tokens = float(self._waiting_tokens())
        if self._prefill_bound():
            tokens += self._fresh(self._last.queued_tokens)
        bearable = len(workers) * settings.ttft_seconds * _WAIT_SHARE
        backlog = max(0.0, tokens / capacity - bearable) / settings.window_seconds
        held = sum(self._busy[worker.name] for worker in workers)
        return RoleLoad(self._fresh(self._rate("prompt_tokens")) / capacity, backlog, held)

    def _decode_load(self) -> RoleLoad:
        settings = self._settings
        workers = self._of("decode")
        queued = 0 if self._prefill_bound() else self._last.queued
        sequences = self._mean_sequences()
        held = max(sequences / self._batch, sum(worker.kv_use for worker in workers))
        if self._itl > settings.itl_seconds:
            held = max(held, len(workers) * self._itl / settings.itl_seconds)
        tokens = queued * self._workload.output_tokens
        backlog = tokens / self._capacity["decode"] / settings.window_seconds
        return RoleLoad(
            self._arriving_tokens() / self._capacity["decode"], backlog, held + queued / self._batch
        )

    def _prefill_bound(self) -> bool:
        """Whether requests in the queue wait for prefill: they do unless decode workers have no room, in blocks or sequences."""
        decode = self._of("decode")
        if not decode:
            return False
        full = [max(w.kv_use, (w.running + w.waiting) / w.max_num_seqs) for w in decode]
        return fmean(full) < _FULL

    def _mean_sequences(self) -> float:
        """Sequences that decode workers held, averaged over the later half of the window."""
        half = [each for each in self._samples if each.at >= self._last.at - self._seconds / 2.0]
        return fmean(
            [sum(w.running + w.waiting for w in each.workers if w.role == "decode") for each in half]
        )

    def _arriving_tokens(self) -> float:
        expected = self._rate("requests") * self._workload.output_tokens
        return max(expected, self._rate("generated_tokens"))

    # --- workers --------------------------------------------------------------------------

    def _worker(self, worker: WorkerSample) -> WorkerLoad:
        return WorkerLoad(
            worker.name,
            worker.role,
            worker.state,
            worker.epoch,
            worker.cordoned,
            self._busy[worker.name],
            worker.running,
            worker.waiting,
            worker.kv_use,
            worker.cached_blocks * worker.block_tokens,
            min(self._drain_limit, self._drain(worker)),
        )

    def _drain(self, worker: WorkerSample) -> float:
        if worker.role == "prefill":
            return worker.waiting_tokens / self._capacity["prefill"]
        if not worker.running + worker.waiting:
            return 0.0
        return self._workload.output_tokens * max(worker.step_seconds, self._itl)

    def _busy_share(self, worker: WorkerSample) -> float:
        """Since the window's start, or since it got its role."""
        for sample in self._samples:
            for before in sample.workers:
                same = (before.name, before.incarnation, before.role) == (
                    worker.name,
                    worker.incarnation,
                    worker.role,
                )
                if same and sample.at < self._last.at:
                    share = (worker.busy_seconds - before.busy_seconds) / (self._last.at - sample.at)
                    return min(1.0, max(0.0, share))
        return 0.0

    def _of(self, role: Role) -> list[WorkerSample]:
        return [
            worker
            for worker in self._last.workers
            if worker.role == role and worker.state == "ready" and not worker.cordoned
        ]

    def _waiting_tokens(self) -> int:
        return sum(worker.waiting_tokens for worker in self._last.workers if worker.role == "prefill")

    # --- figures --------------------------------------------------------------------------

    def _rate(self, counter: str) -> float:
        if not self._seconds:
            return 0.0
        change: float = getattr(self._last, counter) - getattr(self._first, counter)
        return change / self._seconds

    def _fresh(self, tokens: float) -> float:
        """Of prompt tokens, those that have to be computed."""
        return tokens * self._workload.uncached_tokens / max(1.0, self._workload.prompt_tokens)

    def _token_seconds(self) -> float:
        """Step time of the decode workers that run something, the slowest one's, averaged over the samples."""
        slowest = [
            max((w.step_seconds for w in each.workers if w.role == "decode" and w.running), default=0.0)
            for each in self._samples
        ]
        return fmean(slowest)

    def _cost(self, role: Role) -> Cost | None:
        """The mean cost model of the workers that have one: any worker may get any role."""
        every = [w.prefill_cost if role == "prefill" else w.step_cost for w in self._last.workers]
        known = [cost for cost in every if cost is not None]
        if not known:
            return None
        return Cost(
            fmean([cost.base for cost in known]),
            fmean([cost.unit for cost in known]),
            fmean([cost.context for cost in known]),
        )

    def _limits(self) -> WorkerLimits:
        workers = self._last.workers
        if not workers:
            return WorkerLimits(1, 1)
        return WorkerLimits(
            int(fmean([worker.total_blocks * worker.block_tokens for worker in workers])),
            int(fmean([worker.max_num_seqs for worker in workers])),
        )

    def _sequences(self) -> float:
        """Sequences that a decode worker may run within the objective."""
        cost, limits = self._cost("decode"), self._limits()
        if cost is not None:
            return batch(cost, limits, self._workload, self._settings.itl_seconds)
        # Not measured at the start: by what steps take now, as if they took twice as long with twice as many sequences.
        running = [worker.running for worker in self._of("decode") if worker.running]
        if not running or not self._itl:
            return float(limits.max_num_seqs)
        room = fmean(running) * self._settings.itl_seconds / self._itl
        return max(1.0, min(room, float(limits.max_num_seqs)))

    def _decode(self) -> float:
        cost = self._cost("decode")
        if cost is None:
            return self._batch / self._settings.itl_seconds
        return decode_capacity(cost, self._limits(), self._workload, self._settings.itl_seconds)

    def _prefill(self) -> float:
        cost = self._cost("prefill")
        if cost is not None:
            return prefill_capacity(cost, self._workload)
        # Not measured at the start: tokens computed a second of steps.
        busy = sum(self._busy[worker.name] for worker in self._of("prefill")) * self._seconds
        computed = self._fresh(self._last.prefilled_tokens - self._first.prefilled_tokens)
        return max(1.0, computed / busy) if busy > 0 and computed > 0 else 1e4


def empty(pool: str, at: float) -> Telemetry:
    """A pool of which nothing is known."""
    return Telemetry(pool, at, (), {role: RoleLoad() for role in ROLES})
