# SPDX-License-Identifier: Apache-2.0
"""Pools, loads and settings for the rebalancer's tests."""

from dataclasses import replace

from twinpool.config import RebalanceSection
from twinpool.control.rebalance.decision import Decision
from twinpool.control.rebalance.history import History
from twinpool.control.rebalance.policy import Policy
from twinpool.control.rebalance.telemetry import Role, RoleLoad, Telemetry, WorkerLoad
from twinpool.v1.control_pb2 import PoolSpec, RoleSpec

SETTINGS = RebalanceSection(
    interval_seconds=5,
    window_seconds=30,
    confirm_seconds=10,
    dwell_seconds=60,
    cooldown_seconds=20,
    reversal_seconds=300,
    flip_seconds=5,
    horizon_seconds=300,
)


def spec(least: int = 1, most: int = 0) -> PoolSpec:
    """The same bounds for both roles."""
    role = RoleSpec(least=least, most=most)
    return PoolSpec(pool="default", prefill=role, decode=role, auto=True)


def pool(prefill: int, decode: int, **changes: object) -> tuple[WorkerLoad, ...]:
    """Ready workers."""
    roles: list[tuple[Role, int]] = [("prefill", prefill), ("decode", decode)]
    workers = [WorkerLoad(f"{role}-{number}", role) for role, count in roles for number in range(count)]
    return tuple(replace(worker, **changes) for worker in workers)  # type: ignore[arg-type]


def telemetry(
    prefill: float, decode: float, workers: tuple[WorkerLoad, ...], at: float = 1000.0, seconds: float = 30.0
) -> Telemetry:
    """A pool whose roles have work for so many workers."""
    load: dict[Role, RoleLoad] = {"prefill": RoleLoad(prefill), "decode": RoleLoad(decode)}
    return Telemetry("default", at, workers, load, seconds=seconds)


def asking(policy: Policy, what: Telemetry, bounds: PoolSpec, history: History | None = None) -> Decision:
    """The decision once whatever the load asks for has been confirmed."""
    known = history or History()
    now = what.at
    first = policy.decide(what, bounds, known, now)
    long_ago = replace(known, asking=first.wish, asking_since=now - 1e6)
    return policy.decide(what, bounds, long_ago, now)


class Loop:
    """Runs the policy over time on a pool whose flips take a while, as whoever carries decisions out does."""

    def __init__(self, prefill: int, decode: int, settings: RebalanceSection = SETTINGS) -> None:
        self.settings = settings
        self.policy = Policy(settings)
        self.workers = {worker.name: worker for worker in pool(prefill, decode)}
        self.history = History()
        self.now = 1000.0
        self.decisions: list[Decision] = []
        self._due: dict[str, tuple[float, Role]] = {}

    def step(self, prefill: float, decode: float, bounds: PoolSpec, takes: float = 8.0) -> Decision:
        """One interval under so much load."""
        self.now += self.settings.interval_seconds
        for name, (due, to) in list(self._due.items()):
            if due <= self.now:
                del self._due[name]
                before = self.workers[name]
                self.workers[name] = replace(before, role=to, state="ready", epoch=before.epoch + 1)
                self.history = self.history.ended(name, self.now)
        what = telemetry(prefill, decode, tuple(self.workers.values()), self.now)
        decision = self.policy.decide(what, bounds, self.history, self.now)
        self.history = self.history.asked(decision.wish, self.now)
        if decision.to is not None:
            self.history = self.history.began(decision.worker, decision.to, self.now)
            self.workers[decision.worker] = replace(self.workers[decision.worker], state="flipping")
            self._due[decision.worker] = (self.now + takes, decision.to)
        self.decisions.append(decision)
        return decision

    def count(self, role: Role) -> int:
        """Workers that serve in a role."""
        return sum(worker.role == role and worker.state == "ready" for worker in self.workers.values())

    @property
    def flips(self) -> list[Decision]:
        """Decisions to flip, in their order."""
        return [decision for decision in self.decisions if decision.kind == "flip"]
