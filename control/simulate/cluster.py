# SPDX-License-Identifier: Apache-2.0
"""The simulated cluster: a request's way through it, as ``router/lifecycle.py`` has it for the real one.

arrive -> placed -> decode reserves -> prefix fetched -> prefill -> first token -> hand-off -> decode -> finish
"""

from collections import deque
from collections.abc import Iterator

import numpy as np

from twinpool.control.replay.blocks import BlockMap, Hashes
from twinpool.control.replay.figures import Timing
from twinpool.control.replay.infinite import InfiniteCache
from twinpool.control.replay.trace import Release, Request, Trace
from twinpool.control.simulate.clock import Clock
from twinpool.control.simulate.decode import DecodeWorker
from twinpool.control.simulate.flips import Flips
from twinpool.control.simulate.job import Attempt, Blocks, Job, Status
from twinpool.control.simulate.links import Links
from twinpool.control.simulate.prefill import PrefillWorker
from twinpool.control.simulate.rebalance import Rebalancer
from twinpool.control.simulate.router import Ended, Placement, Router
from twinpool.control.simulate.setup import Setup
from twinpool.control.simulate.tally import Tally
from twinpool.control.simulate.worker import Load, Worker

_NO_HASHES: Hashes = np.zeros((0, 16), np.uint8)
# Decode command, its answer, prefill command: what a prompt waits for before its worker has it.
_PLACING_HOPS = 3


