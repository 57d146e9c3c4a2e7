# SPDX-License-Identifier: Apache-2.0
"""The decode role: reserves blocks, pulls the prompt's KV into them or computes it, then generates.

An attempt goes through up to four phases::

    [FETCHING --prefix here or given up-->] RESERVED --all KV here and proven--> STARTING --every choice has blocks-->
    DECODING --last choice ends--> gone

    [FETCHING ...] COMPUTING --first tokens drawn--> STARTING ...   where no other worker computes the prompt

While it is reserved its blocks may be written to by reads in flight; whatever ends it there, blocks that a read may still
write to go into quarantine until that read is over.
"""

from collections.abc import Sequence

from twinpool import tracing
from twinpool._core import StepPlan
from twinpool.decode_worker import kept
from twinpool.decode_worker.attempt import Choice, DecodeAttempt
from twinpool.decode_worker.local import LocalPrefills
from twinpool.decode_worker.output import StepOutput, handoff_done, prefill_done
from twinpool.engine.runner import SequenceDraw, StepResult
from twinpool.transfer.base import PeerDescriptor
from twinpool.transfer.fence import HandoffFailure
from twinpool.transfer.session import PullSession, PullStats
from twinpool.transfer.ticket import PromptShape
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.resume_pb2 import PortableState
from twinpool.worker.commands import CommandError, DecodeWork, Reason
from twinpool.worker.first_tokens import first_tokens
from twinpool.worker.kept import means
from twinpool.worker.parts import WorkerParts
from twinpool.worker.quarantine import PullQuarantine
from twinpool.worker.role_base import RoleBase, ending


def make_handler(parts: WorkerParts) -> "DecodeRole":
    """The factory that ``twinpool.launch`` names."""
    return DecodeRole(parts)


