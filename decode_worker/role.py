# SPDX-License-Identifier: Apache-2.0
"""The decode role: reserves blocks, pulls the prompt's KV into them, then generates.

An attempt goes through up to four phases::

    [FETCHING --prefix here or given up-->] RESERVED --all KV here and proven--> STARTING --every choice has blocks-->
    DECODING --last choice ends--> gone

While it is reserved its blocks may be written to by reads in flight; whatever ends it there, blocks that a read may still
write to go into quarantine until that read is over.
"""

from collections.abc import Sequence

from twinpool._core import StepPlan
from twinpool.decode_worker.attempt import Choice, DecodeAttempt
from twinpool.decode_worker.output import StepOutput, handoff_done
from twinpool.engine.runner import SequenceDraw, StepResult
from twinpool.ids import WorkerKey
from twinpool.transfer.base import AttemptKey, PeerDescriptor
from twinpool.transfer.fence import HandoffFailure
from twinpool.transfer.session import PullSession
from twinpool.transfer.ticket import PromptShape
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker.commands import CommandError, DecodeWork, Reason
from twinpool.worker.parts import WorkerParts
from twinpool.worker.quarantine import PullQuarantine
from twinpool.worker.role_base import RoleBase


def make_handler(parts: WorkerParts) -> "DecodeRole":
    """The factory that ``twinpool.launch`` names."""
    return DecodeRole(parts)


