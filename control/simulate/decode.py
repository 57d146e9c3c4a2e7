# SPDX-License-Identifier: Apache-2.0
"""A decode worker: continuous batching, with steps computed in closed form as long as the batch stays the same.

A step of B sequences that hold K tokens of KV takes ``a + b B + c K`` seconds, and each step adds B to K. So n steps take
``n (a + b B + c K) + c B n (n - 1) / 2``, and only what changes the batch is an event: a sequence that ends, one that
needs a block, one that joins. Prompts that are computed here (local prefill, or again after a preemption) run in chunks beside
the decodes, one step at a time.
"""

import heapq
import math
from collections import deque

import numpy as np

from twinpool.control.replay.blocks import own_hashes
from twinpool.control.simulate.cache import concatenate
from twinpool.control.simulate.job import NO_BLOCKS, Attempt
from twinpool.control.simulate.model import WorkerModel
from twinpool.control.simulate.worker import Host, Load, Worker

_ENDS, _GROWS = 0, 1


class DecodeWorker(Worker):
    """Reserves blocks, takes hand-offs, decodes."""

    role = "decode"

    def __init__(
        self, host: Host, name: str, incarnation: int, model: WorkerModel, num_blocks: int, block_tokens: int
    ) -> None:
        super().__init__(host, name, incarnation, model, num_blocks, block_tokens)
        self._reserved: set[Attempt] = set()
        self._running: dict[Attempt, None] = {}
        self._joining: list[Attempt] = []
        self._local: deque[Attempt] = deque()
        self._recompute: deque[Attempt] = deque()
        self._steps = 0  # completed
        self._kv_tokens = 0  # read by the next step
        self._marks: list[tuple[int, int, int, Attempt, int]] = []
        self._mark_number = 0
        self._segment_at = 0.0  # when the running steps began
        self._event = 0  # number of the planned event; older ones are void
        self._planned = 0  # steps until it
        self._turning = False  # between two steps: whoever joins is taken in at the end of it

    # --- reservations ---------------------------------------------------------------------

    def reserve(self, attempt: Attempt) -> bool:
        """Blocks for the prompt, those cached here included, and one for the output; False if there is no room."""
        if not self.alive or self._sequences() >= self.model.max_num_seqs:
            return False
        job = attempt.job
        taken = self.cache.take(job.hashes, self.blocks_for(job.request.input_length) + 1)
        if taken is None:
            return False
        attempt.decode_blocks, attempt.reserved_cached = taken
        attempt.offered = attempt.reserved_cached
        job.decode_cached = attempt.reserved_cached
        self._reserved.add(attempt)
        return True

    def start(self, attempt: Attempt) -> None:
        """The prompt's KV and the first token are here."""
        job = attempt.job
        self._reserved.discard(attempt)
        self.cache.publish(attempt.decode_blocks, job.hashes, attempt.reserved_cached, len(job.hashes))
        if job.request.output_length == 1:
            self._end(attempt)
            return
        self._join(attempt)

    def fetched(self, attempt: Attempt, blocks: int) -> None:
        """The first blocks of a prompt that is computed here were pulled."""
        self.cache.publish(attempt.decode_blocks, attempt.job.hashes, attempt.reserved_cached, blocks)
        attempt.published = blocks

    def compute(self, attempt: Attempt) -> None:
        """The prompt is computed here."""
        attempt.published = max(attempt.published, attempt.reserved_cached)
        attempt.computed = min(attempt.published, attempt.job.usable) * self.block_tokens
        self._local.append(attempt)
        self._interrupt()

    def drop(self, attempt: Attempt) -> None:
        """The attempt is over, whatever its state."""
        if not self.alive:
            return
        self._settle()
        self._reserved.discard(attempt)
        if attempt in self._running:
            del self._running[attempt]
            self._kv_tokens -= self._context(attempt)
        for queue in (self._joining, self._local, self._recompute):
            if attempt in queue:
                queue.remove(attempt)
        self._give_back(attempt)
        self._go_on()

    def answers_at(self) -> float:
        """See Worker. Steps are counted in closed form, so half a step on average."""
        return self.host.clock.now + (self.step_seconds / 2.0 if self._planned else 0.0)

    def load(self) -> Load:
        """See Worker."""
        return Load(
            len(self._running) + len(self._joining),
            len(self._reserved) + len(self._recompute),
            sum(attempt.job.request.input_length - attempt.computed for attempt in self._local),
            self.cache.available,
            self.step_seconds,
        )

    def _sequences(self) -> int:
        return len(self._reserved) + len(self._running) + len(self._joining) + len(self._recompute)

    # --- the running batch ----------------------------------------------------------------

    def _join(self, attempt: Attempt) -> None:
        self._joining.append(attempt)
        self._interrupt()

    def _interrupt(self) -> None:
        """Something wants to take part from the next step on: ends the planned steps after the one that runs now."""
        if self._turning:
            return
        if not self._planned:
            self._go_on()
        elif self._planned > 1:
            done = self._steps_by(self.host.clock.now)
            self._plan_event(max(1, min(self._planned, done)))

    def _go_on(self) -> None:
        """Between two steps: takes in who waits and plans until something changes."""
        now = self.host.clock.now
        self._readmit()
        for attempt in self._joining:
            self._enter(attempt)
        self._joining.clear()
        self._segment_at = now
        self._planned = 0
        self._event += 1
        if self._local:
            self._plan_event(1)
        elif self._running:
            self._plan_event(self._marks[0][0] - self._steps)

    def _enter(self, attempt: Attempt) -> None:
        """A sequence joins the batch: marks where it ends and where it needs its next block."""
        attempt.first_step = self._steps
        self._running[attempt] = None
        self._kv_tokens += self._context(attempt)
        request = attempt.job.request
        self._mark(self._steps + request.output_length - attempt.tokens, _ENDS, attempt)
        room = len(attempt.decode_blocks) * self.block_tokens - (request.input_length + attempt.tokens - 1)
        self._mark_growth(attempt, self._steps + room)

    def _mark_growth(self, attempt: Attempt, step: int) -> None:
        if step < attempt.first_step + attempt.job.request.output_length - attempt.tokens:
            self._mark(step, _GROWS, attempt)

    def _mark(self, step: int, kind: int, attempt: Attempt) -> None:
        self._mark_number += 1
        heapq.heappush(self._marks, (step, kind, self._mark_number, attempt, attempt.first_step))

    def _context(self, attempt: Attempt) -> int:
        """Tokens of KV that its next step reads, the new one included."""
        return attempt.job.request.input_length + attempt.tokens + self._steps - attempt.first_step

    # --- time -----------------------------------------------------------------------------

    def _seconds(self, steps: int) -> float:
        model, batch = self.model, len(self._running)
        first = model.step_base + model.step_sequence * batch + model.step_token * self._kv_tokens
        seconds = steps * first + model.step_token * batch * steps * (steps - 1) / 2.0
        if self._local:
            # A chunk beside the decodes; the plan is for one step.
            head = self._local[0]
            seconds += model.prefill_seconds(self._local_chunk(head), head.computed)
        return seconds * self.slowness

    def _steps_by(self, time: float) -> int:
        """Steps of the running plan that have begun by ``time``: the one that runs is the last of them."""
        model, batch = self.model, len(self._running)
        elapsed = (time - self._segment_at) / self.slowness
        first = model.step_base + model.step_sequence * batch + model.step_token * self._kv_tokens
        slope = model.step_token * batch / 2.0
        linear = first - slope
        root = math.sqrt(linear * linear + 4.0 * slope * elapsed) if slope else 0.0
        count = 2.0 * elapsed / (linear + root) if slope else elapsed / first
        return max(1, math.ceil(count - 1e-9))

    def _plan_event(self, steps: int) -> None:
        self._planned = steps
        self._event += 1
        self.host.clock.at(self._segment_at + self._seconds(steps), self._due, self._event)

    def _due(self, event: int) -> None:
        if not self.alive or event != self._event:
            return
        self._turning = True
        self._advance(self._planned)
        self._planned = 0
        self._handle_marks()
        self._turning = False
        self._go_on()

    def _settle(self) -> None:
        """Counts the steps that have ended by now, so that the batch may change between steps."""
        if not self._planned:
            return
        whole = self._steps_by(self.host.clock.now) - 1
        if 0 < whole < self._planned:
            self._advance(whole)
        self._planned = 0

    def _advance(self, steps: int) -> None:
        seconds, batch = self._seconds(steps), len(self._running)
        self.busy_seconds += seconds
        self.step_seconds = seconds / steps
        self._steps += steps
        self._kv_tokens += steps * batch
        if batch:
            self.host.step(seconds / steps, steps * batch)
        if self._local:
            self._local_done()

    def _handle_marks(self) -> None:
        marks = self._marks
        while marks and marks[0][0] <= self._steps:
            _, kind, _, attempt, first_step = heapq.heappop(marks)
            # A sequence that left and came back has newer marks.
            if attempt not in self._running or attempt.first_step != first_step:
                continue
            if kind == _ENDS:
                self._kv_tokens -= self._context(attempt)
                del self._running[attempt]
                self._end(attempt)
            elif not self._grow(attempt):
                self._preempt(self._victim())
                if attempt in self._running:
                    self._mark(self._steps, _GROWS, attempt)

    def _end(self, attempt: Attempt) -> None:
        """The answer is complete: the blocks of its output stay cached, too."""
        request = attempt.job.request
        full = min(
            (request.input_length + request.output_length - 1) // self.block_tokens,
            len(attempt.decode_blocks),
        )
        prompt = len(attempt.job.hashes)
        if full > prompt and not attempt.dead:
            own = own_hashes(request.id, prompt, full - prompt)
            self.cache.publish(attempt.decode_blocks, np.concatenate([attempt.job.hashes, own]), prompt, full)
        self._give_back(attempt)
        self.host.decoded(attempt)

    def _give_back(self, attempt: Attempt) -> None:
        blocks, attempt.decode_blocks = attempt.decode_blocks, NO_BLOCKS
        self.cache.release(blocks)

    # --- blocks run out -------------------------------------------------------------------

    def _grow(self, attempt: Attempt) -> bool:
        block = self.cache.grow()
        if block is None:
            return False
        attempt.decode_blocks = concatenate(attempt.decode_blocks, block)
        self._mark_growth(attempt, self._steps + self.block_tokens)
        return True

    def _victim(self) -> Attempt:
        """The one with the least work to lose; among equals the latest."""
        return min(self._running, key=lambda attempt: (self._context(attempt), -attempt.job.timing.arrival))

    def _preempt(self, attempt: Attempt) -> None:
        self._kv_tokens -= self._context(attempt)
        attempt.tokens += self._steps - attempt.first_step
        del self._running[attempt]
        self._give_back(attempt)
        self._recompute.append(attempt)

    def _readmit(self) -> None:
        """Preempted sequences get their blocks back when there are enough, and are computed again."""
        while self._recompute:
            attempt = self._recompute[0]
            hashes = attempt.job.hashes[: attempt.job.usable]
            total = self.blocks_for(attempt.job.request.input_length + attempt.tokens)
            # Each sequence that runs may want a block soon; without that much left, this would end in preemption again.
            spare = len(self._running) + len(self._joining)
            if total - self.cache.lookup(hashes) + spare > self.cache.available:
                return
            taken = self.cache.take(hashes, total)
            if taken is None:
                return
            attempt.decode_blocks, attempt.published = taken
            attempt.computed = attempt.published * self.block_tokens
            self._recompute.popleft()
            self._local.append(attempt)

    # --- prompts computed here ------------------------------------------------------------

    def _local_left(self, attempt: Attempt) -> int:
        again = attempt.tokens - 1 if attempt.first_step >= 0 else 0
        return attempt.job.request.input_length + again - attempt.computed

    def _local_chunk(self, attempt: Attempt) -> int:
        budget = max(1, self.model.max_batched_tokens - len(self._running))
        return min(self._local_left(attempt), self.model.max_chunk_tokens, budget)

    def _local_done(self) -> None:
        attempt = self._local[0]
        chunk = self._local_chunk(attempt)
        attempt.computed += chunk
        attempt.job.computed += chunk
        self.computed_tokens += chunk
        full = min(attempt.computed // self.block_tokens, len(attempt.job.hashes))
        self.cache.publish(attempt.decode_blocks, attempt.job.hashes, attempt.published, full)
        attempt.published = max(full, attempt.published)
        if self._local_left(attempt):
            return
        self._local.popleft()
        if attempt.first_step < 0:
            self._reserved.discard(attempt)
            self.host.chunk_done(attempt)
            if attempt.job.request.output_length == 1:
                self._end(attempt)
                return
        self._joining.append(attempt)
