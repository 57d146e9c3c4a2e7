# SPDX-License-Identifier: Apache-2.0
"""WorkerService: the one multiplexed stream between a router and this worker.

The stream is the router's life: when it ends, all that the router started here is cancelled and freed.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias, TypeVar

from twinpool import errors, metrics
from twinpool.engine.sampling import GrammarError, Grammars
from twinpool.errors import TwinpoolError
from twinpool.ids import WorkerKey
from twinpool.logs import get_logger
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1 import worker_pb2_grpc
from twinpool.worker.commands import (
    CancelWork,
    CommandError,
    DecodeWork,
    Limits,
    PrefillWork,
    attempt_of,
    grammar_of,
    parse_command,
    worker_id,
)
from twinpool.worker.heat import PromptHeat
from twinpool.worker.inspect import Inspector
from twinpool.worker.prefix_pins import PrefixPins
from twinpool.worker.prefix_take import PrefixTaker
from twinpool.worker.step_loop import LoopEndedError, StepLoop, outcome
from twinpool.worker.streams import Context, MessageQueue

SESSIONS_MAX: Final = 1024
"""Most routers that are served at a time."""

DRAIN_SECONDS_MAX: Final = 86400.0
"""Longest time for requests that whoever asks a worker to leave, or to change its role, may name."""

HELLO_SECONDS: Final = 10.0
"""A stream that says nothing for so long is not a router's."""

log = get_logger(__name__)
T = TypeVar("T")

ChangeRole: TypeAlias = Callable[[pb.Role.ValueType, int, float | None], pb.ChangeRoleResponse]
"""Begins a change of role or says how far it is: role, epoch as it is known, seconds."""


