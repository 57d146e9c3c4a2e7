# SPDX-License-Identifier: Apache-2.0
"""A split that an operator asks for, or that the policy would choose, as single moves. No I/O and no clock."""

from collections.abc import Iterable
from dataclasses import dataclass

from twinpool.control.rebalance.decision import Effect
from twinpool.control.rebalance.history import History
from twinpool.control.rebalance.policy import Policy, by_loss
from twinpool.control.rebalance.split import Split, within
from twinpool.control.rebalance.telemetry import Role, Telemetry, WorkerLoad, other
from twinpool.errors import TwinpoolError
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2

ROLE_NUMBERS: dict[Role, worker_pb2.Role.ValueType] = {
    "prefill": worker_pb2.ROLE_PREFILL,
    "decode": worker_pb2.ROLE_DECODE,
}
ROLE_NAMES: dict[int, Role] = {number: role for role, number in ROLE_NUMBERS.items()}


@dataclass(frozen=True, slots=True)
class Flip:
    """One worker's change of role."""

    worker: str
    to: Role
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done to a pool."""

    now: Split
    """Workers that there are, those included that are not fit for work at this moment: they will be again."""
    after: Split
    flips: tuple[Flip, ...]
    """Of workers that can change their role now; fewer than ``needed`` if others cannot."""
    needed: int
    """Flips on the way to ``after``."""
    reason: str
    effect: Effect | None
    """None: the pool's load is not known."""

    @property
    def added(self) -> int:
        """Workers to be started; below 0: to be taken out."""
        return self.after.prefill + self.after.decode - self.now.prefill - self.now.decode

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return self.now == self.after

    def message(self, records: Iterable[pb.WorkerRecord]) -> pb.RebalancePlan:
        """As operators get it."""
        incarnations = {record.worker.name: record.worker.incarnation for record in records}
        found = pb.RebalancePlan(
            prefill=self.after.prefill,
            decode=self.after.decode,
            added=self.added,
            reason=self.reason,
            moves=[
                pb.RebalanceMove(
                    worker=worker_pb2.WorkerId(
                        name=flip.worker, incarnation=incarnations.get(flip.worker, 0)
                    ),
                    target_role=ROLE_NUMBERS[flip.to],
                    reason=flip.reason,
                )
                for flip in self.flips
            ],
        )
        if self.effect is not None:
            found.effect.CopyFrom(_effect(self.effect))
        return found


def plan_split(
    policy: Policy, telemetry: Telemetry, spec: pb.PoolSpec, history: History, wanted: Split | None
) -> Plan:
    """The moves to ``wanted``, or to the split that suits the load best (None). Flips first, so that as few workers as possible are
    started or taken out. Raises INVALID_ARGUMENT if the bounds of the pool do not allow the split, or if the best one is asked
    for and the load is not known."""
    now = Split(telemetry.count("prefill"), telemetry.count("decode"))
    known = telemetry.seconds > 0
    if wanted is None:
        if not known:
            raise TwinpoolError(
                "INVALID_ARGUMENT",
                f"the load of {spec.pool} is not known yet; name the numbers, or ask again soon",
            )
        wanted = policy.target(telemetry, spec, history)
        reason = f"{wanted} suits the load best"
    else:
        reason = f"{wanted} was asked for"
    if not within(spec, wanted):
        raise TwinpoolError(
            "INVALID_ARGUMENT", f"{wanted} is outside of the bounds of {spec.pool}: {_bounds(spec)}"
        )
    to: Role = "prefill" if wanted.prefill - now.prefill > wanted.decode - now.decode else "decode"
    count = max(0, min(wanted.of(to) - now.of(to), now.of(other(to)) - wanted.of(other(to))))
    chosen = by_loss(w for w in telemetry.workers if w.role == other(to) and w.serving)[:count]
    seconds = sum(policy.flip_seconds(worker, history) for worker in chosen)
    effect = policy.effect(telemetry, spec, history, wanted, seconds) if known else None
    return Plan(now, wanted, tuple(_flip(worker, to, known) for worker in chosen), count, reason, effect)


def _flip(worker: WorkerLoad, to: Role, known: bool) -> Flip:
    if not known:
        return Flip(worker.name, to, "its load is not known")
    work = f"{worker.running} running, {worker.waiting} waiting, {worker.kv_use:.0%} of its blocks in use"
    return Flip(worker.name, to, f"{work}: empty in {worker.drain_seconds:.0f} s")


def _bounds(spec: pb.PoolSpec) -> str:
    return ", ".join(
        f"{name} {max(1, role.least)} to {role.most or 'any number'}"
        for name, role in (("prefill", spec.prefill), ("decode", spec.decode))
    )


def _effect(effect: Effect) -> pb.RebalanceEffect:
    message = pb.RebalanceEffect(
        prefill_utilisation=effect.prefill,
        decode_utilisation=effect.decode,
        prefill_utilisation_after=effect.prefill_after,
        decode_utilisation_after=effect.decode_after,
        served=effect.served,
        served_after=effect.served_after,
    )
    message.duration.FromNanoseconds(int(effect.seconds * 1e9))
    return message
