# SPDX-License-Identifier: Apache-2.0
"""What operators ask of the rebalancer: a plan, its execution, or that a pool rebalances itself.

An execution is an operation of two steps. Each flip and the scale are operations of their own, with this one as their parent.

    flip   one worker after the other changes its role, until the split is the wanted one
    scale  the pool gets the rest of the wanted numbers, where their sum changes
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final

from twinpool.control.patience import patiently
from twinpool.control.rebalance.loop import RebalanceLoop
from twinpool.control.rebalance.plan import ROLE_NAMES, Flip, Plan, plan_split
from twinpool.control.rebalance.ports import Mover, Specs
from twinpool.control.rebalance.split import Split
from twinpool.control.rebalance.telemetry import ROLES, Telemetry, WorkerLoad
from twinpool.errors import TwinpoolError
from twinpool.v1 import control_pb2 as pb

READY_SECONDS: Final = 45.0
"""How long, beyond the time for a worker's requests, a worker that can change its role is waited for."""


LOOK_SECONDS: Final = 0.1
"""Time between two looks at a child operation."""

REASON_CHARS: Final = 256
"""Longest reason that an operation's record keeps."""

_STATES: Final = {pb.WORKER_STATE_READY: "ready", pb.WORKER_STATE_DRAINING: "draining"}

Step = Callable[[pb.Operation], Awaitable[None]]
Submit = Callable[[pb.Operation], Awaitable[pb.Operation]]
Workers = Callable[[str], Sequence[pb.WorkerRecord]]


