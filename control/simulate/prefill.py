# SPDX-License-Identifier: Apache-2.0
"""A prefill worker: prompts in the order of their arrival, in chunks that share a token budget a step."""

from collections import deque

from twinpool.control.simulate.job import NO_BLOCKS, Attempt
from twinpool.control.simulate.model import WorkerModel
from twinpool.control.simulate.worker import Host, Load, Worker


class PrefillWorker(Worker):
    """Plans steps as the step scheduler does: prompts that run already go on, then waiting ones join while there are
    tokens left in the step and blocks left in the pool."""

    role = "prefill"

    def __init__(
        self, host: Host, name: str, incarnation: int, model: WorkerModel, num_blocks: int, block_tokens: int
    ) -> None:
        super().__init__(host, name, incarnation, model, num_blocks, block_tokens)
        self._waiting: deque[Attempt] = deque()
        self._running: list[Attempt] = []
        self._stepping: list[Attempt] = []
        self._finished = 0
        """Computed and not yet given back: their blocks are pinned for the reader."""
        self._waiting_tokens = 0
        self._step_took = 0.0
        self._step_ends = 0.0

    def add(self, attempt: Attempt) -> None:
        """A prompt to compute."""
        if attempt.dead or not self.alive:
            return
        self._waiting.append(attempt)
        self._waiting_tokens += attempt.job.request.input_length
        if not self._stepping:
            self._plan()

    def fetched(self) -> None:
        """A prefix that a prompt waits for is here."""
        if self.alive and not self._stepping:
            self._plan()

    def release(self, attempt: Attempt) -> None:
        """The reader has all blocks, or the attempt is over."""
        blocks, attempt.blocks = attempt.blocks, NO_BLOCKS
        if not self.alive:
            return
        if attempt in self._waiting:
            self._waiting.remove(attempt)
            self._waiting_tokens -= attempt.job.request.input_length
        elif attempt in self._running:
            self._running.remove(attempt)
            self._waiting_tokens -= attempt.job.request.input_length - attempt.computed
        elif len(blocks):
            self._finished -= 1
        self.cache.release(blocks)
        if not self._stepping:
            self._plan()

    def answers_at(self) -> float:
        """See Worker."""
        return max(self._step_ends, self.host.clock.now)

    def load(self) -> Load:
        """See Worker."""
        return Load(
            len(self._running),
            len(self._waiting),
            self._waiting_tokens,
            self.cache.available,
            self.step_seconds,
        )

    def _plan(self) -> None:
        budget = self.model.max_batched_tokens
        seconds = self.model.prefill_base
        step = self._stepping
        for attempt in self._running:
            if budget <= 0:
                break
            budget, seconds = self._chunk(attempt, budget, seconds)
        while budget > 0 and self._waiting and len(self._running) + self._finished < self.model.max_num_seqs:
            admitted = self._admit()
            if admitted is None:
                break
            budget, seconds = self._chunk(admitted, budget, seconds)
        if step:
            self._step_took = seconds * self.slowness
            self._step_ends = self.host.clock.now + self._step_took
            self.host.clock.at(self._step_ends, self._step_done)

    def _chunk(self, attempt: Attempt, budget: int, seconds: float) -> tuple[int, float]:
        left = attempt.job.request.input_length - attempt.computed
        query = min(left, self.model.max_chunk_tokens, budget)
        if query < left:
            # A chunk that ends with a full block can be offered whole.
            end = attempt.computed + query
            aligned = end - end % self.block_tokens
            query = aligned - attempt.computed if aligned > attempt.computed else query
        attempt.chunk = query
        self._stepping.append(attempt)
        return budget - query, seconds + self.model.prefill_seconds(query, attempt.computed)

    def _admit(self) -> Attempt | None:
        """Gives the first waiting prompt that is ready its blocks and a row."""
        now = self.host.clock.now
        chosen = next((attempt for attempt in self._waiting if attempt.ready_at <= now), None)
        if chosen is None:
            return None
        job = chosen.job
        taken = self.cache.take(job.hashes[: job.usable], self.blocks_for(job.request.input_length))
        if taken is None:
            return None
        chosen.blocks, prefix = taken
        chosen.computed = prefix * self.block_tokens
        chosen.published = prefix
        chosen.job.cached = prefix
        self._waiting.remove(chosen)
        self._waiting_tokens -= chosen.computed
        self._running.append(chosen)
        return chosen

    def _step_done(self) -> None:
        if not self.alive:
            return
        took = self._step_took
        self.step_seconds = took
        self.busy_seconds += took
        step, self._stepping = self._stepping, []
        tokens = sum(attempt.chunk for attempt in step)
        for attempt in step:
            if attempt.dead:
                continue
            attempt.compute_seconds += took * attempt.chunk / tokens
            attempt.computed += attempt.chunk
            attempt.job.computed += attempt.chunk
            self.computed_tokens += attempt.chunk
            self._waiting_tokens -= attempt.chunk
            full = min(attempt.computed // self.block_tokens, len(attempt.job.hashes))
            self.cache.publish(attempt.blocks, attempt.job.hashes, attempt.published, full)
            attempt.published = max(attempt.published, full)
            if attempt.computed == attempt.job.request.input_length:
                self._running.remove(attempt)
                self._finished += 1
        for attempt in step:
            if not attempt.dead:
                self.host.chunk_done(attempt)
        if not self._stepping:
            self._plan()
