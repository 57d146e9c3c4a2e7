# SPDX-License-Identifier: Apache-2.0
"""A control process around the rebalancer, of the tests' own: a pool, its operations, its events."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.unit.control.rebalancing import SETTINGS, pool, spec
from twinpool.config import RebalanceSection
from twinpool.control.rebalance.capacity import Cost
from twinpool.control.rebalance.desk import RebalanceDesk, Submit
from twinpool.control.rebalance.loop import RebalanceLoop
from twinpool.control.rebalance.plan import ROLE_NUMBERS
from twinpool.control.rebalance.telemetry import Role
from twinpool.control.rebalance.window import Sample, WorkerSample
from twinpool.errors import TwinpoolError
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2

BEGAN = 1_000_000.0


@dataclass
class Pool:
    """Workers, their operations and what was told. Implements all ports. Flips end when the test says so."""

    prefill: int = 3
    decode: int = 3
    spec: pb.PoolSpec = field(default_factory=spec)
    now: float = BEGAN
    roles: dict[str, Role] = field(default_factory=dict)
    operations: list[pb.Operation] = field(default_factory=list)
    told: list[tuple[str, str, bool]] = field(default_factory=list)
    refusal: TwinpoolError | None = None
    silent: bool = False
    unready: set[str] = field(default_factory=set)
    at_once: bool = False
    """Flips and scales end as soon as they begin."""

    def __post_init__(self) -> None:
        for worker in pool(self.prefill, self.decode):
            self.roles[worker.name] = worker.role

    async def sample(self, pool: str, at: float) -> Sample | None:
        """Prompts that take four prefill workers; next to no answers."""
        if self.silent:
            return None
        flipping = {op.worker.name for op in self.operations if op.state == pb.OPERATION_STATE_RUNNING}
        workers = tuple(
            WorkerSample(
                name,
                1,
                role,
                "flipping" if name in flipping else "ready",
                available_blocks=10_000,
                total_blocks=10_000,
                prefill_cost=Cost(0.0, 1e-3),
                step_cost=Cost(0.01, 1e-4),
            )
            for name, role in sorted(self.roles.items())
        )
        tokens = int((at - BEGAN) * 4000)
        return Sample(at, workers, requests=tokens // 1000, prompt_tokens=tokens, prefilled_tokens=tokens)

    def record(
        self,
        reason: str,
        message: str,
        *,
        pool: str,
        subject: str = "",
        operation: str = "",
        warning: bool = False,
    ) -> None:
        self.told.append((reason, subject, warning))

    async def flip(
        self, worker: str, role: Role, reason: str, *, parent: str = "", seconds: float | None = None
    ) -> str:
        if self.refusal is not None:
            raise self.refusal
        operation = self._begun(pb.OPERATION_KIND_FLIP, reason, parent)
        operation.worker.name, operation.target_role = worker, ROLE_NUMBERS[role]
        self._maybe_end(operation)
        return operation.id

    async def scale(self, pool: str, prefill: int, decode: int, reason: str, *, parent: str = "") -> str:
        if self.refusal is not None:
            raise self.refusal
        operation = self._begun(pb.OPERATION_KIND_SCALE, reason, parent)
        operation.plan.prefill, operation.plan.decode = prefill, decode
        self._maybe_end(operation)
        return operation.id

    def get(self, operation: str) -> pb.Operation:
        return next(each for each in self.operations if each.id == operation)

    async def submit(self, operation: pb.Operation) -> pb.Operation:
        self.operations.append(operation)
        return operation

    def workers(self, pool: str) -> list[pb.WorkerRecord]:
        return [
            pb.WorkerRecord(
                worker=worker_pb2.WorkerId(name=name, incarnation=7),
                pool="default",
                role=ROLE_NUMBERS[role],
                state=pb.WORKER_STATE_UNREADY if name in self.unready else pb.WORKER_STATE_READY,
            )
            for name, role in sorted(self.roles.items())
        ]

    def end(self, operation: pb.Operation, error: str = "") -> None:
        """The operation ends."""
        step = operation.steps.add(name="commit")
        step.done_at.FromNanoseconds(int(self.now * 1e9))
        operation.ended_at.CopyFrom(step.done_at)
        operation.state = pb.OPERATION_STATE_FAILED if error else pb.OPERATION_STATE_SUCCEEDED
        operation.error = error
        if operation.kind == pb.OPERATION_KIND_FLIP and not error:
            to: Role = "prefill" if operation.target_role == worker_pb2.ROLE_PREFILL else "decode"
            self.roles[operation.worker.name] = to

    def _begun(self, kind: "pb.OperationKind.ValueType", reason: str, parent: str) -> pb.Operation:
        operation = pb.Operation(
            id=f"op-{len(self.operations)}",
            kind=kind,
            pool="default",
            state=pb.OPERATION_STATE_RUNNING,
            reason=reason,
            parent=parent,
        )
        operation.created_at.FromNanoseconds(int(self.now * 1e9))
        self.operations.append(operation)
        return operation

    def _maybe_end(self, operation: pb.Operation) -> None:
        if self.at_once:
            self.end(operation)

    def count(self, role: Role) -> int:
        """Workers of a role."""
        return sum(each == role for each in self.roles.values())


class Specs:
    """The pool's record."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def all(self) -> Sequence[pb.PoolSpec]:
        return [self._pool.spec]

    async def set_auto(self, pool: str, auto: bool) -> None:
        self._pool.spec.auto = auto


class Mover:
    """The pool as the one who carries changes out."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.flip, self.scale, self.get = pool.flip, pool.scale, pool.get

    def all(self) -> Sequence[pb.Operation]:
        return self._pool.operations


def loop_of(around: Pool, settings: RebalanceSection = SETTINGS) -> RebalanceLoop:
    """The loop; the test turns it, on the pool's own clock."""
    return RebalanceLoop(settings, Specs(around), around, Mover(around), around, 30.0, lambda: around.now)


def desk_of(around: Pool, loop: RebalanceLoop, submit: Submit | None = None) -> RebalanceDesk:
    """The operator's desk; operations go to ``submit``, or only into the pool's list."""
    return RebalanceDesk(loop, Specs(around), Mover(around), around.workers, submit or around.submit, 30.0)
