# SPDX-License-Identifier: Apache-2.0
"""Drives the C++ core from the event loop: one caller, one clock, one timer.

Everything that changes the core goes through here, on the loop's thread. Planning is put off to the end of the current
loop turn, so that requests and events that come together are planned together; load is reserved inside the core in the
moment a pair is chosen.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Final, Protocol

from twinpool import metrics
from twinpool._core import Action, AdmissionConfig, CoreError, RouterCore, Transition
from twinpool.config import RouterSection
from twinpool.errors import TABLE, TwinpoolError
from twinpool.ids import WorkerKey
from twinpool.logs import get_logger
from twinpool.router.heard import seconds_of
from twinpool.router.pool_loads import PoolLoads
from twinpool.router.request import Prepared
from twinpool.router.trace import TraceBook
from twinpool.v1 import control_pb2, inference_pb2, worker_pb2

log = get_logger(__name__)

_TOO_LONG: Final = metrics.ROUTER_TRANSFER_ERROR.labels("over")
_TOO_SHORT: Final = metrics.ROUTER_TRANSFER_ERROR.labels("under")

# A timer that is off by so much is not worth a wake-up of its own.
_TIMER_SLACK_SECONDS: Final = 0.001
_LONGEST_TIMER_SECONDS: Final = 3600.0

Prefer = Callable[[Prepared], list[tuple[str, int, int]]]


class Admitted(Protocol):
    """What a waiting request hears from admission."""

    def on_placed(self, action: Action) -> None:
        """A pair was chosen and its load is reserved."""

    def on_preempted(self, action: Action) -> None:
        """The core has taken the pair away for a request of higher priority."""

    def on_ended(self, action: Action) -> None:
        """The core ended the request (its deadline, or its time in the queue)."""

    def on_fault(self, error: Exception) -> None:
        """A call above has raised, or the core refused an event: a fault of ours, which ends this request alone."""

    def on_leaving(self, decode: WorkerKey) -> bool:
        """A decode worker is about to leave: whether the answer moves away from it."""
        ...


def core_config(limits: RouterSection) -> AdmissionConfig:
    """The core's limits, each by its name in the configuration."""
    return AdmissionConfig(**{name: getattr(limits, name) for name in AdmissionConfig.FIELDS})