class Cluster:
    """One run: a trace through a router and its workers. Implements ``worker.Host``."""

    def __init__(self, trace: Trace, setup: Setup, router: Router) -> None:
        self.trace = trace
        self.setup = setup
        self.router = router
        self.clock = Clock()
        self.links = Links(setup.model, setup.block_tokens)
        self.jobs: list[Job] = []
        self.prefill: dict[str, PrefillWorker] = {}
        self.decode: dict[str, DecodeWorker] = {}
        self.lost: list[Worker] = []
        """Workers that a fault ended."""
        self.tally = Tally()
        self.flips = Flips(self)
        self.rebalancer = None if setup.rebalance is None else Rebalancer(self, setup.rebalance)
        self.step_seconds: list[float] = []
        self.step_tokens: list[int] = []
        self.not_sent = 0
        """Requests whose predecessor failed, or that would have come after the horizon."""
        self._hop = setup.model.hop
        self._blocks = BlockMap(trace.block_tokens, setup.block_tokens)
        self._infinite = InfiniteCache()
        self._release = Release(trace.requests, setup.closed)
        self._pending = len(trace.requests)
        self._live: dict[Attempt, None] = {}
        self._at_decode: dict[str, deque[Attempt]] = {}
        self._incarnation = 0
        self._wake_at = float("inf")

    # --- running --------------------------------------------------------------------------

    def run(self) -> None:
        """Runs until every request has ended."""
        for number in range(self.setup.prefill):
            self.start_worker("prefill", f"prefill-{number}")
        for number in range(self.setup.decode):
            self.start_worker("decode", f"decode-{number}")
        for fault in self.setup.faults:
            self.clock.at(fault.at, fault.apply, self)
        if self.rebalancer is not None:
            self.rebalancer.start()
        self._send_next(iter(self._release.initial), None)
        self.clock.run(lambda: self._pending == 0)

    def _send_next(self, rest: Iterator[Request], request: Request | None) -> None:
        """Sends what waits for nothing, one after the other, so that the clock's heap stays small."""
        if request is not None:
            self.arrive(request)
        for following in rest:
            if following.arrival < self.setup.horizon:
                self.clock.at(following.arrival, self._send_next, rest, following)
                return
            self._skip(following)

    # --- workers --------------------------------------------------------------------------

    def start_worker(self, role: str, name: str) -> None:
        """A new worker with an empty cache."""
        self._incarnation += 1
        self._enter(self._make(role, name, self._incarnation))

    def _make(self, role: str, name: str, incarnation: int) -> Worker:
        kind = PrefillWorker if role == "prefill" else DecodeWorker
        setup = self.setup
        return kind(self, name, incarnation, setup.model, setup.blocks(role), setup.block_tokens)

    def _enter(self, worker: Worker) -> None:
        if isinstance(worker, PrefillWorker):
            self.prefill[worker.name] = worker
        elif isinstance(worker, DecodeWorker):
            self.decode[worker.name] = worker
            self._at_decode[worker.name] = deque()
        self.router.worker_up(self.clock.now, worker, worker.cache.num_blocks)
        if self.router.reports:
            self._report(worker, None)
        self._plan()

    def change_role(self, worker: Worker, role: str) -> None:
        """The worker, on which nothing runs, gets the other role. It keeps its incarnation and its cache."""
        successor = self._make(role, worker.name, worker.incarnation)
        successor.take_over(worker)
        (self.prefill if worker.role == "prefill" else self.decode).pop(worker.name)
        self._enter(successor)

    def idle(self, worker: Worker) -> bool:
        """Whether no request needs the worker, and nobody reads from it."""
        return not worker.cache.held and not any(
            a.decode is worker or (a.prefill is worker and not a.handed_off) for a in self._live
        )

    def find(self, name: str) -> Worker | None:
        """A worker that is alive."""
        return self.prefill.get(name) or self.decode.get(name)

    def kill_worker(self, worker: Worker) -> None:
        """A worker dies; the attempts that need it fail."""
        now = self.clock.now
        (self.prefill if worker.role == "prefill" else self.decode).pop(worker.name)
        self.lost.append(worker)
        worker.kill()
        hit = [a for a in self._live if a.decode is worker or (a.prefill is worker and not a.handed_off)]
        self.router.worker_down(now, worker)
        for attempt in hit:
            self._drop(attempt)
        for attempt in hit:
            if self.router.failed(now, attempt, worker):
                continue
            self._end(attempt.job, Status.FAILED, f"{worker.role}_lost")
        self._plan()

    def _drop(self, attempt: Attempt) -> None:
        attempt.dead = True
        self._live.pop(attempt, None)
        if attempt.prefill is not attempt.decode:
            self._prefill_of(attempt).release(attempt)
        self._decode_of(attempt).drop(attempt)
        waiting = self._at_decode.get(attempt.decode.name)
        if waiting and attempt in waiting:
            waiting.remove(attempt)

    def _report(self, worker: Worker, before: Load | None) -> None:
        if self.find(worker.name) is not worker:
            return
        load = worker.load()
        # The step time differs a little in every step, which is no news.
        if before is None or load[:4] != before[:4]:
            self.router.report(self.clock.now, worker, load)
            self._plan()
        self.clock.at(self.clock.now + self.setup.report_seconds, self._report, worker, load)

    # --- the way in -----------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """A request reaches the router."""
        now, bt = self.clock.now, self.setup.block_tokens
        hashes = self._blocks.hashes(request)
        usable = min(len(hashes), (request.input_length - 1) // bt)
        infinite = self._infinite.hits(hashes, usable)
        # As the trace counts: with the partial block where it lists it.
        partial = request.tail_id >= 0 and request.input_length % bt > 0
        self.tally.arrived(request)
        job = Job(request, hashes, len(hashes) + partial, usable, infinite, Timing(now))
        self.jobs.append(job)
        most = -(-(request.input_length + request.output_length) // bt) + 1
        if most > min(self.setup.blocks("prefill"), self.setup.blocks("decode")):
            self._end(job, Status.REJECTED, "REQUEST_EXCEEDS_CAPACITY")
            return
        reason = self.router.submit(now, job)
        if reason:
            self._end(job, Status.REJECTED, reason)
            return
        self._plan()

    def _plan(self) -> None:
        router, now = self.router, self.clock.now
        while router.queued:
            actions = router.plan(now)
            for action in actions:
                if isinstance(action, Ended):
                    self._end(action.job, Status.REJECTED, action.cause)
                else:
                    self._place(action)
            if not actions:
                break
        wake = router.next_wake(now) if router.queued else None
        if wake is not None and not now < self._wake_at <= wake:
            self._wake_at = max(wake, now + 1e-6)
            self.clock.at(self._wake_at, self._plan)

    def _place(self, placement: Placement) -> None:
        now, job = self.clock.now, placement.job
        job.attempts += 1
        attempt = Attempt(
            job,
            job.attempts,
            placement.prefill,
            placement.decode,
            placement.fetch_from,
            placement.local,
        )
        job.attempt, job.placed_at, job.predicted = attempt, now, placement.predicted
        job.local = placement.local
        waiting = self._at_decode[placement.decode.name]
        if not waiting and self._decode_of(attempt).reserve(attempt):
            self._live[attempt] = None
            self._reserved(attempt)
        elif self.router.waits:
            self._live[attempt] = None
            waiting.append(attempt)
        else:
            self.router.refused(now, attempt)

    def _reserved(self, attempt: Attempt) -> None:
        now = self.clock.now
        self.router.reserved(now, attempt)
        if attempt.local:
            self.clock.at(now + self._hop, self._compute_there, attempt)
        else:
            self.clock.at(now + _PLACING_HOPS * self._hop, self._prefill_command, attempt)

    def _compute_there(self, attempt: Attempt) -> None:
        if attempt.dead:
            return
        holder = attempt.fetch_from
        if holder is None:
            self._decode_of(attempt).compute(attempt)
        else:
            self.clock.at(holder.answers_at(), self._pull_there, attempt, holder)

    def _pull_there(self, attempt: Attempt, holder: Worker) -> None:
        if attempt.dead:
            return
        job, own = attempt.job, attempt.reserved_cached
        there = holder.cache.lookup(job.hashes[: job.usable]) if holder.alive else 0
        if there <= own:
            self._decode_of(attempt).compute(attempt)
            return
        held = holder.cache.hold(job.hashes[:there])
        arrives = self.links.move(self.clock.now, holder.name, attempt.decode.name, there - own)
        self.clock.at(arrives, self._fetched_there, attempt, holder, held, there)

    def _fetched_there(self, attempt: Attempt, holder: Worker, held: Blocks, there: int) -> None:
        if holder.alive:
            holder.cache.release(held)
        if attempt.dead:
            return
        if holder.alive:
            attempt.job.fetched = there - attempt.reserved_cached
            self._decode_of(attempt).fetched(attempt, there)
        self._decode_of(attempt).compute(attempt)

    def _prefill_command(self, attempt: Attempt) -> None:
        if attempt.dead:
            return
        holder = attempt.fetch_from
        if holder is not None and holder.alive:
            attempt.ready_at = float("inf")
            self.clock.at(holder.answers_at(), self._fetch, attempt, holder)
        self._prefill_of(attempt).add(attempt)

    def _fetch(self, attempt: Attempt, holder: Worker) -> None:
        """Pulls what the prefill worker lacks of the holder's prefix; the prompt waits for it in its place in the queue."""
        if attempt.dead:
            return
        job, now = attempt.job, self.clock.now
        hashes = job.hashes[: job.usable]
        own = attempt.prefill.cache.lookup(hashes)
        there = holder.cache.lookup(hashes) if holder.alive else 0
        if there <= own:
            attempt.ready_at = now
            self._prefill_of(attempt).fetched()
            return
        held = holder.cache.hold(hashes[:there])
        attempt.ready_at = self.links.move(now, holder.name, attempt.prefill.name, there - own)
        self.clock.at(attempt.ready_at, self._fetched, attempt, holder, held, own, there)

    def _fetched(self, attempt: Attempt, holder: Worker, held: Blocks, own: int, there: int) -> None:
        if holder.alive:
            holder.cache.release(held)
        if attempt.dead:
            return
        job = attempt.job
        if holder.alive and attempt.prefill.cache.insert(job.hashes, own, there):
            job.fetched = there - own
        self._prefill_of(attempt).fetched()

    # --- the way through ------------------------------------------------------------------

    def chunk_done(self, attempt: Attempt) -> None:
        """See Host."""
        now, request = self.clock.now, attempt.job.request
        done = attempt.computed >= request.input_length
        if not attempt.local:
            complete = attempt.computed // self.setup.block_tokens
            blocks = attempt.prefill.blocks_for(request.input_length) if done else complete
            if blocks > attempt.offered:
                count, attempt.offered = blocks - attempt.offered, blocks
                attempt.arrives_at = self.links.move(now, attempt.prefill.name, attempt.decode.name, count)
                attempt.pulled += count
                attempt.pull_seconds += attempt.arrives_at - now
        if done:
            self.clock.at(now + self._hop, self._first_token, attempt)
            if not attempt.local:
                self.clock.at(max(attempt.arrives_at, now) + self._hop, self._handed_off, attempt)

    def _first_token(self, attempt: Attempt) -> None:
        if attempt.dead or attempt.job.delivered:
            return
        now = self.clock.now
        attempt.job.timing.first = now
        attempt.job.delivered = True
        self.tally.prefilled(attempt.job, self.setup.block_tokens)
        self.router.first_token(now, attempt, attempt.compute_seconds)
        self._plan()

    def _handed_off(self, attempt: Attempt) -> None:
        if attempt.dead:
            return
        attempt.handed_off = True
        self.router.handed_off(self.clock.now, attempt, attempt.pulled, attempt.pull_seconds)
        self._prefill_of(attempt).release(attempt)
        self._decode_of(attempt).start(attempt)
        self._plan()

    def decoded(self, attempt: Attempt) -> None:
        """See Host."""
        job, now = attempt.job, self.clock.now
        if attempt.dead:
            return
        self._live.pop(attempt, None)
        # One computed on the decode worker may end in the very step of its first token.
        if job.timing.first < 0:
            self._first_token(attempt)
        job.timing.end = now + self._hop
        job.timing.output_tokens = job.request.output_length
        self.tally.finished(job)
        self.router.finished(now, attempt)
        self._end(job, Status.SERVED, "")
        waiting = self._at_decode[attempt.decode.name]
        while waiting and self._decode_of(waiting[0]).reserve(waiting[0]):
            self._reserved(waiting.popleft())
        self._plan()

    def step(self, seconds: float, tokens: int) -> None:
        """See Host."""
        self.step_seconds.append(seconds)
        self.step_tokens.append(tokens)
        self.tally.generated_tokens += tokens

    def cache_event(self, worker: Worker, kind: str, hashes: Hashes) -> None:
        """See Host."""
        self.router.cache_event(worker, kind, hashes)

    def _end(self, job: Job, status: Status, cause: str) -> None:
        job.status, job.cause = status, cause
        job.hashes, job.attempt = _NO_HASHES, None
        self._pending -= 1
        if status is Status.SERVED:
            for follower in self._release.ended(job.request.id):
                arrival = job.timing.end + follower.think
                if arrival < self.setup.horizon:
                    self.clock.at(arrival, self.arrive, follower)
                else:
                    self._skip(follower)
        else:
            self._drop_followers(job.request)

    def _skip(self, request: Request) -> None:
        """Not sent, nor what would follow it: the run's time is over."""
        self._pending -= 1
        self.not_sent += 1
        self._drop_followers(request)

    def _drop_followers(self, request: Request) -> None:
        dropped = self._release.dropped(request.id)
        self._pending -= dropped
        self.not_sent += dropped

    def _prefill_of(self, attempt: Attempt) -> PrefillWorker:
        assert isinstance(attempt.prefill, PrefillWorker)
        return attempt.prefill

    def _decode_of(self, attempt: Attempt) -> DecodeWorker:
        assert isinstance(attempt.decode, DecodeWorker)
        return attempt.decode
