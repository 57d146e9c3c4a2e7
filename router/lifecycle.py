# SPDX-License-Identifier: Apache-2.0
"""A request from arrival to end, as one readable file.

    submit -> placed -> decode reserves -> prefill -> first token -> hand-off -> decode -> finish

Each hop is one event of the core's state machine, one histogram and one entry of the answer's timings (``timing``). Workers' messages come
as calls to ``Attempt`` and are applied at once; the client's own coroutine (``Lifecycle.run``) only takes what is ready and writes it, so
a slow client slows nobody else.

The two legs of an attempt share one fate. The first failure is told to the state machine, which decides whether the request is placed
anew; an answer goes on behind the tokens that its client has (``resume``). The next attempt starts when both workers have acknowledged
that they hold nothing, or the wait for that ran out. A decode worker that computes the prompt itself says what both would have said, on
the one leg that there is then.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from twinpool import metrics
from twinpool._core import Action
from twinpool.errors import TwinpoolError, as_twinpool_error
from twinpool.ids import WorkerKey
from twinpool.router.dispatch import Leg, wait_ended
from twinpool.router.fields import decode_command, prefill_command, worker_id
from twinpool.router.finish import finished_event, started_event
from twinpool.router.heard import RESERVATION, Early, fault_in_order, fault_in_prefill
from twinpool.router.hops import Hops, NewAnswer, Write
from twinpool.router.outcome import Outcome, core_error, found, leaving, lost, said_by
from twinpool.router.patience import patient
from twinpool.router.prompt_scores import PromptScores
from twinpool.router.request import Prepared, passed
from twinpool.router.resume import continuation
from twinpool.router.stream import TOKENS_A_REPORT, Answer
from twinpool.router.timing import DECODE, HANDOFF, PREFILL, QUEUE, RESERVE, Hop, HopClock
from twinpool.router.waker import Waker
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import worker_pb2 as worker


class Attempt:
    """One placement: its two legs, and what they have said. Implements ``dispatch.LegEvents``."""

    def __init__(self, request: "Lifecycle", action: Action) -> None:
        self.number = action.attempt
        self.prefill, self.decode = WorkerKey(*action.prefill), WorkerKey(*action.decode)
        self.local = action.local
        self.source = request.hops.prefixes.placed(action)
        self.prepared = request.prepared
        self.prediction = request.hops.locality.placed(self.prepared, action)
        self.answer: Answer = request.answer()
        request.scores.begin(self.prepared)
        self.over = False
        self.reserved: worker.Reserved | None = None
        self.prefill_done: worker.PrefillDone | None = None
        self.handoff: pb.HandoffStats | None = None
        self._request = request
        self._id = worker.AttemptId(request_id=request.prepared.request_id, attempt=action.attempt)
        self._legs: dict[WorkerKey, Leg] = {}
        self._early = Early(request.hops.limits.max_buffered_tokens)
        self._stop_timer: Callable[[], None] = lambda: None

    # --- the path -------------------------------------------------------------------------

    def start(self) -> None:
        """Placed: the decode worker is asked to reserve."""
        owner = self._request.hops.fleet.record(self.prefill)
        if owner is None:
            self._lose(self.prefill, "it is gone")
            return
        command = decode_command(self.prepared, self._id, None if self.local else owner, self.source)
        wait = self._request.hops.limits.reserve_timeout_seconds
        late = lost(self.decode, "decode", "it did not answer the reservation in time", late=True)
        self._stop_timer = asyncio.get_running_loop().call_later(wait, self.fail, late).cancel
        self._send(self.decode, worker.SessionRequest(decode=command))

    def on_reserved(self, leg: Leg, message: worker.Reserved) -> None:
        """The decode worker holds blocks: prefill may start."""
        if self.over or self.reserved is not None or self._refuses(leg, RESERVATION):
            return
        self._stop_timer()
        self.reserved = message
        request, prepared = self._request, self.prepared
        cached = min(message.cached_blocks, len(prepared.hashes))
        request.hop(RESERVE)
        request.tell("prefill_started")
        if not self.local:
            command = prefill_command(prepared, self._id, worker_id(self.decode), cached, self.source)
            self._send(self.prefill, worker.SessionRequest(prefill=command))

    def on_prompt_scored(self, leg: Leg, message: worker.PromptScored) -> None:
        """Log-probabilities of the prompt: they go to the client before its first token."""
        if self.over or self._refuses(leg, "prefill"):
            return
        if (error := self._request.scores.hear(message.logprobs)) is not None:
            self.fail(found(error))
        self._request.wake()

    def on_prefill_done(self, leg: Leg, message: worker.PrefillDone) -> None:
        """The first token of each choice is here; it goes to the client at once."""
        request, prepared = self._request, self.prepared
        fault = fault_in_prefill(message, prepared.prompt_tokens, prepared.n) or request.scores.missing()
        if self.over or self._refuses(leg, "prefill", fault) or self.prefill_done is not None:
            return
        self.prefill_done = message
        request.hop(PREFILL)
        request.hops.admission.observe_prefill(self.prefill, prepared.prompt_tokens, message)
        request.hops.locality.prefilled(self.prediction, message.cached_tokens)
        request.hops.prefixes.fetched(self.source, self.prefill, message)
        for first in message.first_tokens:
            self._push(first, prepared.drawn)
        self._early.apply(lambda: self.over)
        self.on_step_end(leg)

    def on_handoff_done(self, leg: Leg, message: worker.HandoffDone) -> None:
        """The decode worker holds all KV: the prefill worker's part is over."""
        if self._refuses(leg, "the hand-off"):
            return
        if self.prefill_done is None:
            self._early.keep(partial(self.on_handoff_done, leg, message))
        elif self.handoff is None:
            self.handoff = message.stats
            self._request.hops.admission.observe_transfer(self.decode, message.stats)
            self._request.hops.retries.handed_off(self.prefill, self.decode)
            if not self.local:
                self._legs[self.prefill].end()
            if self.answer.exhausted:
                # The first tokens were the last ones.
                self._legs[self.decode].end()
            if not self.over:
                self._request.hop(HANDOFF)

    def on_token(self, leg: Leg, token: worker.StepToken) -> None:
        """A token of a decode step."""
        if self.prefill_done is None:
            self._early.keep(partial(self.on_token, leg, token))
        elif self.handoff is None:
            self.fail(found(TwinpoolError("INTERNAL", "decode drew a token before it held the KV")))
        else:
            self._push(token, token.offset)

    def on_step_end(self, leg: Leg) -> None:
        """All tokens of one message have come."""
        if self.over or self.prefill_done is None:
            return
        if self.handoff is not None and self.answer.exhausted:
            self._legs[self.decode].end()
        if self.answer.drawn:
            # Nothing more will come: the end does not wait for the client to read.
            self._request.collect()
        self._request.wake(at_once=self.handoff is None)

    def _refuses(self, leg: Leg, kind: str, fault: str = "") -> bool:
        own = self.prefill if kind == "prefill" and not self.local else self.decode
        if fault := fault_in_order(kind, leg.key == own, self.reserved is not None) or fault:
            self.fail(found(TwinpoolError("INTERNAL", fault)))
        return bool(fault)

    def _push(self, token: worker.FirstToken | worker.StepToken, offset: int) -> None:
        if self.over:
            return
        logprobs = token.logprobs if token.HasField("logprobs") else None
        try:
            self.answer.push(token.index, token.token_id, offset, token.finish, logprobs)
        except TwinpoolError as error:
            self.fail(found(error))

    def _send(self, key: WorkerKey, message: worker.SessionRequest) -> None:
        leg = self._request.hops.fleet.start_leg(key, (self._id.request_id, self.number), message, self)
        if leg is None:
            self._lose(key, "it is gone")
        else:
            self._legs[key] = leg

    # --- the other ends -------------------------------------------------------------------

    def on_failed(self, leg: Leg, message: worker.AttemptFailed) -> None:
        """A leg refused or failed; the other one shares its fate."""
        unasked = leg.key == self.decode and self.reserved is None
        self.fail(said_by(message, leg.key, self._side(leg.key), reserving=unasked))

    def on_lost(self, leg: Leg, cause: str) -> None:
        """A stream broke. After its first token the prefill worker is needed by the decode worker alone, which
        either holds all KV by now or will say that its peer is lost."""
        if leg.key == self.decode or self.prefill_done is None:
            self._lose(leg.key, cause)

    def on_fault(self, error: Exception) -> None:
        """The router itself failed."""
        self.fail(found(as_twinpool_error(error)))

    def _lose(self, key: WorkerKey, cause: str) -> None:
        self.fail(lost(key, self._side(key), cause))

    def fail(self, outcome: Outcome) -> None:
        """The attempt has failed. Only the first cause counts."""
        first = not self.over
        self.stop(keep=True)
        if first:
            self._request.attempt_failed(self, outcome)

    def stop(self, keep: bool = False) -> None:
        """Takes no more tokens and asks both workers to drop the attempt. ``keep``: see ``Leg.cancel``."""
        if not self.over:
            self.over = True
            self.answer.drop()
        self._stop_timer()
        for leg in self._legs.values():
            leg.cancel(keep)

    def finish(self) -> None:
        """The answer is complete. A decode worker that would draw on is stopped; one that only pulls yet serves the next turn."""
        self.over = True
        if not self.answer.exhausted:
            for leg in self._legs.values():
                leg.cancel(keep=True)

    @property
    def idle(self) -> bool:
        """Whether both workers hold nothing of it."""
        return all(leg.ended for leg in self._legs.values())

    async def drained(self, timeout: float) -> None:
        """Waits until both workers hold nothing of it, at most ``timeout`` seconds."""
        await wait_ended(self._legs.values(), timeout)

    def _side(self, key: WorkerKey) -> str:
        return "decode" if key == self.decode else "prefill"


