# SPDX-License-Identifier: Apache-2.0
"""How many workers each role should have, given what each has to do."""

from collections.abc import Mapping
from dataclasses import dataclass

from twinpool.control.rebalance.telemetry import Role
from twinpool.v1.control_pb2 import PoolSpec

UNBOUNDED = 1 << 20
"""What ``most`` means where a pool sets no bound."""


@dataclass(frozen=True, slots=True)
class Split:
    """Workers of each role."""

    prefill: int
    decode: int

    def of(self, role: Role) -> int:
        """Workers of a role."""
        return self.prefill if role == "prefill" else self.decode

    def moved(self, to: Role, count: int = 1) -> "Split":
        """With ``count`` workers more in one role and fewer in the other."""
        step = count if to == "prefill" else -count
        return Split(self.prefill + step, self.decode - step)

    def added(self, role: Role, count: int) -> "Split":
        """With ``count`` workers more in a role."""
        if role == "prefill":
            return Split(self.prefill + count, self.decode)
        return Split(self.prefill, self.decode + count)

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"


def bounds(spec: PoolSpec, role: Role) -> tuple[int, int]:
    """Least and most workers of a role. At least one: a pool that lacks a role serves nothing. 0 for ``most``: no bound."""
    found = spec.prefill if role == "prefill" else spec.decode
    return max(1, found.least), found.most or UNBOUNDED


def within(spec: PoolSpec, split: Split) -> bool:
    """Whether a split keeps the bounds of both roles."""
    for role, count in (("prefill", split.prefill), ("decode", split.decode)):
        least, most = bounds(spec, "prefill" if role == "prefill" else "decode")
        if not least <= count <= most:
            return False
    return True


def utilisation(demand: float, workers: int) -> float:
    """Share of a role's capacity that its demand takes; infinite without workers."""
    if workers > 0:
        return demand / workers
    return float("inf") if demand > 0 else 0.0


def served(demand: Mapping[Role, float], split: Split, high: float) -> float:
    """Share of the requests that a split has capacity for, 0 to 1, if ``high`` of each worker's can be used. Each request needs
    both roles, so the scarcer one decides."""
    worst = max(utilisation(demand["prefill"], split.prefill), utilisation(demand["decode"], split.decode))
    return 1.0 if worst <= high else high / worst


def best_split(demand: Mapping[Role, float], now: Split, spec: PoolSpec) -> Split:
    """The split of as many workers that leaves the busier role the least busy; among equals the one next to ``now``. ``now`` if the
    bounds allow no other. More demand of a role never gives it fewer workers."""
    total = now.prefill + now.decode
    low, high = bounds(spec, "prefill")
    least, most = bounds(spec, "decode")
    allowed = range(max(low, total - most), min(high, total - least) + 1)
    if not allowed:
        return now

    def key(prefill: int) -> tuple[float, int, int]:
        worst = max(utilisation(demand["prefill"], prefill), utilisation(demand["decode"], total - prefill))
        return worst, abs(prefill - now.prefill), prefill

    prefill = min(allowed, key=key)
    return Split(prefill, total - prefill)