class Admission:
    """The core and those who wait for its actions."""

    def __init__(
        self,
        core: RouterCore,
        traces: TraceBook | None = None,
        prefer: Prefer = lambda _prepared: [],
        saw: Callable[[Prepared], None] = lambda _prepared: None,
        gave_way: Callable[[int, int], None] = lambda _tokens, _to: None,
    ) -> None:
        """``prefer``: which workers a request is better off with, all else alike; see ``RouterCore.submit``. ``saw``: is told of each
        request that was accepted. ``gave_way``: of each that was preempted, by the lengths of its prompt and of the other one's."""
        self.core = core
        self._prefer = prefer
        self._saw = saw
        self._gave_way = gave_way
        self._prompt_tokens: dict[int, int] = {}
        self._traces = TraceBook(core, 0) if traces is None else traces
        self._waiting: dict[int, Admitted] = {}
        self.loads = PoolLoads(core)
        self._timer: asyncio.TimerHandle | None = None
        self._wake_at: float | None = None
        self._planned = False

    def close(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._planned = True

    def configure(self, limits: AdmissionConfig) -> None:
        """Other limits from now on, also for what waits."""
        self.core.configure(time.monotonic(), limits)
        self.kick()

    @property
    def active(self) -> int:
        """Requests that have not been forgotten."""
        return len(self._waiting)

    # --- requests -------------------------------------------------------------------------

    def submit(self, prepared: Prepared, owner: Admitted) -> int:
        """Hands a request to the core and returns the core's number for it. Raises the core's refusal."""
        submission = self.core.submit(
            time.monotonic(),
            prepared.request_id,
            prepared.group.label,
            prepared.prompt_tokens,
            prepared.remaining_tokens,
            prepared.cacheable_hashes,
            n=prepared.n,
            priority=prepared.priority,
            tenant=prepared.tenant,
            deadline=prepared.deadline.at or 0.0,
            bytes=prepared.size_bytes,
            preemptible=prepared.preemptible,
            adapter=prepared.adapter,
            prefer=self._prefer(prepared),
        )
        if not submission.accepted:
            metrics.ROUTER_REJECTIONS.labels(submission.reason).inc()
            raise refusal(submission.reason, submission.limit, submission.retry_after)
        self._traces.begin(submission.request, prepared)
        self.loads.began(submission.request, prepared)
        self._saw(prepared)
        self._waiting[submission.request] = owner
        self._prompt_tokens[submission.request] = prepared.prompt_tokens
        self.kick()
        return submission.request

    def advance(self, request: int, attempt: int, event: str, detail: str = "") -> Transition:
        """Applies an event of an attempt. One that the state machine refuses is a fault of ours: it ends the request."""
        try:
            transition = self.core.advance(time.monotonic(), request, attempt, event, detail)
        except CoreError as error:
            log.exception("event_refused", fsm_event=event, attempt=attempt)
            if request in self._waiting:
                self._waiting[request].on_fault(error)
            transition = self.core.advance(time.monotonic(), request, attempt, "cancel")
        self._traces.advanced(request, attempt, event, detail, transition)
        if not transition.applied:
            log.debug("event_not_applied", fsm_event=event, state=transition.state, attempt=attempt)
        self.kick()
        return transition

    def extend(self, request: int, prepared: Prepared) -> None:
        """What the client has of the answer is part of the prompt now."""
        self.core.extend(
            request, prepared.prompt_tokens, prepared.remaining_tokens, prepared.cacheable_hashes
        )

    def forget(self, request: int) -> None:
        """Ends the router's interest in a request. One that has not ended by now is cancelled."""
        if self._waiting.pop(request, None) is not None:
            self._prompt_tokens.pop(request, None)
            after = self.core.advance(time.monotonic(), request, 0, "cancel")
            self._traces.advanced(request, 0, "cancel", "", after)
            self._traces.end(request)
            self.loads.ended(request)
            self.core.forget(request)
            self.kick()

    def owners_on(self, key: WorkerKey) -> list[Admitted]:
        """Those whose placement uses a worker."""
        placed = self.core.requests_on(key.name, key.incarnation)
        return [self._waiting[request] for request, _ in placed if request in self._waiting]

    # --- workers --------------------------------------------------------------------------

    def upsert_worker(
        self, key: WorkerKey, pool: str, role: str, state: str, record: control_pb2.WorkerRecord
    ) -> None:
        """A worker that can be reached, or a change of it."""
        self.core.upsert_worker(
            time.monotonic(),
            key.name,
            key.incarnation,
            pool,
            role,
            state,
            record.fingerprint,
            record.num_blocks,
            record.block_tokens,
            record.max_num_seqs,
        )
        self.kick()

    def seed_costs(
        self,
        key: WorkerKey,
        record: control_pb2.WorkerRecord,
        kinds: Collection[str] = ("prefill", "step"),
    ) -> bool:
        """Lets the core predict with what the worker measured at its start, until it has learned more. What it has learned
        of these ``kinds`` is forgotten. False: the record has no usable measurement, and the core's own guesses stay."""
        seeded = False
        costs = {"prefill": record.prefill_cost, "step": record.step_cost}
        for kind, cost in ((kind, costs[kind]) for kind in kinds):
            coefficients = (cost.base_seconds, cost.unit_seconds, cost.context_seconds)
            if not any(coefficients):
                continue
            try:
                self.core.set_cost_model(key.name, key.incarnation, kind, *coefficients)
                seeded = True
            except CoreError as error:
                log.warning("calibration_ignored", worker=str(key), kind=kind, detail=str(error))
        return seeded

    def remove_worker(self, key: WorkerKey) -> None:
        """A worker that is registered no more."""
        self.core.remove_worker(time.monotonic(), key.name, key.incarnation)
        self.kick()

    def quarantine(self, key: WorkerKey, seconds: float, probation: bool = False) -> None:
        """Gives a worker no work for so long; 0 ends its quarantine. On ``probation`` it then gets one placement, and no other
        before the next call."""
        now = time.monotonic()
        self.core.quarantine(now, key.name, key.incarnation, now + seconds, probation)
        self.kick()

    def report_load(self, key: WorkerKey, report: worker_pb2.LoadReport) -> None:
        """What a worker says of itself."""
        self.core.report_load(
            time.monotonic(),
            key.name,
            key.incarnation,
            report.running_requests,
            report.waiting_requests,
            report.waiting_prefill_tokens,
            report.available_blocks,
            seconds_of(report.step_time),
        )
        self.kick()

    def observe_prefill(self, key: WorkerKey, prompt_tokens: int, done: worker_pb2.PrefillDone) -> None:
        """What a prefill really took: the cost model learns from it."""
        self.core.observe_prefill(
            key.name,
            key.incarnation,
            prompt_tokens - done.cached_tokens,
            done.cached_tokens,
            seconds_of(done.compute_time),
        )

    def observe_transfer(self, key: WorkerKey, stats: inference_pb2.HandoffStats) -> None:
        """What a pull really took; beside it goes what it was expected to take."""
        seconds = seconds_of(stats.read_time)
        if stats.blocks:
            expected = self.core.predict_transfer(key.name, key.incarnation, stats.blocks)
            metrics.ROUTER_TRANSFER_TIME.observe(seconds)
            metrics.ROUTER_PREDICTED_TRANSFER_TIME.observe(expected)
            (_TOO_LONG if expected > seconds else _TOO_SHORT).observe(abs(expected - seconds))
        self.core.observe_transfer(key.name, key.incarnation, stats.blocks, seconds)

    # --- planning -------------------------------------------------------------------------

    def kick(self) -> None:
        """Plans at the end of this loop turn."""
        if not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_soon(self._plan)

    def _plan(self) -> None:
        self._planned = False
        now = time.monotonic()
        actions = self.core.plan(now)
        metrics.ROUTER_PLAN_TIME.observe(time.monotonic() - now)
        for action in actions:
            self._traces.acted(action)
            owner = self._waiting.get(action.request)
            if owner is None:
                log.error("action_without_owner", kind=action.kind, request=action.request)
                continue
            try:
                if action.kind == "place":
                    owner.on_placed(action)
                elif action.kind == "preempt":
                    self._gave_way(self._prompt_tokens[action.request], self._prompt_tokens.get(action.by, 0))
                    owner.on_preempted(action)
                else:
                    owner.on_ended(action)
            except Exception as error:
                log.exception("action_failed", kind=action.kind, type=type(error).__name__)
                owner.on_fault(error)
        self._arm()

    def _arm(self) -> None:
        now = time.monotonic()
        wake = self.core.next_wake(now)
        if wake == self._wake_at:
            return
        self._wake_at = wake
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wake is not None:
            delay = min(max(wake - now, _TIMER_SLACK_SECONDS), _LONGEST_TIMER_SECONDS)
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._wake_at = self._timer = None
        self._plan()


def refusal(reason: str, limit: str, retry_after: float) -> TwinpoolError:
    """A refusal of the core as an error of the table. ``limit``: the limit that was hit, as name=value."""
    known = reason if reason in TABLE else "INTERNAL"
    message = f"{TABLE[known].message}; the limit is {limit}" if limit else None
    metadata = {"limit": limit} if limit else None
    return TwinpoolError(known, message, retry_after=retry_after or None, metadata=metadata)
