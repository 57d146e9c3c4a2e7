# SPDX-License-Identifier: Apache-2.0
"""The prefill role: computes prompts, offers their KV while it computes, draws the first tokens.

An attempt goes through up to three phases::

    [FETCHING --prefix here or given up-->] COMPUTING --first tokens drawn--> OFFERED --reader has released--> gone

Blocks are offered as soon as they are full, those from the cache before anything is computed, so the reader pulls while
the rest is computed. The offer's pins outlive the sequence: they end by the reader's release, its death, the lease, or a
cancel.
"""

from twinpool import tracing
from twinpool._core import StepPlan
from twinpool.engine.runner import SequenceDraw, StepResult
from twinpool.logs import get_logger
from twinpool.prefill_worker.attempt import PrefillAttempt
from twinpool.transfer.base import AttemptKey
from twinpool.transfer.offer import OfferEnd
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker.commands import CommandError, PrefillWork, Reason
from twinpool.worker.first_tokens import first_draw, first_tokens
from twinpool.worker.load import duration
from twinpool.worker.parts import WorkerParts
from twinpool.worker.role_base import RoleBase, ending

log = get_logger(__name__)


def make_handler(parts: WorkerParts) -> "PrefillRole":
    """The factory that ``twinpool.launch`` names."""
    return PrefillRole(parts)