@dataclass(frozen=True, slots=True)
class RouterSession:
    """One router's stream."""

    number: int
    router: str
    out: MessageQueue[pb.SessionResponse] = field(default_factory=MessageQueue)


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Serves Session and Inspect."""

    def __init__(
        self,
        *,
        worker: WorkerKey,
        limits: Limits,
        loop: StepLoop,
        inspector: Inspector,
        heat: PromptHeat,
        taker: PrefixTaker,
        pins: PrefixPins,
        on_drain: Callable[[float | None], object],
        on_change_role: ChangeRole,
        on_cordon: Callable[[bool], object],
        grammars: Grammars | None = None,
    ) -> None:
        """``heat`` is told of each prompt, on the step thread; ``on_drain`` that the worker is to leave, and how long its
        requests may take; ``on_change_role`` which role it is to have, in which epoch that was asked, and how long it may take;
        ``on_cordon`` whether new work is to go elsewhere. ``grammars`` compiles what answers must follow; None: this worker
        cannot draw by grammars."""
        self._worker = worker
        self._limits = limits
        self._loop = loop
        self._inspector = inspector
        self._heat = heat
        self._taker = taker
        self._pins = pins
        self._on_drain = on_drain
        self._on_change_role = on_change_role
        self._on_cordon = on_cordon
        self._grammars = grammars
        self._numbers = itertools.count(1)
        self._sessions: dict[int, RouterSession] = {}
        self._draining = False
        self._stalled = ""
        self._unfit = ""
        self._flipping = False

    @property
    def sessions(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    def drain(self) -> None:
        """From now on every new attempt is refused with NOT_SERVING; what runs goes on."""
        self._draining = True

    def refuse(self, why: str) -> None:
        """As ``drain``, until it is called with ""."""
        self._unfit = why

    def hold_off(self, flipping: bool) -> None:
        """As ``refuse``, while the worker changes its role."""
        self._flipping = flipping

    def stall(self, why: str) -> None:
        """Ends every session, so that routers place what runs here elsewhere, and takes none until it is called with ""."""
        self._stalled = why
        if why:
            for session in list(self._sessions.values()):
                session.out.close(TwinpoolError("WORKER_HUNG", f"worker {self._worker} {why}"), drop=True)

    def close(self) -> None:
        """Ends every session."""
        for session in list(self._sessions.values()):
            session.out.close(TwinpoolError("DRAINING", f"worker {self._worker} stops"))

    def deliver(self, number: int, message: pb.SessionResponse) -> None:
        """Queues a message for a session; dropped if it is gone."""
        session = self._sessions.get(number)
        if session is not None:
            session.out.send(message)

    async def Session(
        self,
        request_iterator: AsyncIterator[pb.SessionRequest],
        context: Context,
    ) -> AsyncIterator[pb.SessionResponse]:
        """See the protocol. Any end of the stream, by either side, cancels what it started."""
        hello = await self._hello(request_iterator)
        if self._stalled:
            raise TwinpoolError("WORKER_HUNG", f"worker {self._worker} {self._stalled}")
        session = self._open(hello)
        reader = asyncio.create_task(self._read(session, request_iterator), name=f"session-{session.number}")
        try:
            role = self._loop.role
            welcome = pb.Welcome(worker=worker_id(self._worker), role=role.role, epoch=role.epoch)
            yield pb.SessionResponse(welcome=welcome)
            async for message in session.out.messages():
                yield message
            if session.out.error is not None:
                raise session.out.error
        finally:
            reader.cancel()
            self._close(session)

    async def Inspect(self, request: pb.InspectRequest, context: Context) -> pb.InspectResponse:
        """Counts, all taken at one moment between two steps."""
        return await self._inspector.inspect(self.sessions)

    async def TakeOver(self, request: pb.TakeOverRequest, context: Context) -> pb.TakeOverResponse:
        """See the protocol. Waits for the end of the running step. Raises DRAINING once the step loop has ended."""
        asked = (request.stream_id, request.key, request.digest, request.forget)
        state = await self._on_step_thread(lambda: self._loop.role.take_over(*asked))
        return pb.TakeOverResponse(state=state)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """See the protocol. Returns at once; a second call changes nothing."""
        self._check_meant(request.worker)
        self._on_drain(_timeout(request))
        return pb.DrainResponse()

    async def ChangeRole(self, request: pb.ChangeRoleRequest, context: Context) -> pb.ChangeRoleResponse:
        """See the protocol and ``RoleFlip.ask``. Returns at once."""
        self._check_meant(request.worker)
        if request.role not in (pb.ROLE_PREFILL, pb.ROLE_DECODE):
            raise TwinpoolError("INVALID_ARGUMENT", f"role: {request.role} is neither prefill nor decode")
        answer = self._on_change_role(request.role, request.epoch, _timeout(request))
        # As of now, whatever the step thread does: one that stands still must not keep this answer back.
        answer.attempts = self._loop.role.attempts
        return answer

    async def Cordon(self, request: pb.CordonRequest, context: Context) -> pb.CordonResponse:
        """See the protocol. Routers follow the record; what is on its way here still runs."""
        self._check_meant(request.worker)
        self._on_cordon(request.cordoned)
        return pb.CordonResponse()

    async def TakePrefixes(
        self, request: pb.TakePrefixesRequest, context: Context
    ) -> pb.TakePrefixesResponse:
        """See the protocol. A worker that leaves, changes its role or is unfit takes none."""
        if self._draining or self._unfit or self._stalled or self._flipping:
            raise TwinpoolError("DRAINING", f"worker {self._worker} takes no work")
        return await self._taker.take(request)

    async def PinPrefix(self, request: pb.PinPrefixRequest, context: Context) -> pb.PinPrefixResponse:
        """See the protocol. A worker that leaves or is unfit pins nothing."""
        if self._draining or self._unfit or self._stalled:
            raise TwinpoolError("DRAINING", f"worker {self._worker} takes no work")
        self._pins.check_pin(request)
        return await self._on_step_thread(partial(self._pins.pin, request))

    async def ReleasePrefix(
        self, request: pb.ReleasePrefixRequest, context: Context
    ) -> pb.ReleasePrefixResponse:
        """See the protocol."""
        self._pins.check_release(request)
        return await self._on_step_thread(partial(self._pins.release, request))

    async def _on_step_thread(self, work: Callable[[], T]) -> T:
        try:
            return await outcome(self._loop.call(work))
        except LoopEndedError:
            raise TwinpoolError("DRAINING", f"worker {self._worker} has stopped") from None

    def _check_meant(self, meant: pb.WorkerId) -> None:
        own = self._worker
        if (meant.name, meant.incarnation) != (own.name, own.incarnation):
            detail = f"this is worker {own}, not {meant.name[:64]}@{meant.incarnation:016x}"
            raise TwinpoolError("INCARNATION_MISMATCH", detail)

    async def _hello(self, requests: AsyncIterator[pb.SessionRequest]) -> pb.Hello:
        try:
            first = await asyncio.wait_for(anext(requests), HELLO_SECONDS)
        except StopAsyncIteration:
            raise TwinpoolError("INVALID_ARGUMENT", "the stream ended before Hello") from None
        except TimeoutError:
            raise TwinpoolError("INVALID_ARGUMENT", f"no Hello within {HELLO_SECONDS:g} s") from None
        if first.WhichOneof("message") != "hello":
            raise TwinpoolError("INVALID_ARGUMENT", "the first message is not Hello")
        self._check_meant(first.hello.worker)
        return first.hello

    def _open(self, hello: pb.Hello) -> RouterSession:
        router = f"{hello.router}@{hello.incarnation:016x}"
        for other in list(self._sessions.values()):
            # The router has dialled anew, so the old connection is dead, noticed here or not.
            if other.router == router:
                other.out.close(TwinpoolError("CANCELLED", "the router opened another session"))
        if sum(other.router != router for other in self._sessions.values()) >= SESSIONS_MAX:
            raise TwinpoolError("QUEUE_FULL", f"{SESSIONS_MAX} routers are served; the limit is so many")
        session = RouterSession(next(self._numbers), router)
        self._sessions[session.number] = session
        metrics.WORKER_SESSIONS.set(len(self._sessions))
        self._loop.post(partial(self._loop.load.open, session.number))
        log.info("session_opened", session=session.number, router=router)
        return session

    def _close(self, session: RouterSession) -> None:
        session.out.close()
        if self._sessions.pop(session.number, None) is None:
            return
        metrics.WORKER_SESSIONS.set(len(self._sessions))
        number = session.number
        self._loop.post(partial(self._loop.load.close, number))
        self._loop.post(lambda: self._loop.role.on_session_closed(number))
        log.info("session_closed", session=number, router=session.router)

    async def _read(self, session: RouterSession, requests: AsyncIterator[pb.SessionRequest]) -> None:
        error: TwinpoolError | None = None
        try:
            async for message in requests:
                if not (grammar := grammar_of(message)) or await self._compiled(session, message, grammar):
                    self._accept(session, message)
        except asyncio.CancelledError:
            raise
        except Exception as caught:
            log.exception("session_read_failed", session=session.number)
            error = errors.as_twinpool_error(caught)
        session.out.close(error)

    async def _compiled(self, session: RouterSession, message: pb.SessionRequest, grammar: str) -> bool:
        """Compiles a grammar, beside both loops. What comes on the stream meanwhile waits, so that it stays in order."""
        try:
            if self._grammars is not None:
                await asyncio.to_thread(self._grammars.compile, grammar)
        except GrammarError as error:
            detail = f"draw.grammar cannot be compiled: {error}"
            self._refuse(session, message, CommandError(pb.FAILURE_REASON_INVALID, detail))
            return False
        return True

    def _accept(self, session: RouterSession, message: pb.SessionRequest) -> None:
        try:
            work = parse_command(message, self._limits, self._grammars)
            if not isinstance(work, CancelWork):
                self._check_serving()
        except CommandError as refused:
            self._refuse(session, message, refused)
            return
        if isinstance(work, CancelWork):
            self._loop.post(partial(self._cancel, session.number, work, time.monotonic()))
        else:
            self._loop.post(partial(self._work, session.number, work))

    def _refuse(self, session: RouterSession, message: pb.SessionRequest, refused: CommandError) -> None:
        key = attempt_of(message)
        if key is None:
            session.out.close(TwinpoolError("INVALID_ARGUMENT", refused.detail))
            return
        failed = pb.AttemptFailed(id=key.message(), reason=refused.reason, detail=refused.detail)
        session.out.send(pb.SessionResponse(failed=failed))

    def _check_serving(self) -> None:
        flips = "it changes its role" if self._flipping else ""
        why = "it is draining" if self._draining else self._unfit or flips
        if why:
            raise CommandError(pb.FAILURE_REASON_NOT_SERVING, f"worker {self._worker}: {why}")

    def _work(self, number: int, work: PrefillWork | DecodeWork) -> None:
        """On the step thread."""
        if self._loop.tap is not None:
            self._loop.tap.saw_root(work.prompt.root)
        self._heat.saw(work.prompt.root, work.prompt.hashes)
        self._loop.role.on_work(number, work)

    def _cancel(self, number: int, work: CancelWork, arrived: float) -> None:
        """On the step thread: a cancel is answered in the call, so its time is the wait for the running step."""
        self._loop.role.on_work(number, work)
        metrics.WORKER_CANCEL_TIME.observe(time.monotonic() - arrived)


def _timeout(request: pb.DrainRequest | pb.ChangeRoleRequest) -> float | None:
    """The time that was asked for. Raises INVALID_ARGUMENT."""
    timeout = request.timeout.ToNanoseconds() / 1e9 if request.HasField("timeout") else None
    if timeout is not None and not 0 <= timeout <= DRAIN_SECONDS_MAX:
        raise TwinpoolError("INVALID_ARGUMENT", f"timeout: {timeout:g} s is not in 0..{DRAIN_SECONDS_MAX:g}")
    return timeout