class RebalanceDesk:
    """One a control process. On its event loop."""

    def __init__(
        self,
        loop: RebalanceLoop,
        specs: Specs,
        mover: Mover,
        workers: Workers,
        submit: Submit,
        drain_seconds: float,
    ) -> None:
        """``workers``: those of a pool that are registered. ``submit``: records an operation and begins it; its steps are
        ``steps``. ``drain_seconds``: how long a worker's requests may take unless an operator says otherwise."""
        self._loop, self._specs, self._mover = loop, specs, mover
        self._workers, self._submit = workers, submit
        self._drain_seconds = drain_seconds

    @property
    def steps(self) -> Mapping[str, Step]:
        """What an operation of the kind REBALANCE does."""
        return {"flip": self._flip, "scale": self._scale}

    async def rebalance(
        self, request: pb.RebalancePoolRequest, seconds: float | None
    ) -> pb.RebalancePoolResponse:
        """See the protocol. ``seconds``: how long each worker's requests may take. Raises INVALID_ARGUMENT, OPERATION_RUNNING,
        STORE_UNAVAILABLE."""
        spec = self._spec(request.pool)
        numbers = request.HasField("prefill") or request.HasField("decode")
        if request.HasField("auto"):
            if numbers:
                raise TwinpoolError("INVALID_ARGUMENT", "numbers and auto exclude one another", field="auto")
            if not request.dry_run:
                await self._specs.set_auto(spec.pool, request.auto)
            return pb.RebalancePoolResponse(auto=request.auto, plan=self._outlook(spec))
        telemetry = self._telemetry(spec.pool)
        plan = self._plan(spec, telemetry, self._wanted(request, telemetry) if numbers else None)
        answer = pb.RebalancePoolResponse(auto=spec.auto, plan=plan.message(self._workers(spec.pool)))
        if not request.dry_run and not plan.empty:
            self._check_free(spec.pool, plan)
            answer.operation.CopyFrom(await self._submit(self._operation(spec, answer.plan, seconds)))
        return answer

    # --- planning

    def _spec(self, pool: str) -> pb.PoolSpec:
        known = list(self._specs.all())
        found = [spec for spec in known if spec.pool == pool] if pool else known
        if len(found) != 1:
            names = ", ".join(sorted(spec.pool for spec in known)) or "none"
            raise TwinpoolError("INVALID_ARGUMENT", f"pool {pool[:64]!r}; there are: {names}", field="pool")
        return found[0]

    def _telemetry(self, pool: str) -> Telemetry:
        """The pool's workers as they are registered now, with their load as far as it is known."""
        seen = self._loop.telemetry(pool)
        loads = {} if seen is None else {worker.name: worker for worker in seen.workers}
        workers = []
        for record in self._workers(pool):
            if record.role not in ROLE_NAMES:
                continue
            name, role = record.worker.name, ROLE_NAMES[record.role]
            state = _STATES.get(record.state, "unready")
            load = loads.get(name)
            if load is not None and load.role == role:
                workers.append(
                    WorkerLoad(
                        name,
                        role,
                        state,
                        load.epoch,
                        load.cordoned,
                        load.busy,
                        load.running,
                        load.waiting,
                        load.kv_use,
                        load.cached_tokens,
                        load.drain_seconds,
                    )
                )
            else:
                workers.append(WorkerLoad(name, role, state))
        if seen is None:
            return Telemetry(pool, 0.0, tuple(workers))
        return Telemetry(pool, seen.at, tuple(workers), seen.load, seen.queued, seconds=seen.seconds)

    def _wanted(self, request: pb.RebalancePoolRequest, telemetry: Telemetry) -> Split:
        """The numbers that were asked for; one that was not is the rest of the workers that there are."""
        total = sum(telemetry.count(role) for role in ROLES)
        prefill, decode = request.prefill, request.decode
        if not request.HasField("prefill"):
            prefill = max(0, total - decode)
        if not request.HasField("decode"):
            decode = max(0, total - prefill)
        return Split(prefill, decode)

    def _plan(self, spec: pb.PoolSpec, telemetry: Telemetry, wanted: Split | None) -> Plan:
        return plan_split(self._loop.policy, telemetry, spec, self._loop.history(spec.pool), wanted)

    def _outlook(self, spec: pb.PoolSpec) -> pb.RebalancePlan:
        """What the rebalancer would do next."""
        telemetry, decision = self._telemetry(spec.pool), self._loop.decision(spec.pool)
        now = Split(telemetry.serving("prefill"), telemetry.serving("decode"))
        if decision is None:
            return pb.RebalancePlan(
                prefill=now.prefill, decode=now.decode, reason="the load is not known yet"
            )
        reason = f"{decision.reason}: {decision.message}"
        if decision.to is None:
            return pb.RebalancePlan(prefill=now.prefill, decode=now.decode, reason=reason)
        after = now.moved(decision.to)
        flip = Flip(decision.worker, decision.to, "it loses least")
        return Plan(now, after, (flip,), 1, reason, decision.effect).message(self._workers(spec.pool))

    def _check_free(self, pool: str, plan: Plan) -> None:
        for operation in self._mover.all():
            running = operation.state == pb.OPERATION_STATE_RUNNING
            if not running or operation.pool != pool:
                continue
            taken = operation.kind == pb.OPERATION_KIND_REBALANCE
            if taken or operation.worker.name in {flip.worker for flip in plan.flips}:
                raise TwinpoolError("OPERATION_RUNNING", f"{operation.id} of {pool} is under way")

    def _operation(self, spec: pb.PoolSpec, plan: pb.RebalancePlan, seconds: float | None) -> pb.Operation:
        operation = pb.Operation(
            id=f"rebalance-{secrets.token_hex(6)}",
            kind=pb.OPERATION_KIND_REBALANCE,
            state=pb.OPERATION_STATE_RUNNING,
            pool=spec.pool,
            reason=plan.reason[:REASON_CHARS],
            plan=plan,
        )
        operation.timeout.FromNanoseconds(int((self._drain_seconds if seconds is None else seconds) * 1e9))
        operation.created_at.GetCurrentTime()
        return operation

    # --- doing

    async def _flip(self, operation: pb.Operation) -> None:
        """Each flip brings the split nearer, so one that was begun before a restart is found done or under way."""
        wanted = Split(operation.plan.prefill, operation.plan.decode)
        seconds = operation.timeout.ToNanoseconds() / 1e9
        planned = [move.worker.name for move in operation.plan.moves]
        left = None
        while (plan := await self._next(operation, wanted)).needed:
            # One more than it takes: somebody else may change a role meanwhile.
            left = plan.needed if left is None else left - 1
            if left < 0:
                raise TwinpoolError(
                    "DEADLINE_EXCEEDED", f"{operation.pool} is not at {wanted} after the flips that it takes"
                )
            flip = next((each for each in plan.flips if each.worker in planned), plan.flips[0])
            reason = f"{operation.reason}; {flip.reason}"[:REASON_CHARS]
            begin = partial(
                self._mover.flip, flip.worker, flip.to, reason, parent=operation.id, seconds=seconds
            )
            await patiently(operation, begin, "rebalance_waits")

    async def _next(self, operation: pb.Operation, wanted: Split) -> Plan:
        """The plan as it is once no flip is under way: no more is needed, or a worker can change its role. Raises what a flip failed
        with, and DEADLINE_EXCEEDED."""
        await self._await_flips(operation)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + operation.timeout.ToNanoseconds() / 1e9 + READY_SECONDS
        while True:
            plan = self._plan(self._spec(operation.pool), self._telemetry(operation.pool), wanted)
            if plan.flips or not plan.needed:
                return plan
            # They are there, and not fit for work now: others in their stead would be started and drained for nothing.
            text = "no worker of the other role is ready to change its own"
            if loop.time() > deadline:
                raise TwinpoolError("DEADLINE_EXCEEDED", f"{operation.pool}: {text}")
            if operation.steps:
                operation.steps[-1].detail = text
            await asyncio.sleep(LOOK_SECONDS)

    async def _await_flips(self, operation: pb.Operation) -> None:
        """Waits for the children that run. Raises what one of them failed with."""
        for child in self._children(operation, pb.OPERATION_KIND_FLIP):
            await self._ends_well(child)

    async def _scale(self, operation: pb.Operation) -> None:
        plan = operation.plan
        if not plan.added:
            return
        begin = partial(
            self._mover.scale,
            operation.pool,
            plan.prefill,
            plan.decode,
            operation.reason,
            parent=operation.id,
        )
        # One that a control process began that is no more is this one's.
        begun = self._children(operation, pb.OPERATION_KIND_SCALE)
        await self._ends_well(begun[0] if begun else await patiently(operation, begin, "rebalance_waits"))

    def _children(self, operation: pb.Operation, kind: "pb.OperationKind.ValueType") -> list[str]:
        return [each.id for each in self._mover.all() if (each.parent, each.kind) == (operation.id, kind)]

    async def _ends_well(self, child: str) -> None:
        """Waits for its end. Raises what it failed with."""
        while True:
            found = self._mover.get(child)
            if found.state == pb.OPERATION_STATE_FAILED:
                raise _failure(found)
            if found.state != pb.OPERATION_STATE_RUNNING:
                return
            await asyncio.sleep(LOOK_SECONDS)


def _failure(operation: pb.Operation) -> TwinpoolError:
    """What a child failed with, as its record says: ``REASON: text``."""
    reason, _, text = operation.error.partition(": ")
    try:
        return TwinpoolError(reason, f"{operation.id}: {text}")
    except KeyError:
        return TwinpoolError("INTERNAL", f"{operation.id}: {operation.error}")