class DecodeRole(RoleBase[DecodeAttempt, DecodeWork]):
    """See the module. Listens to its own pulls."""

    def __init__(self, parts: WorkerParts) -> None:
        super().__init__(parts)
        self._open_owners: set[WorkerKey] = set()
        self._choices: dict[int, Choice] = {}
        self._starting: dict[DecodeAttempt, None] = {}
        self._quarantine = PullQuarantine(parts.blocks)

    @property
    def role(self) -> pb.Role.ValueType:
        """See RoleHandler."""
        return pb.ROLE_DECODE

    def _work_kind(self) -> type[DecodeWork]:
        return DecodeWork

    def _attempt_of(self, seq: int) -> DecodeAttempt | None:
        choice = self._choices.get(seq)
        return choice.attempt if choice is not None else None

    # --- reserve

    def _admit(self, session: int, work: DecodeWork, deadline: float | None) -> None:
        self._check_fit(work)
        attempt = DecodeAttempt(work, session, deadline)
        self._attempts.add(attempt)
        self._with_prefix(attempt, work, self._reserve)

    def _reserve(self, attempt: DecodeAttempt) -> None:
        work, prompt = attempt.work, attempt.work.prompt
        seq = self._scheduler.reserve(
            prompt.tokens,
            prompt.hashes,
            prompt.root,
            max_new_tokens=work.draw.params.max_tokens,
            priority=work.priority,
            arrival=self._clock(),
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
        self._endpoints[work.owner] = work.owner_endpoint
        attempt.pull = self._pulls.expect(self._clock(), work.key, work.owner, shape, local, self)
        if work.owner in self._open_owners:
            self._tell_reserved(attempt)

    def _check_fit(self, work: DecodeWork) -> None:
        """An attempt that no idle pool of this size holds would wait, or be preempted, for ever."""
        total = len(work.prompt) + work.draw.params.max_tokens
        if self._limits.blocks_of(total) > self._limits.num_blocks:
            detail = (
                f"prompt and max_tokens of {total} tokens do not fit into {self._limits.num_blocks} KV blocks"
            )
            raise CommandError(pb.FAILURE_REASON_INVALID, detail)
        if work.draw.n > self._limits.max_num_seqs:
            detail = f"n {work.draw.n} exceeds {self._limits.max_num_seqs} sequences"
            raise CommandError(pb.FAILURE_REASON_INVALID, detail)

    def _tell_reserved(self, attempt: DecodeAttempt) -> None:
        """The owner can be reached and knows that we expect the attempt: only now may prefill start."""
        if not attempt.told_reserved:
            attempt.told_reserved = True
            reserved = pb.Reserved(id=attempt.key.message(), cached_blocks=attempt.cached_blocks)
            self._outbox.session(attempt.session, pb.SessionResponse(reserved=reserved))

    # --- pull

    def on_owner_opened(self, owner: PeerDescriptor) -> None:
        """See RoleHandler."""
        self._open_owners.add(owner.worker)
        for attempt in self._attempts:
            if attempt.work.owner == owner.worker and attempt.pull is not None:
                self._tell_reserved(attempt)

    def on_owner_lost(
        self, owner: WorkerKey, expected: list[AttemptKey], reason: Reason, detail: str
    ) -> None:
        """See RoleHandler."""
        self._open_owners.discard(owner)
        super().on_owner_lost(owner, expected, reason, detail)

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
        work = attempt.work
        vocab = self._limits.vocab_size
        if [token.index for token in first] != list(range(work.draw.n)) or any(
            token.token_id >= vocab for token in first
        ):
            self._fail(attempt, pb.FAILURE_REASON_FENCED, "the owner's first tokens do not fit the command")
            return
        self._outbox.session(attempt.session, handoff_done(attempt.key, session.stats))
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

    def _start(self, attempt: DecodeAttempt) -> bool:
        """Starts every choice, or none if there is no room for all. True if they decode."""
        reserved = attempt.reserved
        assert reserved is not None
        params = attempt.work.draw.params
        head, *others = attempt.unforked
        for token in others:
            fork = self._scheduler.fork(reserved, token.token_id, max_new_tokens=params.max_tokens)
            if fork is None:
                self._drop_forks(attempt)
                return False
            attempt.forks.append(fork)
        self._scheduler.start(reserved, head.token_id)
        seqs = (reserved, *attempt.forks)
        attempt.reserved, attempt.unforked, attempt.forks = None, [], []
        del self._starting[attempt]
        for seq, token in zip(seqs, (head, *others), strict=True):
            prompt = attempt.work.prompt.tokens
            draw = SequenceDraw(params, prompt, choice=token.index, outputs=(token.token_id,))
            choice = Choice(attempt, token.index, seq, draw)
            attempt.choices[token.index] = self._choices[seq] = choice
        return True

    def _drop_forks(self, attempt: DecodeAttempt) -> None:
        for seq in attempt.forks:
            self._scheduler.remove(seq)
        attempt.forks.clear()

    def _retry_starts(self) -> None:
        for attempt in list(self._starting):
            self._guard(attempt, self._start, attempt)
        stuck = list(self._starting)
        if stuck and not self._scheduler.running and self._scheduler.reserved <= len(stuck):
            # Nothing runs and nothing else is on its way: no block will ever come free by waiting.
            detail = f"no room for {len(stuck[-1].unforked)} choices"
            self._fail(stuck[-1], pb.FAILURE_REASON_NO_CAPACITY, detail)

    # --- decode

    def draws(self, plan: StepPlan) -> list[SequenceDraw]:
        """See RoleHandler."""
        return [self._choices[seq].draw for seq in plan.seq.tolist()]

    def on_step(self, plan: StepPlan, result: StepResult) -> None:
        """See RoleHandler."""
        output = StepOutput()
        failed: list[DecodeAttempt] = []
        seqs, sampled, tokens = plan.seq.tolist(), plan.sample.tolist(), result.tokens.tolist()
        for index, seq in enumerate(seqs):
            choice = self._choices.get(seq)
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

    def _finish(self, choice: Choice) -> None:
        self._scheduler.remove(choice.seq)
        del self._choices[choice.seq]
        attempt = choice.attempt
        del attempt.choices[choice.index]
        if not attempt.choices:
            self._end(attempt, None, None, "")

    # --- time and ends

    def on_clock(self, now: float) -> None:
        """See RoleHandler."""
        super().on_clock(now)
        if self._starting:
            self._retry_starts()

    def _free(self, attempt: DecodeAttempt, reason: Reason | None, detail: str) -> None:
        self._stop_fetch(attempt)
        self._starting.pop(attempt, None)
        for choice in list(attempt.choices.values()):
            del self._choices[choice.seq]
            self._scheduler.remove(choice.seq)
        attempt.choices.clear()
        self._drop_forks(attempt)
        if attempt.reserved is None:
            return
        seq, attempt.reserved = attempt.reserved, None
        pull, attempt.pull = attempt.pull, None
        if pull is not None:
            self._pulls.abort(self._clock(), attempt.key)
            # The scheduler lets go of what no read can write to.
            self._quarantine.hold(pull)
        self._scheduler.remove(seq)