class PrefillRole(RoleBase[PrefillAttempt, PrefillWork]):
    """See the module."""

    def __init__(self, parts: WorkerParts) -> None:
        super().__init__(parts)
        self._worker = parts.worker
        self._computing: dict[int, PrefillAttempt] = {}
        self._step_began = 0.0

    @property
    def role(self) -> pb.Role.ValueType:
        """See RoleHandler."""
        return pb.ROLE_PREFILL

    def _work_kind(self) -> type[PrefillWork]:
        return PrefillWork

    def _attempt_of(self, seq: int) -> PrefillAttempt | None:
        return self._computing.get(seq)

    # --- admit

    def _admit(self, session: int, work: PrefillWork, deadline: float | None) -> None:
        if work.reader == self._worker:
            raise CommandError(pb.FAILURE_REASON_INVALID, f"reader {work.reader} is this worker itself")
        try:
            self._offers.begin(work.key, [work.reader])
        except ValueError as error:
            # It ended here a moment ago; its id is spent.
            raise CommandError(pb.FAILURE_REASON_DUPLICATE, str(error)) from None
        attempt = PrefillAttempt(
            work=work,
            session=session,
            deadline=deadline,
            draw=first_draw(work.draw, work.prompt),
            offered=work.reader_cached_blocks,
            arrived=self._clock(),
            span=tracing.start(
                "worker.prefill", work.traceparent, attempt=work.key.attempt, prompt_tokens=len(work.prompt)
            ),
        )
        self._attempts.add(attempt)
        self._with_prefix(attempt, work, self._schedule)

    def _schedule(self, attempt: PrefillAttempt) -> None:
        """A prompt that waited for its prefix keeps its place in the queue."""
        prompt = attempt.work.prompt
        attempt.seq = self._scheduler.add(
            prompt.tokens,
            prompt.hashes,
            prompt.root,
            max_new_tokens=0,
            priority=attempt.work.priority,
            preemptible=attempt.work.preemptible,
            arrival=attempt.arrived,
            use_cache=attempt.work.draw.use_cache,
        )
        self._computing[attempt.seq] = attempt

    # --- compute

    def draws(self, plan: StepPlan) -> list[SequenceDraw]:
        """See RoleHandler."""
        now = self._step_began = self._clock()
        draws = []
        for seq in plan.seq.tolist():
            attempt = self._computing[seq]
            if attempt.started is None:
                attempt.started = now
                # What the cache holds is read while the rest is computed.
                self._guard(attempt, self._offer_chunk, attempt, seq)
            draws.append(attempt.draw)
        return draws

    def on_step(self, plan: StepPlan, result: StepResult) -> None:
        """See RoleHandler."""
        failed: list[PrefillAttempt] = []
        seqs, sampled, starts = plan.seq.tolist(), plan.sample.tolist(), plan.q_start.tolist()
        # A step's time is shared by tokens: what a prompt costs must not hang on what ran beside it.
        token_seconds = (self._clock() - self._step_began) / max(1, starts[-1])
        for index, seq in enumerate(seqs):
            attempt = self._computing.get(seq)
            if attempt is None:
                continue
            attempt.compute_seconds += token_seconds * (starts[index + 1] - starts[index])
            if index in result.failed:
                failed.append(attempt)
            else:
                self._guard(attempt, self._computed, attempt, result, index, bool(sampled[index]))
        self._fail_unhealthy(failed)

    def _computed(self, attempt: PrefillAttempt, result: StepResult, index: int, whole: bool) -> None:
        """A chunk of the prompt is computed; ``whole``: the last one."""
        self._tell_scored(attempt, result, index)
        if whole:
            self._complete(attempt, result, index)
        elif attempt.seq is not None:
            self._offer_chunk(attempt, attempt.seq)

    def _offer_chunk(self, attempt: PrefillAttempt, seq: int) -> None:
        """Announces the blocks that have become full. After a preemption there are none until it has caught up."""
        size = self._limits.block_tokens
        full = self._scheduler.computed_tokens(seq) // size
        if full > attempt.offered:
            blocks = self._scheduler.blocks(seq)[attempt.offered : full]
            first, attempt.offered = attempt.offered, full
            self._offers.announce(self._clock(), attempt.key, first, blocks, full * size)

    def _complete(self, attempt: PrefillAttempt, result: StepResult, index: int) -> None:
        """The prompt is computed and every choice has its first token."""
        seq = attempt.seq
        assert seq is not None
        now, length = self._clock(), len(attempt.work.prompt)
        drawn = first_tokens(attempt.draw, result, index)
        blocks = self._scheduler.blocks(seq)[attempt.offered : self._limits.blocks_of(length)]
        # The pins are taken here, so the sequence can go.
        self._offers.complete(
            now, attempt.key, attempt.offered, blocks, length, drawn, attempt.span.traceparent
        )
        cached = self._scheduler.cached_tokens(seq)
        self._count_prefix(length, cached)
        attempt.done = True
        attempt.span.set(cached_tokens=cached)
        attempt.span.end()
        self._release(attempt)
        started = attempt.arrived if attempt.started is None else attempt.started
        done = pb.PrefillDone(
            id=attempt.key.message(),
            first_tokens=drawn,
            cached_tokens=cached,
            queue_time=duration(started - attempt.arrived),
            compute_time=duration(attempt.compute_seconds),
            fetched=attempt.fetched,
        )
        self._outbox.session(attempt.session, pb.SessionResponse(prefill_done=done))

    # --- ends

    def on_offer_ended(self, key: AttemptKey, end: OfferEnd) -> None:
        """See RoleHandler."""
        attempt = self._attempts.get(key)
        if attempt is None:
            return
        if attempt.done:
            if end is not OfferEnd.RELEASED:
                log.info("offer_ended_unread", attempt=str(key), end=str(end))
            self._end(attempt, None, None, "")
        else:
            self._fail(attempt, pb.FAILURE_REASON_PEER_LOST, f"the reader let go of the attempt: {end}")

    def _free(self, attempt: PrefillAttempt, reason: Reason | None, detail: str) -> None:
        self._stop_fetch(attempt)
        attempt.span.end(ending(reason))
        self._release(attempt)
        if reason is not None:
            self._offers.fail(attempt.key, reason, detail)

    def _release(self, attempt: PrefillAttempt) -> None:
        if attempt.seq is not None:
            seq, attempt.seq = attempt.seq, None
            del self._computing[seq]
            self._pins.note(attempt.work.session, attempt.key, seq)
            self._scheduler.remove(seq)