class Lifecycle:
    """One request. ``run`` serves it to its end. Implements ``admission.Admitted``."""

    def __init__(
        self, hops: Hops, prepared: Prepared, new_answer: NewAnswer, drawn: Answer | None = None
    ) -> None:
        """``drawn``: what another router was given of the answer, where it goes on here."""
        self.hops = hops
        # As it arrived, and as the next attempt computes it: the two part when the answer goes on elsewhere.
        self.arrived = prepared
        self.prepared = prepared if drawn is None else continuation(prepared, drawn.outputs)
        self.scores = PromptScores(hops.limits.max_buffered_tokens)
        self._new_answer, self._answer = new_answer, drawn
        self.clock = HopClock.of(prepared, hops.recent)
        self.attempt: Attempt | None = None
        self._request = 0
        self._started = self._over = False
        self._error: TwinpoolError | None = None
        self._ready: list[pb.GenerateResponse] = []
        self._delivered = drawn is not None and drawn.completion_tokens > 0
        self.moves = False  # whether it goes on elsewhere when it leaves here
        self._waker = Waker(hops.limits.stream_interval_seconds)
        self.wake = self._waker.wake

    async def run(self, write: Write) -> None:
        """Serves the request. Raises the one cause if its end is not success."""
        write = patient(write, self.hops.limits.client_stall_seconds)
        self._request = self.hops.admission.submit(self.prepared, self)
        self.hops.retries.requested()
        try:
            while not (self._over and self._error is None and not self._ready):
                await self._waker.wait()
                self.collect()
                if self._error is not None:
                    raise self._error
                if self.attempt is not None and not self._started:
                    self._started = True
                    await write(started_event(self.arrived))
                while self._ready:
                    messages, self._ready = self._ready, []
                    for message in messages:
                        await write(message)
        finally:
            self._leave()

    # --- from admission -------------------------------------------------------------------

    def on_placed(self, action: Action) -> None:
        """A pair was chosen and its load is reserved."""
        self.clock.mark(QUEUE)
        metrics.ROUTER_ATTEMPTS.inc()
        self.attempt = Attempt(self, action)
        self.attempt.start()
        self.wake()

    def on_preempted(self, action: Action) -> None:
        """The core has taken the pair away: the request waits again."""
        if self.attempt is not None:
            self.attempt.stop()
            self.hops.background.start(self._place_anew(self.attempt))

    def on_ended(self, action: Action) -> None:
        """The core ended the request: its deadline, or its time in the queue."""
        self._end(core_error(action.cause, action.retry_after))

    def on_fault(self, error: Exception) -> None:
        """The router itself failed."""
        self._end(as_twinpool_error(error))

    def on_leaving(self, decode: WorkerKey) -> bool:
        """Choices have parted and would be drawn anew, so several of them end where they are."""
        attempt, moves = self.attempt, self.arrived.n == 1
        if attempt is None or attempt.over or attempt.decode != decode or not moves:
            return False
        attempt.fail(leaving(decode))
        return True

    # --- from the attempt -----------------------------------------------------------------

    def answer(self) -> Answer:
        """What an attempt adds to: all that the client has, or nothing yet."""
        if self._answer is None or not self._delivered:
            self._answer = self._new_answer()
        return self._answer

    def hop(self, hop: Hop) -> None:
        """The request has made a step."""
        self.clock.mark(hop)
        self.tell(hop.event)

    def tell(self, event: str, detail: str = "") -> None:
        """Tells the state machine of the present attempt."""
        assert self.attempt is not None
        self.hops.admission.advance(self._request, self.attempt.number, event, detail)

    def collect(self) -> None:
        """Makes messages of the tokens that wait, and the last one if these were the last."""
        self._ready += self.scores.take()
        attempt = self.attempt
        if attempt is None or attempt.over:
            return
        try:
            messages = attempt.answer.take()
        except TwinpoolError as error:
            attempt.fail(found(error))
            return
        if messages and self.clock.tokens():
            self._delivered = True
            self.tell("delivered")
        self._ready += messages
        if attempt.answer.finished:
            self._finish(attempt)
        else:
            self._tell_tokens(attempt, TOKENS_A_REPORT)

    def _tell_tokens(self, attempt: Attempt, at_least: int) -> None:
        """The core counts tokens to know how far a decode worker's blocks have grown."""
        if attempt.handoff is not None and (new := attempt.answer.untold(at_least)):
            self.tell("token", str(new))

    def _finish(self, attempt: Attempt) -> None:
        self._tell_tokens(attempt, 1)
        self.hop(DECODE)
        self._over = True
        attempt.finish()
        self.hops.sessions.ended(self.arrived, attempt.prefill, attempt.decode)
        self._ready.append(finished_event(self.arrived, attempt, self.clock))
        self.wake()

    # --- the other ends -------------------------------------------------------------------

    def attempt_failed(self, attempt: Attempt, outcome: Outcome) -> None:
        """An attempt has failed: the state machine decides what follows."""
        after = self.hops.admission.advance(self._request, attempt.number, outcome.event, outcome.detail)
        outcome.log(self.prepared.request_id, attempt.number, after.state)
        error = self.hops.retries.verdict(outcome, attempt, after.terminal, self._delivered)
        if error is not None:
            self._end(error)
        elif after.state == "Retrying":
            self.hops.background.start(self._place_anew(attempt))

    async def _place_anew(self, attempt: Attempt) -> None:
        await attempt.drained(self.hops.limits.cancel_timeout_seconds)
        if self._over:
            return
        if self._delivered:
            self.prepared = continuation(self.arrived, attempt.answer.outputs)
            self.hops.admission.extend(self._request, self.prepared)
        self.tell("requeue")

    def _end(self, error: TwinpoolError) -> None:
        if self._over:
            return
        self._over, self._error, self._ready = True, error, []
        if self.attempt is not None:
            self.attempt.stop()
        self.wake()

    def _leave(self) -> None:
        """The client's coroutine ends, well or not: nothing of the request may stay behind anywhere."""
        self._waker.close()
        if not self._over:
            self._over = True
            if passed(self.prepared.deadline):
                self.hops.admission.advance(self._request, 0, "deadline")
            if self.attempt is not None:
                self.attempt.stop(keep=self.moves)
        self.hops.admission.forget(self._request)
        if self.attempt is not None and not self.attempt.idle:
            self.hops.background.start(self.attempt.drained(self.hops.limits.cancel_timeout_seconds))
