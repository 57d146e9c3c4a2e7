# SPDX-License-Identifier: Apache-2.0
"""Our policy: the very router core that the router runs, fed with what a real router would hear."""

from twinpool._core import AdmissionConfig, RouterCore
from twinpool.control.replay.blocks import Hashes
from twinpool.control.simulate.job import Attempt, Job
from twinpool.control.simulate.router import Ended, Placement
from twinpool.control.simulate.setup import Setup
from twinpool.control.simulate.worker import Load, Worker

_POOL = "default"
_FINGERPRINT = "simulated"


class CoreRouter:
    """Implements ``Router`` over a RouterCore. Options of its AdmissionConfig come from ``Setup.core``."""

    reports = True
    waits = False

    def __init__(self, setup: Setup) -> None:
        self.core = RouterCore(AdmissionConfig(**setup.core))
        self._block_tokens = setup.block_tokens
        self._max_num_seqs = setup.model.max_num_seqs
        self._max_new_tokens = setup.max_new_tokens
        self._jobs: dict[int, Job] = {}
        self._numbers: dict[int, int] = {}  # of a request: the core's number
        self._workers: dict[tuple[str, int], Worker] = {}
        self._waiting = 0

    @property
    def queued(self) -> bool:
        """See Router."""
        return self._waiting > 0

    # --- workers --------------------------------------------------------------------------

    def worker_up(self, now: float, worker: Worker, num_blocks: int) -> None:
        """See Router."""
        self._workers[worker.name, worker.incarnation] = worker
        self._upsert(now, worker, "ready", num_blocks)

    def worker_leaves(self, now: float, worker: Worker) -> None:
        """See Router. What it holds stays in the index."""
        self._upsert(now, worker, "flipping", worker.cache.num_blocks)

    def _upsert(self, now: float, worker: Worker, state: str, num_blocks: int) -> None:
        self.core.upsert_worker(
            now,
            worker.name,
            worker.incarnation,
            _POOL,
            worker.role,
            state,
            _FINGERPRINT,
            num_blocks,
            self._block_tokens,
            self._max_num_seqs,
        )

    def backlog(self) -> tuple[int, int]:
        """See Router."""
        stats = self.core.stats()
        return stats["queued"], stats["queued_tokens"]

    def worker_down(self, now: float, worker: Worker) -> None:
        """See Router."""
        self.core.quarantine(now, worker.name, worker.incarnation, now + 1e9)

    def cache_event(self, worker: Worker, kind: str, hashes: Hashes) -> None:
        """See Router."""
        if kind == "stored":
            self.core.index_stored(worker.name, worker.incarnation, hashes)
        else:
            self.core.index_removed(worker.name, worker.incarnation, hashes)

    def report(self, now: float, worker: Worker, load: Load) -> None:
        """See Router."""
        self.core.report_load(
            now,
            worker.name,
            worker.incarnation,
            load.running,
            load.waiting,
            load.waiting_tokens,
            load.available,
            load.step_seconds,
        )

    # --- requests -------------------------------------------------------------------------

    def submit(self, now: float, job: Job) -> str:
        """See Router."""
        request = job.request
        made = self.core.submit(
            now,
            str(request.id),
            _POOL,
            request.input_length,
            max(self._max_new_tokens, request.output_length),
            job.hashes,
        )
        if not made.accepted:
            return made.reason
        self._jobs[made.request] = job
        self._numbers[request.id] = made.request
        self._waiting += 1
        return ""

    def plan(self, now: float) -> list[Placement | Ended]:
        """See Router."""
        done: list[Placement | Ended] = []
        for action in self.core.plan(now):
            job = self._jobs[action.request]
            if action.kind == "place":
                self._waiting -= 1
                done.append(
                    Placement(
                        job,
                        self._workers[action.prefill],
                        self._workers[action.decode],
                        None if action.fetch_from is None else self._workers[action.fetch_from],
                        action.local,
                        action.predicted_cached_blocks,
                    )
                )
            elif action.kind == "end":
                self._waiting -= 1
                self._forget(job)
                done.append(Ended(job, action.cause))
            else:
                raise RuntimeError("the simulator runs all requests at one priority: nothing is preempted")
        return done

    def next_wake(self, now: float) -> float | None:
        """See Router."""
        return self.core.next_wake(now)

    def reserved(self, now: float, attempt: Attempt) -> None:
        """See Router."""
        self._advance(now, attempt, "decode_reserved")

    def refused(self, now: float, attempt: Attempt) -> None:
        """See Router."""
        self._waiting += 1
        self._advance(now, attempt, "decode_refused")

    def first_token(self, now: float, attempt: Attempt, seconds: float) -> None:
        """See Router."""
        if not attempt.local:
            job, worker = attempt.job, attempt.prefill
            cached = job.cached * self._block_tokens
            self.core.observe_prefill(
                worker.name, worker.incarnation, job.request.input_length - cached, cached, seconds
            )
        self._advance(now, attempt, "first_token")
        self._advance(now, attempt, "delivered")

    def handed_off(self, now: float, attempt: Attempt, blocks: int, seconds: float) -> None:
        """See Router."""
        if blocks:
            worker = attempt.decode
            self.core.observe_transfer(worker.name, worker.incarnation, blocks, seconds)
        self._advance(now, attempt, "handoff_done")

    def finished(self, now: float, attempt: Attempt) -> None:
        """See Router."""
        if attempt.local:
            self._advance(now, attempt, "handoff_done")
        self._advance(now, attempt, "token", str(attempt.job.request.output_length))
        self._advance(now, attempt, "finished")
        self._forget(attempt.job)

    def failed(self, now: float, attempt: Attempt, lost: Worker) -> bool:
        """See Router."""
        after = self._advance(now, attempt, "worker_lost", lost.role)
        if after == "Retrying":
            after = self._advance(now, attempt, "requeue")
        if after == "Queued":
            self._waiting += 1
            return True
        self._forget(attempt.job)
        return False

    def withdraw(self, now: float, job: Job, attempt: int = 0) -> None:
        """Takes back a request that waits for ``plan``, or that it has placed: then with the attempt's number."""
        self.core.advance(now, self._numbers[job.request.id], attempt, "cancel")
        self._waiting -= attempt == 0
        self._forget(job)

    def _advance(self, now: float, attempt: Attempt, event: str, detail: str = "") -> str:
        number = self._numbers[attempt.job.request.id]
        return self.core.advance(now, number, attempt.number, event, detail).state

    def _forget(self, job: Job) -> None:
        number = self._numbers.pop(job.request.id)
        del self._jobs[number]
        self.core.forget(number)
