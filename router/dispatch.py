# SPDX-License-Identifier: Apache-2.0
"""One multiplexed stream to each worker, and the legs of attempts that run on it.

Messages are routed to their legs synchronously, in the order in which the worker sent them: a step message is decoded
once, and its tokens go straight into the buffers of their answers. A stream that breaks ends every leg on it at once;
the session then reconnects with jittered backoff until it is closed.
"""

import asyncio
import contextlib
import enum
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import grpc
import grpc.aio

from twinpool import metrics
from twinpool.ids import WorkerKey
from twinpool.logs import get_logger
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1 import worker_pb2_grpc

log = get_logger(__name__)

# Messages about one attempt, each with a call of its own in LegEvents.
_PROGRESS: Final = frozenset({"reserved", "prompt_scored", "prefill_done", "handoff_done"})
_FIRST_BACKOFF_SECONDS: Final = 0.05
_MAX_BACKOFF_SECONDS: Final = 2.0

Call = grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]
LegId = tuple[str, int]


class LegEvents(Protocol):
    """What an attempt hears of its legs. Called on the event loop, never concurrently."""

    def on_reserved(self, leg: "Leg", message: pb.Reserved) -> None:
        """The decode worker holds blocks."""

    def on_prompt_scored(self, leg: "Leg", message: pb.PromptScored) -> None:
        """Log-probabilities of some more positions of the prompt."""

    def on_prefill_done(self, leg: "Leg", message: pb.PrefillDone) -> None:
        """The first token of each choice is drawn."""

    def on_handoff_done(self, leg: "Leg", message: pb.HandoffDone) -> None:
        """The decode worker holds all KV."""

    def on_token(self, leg: "Leg", token: pb.StepToken) -> None:
        """One token of one choice. ``on_step_end`` follows once all tokens of a message were given."""

    def on_step_end(self, leg: "Leg") -> None:
        """All tokens of one step message were given."""

    def on_failed(self, leg: "Leg", message: pb.AttemptFailed) -> None:
        """The leg ended without success. It holds nothing any more."""

    def on_lost(self, leg: "Leg", cause: str) -> None:
        """The stream to the worker broke. What the leg held ends with the stream."""

    def on_fault(self, error: Exception) -> None:
        """One of the calls above has raised."""


class LegState(enum.Enum):
    """Where a leg stands. Only ``RUNNING`` and ``CANCELLING`` ones are known to the worker."""

    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    ENDED = "ended"


class Leg:
    """One attempt's work on one worker."""

    __slots__ = ("_ended", "events", "id", "session", "state")

    def __init__(self, session: "WorkerSession", leg_id: LegId, events: LegEvents) -> None:
        self.session = session
        self.id = leg_id
        self.events = events
        self.state = LegState.QUEUED
        self._ended: asyncio.Event | None = None

    @property
    def key(self) -> WorkerKey:
        """The worker."""
        return self.session.key

    @property
    def ended(self) -> bool:
        """Whether the worker holds nothing for it any more, as far as the router can know."""
        return self.state is LegState.ENDED

    def cancel(self, keep: bool = False) -> None:
        """Asks the worker to drop the leg. Idempotent; the leg ends when the worker acknowledges. ``keep``: the answer is not
        over, so what another router would need of it stays there for a while."""
        self.session.cancel(self, keep)

    def end(self) -> None:
        """The attempt knows that the leg is over (its last token came, or its KV was handed off)."""
        self.session.release(self)

    async def wait_ended(self) -> None:
        """Returns when the leg has ended."""
        if self.state is not LegState.ENDED:
            if self._ended is None:
                self._ended = asyncio.Event()
            await self._ended.wait()

    def mark_ended(self) -> None:
        """For the session alone."""
        self.state = LegState.ENDED
        if self._ended is not None:
            self._ended.set()


async def wait_ended(legs: Iterable[Leg], timeout: float) -> None:
    """Returns when all legs have ended. Those that have not after ``timeout`` seconds are cancelled and forgotten."""
    waited = list(legs)
    try:
        async with asyncio.timeout(timeout):
            for leg in waited:
                await leg.wait_ended()
    except TimeoutError:
        for leg in waited:
            if not leg.ended:
                log.warning("leg_did_not_end", worker=str(leg.key), state=leg.state.value, attempt=leg.id[1])
                leg.cancel()
                leg.end()


class SessionOwner(Protocol):
    """Who hears of the session itself."""

    def session_up(self, session: "WorkerSession", role: pb.Role.ValueType) -> None:
        """The worker answered Hello: it can be given work."""

    def session_down(self, session: "WorkerSession", cause: str) -> None:
        """The stream broke; it will be tried again."""

    def load_reported(self, session: "WorkerSession", report: pb.LoadReport) -> None:
        """The worker sent its load."""


