# SPDX-License-Identifier: Apache-2.0
"""Answers that can be resumed. Each is made by a task of its own, into a journal that its client's stream only reads.

A client that goes leaves the answer running for its grace; one that has ended is kept for as long. What is kept is
bounded: ended answers go early where memory is short, and while running ones take all of it no new one is taken on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from twinpool import metrics
from twinpool.errors import TwinpoolError, as_twinpool_error
from twinpool.logs import get_logger
from twinpool.router.answers import AnswerMaker
from twinpool.router.finish import resumed_event, started_message
from twinpool.router.hops import Hops, Write
from twinpool.router.journal import Journal, JournalSpec
from twinpool.router.lifecycle import Lifecycle
from twinpool.router.patience import patient
from twinpool.router.portable import replayed, scored_anew, state_of
from twinpool.router.request import Prepared, passed
from twinpool.router.resume_token import TokenSeal
from twinpool.router.stream import Answer
from twinpool.router.tally import Tally
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import router_pb2
from twinpool.v1.resume_pb2 import PortableRequest, PortableState, ResumeTicket

log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class Kept:
    """One answer. ``task`` makes it, None if it came here whole. ``parked``: from where it can go on again, if it does not
    run here: another router has it, or it ended for a reason that may pass."""

    prepared: Prepared
    portable: PortableRequest
    journal: Journal
    lifecycle: Lifecycle | None = None
    task: asyncio.Task[None] | None = None
    parked: PortableState | None = None
    ending: TwinpoolError | None = None
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def grace(self) -> float:
        """Seconds without a client."""
        return self.portable.grace.ToNanoseconds() / 1e9

    @property
    def running(self) -> bool:
        """Whether it is being made."""
        return self.task is not None and not self.task.done() and self.ending is None

    @property
    def readable(self) -> bool:
        """Whether a client may attach: it is being made here, or has ended for good."""
        return self.parked is None


class KeptBook:
    """All of one router. ``name`` and ``incarnation`` are the router's, for its tokens."""

    def __init__(
        self, hops: Hops, answers: AnswerMaker, seal: TokenSeal, name: str, incarnation: int
    ) -> None:
        self._hops = hops
        self._limits = hops.limits
        self._seal = seal
        self._router = (name, incarnation)
        self._answers = answers
        # In the order of their ends, once they have ended: the oldest goes first.
        self._kept: dict[str, Kept] = {}
        self._by_key: dict[bytes, Kept] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, stream_id: str) -> Kept | None:
        """By its stream."""
        return self._kept.get(stream_id)

    def find_key(self, key: bytes) -> Kept | None:
        """By its idempotency key."""
        return self._by_key.get(key)

    def show(self) -> None:
        """Sets the gauges."""
        metrics.ROUTER_KEPT_ANSWERS.set(len(self._kept))
        metrics.ROUTER_KEPT_BYTES.set(self._bytes)

    # --- beginnings -----------------------------------------------------------------------

    def begin(self, prepared: Prepared, tally: Tally, on_end: Callable[[], None]) -> Kept:
        """Starts a request that was never anywhere else. Raises RESUME_FULL."""
        self._trim()
        if self._bytes > self._limits.resume_bytes:
            raise TwinpoolError(
                "RESUME_FULL",
                f"resumable answers that run take {self._bytes} bytes; the limit is {self._limits.resume_bytes}",
                retry_after=1.0,
            )
        kept = self._open(prepared)
        self._start(kept, None, tally, on_end)
        return kept

    def restore(
        self,
        state: PortableState,
        prepared_for: Callable[[PortableState], Prepared],
        next_index: Sequence[int],
        tally: Tally,
    ) -> Kept:
        """Goes on with what another router had, or this one. Whatever was drawn is there at once."""
        state = scored_anew(state, next_index)
        prepared = replace(prepared_for(state), span=tally.span)
        self.remove(self._kept.get(state.request.stream_id))
        kept = self._open(prepared)
        drawn = self._answers.make(prepared)
        kept.journal.put(pb.GenerateResponse(started=started_message(prepared)))
        for message in replayed(drawn, prepared, state, next_index):
            kept.journal.put(message)
        if state.HasField("finished") or drawn.finished:
            told = pb.GenerateResponse(finished=state.finished) if state.HasField("finished") else None
            kept.journal.put(told or resumed_event(prepared, drawn, state.worker))
            tally.end(None)
            self._arm(kept)
        else:
            self._start(kept, drawn, tally, lambda: None)
        return kept

    def _open(self, prepared: Prepared) -> Kept:
        portable = prepared.portable
        assert portable is not None
        name, incarnation = self._router
        ticket = ResumeTicket(
            router=name, incarnation=incarnation, stream_id=portable.stream_id, tenant=portable.tenant
        )
        spec = JournalSpec(
            n=prepared.n,
            logprobs=prepared.logprobs is not None,
            text=self._answers.text(prepared),
            token=self._seal.seal(ticket),
            max_ahead_tokens=self._limits.max_buffered_tokens,
            scored_tokens=prepared.prompt_tokens if prepared.prompt_logprobs is not None else 0,
        )
        kept = Kept(prepared, portable, Journal(spec, self._grew))
        self._bytes += prepared.size_bytes
        self._kept[portable.stream_id] = kept
        if portable.key:
            self._by_key[portable.key] = kept
        return kept

    # --- running --------------------------------------------------------------------------

    def _start(self, kept: Kept, drawn: Answer | None, tally: Tally, on_end: Callable[[], None]) -> None:
        prepared = kept.prepared
        kept.lifecycle = Lifecycle(self._hops, prepared, lambda: self._answers.make(prepared), drawn)
        kept.task = asyncio.get_running_loop().create_task(kept.lifecycle.run(kept.journal.write))
        # Not in the task itself: one that is cancelled before its first step never runs.
        kept.task.add_done_callback(lambda task: self._ended(kept, task, tally, on_end))
        self._arm(kept)

    def _ended(
        self, kept: Kept, task: "asyncio.Task[None]", tally: Tally, on_end: Callable[[], None]
    ) -> None:
        error: TwinpoolError | None = None
        if task.cancelled():
            late = passed(kept.prepared.deadline)
            error = kept.ending or TwinpoolError("DEADLINE_EXCEEDED" if late else "CANCELLED")
        elif (caught := task.exception()) is not None:
            error = as_twinpool_error(caught)
            if error.reason == "INTERNAL":
                log.error("kept_answer_failed", type=type(caught).__name__, exc_info=caught)
            if error.retryable:
                kept.parked = kept.parked or state_of(kept.prepared, kept.journal)
        # What it held for its attempts is not worth keeping.
        kept.lifecycle = None
        on_end()
        tally.end(error)
        if error is not None:
            kept.journal.fail(error)
        if self._kept.get(kept.portable.stream_id) is kept:
            # To the end of the line of those that have ended.
            self._kept[kept.portable.stream_id] = self._kept.pop(kept.portable.stream_id)
            self._arm(kept)
            self._trim()

    async def follow(self, kept: Kept, next_index: Sequence[int], write: Write) -> None:
        """Serves one stream, from these positions on. However it ends, the answer stays."""
        write = patient(write, self._limits.client_stall_seconds)
        reader = kept.journal.attach(next_index)
        self._arm(kept)
        try:
            async for event in reader.events():
                await write(event)
        finally:
            if kept.journal.detach(reader):
                self._arm(kept)

    # --- ends -----------------------------------------------------------------------------

    def end(self, kept: Kept, error: TwinpoolError, *, moves: bool = False) -> None:
        """Ends the answer, unless it has ended; its readers are told. ``moves``: it goes on elsewhere."""
        kept.journal.fail(error)
        if kept.running:
            assert kept.task is not None
            assert kept.lifecycle is not None
            kept.ending, kept.lifecycle.moves = error, moves
            kept.task.cancel()

    def cancel(self, kept: Kept) -> bool:
        """The client wants no more of it: it stays known as cancelled for its grace. Whether it was of any use until now."""
        useful = kept.journal.error is None or kept.parked is not None
        kept.parked = None
        self.end(kept, TwinpoolError("CANCELLED"))
        return useful

    def remove(self, kept: Kept | None) -> None:
        """Forgets an answer; one that runs is ended."""
        if kept is None or self._kept.get(kept.portable.stream_id) is not kept:
            return
        if kept.timer is not None:
            kept.timer.cancel()
        self.end(kept, TwinpoolError("CANCELLED"))
        del self._kept[kept.portable.stream_id]
        if self._by_key.get(kept.portable.key) is kept:
            del self._by_key[kept.portable.key]
        self._bytes -= kept.journal.size_bytes + kept.prepared.size_bytes

    def hand_over(self, kept: Kept) -> router_pb2.HandOverResponse:
        """Another router goes on with it. It can go on here again, should that router be lost as well."""
        journal = kept.journal
        if kept.parked is None and journal.error is not None:
            return router_pb2.HandOverResponse(
                error_reason=journal.error.reason, error_message=journal.error.message
            )
        if kept.parked is None:
            state = state_of(kept.prepared, journal)
            if not kept.running:
                return router_pb2.HandOverResponse(state=state)
            kept.parked = state
            self.end(kept, TwinpoolError("STREAM_SUPERSEDED", "another router goes on with it"), moves=True)
        return router_pb2.HandOverResponse(state=kept.parked)

    def send_away(self) -> None:
        """Ends the streams, not the answers: the clients find them on another router."""
        for kept in self._kept.values():
            kept.journal.send_away(
                TwinpoolError("DRAINING", "this router is shutting down: resume elsewhere")
            )

    async def close(self) -> None:
        """Ends everything; what another router needs of it stays on the workers."""
        tasks: list[Awaitable[None]] = [kept.task for kept in self._kept.values() if kept.task is not None]
        for kept in list(self._kept.values()):
            self.end(kept, TwinpoolError("DRAINING"), moves=True)
            self.remove(kept)
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- time and memory ------------------------------------------------------------------

    def _arm(self, kept: Kept) -> None:
        """Sets the timer anew: what is due next is the deadline, the end of the grace, or the end of keeping."""
        if kept.timer is not None:
            kept.timer.cancel()
            kept.timer = None
        left = kept.prepared.deadline.remaining() if kept.running else None
        if not kept.journal.attached:
            left = kept.grace if left is None else min(left, kept.grace)
        if left is not None:
            kept.timer = asyncio.get_running_loop().call_later(left, self._due, kept)

    def _due(self, kept: Kept) -> None:
        kept.timer = None
        if not kept.running:
            self.remove(kept)
        elif passed(kept.prepared.deadline):
            self.end(kept, TwinpoolError("DEADLINE_EXCEEDED"))
        else:
            log.info("resume_grace_passed", request_id=kept.prepared.request_id)
            self.end(
                kept, TwinpoolError("RESUME_LOST", "its client was gone for longer than the resume grace")
            )

    def _grew(self, size: int) -> None:
        self._bytes += size

    def _trim(self) -> None:
        if self._bytes <= self._limits.resume_bytes:
            return
        for kept in [kept for kept in self._kept.values() if not kept.running and not kept.journal.attached]:
            if self._bytes <= self._limits.resume_bytes:
                return
            self.remove(kept)