class DecodeRole(RoleBase[DecodeAttempt, DecodeWork]):
    """See the module. Listens to its own pulls."""

    def __init__(self, parts: WorkerParts) -> None:
        super().__init__(parts)
        self._choices: dict[int, Choice] = {}
        self._starting: dict[DecodeAttempt, None] = {}
        self._quarantine = PullQuarantine(parts.blocks)
        self._local = LocalPrefills(parts.scheduler, parts.blocks, parts.limits)
        self._stuck = False

    @property
    def role(self) -> pb.Role.ValueType:
        """See RoleHandler."""
        return pb.ROLE_DECODE

    def _work_kind(self) -> type[DecodeWork]:
        return DecodeWork

    def _attempt_of(self, seq: int) -> DecodeAttempt | None:
        choice = self._choices.get(seq)
        return choice.attempt if choice is not None else self._local.attempt_of(seq)

    # --- reserve

    def _admit(self, session: int, work: DecodeWork, deadline: float | None) -> None:
        self._check_fit(work)
        attempt = DecodeAttempt(work, session, deadline, self._clock())
        if work.owner is not None:
            self._attempts.add(attempt)
            self._with_prefix(attempt, work, self._reserve)
            return
        self._local.take_on(attempt)
        self._attempts.add(attempt)
        self._tell_reserved(attempt)
        self._with_prefix(attempt, work, self._local.schedule)

    def _reserve(self, attempt: DecodeAttempt) -> None:
        work, prompt, owner = attempt.work, attempt.work.prompt, attempt.work.owner
        assert owner is not None
        self._local.check_reservation(prompt, work.draw.n)
        seq = self._scheduler.reserve(
            prompt.tokens,
            prompt.hashes,
            prompt.root,
            seats=work.draw.n,
            max_new_tokens=work.draw.remaining,
            priority=work.priority,
            preemptible=work.preemptible,
            arrival=attempt.arrived,
        )
        if seq is None:
            detail = (
                f"{self._blocks.available_blocks} of {self._blocks.num_blocks} blocks available,"
                f" {self._scheduler.running + self._scheduler.reserved} of {self._limits.max_num_seqs} sequences taken"
            )
            raise CommandError(pb.FAILURE_REASON_NO_CAPACITY, detail)
        cached = self._scheduler.cached_tokens(seq) // self._limits.block_tokens
        self._count_prefix(len(prompt), cached * self._limits.block_tokens)
        attempt.reserved, attempt.cached_blocks = seq, cached
        shape = PromptShape(len(prompt), self._limits.block_tokens, cached)
        local = self._scheduler.blocks(seq)[cached : shape.prompt_blocks]
        self._endpoints[owner] = work.owner_endpoint
        attempt.transfer_span = tracing.start(
            "worker.transfer", work.traceparent, attempt=work.key.attempt, cached_blocks=cached
        )
        attempt.pull = self._pulls.expect(self._clock(), work.key, owner, shape, local, self)
        if owner in self._open_owners:
            self._tell_reserved(attempt)

    def _check_fit(self, work: DecodeWork) -> None:
        """An attempt that no idle pool of this size holds would wait, or be preempted, for ever."""
        total = len(work.prompt) + work.draw.remaining
        if self._limits.blocks_of(total) > self._limits.num_blocks:
            detail = (
                f"prompt and max_tokens of {total} tokens do not fit into {self._limits.num_blocks} KV blocks"
            )
            raise CommandError(pb.FAILURE_REASON_INVALID, detail)
        if work.draw.n > self._limits.max_num_seqs:
            detail = f"n {work.draw.n} exceeds {self._limits.max_num_seqs} sequences"
            raise CommandError(pb.FAILURE_REASON_INVALID, detail)

    def _tell_reserved(self, attempt: DecodeAttempt) -> None:
        """Room is kept; and the owner, if there is one, can be reached and knows that we expect the attempt: only now may
        prefill start."""
        if not attempt.told_reserved:
            attempt.told_reserved = True
            reserved = pb.Reserved(id=attempt.key.message(), cached_blocks=attempt.cached_blocks)
            self._outbox.session(attempt.session, pb.SessionResponse(reserved=reserved))

    # --- pull

    def on_owner_opened(self, owner: PeerDescriptor) -> None:
        """See RoleHandler."""
        super().on_owner_opened(owner)
        for attempt in self._attempts:
            if attempt.work.owner == owner.worker and attempt.pull is not None:
                self._tell_reserved(attempt)

    def on_ready(self, session: PullSession, first_tokens: Sequence[pb.FirstToken]) -> None:
        """All KV of the prompt is here and proven."""
        attempt = self._attempts.get(session.attempt)
        if attempt is None or attempt.pull is not session:
            return
        self._guard(attempt, self._received, attempt, session, list(first_tokens))

    def on_failed(self, session: PullSession, failure: HandoffFailure) -> None:
        """The hand-off failed; the attempt's blocks are not to be used."""
        attempt = self._attempts.get(session.attempt)
        if attempt is not None and attempt.pull is session:
            self._fail(attempt, failure.reason, failure.detail)

    def on_drained(self, session: PullSession) -> None:
        """Nothing can be written into the blocks of a failed hand-off any more."""
        self._quarantine.drained(session)

    # --- start

    def _received(self, attempt: DecodeAttempt, session: PullSession, first: list[pb.FirstToken]) -> None:
        attempt.pull = None
        attempt.prefill_traceparent = session.traceparent
        attempt.transfer_span.link(session.traceparent)
        attempt.transfer_span.set(blocks=session.stats.blocks, bytes=session.stats.size_bytes)
        attempt.transfer_span.end()
        work = attempt.work
        vocab = self._limits.vocab_size
        if [token.index for token in first] != list(range(work.draw.n)) or any(
            token.token_id >= vocab for token in first
        ):
            self._fail(attempt, pb.FAILURE_REASON_FENCED, "the owner's first tokens do not fit the command")
            return
        self._outbox.session(attempt.session, handoff_done(attempt.key, session.stats))
        kept.note_first(attempt, first)
        attempt.unforked = [token for token in first if not token.finish]
        if attempt.unforked:
            self._starting[attempt] = None
            self._start(attempt)
            return
        # Every choice has ended with its first token. Starting publishes the prompt's blocks, which are worth
        # keeping; removing gives them back to the cache.
        assert attempt.reserved is not None
        self._scheduler.start(attempt.reserved, first[0].token_id)
        self._end(attempt, None, None, "")

    def _computed(self, attempt: DecodeAttempt, result: StepResult, index: int, whole: bool) -> None:
        """A chunk of a prompt is computed here; ``whole``: the last one."""
        self._tell_scored(attempt, result, index)
        if whole:
            self._drawn(attempt, result, index)

    def _drawn(self, attempt: DecodeAttempt, result: StepResult, index: int) -> None:
        """The prompt is computed here and every choice has its first token: told as a hand-off that moved nothing."""
        draw, seq, now = attempt.draw, attempt.computing, self._clock()
        assert draw is not None
        assert seq is not None
        first, cached = first_tokens(draw, result, index), self._scheduler.cached_tokens(seq)
        attempt.computed = self._local.end(attempt)
        kept.note_first(attempt, first)
        attempt.unforked = [token for token in first if not token.finish]
        self._count_prefix(len(attempt.work.prompt), cached)
        self._outbox.session(attempt.session, prefill_done(attempt, first, cached, now))
        self._outbox.session(attempt.session, handoff_done(attempt.key, PullStats()))
        if not attempt.unforked:
            self._end(attempt, None, None, "")
        elif attempt.work.draw.n > 1:
            self._starting[attempt] = None
            self._start(attempt)
        else:
            attempt.computed, attempt.unforked = None, []
            self._decode(attempt, 0, seq, draw)

    def _start(self, attempt: DecodeAttempt) -> bool:
        """Starts every choice, or none if there is no room for all. True if they decode."""
        reserved, computed, tokens = attempt.reserved, attempt.computed, attempt.unforked
        parent = reserved if reserved is not None else computed
        assert parent is not None
        params = attempt.work.draw.params
        for token in tokens if reserved is None else tokens[1:]:
            fork = self._scheduler.fork(parent, token.token_id, max_new_tokens=params.max_tokens)
            if fork is None:
                self._drop_forks(attempt)
                return False
            attempt.forks.append(fork)
        seqs = attempt.forks
        if reserved is not None:
            self._scheduler.start(reserved, tokens[0].token_id)
            seqs = [reserved, *seqs]
        else:
            self._scheduler.remove(parent)
        attempt.reserved, attempt.computed, attempt.unforked, attempt.forks = None, None, [], []
        del self._starting[attempt]
        for seq, token in zip(seqs, tokens, strict=True):
            work = attempt.work
            draw = work.draw.sequence(work.prompt, choice=token.index, outputs=(token.token_id,))
            self._decode(attempt, token.index, seq, draw)
        return True

    def _decode(self, attempt: DecodeAttempt, index: int, seq: int, draw: SequenceDraw) -> None:
        """The choice decodes from the next step on."""
        if attempt.decode_span is tracing.OFF:
            attempt.decode_span = tracing.start(
                "worker.decode",
                attempt.work.traceparent,
                links=[attempt.prefill_traceparent],
                attempt=attempt.key.attempt,
            )
        attempt.choices[index] = self._choices[seq] = Choice(attempt, index, seq, draw)

    def _drop_forks(self, attempt: DecodeAttempt) -> None:
        for seq in attempt.forks:
            self._scheduler.remove(seq)
        attempt.forks.clear()

    def _retry_starts(self) -> None:
        for attempt in list(self._starting):
            self._guard(attempt, self._start, attempt)
        stuck = list(self._starting)
        held = sum(attempt.work.draw.n for attempt in stuck if attempt.reserved is not None)
        if not stuck or self._scheduler.running or self._scheduler.reserved > held:
            self._stuck = False
        elif not self._stuck:
            # What waits may start in this turn.
            self._stuck = True
        else:
            # Nothing runs and nothing else is on its way: no block will ever come free by waiting.
            self._stuck = False
            detail = f"no room for {len(stuck[-1].unforked)} choices"
            self._fail(stuck[-1], pb.FAILURE_REASON_NO_CAPACITY, detail)

    # --- decode

    def draws(self, plan: StepPlan) -> list[SequenceDraw]:
        """See RoleHandler."""
        now, choices = self._clock(), self._choices
        return [
            choices[seq].draw if seq in choices else self._local.draw(seq, now) for seq in plan.seq.tolist()
        ]

    def on_step(self, plan: StepPlan, result: StepResult) -> None:
        """See RoleHandler."""
        output = StepOutput()
        failed: list[DecodeAttempt] = []
        seqs, sampled, tokens = plan.seq.tolist(), plan.sample.tolist(), result.tokens.tolist()
        for index, seq in enumerate(seqs):
            choice, computing = self._choices.get(seq), self._local.attempt_of(seq)
            if computing is not None:
                if index in result.failed:
                    failed.append(computing)
                else:
                    self._guard(computing, self._computed, computing, result, index, bool(sampled[index]))
                continue
            if not sampled[index] or choice is None:
                continue
            if index in result.failed:
                failed.append(choice.attempt)
                continue
            finish = choice.draw.finish()
            logprobs = result.logprobs[index] if result.logprobs is not None else None
            output.add(choice, tokens[index], finish, logprobs)
            if finish is not None:
                self._finish(choice)
        output.send(self._outbox)
        self._fail_unhealthy(failed)

    def _let_go(self, attempt: DecodeAttempt, seq: int) -> None:
        """Removes a sequence whose KV is that of the attempt's answer."""
        self._pins.note(attempt.work.session, attempt.key, seq)
        self._scheduler.remove(seq)

    def _finish(self, choice: Choice) -> None:
        attempt = choice.attempt
        self._let_go(attempt, choice.seq)
        del self._choices[choice.seq]
        kept.note_ended(attempt, choice.index, choice.draw.outputs)
        del attempt.choices[choice.index]
        if not attempt.choices:
            self._end(attempt, None, None, "")

    # --- time and ends

    def on_clock(self, now: float) -> None:
        """See RoleHandler."""
        super().on_clock(now)
        if self._starting:
            self._retry_starts()

    def next_wake(self, now: float) -> float | None:
        """See RoleHandler."""
        return now if self._starting and self._stuck else super().next_wake(now)

    def take_over(self, stream_id: str, key: bytes, digest: bytes, forget: bool) -> PortableState | None:
        """See RoleHandler."""
        for attempt in self._attempts:
            portable = attempt.work.portable
            if portable is None or not means(portable, stream_id, key):
                continue
            if not stream_id and not forget and portable.digest != digest:
                return PortableState(request=portable)
            self._fail(attempt, pb.FAILURE_REASON_TAKEN_OVER, "another router goes on with the answer")
        return super().take_over(stream_id, key, digest, forget)

    def _forget(self, attempt: DecodeAttempt) -> None:
        attempt.forgotten = True

    def _free(self, attempt: DecodeAttempt, reason: Reason | None, detail: str) -> None:
        kept.keep(attempt, self._kept)
        self._stop_fetch(attempt)
        for span in (attempt.transfer_span, attempt.decode_span):
            span.end(ending(reason))
        self._starting.pop(attempt, None)
        for choice in list(attempt.choices.values()):
            del self._choices[choice.seq]
            self._let_go(attempt, choice.seq)
        attempt.choices.clear()
        self._drop_forks(attempt)
        for own in (self._local.end(attempt), attempt.computed):
            if own is not None:
                self._let_go(attempt, own)
        attempt.computed = None
        if attempt.reserved is None:
            return
        seq, attempt.reserved = attempt.reserved, None
        pull, attempt.pull = attempt.pull, None
        if pull is not None:
            self._pulls.abort(self._clock(), attempt.key)
            # The scheduler lets go of what no read can write to.
            self._quarantine.hold(pull)
            self._scheduler.remove(seq)
        else:
            self._let_go(attempt, seq)
