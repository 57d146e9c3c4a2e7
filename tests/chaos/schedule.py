# SPDX-License-Identifier: Apache-2.0
"""What goes wrong when: drawn before anything runs, so that a seed gives the same plan every time."""

from __future__ import annotations

import random
from dataclasses import dataclass

ROLES = ("prefill", "decode")
WORKERS_A_ROLE = 3
ROUTERS = 2
STOP_SECONDS = 5.0
QUIET_SECONDS = 3.0
"""Before the first fault, and after the last one's end."""

WORKERS = {f"{role}-{number}": role for role in ROLES for number in range(WORKERS_A_ROLE)}

WEIGHTS = {
    "kill": 4,
    "stop": 3,
    "link_cut": 3,
    "link_delay": 2,
    "isolate": 2,
    "etcd_cut": 2,
    "etcd_stall": 2,
    "etcd_restart": 1,
    "router_kill": 2,
}
NETWORK = frozenset({"link_cut", "link_delay", "isolate"})
"""Kinds that need hosts with links of their own."""

# Until what was hit can be expected to serve again: workers of one role are never all hit at a time, nor both routers.
_RECOVERY = {"kill": 20.0, "router_kill": 15.0}
_RECOVERY_ELSE = 5.0


@dataclass(frozen=True, slots=True)
class Fault:
    """``at`` seconds after the start ``targets`` are hit for ``seconds`` (0: at once and for good); ``delay`` of a link, in
    seconds each way."""

    at: float
    kind: str
    targets: tuple[str, ...]
    seconds: float = 0.0
    delay: float = 0.0

    @property
    def recovered(self) -> float:
        """When its targets may be hit again."""
        return self.at + self.seconds + _RECOVERY.get(self.kind, _RECOVERY_ELSE)


def plan(seed: int, seconds: float, *, kinds: frozenset[str] = frozenset(WEIGHTS)) -> list[Fault]:
    """A fault each 1.5 to 4.5 seconds, of the given kinds."""
    draw = random.Random(seed)
    faults: list[Fault] = []
    at = QUIET_SECONDS
    while True:
        at += draw.uniform(1.5, 4.5)
        fault = _draw(draw, at, kinds, [past for past in faults if past.recovered > at])
        if fault is None:
            continue
        if fault.at + fault.seconds > seconds - QUIET_SECONDS:
            return faults
        faults.append(fault)


def _draw(draw: random.Random, at: float, kinds: frozenset[str], busy: list[Fault]) -> Fault | None:
    """One fault that leaves a worker of each role and a router alone; None if the one that was drawn does not."""
    (kind,) = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))
    hit = {target for past in busy for target in past.targets}
    worker = draw.choice(list(WORKERS))
    pair = (f"prefill-{draw.randrange(WORKERS_A_ROLE)}", f"decode-{draw.randrange(WORKERS_A_ROLE)}")
    length, delay = draw.uniform(1.0, 8.0), draw.uniform(0.02, 0.2)
    if kind not in kinds:
        return None
    if kind in ("kill", "stop", "isolate"):
        mates = sum(WORKERS.get(target) == WORKERS[worker] for target in hit)
        if worker in hit or mates >= WORKERS_A_ROLE - 1:
            return None
        times = {"kill": 0.0, "stop": STOP_SECONDS, "isolate": length}
        return Fault(at, kind, (worker,), times[kind])
    if kind in ("link_cut", "link_delay"):
        if hit & set(pair):
            return None
        return Fault(at, kind, pair, length, delay if kind == "link_delay" else 0.0)
    if kind == "router_kill":
        if any(past.kind == kind for past in busy):
            return None
        return Fault(at, kind, (f"router-{draw.randrange(ROUTERS)}",))
    if "etcd" in hit:
        return None
    return Fault(at, kind, ("etcd",), length)
