# SPDX-License-Identifier: Apache-2.0
"""What the other systems' rules have in common: each request is dispatched when it comes, to a prefill worker and to a decode
worker chosen one after the other, by what the router itself has dispatched."""

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass

from twinpool._core import AdmissionConfig, RouterCore
from twinpool.control.replay.blocks import Hashes
from twinpool.control.simulate.job import Attempt, Job
from twinpool.control.simulate.router import Ended, Placement
from twinpool.control.simulate.setup import Setup
from twinpool.control.simulate.worker import Load, Worker

_POOL = "index"


@dataclass(slots=True, eq=False)
class Known:
    """A worker as the router counts it."""

    worker: Worker
    order: int
    requests: int = 0
    """In flight: until the first token on a prefill worker, until the last on a decode worker."""
    tokens: int = 0
    """Uncached prompt tokens in flight (prefill)."""
    blocks: int = 0
    """Blocks of the requests in flight (decode)."""


class Index:
    """Which worker holds which prefix; the core's index, used for itself alone."""

    def __init__(self, max_bytes: int = 0) -> None:
        self._core = RouterCore(AdmissionConfig(index_max_bytes=max_bytes))

    def add(self, worker: Worker) -> None:
        """A worker that holds nothing yet."""
        self._core.upsert_worker(
            0.0, worker.name, worker.incarnation, _POOL, worker.role, "ready", "", 1, 1, 1
        )

    def remove(self, worker: Worker) -> None:
        """All of a worker's blocks are gone."""
        self._core.remove_worker(0.0, worker.name, worker.incarnation)

    def event(self, worker: Worker, kind: str, hashes: Hashes) -> None:
        """Blocks were "stored" or "removed"."""
        change = self._core.index_stored if kind == "stored" else self._core.index_removed
        change(worker.name, worker.incarnation, hashes)

    def blocks(self, hashes: Hashes) -> dict[str, int]:
        """Leading blocks by worker name; workers with none are left out."""
        return dict(self._core.longest_prefix(hashes))


class Dispatcher(ABC):
    """Implements ``Router`` but for the two choices."""

    reports = False
    waits = True

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.block_tokens = setup.block_tokens
        self.prefill: dict[str, Known] = {}
        self.decode: dict[str, Known] = {}
        self._charged: dict[int, tuple[Known, Known, int, int]] = {}
        self._queue: deque[Job] = deque()
        self._order = 0

    # --- the rule -------------------------------------------------------------------------

    @abstractmethod
    def choose_prefill(self, job: Job, known: list[Known]) -> Known:
        """The prefill worker of a request; ``known`` are the workers that are alive, at least one."""

    def choose_decode(self, job: Job, known: list[Known]) -> Known:
        """The decode worker: the one with the fewest requests, unless the rule says more."""
        return min(known, key=lambda each: (each.requests, each.order))

    def held(self, job: Job, worker: Worker) -> int:
        """Leading blocks that the worker is believed to hold."""
        return 0

    def may_dispatch(self, job: Job) -> bool:
        """False: the request waits in the router."""
        return True

    # --- Router ---------------------------------------------------------------------------

    @property
    def queued(self) -> bool:
        """See Router."""
        return bool(self._queue)

    def worker_up(self, now: float, worker: Worker, num_blocks: int) -> None:
        """See Router."""
        self._order += 1
        pool = self.prefill if worker.role == "prefill" else self.decode
        pool[worker.name] = Known(worker, self._order)

    def worker_leaves(self, now: float, worker: Worker) -> None:
        """See Router."""
        raise RuntimeError("only the router core lets workers change their roles")

    def backlog(self) -> tuple[int, int]:
        """See Router."""
        return len(self._queue), sum(job.request.input_length for job in self._queue)

    def worker_down(self, now: float, worker: Worker) -> None:
        """See Router."""
        (self.prefill if worker.role == "prefill" else self.decode).pop(worker.name)

    def cache_event(self, worker: Worker, kind: str, hashes: Hashes) -> None:
        """See Router."""

    def report(self, now: float, worker: Worker, load: Load) -> None:
        """See Router."""

    def submit(self, now: float, job: Job) -> str:
        """See Router."""
        self._queue.append(job)
        return ""

    def plan(self, now: float) -> list[Placement | Ended]:
        """See Router."""
        done: list[Placement | Ended] = []
        while self._queue and self.prefill and self.decode and self.may_dispatch(self._queue[0]):
            done.append(self._dispatch(self._queue.popleft()))
        return done

    def next_wake(self, now: float) -> float | None:
        """See Router."""
        return None

    def reserved(self, now: float, attempt: Attempt) -> None:
        """See Router."""

    def refused(self, now: float, attempt: Attempt) -> None:
        """See Router."""
        raise RuntimeError("requests wait at their decode worker")

    def first_token(self, now: float, attempt: Attempt, seconds: float) -> None:
        """See Router."""
        prefill, _, tokens, _ = self._charged[attempt.job.request.id]
        prefill.requests -= 1
        prefill.tokens -= tokens

    def handed_off(self, now: float, attempt: Attempt, blocks: int, seconds: float) -> None:
        """See Router."""

    def finished(self, now: float, attempt: Attempt) -> None:
        """See Router."""
        _, decode, _, blocks = self._charged.pop(attempt.job.request.id)
        decode.requests -= 1
        decode.blocks -= blocks

    def failed(self, now: float, attempt: Attempt, lost: Worker) -> bool:
        """See Router. A request is tried anew as long as its client has no token."""
        job = attempt.job
        prefill, decode, tokens, blocks = self._charged.pop(job.request.id)
        if not job.delivered:
            prefill.requests -= 1
            prefill.tokens -= tokens
        decode.requests -= 1
        decode.blocks -= blocks
        if job.delivered:
            return False
        self._queue.append(job)
        return True

    def _dispatch(self, job: Job) -> Placement:
        prefill = self.choose_prefill(job, list(self.prefill.values()))
        decode = self.choose_decode(job, list(self.decode.values()))
        held = min(self.held(job, prefill.worker), job.usable)
        tokens = job.request.input_length - held * self.block_tokens
        blocks = -(-job.request.input_length // self.block_tokens)
        prefill.requests += 1
        prefill.tokens += tokens
        decode.requests += 1
        decode.blocks += blocks
        self._charged[job.request.id] = (prefill, decode, tokens, blocks)
        return Placement(job, prefill.worker, decode.worker, predicted=held)


class Indexed(Dispatcher):
    """A rule that knows by events which prefill worker holds what."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.index = Index()
        self._matches: tuple[Job | None, dict[str, int]] = (None, {})

    def worker_up(self, now: float, worker: Worker, num_blocks: int) -> None:
        """See Router."""
        super().worker_up(now, worker, num_blocks)
        if worker.role == "prefill":
            self.index.add(worker)

    def worker_down(self, now: float, worker: Worker) -> None:
        """See Router."""
        super().worker_down(now, worker)
        if worker.role == "prefill":
            self.index.remove(worker)

    def cache_event(self, worker: Worker, kind: str, hashes: Hashes) -> None:
        """See Router."""
        if worker.role == "prefill":
            self.index.event(worker, kind, hashes)
            self._matches = (None, {})

    def held(self, job: Job, worker: Worker) -> int:
        """See Dispatcher."""
        if self._matches[0] is not job:
            self._matches = (job, self.index.blocks(job.hashes))
        return self._matches[1].get(worker.name, 0)
