# SPDX-License-Identifier: Apache-2.0
"""What both roles do alike: admit or refuse, end an attempt exactly once, tell its router.

A role adds what an attempt *is* and how to free it. Every way to an end (finish, failure, cancel, deadline, the
router's death) goes through ``_end``, so there is one place that frees.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, ParamSpec, Protocol, TypeVar

from twinpool import metrics
from twinpool._core import StepPlan
from twinpool.engine.step import StepResult
from twinpool.ids import WorkerKey
from twinpool.logs import get_logger
from twinpool.transfer.base import AttemptKey, PeerDescriptor
from twinpool.transfer.fence import HandoffFailure, HandoffFault
from twinpool.transfer.offer import OfferEnd
from twinpool.v1 import handoff_pb2 as handoff
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.resume_pb2 import PortableState
from twinpool.worker.attempts import AttemptLike, AttemptTable
from twinpool.worker.commands import CancelWork, CommandError, DecodeWork, PrefillWork, Reason, Work
from twinpool.worker.kept import told
from twinpool.worker.parts import WorkerParts
from twinpool.worker.prefix_fetch import PrefixFetch
from twinpool.worker.tokens import scored_messages

log = get_logger(__name__)


class FetchingAttempt(AttemptLike, Protocol):
    """An attempt that may pull a cached prefix first. ``fetch`` is set while it does, ``fetched`` afterwards."""

    fetch: PrefixFetch | None
    fetched: pb.PrefixFetched | None


A = TypeVar("A", bound=FetchingAttempt)
P = ParamSpec("P")
W = TypeVar("W", PrefillWork, DecodeWork)


def ending(reason: Reason | None) -> str:
    """How a span calls the end of an attempt; "" for success."""
    return "" if reason is None else pb.FailureReason.Name(reason).removeprefix("FAILURE_REASON_")


class RoleBase(ABC, Generic[A, W]):
    """Attempts of kind ``A`` that start with work of kind ``W``. Step thread only."""

    def __init__(self, parts: WorkerParts) -> None:
        self.epoch = 1
        self._limits = parts.limits
        self._scheduler = parts.scheduler
        self._blocks = parts.blocks
        self._offers = parts.offers
        self._pulls = parts.pulls
        self._fetcher = parts.fetcher
        self._pins = parts.pins
        self._endpoints = parts.endpoints
        self._open_owners = parts.open_owners
        self._kept = parts.kept
        self._outbox = parts.outbox
        self._clock = parts.clock
        self._totals = parts.totals
        self._attempts: AttemptTable[A] = AttemptTable()

    @property
    @abstractmethod
    def role(self) -> pb.Role.ValueType:
        """Which role this is."""

    @property
    def requests(self) -> int:
        """Attempts that hold anything on this worker, those that read its cached prefixes included."""
        return len(self._attempts) + self._offers.fetches

    @property
    def attempts(self) -> int:
        """See RoleHandler."""
        return len(self._attempts)

    @abstractmethod
    def _work_kind(self) -> type[W]:
        """What this role can be asked to do."""

    @abstractmethod
    def _admit(self, session: int, work: W, deadline: float | None) -> None:
        """Takes the work on and adds the attempt. Raises CommandError to refuse it, with nothing held but what an
        attempt that was added already answers for."""

    @abstractmethod
    def _free(self, attempt: A, reason: Reason | None, detail: str) -> None:
        """Gives back all that the attempt holds and tells its peer. ``reason`` None: it succeeded."""

    @abstractmethod
    def _attempt_of(self, seq: int) -> A | None:
        """Whose sequence of the scheduler this is."""

    # --- commands

    def on_work(self, session: int, work: Work) -> None:
        """See RoleHandler."""
        if isinstance(work, CancelWork):
            self._cancel(session, work)
            return
        kind, left = self._work_kind(), work.deadline_seconds
        if work.epoch not in (0, self.epoch):
            detail = f"the command is of epoch {work.epoch}, the worker in epoch {self.epoch}"
            self._tell_failed(session, work.key, pb.FAILURE_REASON_STALE_EPOCH, detail)
        elif not isinstance(work, kind):
            detail = f"the role of this worker is {pb.Role.Name(self.role)}"
            self._tell_failed(session, work.key, pb.FAILURE_REASON_NOT_SERVING, detail)
        elif work.key in self._attempts:
            detail = f"attempt {work.key} is running here"
            self._tell_failed(session, work.key, pb.FAILURE_REASON_DUPLICATE, detail)
        elif left is not None and left <= 0:
            detail = "the deadline had passed on arrival"
            self._tell_failed(session, work.key, pb.FAILURE_REASON_DEADLINE, detail)
        else:
            self._take_on(session, work, None if left is None else self._clock() + left)

    def _take_on(self, session: int, work: W, deadline: float | None) -> None:
        try:
            self._admit(session, work, deadline)
            return
        except CommandError as refused:
            reason, detail = refused.reason, refused.detail
        except Exception as error:
            log.exception("admit_failed", attempt=str(work.key))
            reason, detail = pb.FAILURE_REASON_INTERNAL, f"{type(error).__name__} on admission"
        attempt = self._attempts.get(work.key)
        if attempt is not None:
            self._fail(attempt, reason, detail)
        else:
            self._tell_failed(session, work.key, reason, detail)

    def on_session_closed(self, session: int) -> None:
        """See RoleHandler."""
        for attempt in self._attempts.of_session(session):
            self._end(attempt, None, pb.FAILURE_REASON_PEER_LOST, "the router's session ended")

    def take_over(self, stream_id: str, key: bytes, digest: bytes, forget: bool) -> PortableState | None:
        """See RoleHandler. What is kept is from a time in which the worker had another role, or from attempts that ended."""
        return told(self._kept, stream_id, key, digest, forget)

    def _forget(self, attempt: A) -> None:
        """The router says that the answer is over: nothing of it has to be kept for another one."""

    def _cancel(self, session: int, work: CancelWork) -> None:
        key = work.key
        attempt = self._attempts.get(key)
        told = pb.SessionResponse(cancelled=pb.Cancelled(id=key.message()))
        if attempt is not None and attempt.session == session:
            metrics.WORKER_CANCELLED_ATTEMPTS.inc()
            if not work.keep:
                self._forget(attempt)
            # What the peer hears: this side is gone.
            self._end(attempt, told, pb.FAILURE_REASON_PEER_LOST, "cancelled by the router")
        else:
            # Unknown, ended, or another router's: this session holds nothing under that id, as it wants.
            self._outbox.session(session, told)

    # --- time

    def on_clock(self, now: float) -> None:
        """See RoleHandler."""
        for attempt in self._attempts.expired(now):
            self._fail(attempt, pb.FAILURE_REASON_DEADLINE, "the deadline passed")
        self._offers.tick(now)
        self._pulls.tick(now)
        self._kept.tick(now)

    def next_wake(self, now: float) -> float | None:
        """See RoleHandler."""
        times = (self._attempts.next_deadline(), self._offers.next_wake(), self._pulls.next_wake())
        return min((time for time in times if time is not None), default=None)

    # --- steps

    def on_step_failed(self, plan: StepPlan, detail: str) -> None:
        """See RoleHandler."""
        # Sequences of one attempt may be several: ending it once takes all of them out.
        for seq in plan.seq.tolist():
            attempt = self._attempt_of(seq)
            if attempt is not None:
                self._fail(attempt, pb.FAILURE_REASON_INTERNAL, detail)

    def fail_all(self, reason: Reason, detail: str) -> None:
        """See RoleHandler."""
        for attempt in self._attempts:
            self._fail(attempt, reason, detail)

    # --- ends

    def _fail(self, attempt: A, reason: Reason, detail: str) -> None:
        log.info(
            "attempt_failed", attempt=str(attempt.key), reason=pb.FailureReason.Name(reason), detail=detail
        )
        failed = pb.AttemptFailed(id=attempt.key.message(), reason=reason, detail=detail)
        self._end(attempt, pb.SessionResponse(failed=failed), reason, detail)

    def _end(self, attempt: A, told: pb.SessionResponse | None, reason: Reason | None, detail: str) -> None:
        """Takes the attempt out, frees it, then tells the router: an answer says that nothing is held any more."""
        if self._attempts.pop(attempt.key) is None:
            return
        try:
            self._free(attempt, reason, detail)
        except Exception:
            log.exception("free_failed", attempt=str(attempt.key))
        if told is not None:
            self._outbox.session(attempt.session, told)

    def _tell_failed(self, session: int, key: AttemptKey, reason: Reason, detail: str) -> None:
        metrics.WORKER_ATTEMPT_FAILURES.labels(pb.FailureReason.Name(reason)).inc()
        log.info("attempt_refused", attempt=str(key), reason=pb.FailureReason.Name(reason), detail=detail)
        failed = pb.AttemptFailed(id=key.message(), reason=reason, detail=detail)
        self._outbox.session(session, pb.SessionResponse(failed=failed))

    def _guard(self, attempt: A, action: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Runs ``action``; an exception in it fails this attempt alone."""
        try:
            action(*args, **kwargs)
        except CommandError as refused:
            self._fail(attempt, refused.reason, refused.detail)
        except Exception as error:
            log.exception("attempt_raised", attempt=str(attempt.key))
            self._fail(attempt, pb.FAILURE_REASON_INTERNAL, f"{type(error).__name__} in the worker")

    def _count_prefix(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A prompt was looked up in the prefix cache."""
        self._totals.query_tokens += prompt_tokens
        self._totals.hit_tokens += cached_tokens
        metrics.WORKER_PREFIX_QUERIES.inc(prompt_tokens)
        metrics.WORKER_PREFIX_HITS.inc(cached_tokens)

    def _fail_unhealthy(self, attempts: list[A]) -> None:
        """Ends attempts whose logits were not finite, and drops the prefix cache.

        Where the cause lies in the cache, every prompt that hits it would fail from now on.
        """
        for attempt in attempts:
            self._fail(attempt, pb.FAILURE_REASON_INTERNAL, "the model's logits were not finite")
        if attempts:
            dropped = self._blocks.reset_cache()
            log.error("cache_dropped", attempts=len(attempts), blocks=dropped)

    def _tell_scored(self, attempt: A, result: StepResult, index: int) -> None:
        """What a step, as its entry ``index``, has scored of the attempt's prompt."""
        part = result.prompts.get(index)
        for message in scored_messages(attempt.key, part) if part is not None else ():
            self._outbox.session(attempt.session, message)

    # --- prefix

    def _with_prefix(self, attempt: A, work: W, proceed: Callable[[A], None]) -> None:
        """Calls ``proceed`` once the prefix that the work names is in the cache, or is not to be had."""

        def done(fetched: pb.PrefixFetched) -> None:
            attempt.fetch, attempt.fetched = None, fetched
            self._guard(attempt, proceed, attempt)

        if work.prefix is not None and work.draw.use_cache:
            attempt.fetch = self._fetcher.start(work.key, work.prompt, work.prefix, done)
        if attempt.fetch is None:
            proceed(attempt)

    def _stop_fetch(self, attempt: A) -> None:
        """The attempt ends; does nothing unless its prefix is being pulled."""
        fetch, attempt.fetch = attempt.fetch, None
        if fetch is not None:
            self._fetcher.abort(fetch)

    # --- hand-off

    def on_reader_opened(self, stream: int, reader: WorkerKey) -> None:
        """See RoleHandler."""
        self._offers.reader_opened(stream, reader)

    def on_reader_message(self, stream: int, message: handoff.ExchangeRequest) -> None:
        """See RoleHandler."""
        self._offers.on_message(self._clock(), stream, message)

    def on_reader_closed(self, stream: int) -> None:
        """See RoleHandler."""
        self._offers.reader_closed(stream)

    def on_offer_ended(self, key: AttemptKey, end: OfferEnd) -> None:
        """See RoleHandler. Nothing to do for a role that offers nothing."""

    def on_owner_opened(self, owner: PeerDescriptor) -> None:
        """See RoleHandler."""
        self._open_owners.add(owner.worker)

    def on_owner_message(self, owner: WorkerKey, message: handoff.ExchangeResponse) -> None:
        """See RoleHandler."""
        self._pulls.on_message(self._clock(), owner, message)

    def on_owner_lost(
        self, owner: WorkerKey, expected: list[AttemptKey], reason: Reason, detail: str
    ) -> None:
        """See RoleHandler."""
        self._open_owners.discard(owner)
        self._endpoints.pop(owner, None)
        failure = HandoffFailure(HandoffFault.PEER_LOST, detail, reason)
        self._pulls.owner_lost(self._clock(), owner, failure, expected)
