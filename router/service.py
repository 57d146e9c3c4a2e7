# SPDX-License-Identifier: Apache-2.0
"""InferenceService: what clients call.

A handler checks and tokenises the request, hands it to a ``Lifecycle`` and writes what that makes. The client's cancel,
its disconnect and its deadline all reach the handler as a cancelled task, from where the lifecycle ends everything.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

from twinpool import tracing
from twinpool.config import TwinpoolConfig
from twinpool.errors import TwinpoolError
from twinpool.ids import new_request_id
from twinpool.logs import get_logger
from twinpool.router import genai
from twinpool.router.answers import AnswerMaker
from twinpool.router.call import Call
from twinpool.router.chat.prompt import AskedTurn, TurnPlan
from twinpool.router.chat.stream import TurnStream
from twinpool.router.hops import Hops
from twinpool.router.kept import Kept
from twinpool.router.lifecycle import Lifecycle
from twinpool.router.models import ModelTable, Target
from twinpool.router.request import Prepared
from twinpool.router.side_calls import SideCalls
from twinpool.router.streams import Streams
from twinpool.router.structured import GrammarCheck, check_together, grammar_of
from twinpool.router.tally import Tally
from twinpool.router.tenants import Tenants
from twinpool.router.tokenize import TokenizeHop
from twinpool.router.usage import Meter, UsageBook
from twinpool.router.utf8 import Unparsed, add_leniently, parsed
from twinpool.router.validate import (
    Resumable,
    check_length,
    check_params,
    check_resumable,
    check_vocabulary,
)
from twinpool.rpc import Caller
from twinpool.tracing import Span
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1.resume_pb2 import TurnForm

log = get_logger(__name__)

SERVICE: Final = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name

Context = grpc.aio.ServicerContext[Any, pb.GenerateResponse]
ResumeContext = grpc.aio.ServicerContext[Any, pb.ResumeResponse]


class InferenceService(SideCalls):
    """See the module. Raises TwinpoolError; the server turns it into a status."""

    def __init__(
        self,
        config: TwinpoolConfig,
        hops: Hops,
        models: ModelTable,
        tokenize: TokenizeHop,
        answers: AnswerMaker,
        streams: Streams,
        tenants: Tenants,
        usage: UsageBook,
    ) -> None:
        super().__init__(config, hops, models, tokenize, tenants, usage)
        self._limits = config.router
        self._hops = hops
        self._answers = answers
        self._streams = streams
        self._grammars = GrammarCheck(config.router)
        self._running: set[tuple[str, str]] = set()
        self._draining = False

    def drain(self) -> None:
        """From now on new requests are refused; what runs goes on."""
        self._draining = True

    # --- calls ----------------------------------------------------------------------------

    async def Generate(self, request: pb.GenerateRequest | Unparsed, context: Context) -> None:
        """See the protocol."""
        await self.serve(parsed(request), Call.of(context))

    async def serve(
        self,
        request: pb.GenerateRequest,
        call: Call[pb.GenerateResponse],
        turn: AskedTurn | None = None,
    ) -> None:
        """Serves one request. ``turn``: the chat that it is the request of; ``call`` writes to its stream."""
        tally = Tally(tracing.start("generate", call.traceparent, began=call.arrival), call.deadline)
        try:
            request.tenant = self._tenants.admit(call.caller, request.tenant)
            meter = self._usage.metered(request.tenant, call.write)
        except BaseException as error:
            tally.end(error)
            raise
        try:
            await self._served(request, call.to(meter.write), tally, turn, meter)
        finally:
            meter.end()

    async def _served(
        self,
        request: pb.GenerateRequest,
        call: Call[pb.GenerateResponse],
        tally: Tally,
        turn: AskedTurn | None,
        meter: Meter,
    ) -> None:
        try:
            kept = await self._generate(request, call, tally, turn, meter)
        except BaseException as error:
            tally.end(error)
            raise
        if kept is None:
            tally.end(None)
            return
        meter.counted = kept.counted
        had: Sequence[int] = ()
        if turn is not None:
            turn.stream.open(kept.prepared, kept.journal.text_before)
            had = turn.stream.next_index
        await self._streams.follow(kept, had, call.write)

    async def Resume(self, request: pb.ResumeRequest | Unparsed, context: ResumeContext) -> None:
        """See the protocol."""
        wanted, call = parsed(request), Call.of(context)

        async def write(event: pb.GenerateResponse) -> None:
            await context.write(pb.ResumeResponse(response=event))

        await self.resume(wanted, call.to(write))

    async def resume(
        self, request: pb.ResumeRequest, call: Call[pb.GenerateResponse], turn: TurnStream | None = None
    ) -> None:
        """Goes on with an answer. ``turn`` reads it, where it is a chat's."""
        request.tenant = self._tenants.admit(call.caller, request.tenant)

        def opened(kept: Kept) -> None:
            meter.counted = kept.counted
            if turn is not None:
                turn.open(kept.prepared, kept.journal.text_before)

        meter = self._usage.metered(request.tenant, call.write)
        meter.resumed = True
        try:
            await self._streams.resume(request, meter.write, call.traceparent, opened)
        finally:
            meter.end()

    async def Cancel(self, request: pb.CancelRequest | Unparsed, context: Context) -> pb.CancelResponse:
        """See the protocol."""
        wanted = parsed(request)
        wanted.tenant = self._tenants.admit(Caller.of(context), wanted.tenant)
        return await self._streams.cancel(wanted)

    # --- inside ---------------------------------------------------------------------------

    async def _generate(
        self,
        request: pb.GenerateRequest,
        call: Call[pb.GenerateResponse],
        tally: Tally,
        turn: AskedTurn | None,
        meter: Meter,
    ) -> Kept | None:
        """Serves a request, or starts one that can be resumed, or finds the one with its idempotency key."""
        wanted = check_resumable(request, self._limits, turn.request if turn is not None else None)
        if wanted is None or not wanted.key:
            return await self._start(request, call, tally, turn, wanted)
        async with self._streams.claim(request, wanted, call.traceparent) as kept:
            if kept is not None:
                tally.drop()
                meter.resumed = True
                return kept
            return await self._start(request, call, tally, turn, wanted)

    async def _start(
        self,
        request: pb.GenerateRequest,
        call: Call[pb.GenerateResponse],
        tally: Tally,
        turn: AskedTurn | None,
        wanted: Resumable | None,
    ) -> Kept | None:
        if self._draining:
            raise TwinpoolError("DRAINING", "this router is shutting down", retry_after=0.5)
        # A client's id is its own: two tenants may use the same one.
        name = (request.tenant, request.request_id)
        if name in self._running:
            raise TwinpoolError(
                "DUPLICATE_REQUEST",
                f"request_id is {request.request_id!r}; the limit is one request in flight with this id",
                field="request_id",
            )
        if request.request_id:
            self._running.add(name)
        release = partial(self._running.discard, name)
        kept: Kept | None = None
        try:
            target = self._models.resolve(request.model)
            self._tenants.check_model(request.tenant, target.group.model)
            prepared = await self._prepare(request, target, call, tally.span, turn)
            if wanted is not None:
                kept = self._streams.begin(prepared, wanted, tally, release)
                return kept
            if turn is not None:
                turn.stream.open(prepared)
            await Lifecycle(self._hops, prepared, lambda: self._answers.make(prepared)).run(call.write)
        except grpc.aio.BaseError as error:
            # A write to a client that is gone; its cancel has not reached this task yet.
            raise asyncio.CancelledError from error
        finally:
            if kept is None:
                release()
        return None

    async def _prepare(
        self,
        request: pb.GenerateRequest,
        target: Target,
        call: Call[pb.GenerateResponse],
        span: Span,
        turn: AskedTurn | None,
        *,
        placed: bool = False,
    ) -> Prepared:
        """Validate, tokenise, choose the pool, hash. Nothing is reserved anywhere yet. ``placed``: ``target`` is the pool that was
        chosen."""
        plan = turn.planner.plan(turn.request, target.tokenizer) if turn is not None else None
        params = check_params(request, self._limits, target.group, secrets.randbits(63))
        grammar = await self._grammar(request, plan)
        tokens, field, form = await self._prompt(request, target, plan)
        chosen = target if placed else self._placed(target, len(tokens), params.tenant, params.priority)
        if chosen.tokenizer is not target.tokenizer:
            # Its pool reads text in another way than the one that it was read for.
            return await self._prepare(request, chosen, call, span, turn, placed=True)
        group = chosen.group
        check_vocabulary(tokens, field, group)
        max_tokens = check_length(len(tokens), params, field, self._limits, group)
        root, hashes = self._tokenize.hash(tokens, group, params.tenant, params.adapter)
        own = () if params.ignore_eos else group.eos_token_ids
        request_id = new_request_id()
        span.set(request_id=request_id, model=group.model, prompt_tokens=len(tokens), choices=params.n)
        prepared = Prepared(
            request_id=request_id,
            client_id=request.request_id or request_id,
            group=group,
            tokens=tokens,
            hashes=hashes,
            root=root,
            sampling=params.sampling,
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            stop_strings=(*params.stop_strings, *(plan.stop_strings if plan is not None else ())),
            stop_token_ids=tuple(sorted({*params.stop_token_ids, *own})),
            ignore_eos=params.ignore_eos,
            include_stop=params.include_stop,
            n=params.n,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            priority=params.priority,
            preemptible=params.preemptible,
            adapter=params.adapter,
            tenant=params.tenant,
            session_id=params.session_id,
            size_bytes=tokens.nbytes + hashes.nbytes,
            arrival=call.arrival,
            tokenized=time.monotonic(),
            deadline=call.deadline,
            grammar=grammar,
            kept_tokens=plan.kept_tokens if plan is not None else (),
            turn=form,
            span=span,
            pool_reason=chosen.why,
        )
        is_chat = turn is not None or request.WhichOneof("prompt") == "chat"
        genai.asked(span, prepared, request.sampling, chat=is_chat)
        return prepared

    async def _prompt(
        self, request: pb.GenerateRequest, target: Target, plan: TurnPlan | None
    ) -> tuple[NDArray[np.int32], str, TurnForm | None]:
        """The prompt's ids, the field that held it, and how its answer is read."""
        if plan is None:
            tokens, field = await self._tokenize.prompt(request, target.tokenizer, target.group)
            return tokens, field, None
        tokens, form = await self._tokenize.turn(plan, target.tokenizer, request.tenant)
        return tokens, "chat.messages", form

    async def _grammar(self, request: pb.GenerateRequest, plan: TurnPlan | None) -> str:
        """What the answer must follow, known to be possible."""
        grammar = plan.grammar if plan is not None else ""
        if request.HasField("structured"):
            grammar = grammar_of(request.structured)
        if grammar:
            check_together(request)
            await self._tokenize.run(self._grammars.check, grammar)
        return grammar


def register(servicer: InferenceService, server: grpc.aio.Server) -> None:
    """Adds the service with request parsers that never fail: see ``utf8``."""
    add_leniently(pb.DESCRIPTOR.services_by_name["InferenceService"], servicer, server)