class WorkerSession:
    """The stream to one incarnation of one worker."""

    def __init__(
        self,
        key: WorkerKey,
        endpoint: str,
        hello: pb.Hello,
        owner: SessionOwner,
        connect: Callable[[str], grpc.aio.Channel],
        connect_timeout: float,
    ) -> None:
        self.key = key
        self.endpoint = endpoint
        self._hello = hello
        self._owner = owner
        self._connect = connect
        self._connect_timeout = connect_timeout
        self._legs: dict[LegId, Leg] = {}
        self._outbox: deque[tuple[pb.SessionRequest, Leg | None]] = deque()
        self._outbox_filled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._retry = asyncio.Event()
        self.up = False

    def start(self) -> None:
        """Begins to connect."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"session {self.key.name}")

    def retry_now(self) -> None:
        """Ends the wait for the next try to connect: the worker says that it can be reached."""
        self._retry.set()

    async def close(self) -> None:
        """Ends the stream for good; legs that still run on it are lost."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._lose_legs("the session was closed")

    @property
    def legs(self) -> int:
        """Legs that have not ended."""
        return len(self._legs)

    # --- towards the worker ---------------------------------------------------------------

    def start_leg(self, leg_id: LegId, request: pb.SessionRequest, events: LegEvents) -> Leg:
        """Sends a prefill or decode command. The leg of a session that is down is lost before the next loop turn."""
        leg = Leg(self, leg_id, events)
        self._legs[leg_id] = leg
        if self.up:
            self._send(request, leg)
        else:
            asyncio.get_running_loop().call_soon(self._lose, leg, "no stream to the worker")
        return leg

    def cancel(self, leg: Leg, keep: bool = False) -> None:
        """See ``Leg.cancel``."""
        if leg.state is LegState.QUEUED:
            # The worker has not heard of it: the writer drops the command of an ended leg.
            self.release(leg)
        elif leg.state is LegState.RUNNING:
            leg.state = LegState.CANCELLING
            request = pb.SessionRequest()
            request.cancel.id.request_id, request.cancel.id.attempt = leg.id
            request.cancel.keep = keep
            self._outbox.appendleft((request, None))
            self._outbox_filled.set()

    def release(self, leg: Leg) -> None:
        """Forgets a leg that is over; messages that still come for it are dropped."""
        self._legs.pop(leg.id, None)
        leg.mark_ended()

    def _send(self, request: pb.SessionRequest, leg: Leg | None) -> None:
        self._outbox.append((request, leg))
        self._outbox_filled.set()

    # --- the stream -----------------------------------------------------------------------

    async def _run(self) -> None:
        failures = 0
        while not self._closed:
            was_up = False
            self._retry.clear()
            try:
                # A channel a stream: it looks the name up anew, takes renewed certificates and has no back-off of its own.
                async with self._connect(self.endpoint) as channel:
                    was_up, cause = await self._stream_once(channel)
            except Exception as error:
                cause = type(error).__name__
                log.exception("worker_session_failed", worker=str(self.key))
            failures = 0 if was_up else failures + 1
            ceiling = min(_MAX_BACKOFF_SECONDS, _FIRST_BACKOFF_SECONDS * 2 ** min(failures, 10))
            log.debug("worker_session_ended", worker=str(self.key), cause=cause, failures=failures)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(random.uniform(ceiling / 2, ceiling)):
                    await self._retry.wait()

    async def _stream_once(self, channel: grpc.aio.Channel) -> tuple[bool, str]:
        """One stream from Hello to its end. Returns whether the worker welcomed us, and why it ended."""
        call: Call = worker_pb2_grpc.WorkerServiceStub(channel).Session()
        writer: asyncio.Task[None] | None = None
        welcomed = False
        cause = "the worker closed the stream"
        try:
            async with asyncio.timeout(self._connect_timeout):
                await call.write(pb.SessionRequest(hello=self._hello))
                role = _check_welcome(await call.read(), self.key)
            welcomed = self.up = True
            writer = asyncio.get_running_loop().create_task(self._write(call))
            self._owner.session_up(self, role)
            await self._read(call)
        except grpc.aio.AioRpcError as error:
            cause = f"{error.code().name}: {error.details()}"
        except (TimeoutError, _RefusedError, asyncio.InvalidStateError) as error:
            cause = str(error) or "no answer to Hello in time"
        finally:
            self.up = False
            call.cancel()
            if writer is not None:
                writer.cancel()
            self._outbox.clear()
            if welcomed and not self._closed:
                # First, so that what the legs lose is not placed here again.
                self._owner.session_down(self, cause)
            self._lose_legs(cause)
        return welcomed, cause

    async def _write(self, call: Call) -> None:
        while True:
            while self._outbox:
                request, leg = self._outbox.popleft()
                if leg is not None:
                    if leg.ended:
                        continue
                    leg.state = LegState.RUNNING
                try:
                    await call.write(request)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
                    return  # the reader hears of the same end, with its status
            self._outbox_filled.clear()
            await self._outbox_filled.wait()

    async def _read(self, call: Call) -> None:
        while True:
            message = await call.read()
            if not isinstance(message, pb.SessionResponse):
                code = await call.code()
                if code is not grpc.StatusCode.OK:
                    raise _RefusedError(f"{code.name}: {await call.details()}")
                return
            self._apply(message)

    # --- from the worker ------------------------------------------------------------------

    def _apply(self, response: pb.SessionResponse) -> None:
        """Routes a message. A fault of ours in applying it must not end the stream that others share."""
        try:
            self._route(response)
        except Exception as error:
            kind = response.WhichOneof("message")
            log.exception("message_not_applied", kind=kind, type=type(error).__name__)
            for leg in [self._legs[key] for key in _attempts_of(response) if key in self._legs]:
                leg.events.on_fault(error)

    def _route(self, response: pb.SessionResponse) -> None:
        kind = response.WhichOneof("message")
        if kind == "step":
            self._route_step(response.step)
        elif kind == "load":
            self._owner.load_reported(self, response.load)
        elif kind == "cancelled":
            leg = self._find(kind, response.cancelled.id)
            if leg is not None:
                self.release(leg)
        elif kind == "failed":
            leg = self._find(kind, response.failed.id)
            if leg is not None:
                cancelling = leg.state is LegState.CANCELLING
                self.release(leg)
                if not cancelling:
                    leg.events.on_failed(leg, response.failed)
        elif kind is not None and kind != "welcome":
            self._route_progress(kind, response)

    def _route_progress(self, kind: str, response: pb.SessionResponse) -> None:
        message = getattr(response, kind)
        leg = self._find(kind, message.id)
        if leg is None or leg.state is LegState.CANCELLING:
            return
        if kind in _PROGRESS:
            getattr(leg.events, f"on_{kind}")(leg, message)

    def _route_step(self, step: pb.StepTokens) -> None:
        legs = [self._legs.get((attempt.request_id, attempt.attempt)) for attempt in step.ids]
        unknown = 0
        for token in step.tokens:
            leg = legs[token.slot] if token.slot < len(legs) else None
            if leg is None:
                unknown += 1
            elif leg.state is LegState.RUNNING:
                leg.events.on_token(leg, token)
        for leg in legs:
            if leg is not None and leg.state is LegState.RUNNING:
                leg.events.on_step_end(leg)
        if unknown:
            metrics.ROUTER_UNKNOWN_EVENTS.labels("step").inc(unknown)

    def _find(self, kind: str, attempt: pb.AttemptId) -> Leg | None:
        leg = self._legs.get((attempt.request_id, attempt.attempt))
        if leg is None:
            metrics.ROUTER_UNKNOWN_EVENTS.labels(kind).inc()
        return leg

    def _lose(self, leg: Leg, cause: str) -> None:
        if leg.ended:
            return
        cancelling = leg.state is LegState.CANCELLING
        self.release(leg)
        if not cancelling:
            leg.events.on_lost(leg, cause)

    def _lose_legs(self, cause: str) -> None:
        for leg in list(self._legs.values()):
            self._lose(leg, cause)


def _attempts_of(response: pb.SessionResponse) -> list[LegId]:
    kind = response.WhichOneof("message")
    if kind == "step":
        return [(attempt.request_id, attempt.attempt) for attempt in response.step.ids]
    attempt = getattr(getattr(response, kind), "id", None) if kind else None
    return [(attempt.request_id, attempt.attempt)] if attempt is not None else []


class _RefusedError(Exception):
    """The worker's answer to Hello was not the one that the router needs."""


def _check_welcome(message: object, key: WorkerKey) -> pb.Role.ValueType:
    if not isinstance(message, pb.SessionResponse) or message.WhichOneof("message") != "welcome":
        raise _RefusedError("the worker did not answer Hello")
    welcome = message.welcome
    if (welcome.worker.name, welcome.worker.incarnation) != (key.name, key.incarnation):
        raise _RefusedError("another worker answers at this address")
    return welcome.role
