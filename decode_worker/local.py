# SPDX-License-Identifier: Apache-2.0
"""Prompts that a decode worker computes itself, between the decodes of its steps.

Such a prompt is taken on only where it can start at once, as with a reservation: until its first step, what it will need
is kept from those that come after it.
"""

from twinpool._core import BlockManager, StepScheduler
from twinpool.decode_worker.attempt import DecodeAttempt
from twinpool.engine.sampling import SequenceDraw
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker.commands import CommandError, Limits, Prompt
from twinpool.worker.first_tokens import first_draw


class LocalPrefills:
    """Owned by the step thread. An attempt is *due* until its first step and *computing* until its first token."""

    def __init__(self, scheduler: StepScheduler, blocks: BlockManager, limits: Limits) -> None:
        self._scheduler = scheduler
        self._blocks = blocks
        self._limits = limits
        self._due: dict[DecodeAttempt, int] = {}  # blocks that it needs
        self._computing: dict[int, DecodeAttempt] = {}

    def attempt_of(self, seq: int) -> DecodeAttempt | None:
        """Whose prompt this sequence computes."""
        return self._computing.get(seq)

    def take_on(self, attempt: DecodeAttempt) -> None:
        """Keeps room for it and says in the attempt how much of it is cached. Raises CommandError (NO_CAPACITY)."""
        work, prompt = attempt.work, attempt.work.prompt
        total = self._limits.blocks_of(len(prompt)) + 1
        if not work.preemptible and work.draw.n == 1:
            # The scheduler gives it all its blocks at once.
            total = max(total, self._limits.blocks_of(len(prompt) + work.draw.remaining - 1))
        # The last token is computed whatever is cached.
        usable = (len(prompt) - 1) // self._limits.block_tokens if work.draw.use_cache else 0
        cached, needed = self._check_room(prompt, usable, total, work.draw.n)
        attempt.cached_blocks = cached
        self._due[attempt] = needed

    def check_reservation(self, prompt: Prompt, choices: int) -> None:
        """Whether blocks may be reserved for a prompt that arrives from elsewhere: not those that one here is due to get.
        Raises CommandError (NO_CAPACITY)."""
        if self._due:
            total = self._limits.blocks_of(len(prompt)) + 1
            self._check_room(prompt, len(prompt.hashes), total, choices)

    def schedule(self, attempt: DecodeAttempt) -> None:
        """Its first step may come. Several choices start as forks of a sequence that only computes the prompt."""
        work = attempt.work
        attempt.draw = first_draw(work.draw, work.prompt)
        attempt.computing = self._scheduler.add(
            work.prompt.tokens,
            work.prompt.hashes,
            work.prompt.root,
            max_new_tokens=work.draw.remaining if work.draw.n == 1 else 0,
            priority=work.priority,
            preemptible=work.preemptible,
            arrival=attempt.arrived,
            use_cache=work.draw.use_cache,
        )
        self._computing[attempt.computing] = attempt

    def draw(self, seq: int, now: float) -> SequenceDraw:
        """How to draw for a sequence of the plan: it has its blocks now."""
        attempt = self._computing[seq]
        self._due.pop(attempt, None)
        if attempt.started is None:
            attempt.started = now
        assert attempt.draw is not None
        return attempt.draw

    def end(self, attempt: DecodeAttempt) -> int | None:
        """The prompt is computed, or not wanted any more: its sequence, if it has one, is the caller's."""
        self._due.pop(attempt, None)
        seq, attempt.computing = attempt.computing, None
        if seq is not None:
            del self._computing[seq]
        return seq

    def _check_room(self, prompt: Prompt, usable: int, total: int, choices: int) -> tuple[int, int]:
        """Blocks of the prompt that are cached here, at most ``usable``, and those of ``total`` that it needs besides."""
        scheduler, blocks = self._scheduler, self._blocks
        # What of the prefix nobody holds is available now but not to this prompt.
        held = blocks.acquire_prefix(prompt.hashes[:usable])
        available = blocks.available_blocks
        blocks.release(held)
        needed = total - len(held)
        due = sum(self._due.values())
        # One that is due has no seat yet, one that computes that of its first choice alone.
        seats = scheduler.running + scheduler.reserved + sum(a.work.draw.n for a in self._due)
        seats += sum(a.work.draw.n - 1 for a in self._computing.values() if a not in self._due)
        waiting = sum(attempt.computing is not None for attempt in self._due)
        # Each sequence that runs may want a block soon, and one that has lost its blocks gets them back first.
        if (
            needed + due + scheduler.running > available
            or seats + choices > self._limits.max_num_seqs
            or scheduler.waiting > waiting
        ):
            detail = (
                f"{needed} blocks and a sequence are needed; of {available} blocks {due} are promised,"
                f" {seats} of {self._limits.max_num_seqs} sequences are taken"
            )
            raise CommandError(pb.FAILURE_REASON_NO_CAPACITY, detail)
        return len(held), needed
