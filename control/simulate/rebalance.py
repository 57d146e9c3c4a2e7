# SPDX-License-Identifier: Apache-2.0
"""The rebalancer in virtual time: the very policy of the control process, fed with what its loop would read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from twinpool.config import RebalanceSection
from twinpool.control.rebalance.capacity import Cost
from twinpool.control.rebalance.decision import Decision
from twinpool.control.rebalance.history import History
from twinpool.control.rebalance.policy import Policy
from twinpool.control.rebalance.telemetry import ROLES, Role, Telemetry
from twinpool.control.rebalance.window import Sample, Window, WorkerSample
from twinpool.control.simulate.clock import Clock
from twinpool.control.simulate.flips import Flips
from twinpool.control.simulate.router import Router
from twinpool.control.simulate.setup import Setup
from twinpool.control.simulate.tally import Tally
from twinpool.control.simulate.worker import Worker
from twinpool.v1.control_pb2 import PoolSpec, RoleSpec

POOL = "default"


class Watched(Protocol):
    """The cluster as the rebalancer sees it."""

    @property
    def clock(self) -> Clock: ...
    @property
    def setup(self) -> Setup: ...
    @property
    def router(self) -> Router: ...
    @property
    def tally(self) -> Tally: ...
    @property
    def flips(self) -> Flips: ...
    @property
    def prefill(self) -> Mapping[str, Worker]: ...
    @property
    def decode(self) -> Mapping[str, Worker]: ...

    def find(self, name: str) -> Worker | None:
        """A worker that is alive."""
        ...


@dataclass(frozen=True, slots=True)
class Moment:
    """The pool at one decision."""

    at: float
    workers: dict[Role, int]
    utilisation: dict[Role, float]
    """Load over what the workers can do within the objectives."""
    queued: int
    decision: Decision


class Rebalancer:
    """Decides every interval, and flips workers of the simulated cluster."""

    def __init__(self, cluster: Watched, settings: RebalanceSection) -> None:
        self._cluster = cluster
        # Workers that are started or taken out are not simulated: a run compares splits of the same workers.
        self._settings = settings.model_copy(update={"scale": False})
        self._policy = Policy(self._settings)
        self._window = Window(POOL, self._settings, float("inf"))
        bounds = RoleSpec(least=1)
        self._spec = PoolSpec(pool=POOL, prefill=bounds, decode=bounds, auto=True)
        model = cluster.setup.model
        self._prefill_cost = Cost(model.prefill_base, model.prefill_token, model.prefill_pair)
        self._step_cost = Cost(model.step_base, model.step_sequence, model.step_token)
        self.history = History()
        self.timeline: list[Moment] = []
        self.flips: list[Decision] = []
        """Decisions that were carried out, each with the flip of the same number in ``Cluster.flips``."""

    def start(self) -> None:
        """Decides from now on."""
        self._decide()

    def _decide(self) -> None:
        clock = self._cluster.clock
        telemetry = self._window.add(self._sample())
        decision = self._policy.decide(telemetry, self._spec, self.history, clock.now)
        self.history = self.history.asked(decision.wish, clock.now)
        self._note(telemetry, decision)
        worker = self._cluster.find(decision.worker)
        if decision.to is not None and worker is not None and not self._settings.dry_run:
            self._flip(worker, decision, decision.to)
        clock.at(clock.now + self._settings.interval_seconds, self._decide)

    def _flip(self, worker: Worker, decision: Decision, to: Role) -> None:
        name = worker.name
        self.history = self.history.began(name, to, self._cluster.clock.now)
        self.flips.append(decision)

        def done(succeeded: bool) -> None:
            self.history = self.history.ended(name, self._cluster.clock.now, succeeded)

        self._cluster.flips.begin(worker, to, done)

    def _note(self, telemetry: Telemetry, decision: Decision) -> None:
        counts: dict[Role, int] = {role: telemetry.serving(role) for role in ROLES}
        used: dict[Role, float] = {role: telemetry.load[role].demand / max(1, counts[role]) for role in ROLES}
        self.timeline.append(Moment(telemetry.at, counts, used, telemetry.queued, decision))

    def _sample(self) -> Sample:
        cluster, tally = self._cluster, self._cluster.tally
        queued, queued_tokens = cluster.router.backlog()
        workers: list[tuple[Worker, Role]] = [
            *((worker, ROLES[0]) for worker in cluster.prefill.values()),
            *((worker, ROLES[1]) for worker in cluster.decode.values()),
        ]
        return Sample(
            cluster.clock.now,
            tuple(
                self._worker(worker, role) for worker, role in sorted(workers, key=lambda one: one[0].name)
            ),
            tally.requests,
            tally.prompt_tokens,
            tally.prefilled_tokens,
            tally.cached_tokens,
            tally.finished_answers,
            tally.output_tokens,
            tally.generated_tokens,
            queued,
            queued_tokens,
        )

    def _worker(self, worker: Worker, role: Role) -> WorkerSample:
        load, cache = worker.load(), worker.cache
        return WorkerSample(
            worker.name,
            worker.incarnation,
            role,
            "flipping" if worker.flipping else "ready",
            busy_seconds=worker.busy_seconds,
            running=load.running,
            waiting=load.waiting,
            waiting_tokens=load.waiting_tokens,
            available_blocks=load.available,
            cached_blocks=cache.cached,
            total_blocks=cache.num_blocks,
            block_tokens=worker.block_tokens,
            step_seconds=load.step_seconds,
            max_num_seqs=worker.model.max_num_seqs,
            prefill_cost=self._prefill_cost,
            step_cost=self._step_cost,
        )
