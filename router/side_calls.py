# SPDX-License-Identifier: Apache-2.0
"""The calls of InferenceService that make no answer: tokens and text, models, usage, prompts computed ahead of time and kept."""

from abc import ABC, abstractmethod
from dataclasses import asdict
from functools import partial
from typing import Any, Final

import grpc.aio
import numpy as np

from twinpool.config import TwinpoolConfig
from twinpool.errors import TwinpoolError
from twinpool.kv_events import HASH_BYTES
from twinpool.router.call import Call
from twinpool.router.hops import Hops
from twinpool.router.models import ModelTable, Target
from twinpool.router.pins import Pins
from twinpool.router.request import session_bytes
from twinpool.router.tenants import Tenants
from twinpool.router.tokenize import TokenizeHop
from twinpool.router.usage import UsageBook
from twinpool.router.utf8 import Unparsed, parsed, refuse_unknown_fields
from twinpool.router.validate import check_session
from twinpool.rpc import Caller
from twinpool.text import UnknownTokenError
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import worker_pb2 as worker

Context = grpc.aio.ServicerContext[Any, Any]

_NOT_WARMED: Final = (
    "sampling",
    "stop",
    "n",
    "logprobs",
    "prompt_logprobs",
    "resume_grace",
    "idempotency_key",
    "structured",
)
"""What of a request says nothing of how its prompt is computed and cached."""


class SideCalls(ABC):
    """See the module. Raises TwinpoolError; the server turns it into a status."""

    def __init__(
        self,
        config: TwinpoolConfig,
        hops: Hops,
        models: ModelTable,
        tokenize: TokenizeHop,
        tenants: Tenants,
        usage: UsageBook,
    ) -> None:
        self._models = models
        self._tokenize = tokenize
        self._tenants = tenants
        self._usage = usage
        self._limits = config.router
        self._sessions = hops.sessions
        self._max_pinned_tokens = config.sessions.max_pinned_tokens
        self._pins = Pins(config.sessions, hops.fleet)

    @abstractmethod
    async def serve(self, request: pb.GenerateRequest, call: Call[pb.GenerateResponse]) -> None:
        """Serves one request."""

    async def Tokenize(self, request: pb.TokenizeRequest | Unparsed, context: Context) -> pb.TokenizeResponse:
        """See the protocol."""
        wanted = parsed(request)
        tenant = self._tenants.admit(Caller.of(context))
        refuse_unknown_fields(wanted)
        target = self._models.resolve(wanted.model)
        self._tenants.check_model(tenant, target.group.model)
        tokens, _ = await self._tokenize.prompt(wanted, target.tokenizer, target.group)
        return pb.TokenizeResponse(
            token_ids=tokens.tolist(), max_context_tokens=target.group.max_context_tokens
        )

    async def Detokenize(
        self, request: pb.DetokenizeRequest | Unparsed, context: Context
    ) -> pb.DetokenizeResponse:
        """See the protocol."""
        wanted = parsed(request)
        tenant = self._tenants.admit(Caller.of(context))
        refuse_unknown_fields(wanted)
        target = self._models.resolve(wanted.model)
        self._tenants.check_model(tenant, target.group.model)
        ids = wanted.token_ids.ids
        if len(ids) > self._limits.max_prompt_tokens:
            raise TwinpoolError(
                "PROMPT_TOO_LONG",
                f"token_ids.ids has {len(ids)} ids; the limit is {self._limits.max_prompt_tokens}",
                field="token_ids.ids",
            )
        skip = not wanted.keep_special_tokens

        def decode() -> str:
            return target.tokenizer.decode(ids, skip_special_tokens=skip)

        try:
            return pb.DetokenizeResponse(text=await self._tokenize.run(decode))
        except UnknownTokenError as error:
            raise TwinpoolError(
                "TOKEN_OUT_OF_VOCABULARY", f"token_ids.ids: {error}", field="token_ids.ids"
            ) from error

    async def Warm(self, request: pb.WarmRequest | Unparsed, context: Context) -> pb.WarmResponse:
        """See the protocol. The prompt is computed as that of a request whose answer nobody wants: one token of it is drawn, so
        that both the worker that computes and the one that would generate hold its blocks."""
        wanted, call = parsed(request), Call.of(context)
        refuse_unknown_fields(wanted)
        asked = pb.GenerateRequest()
        asked.CopyFrom(wanted.request)
        for name in _NOT_WARMED:
            asked.ClearField(name)
        asked.stop.max_tokens = 1
        if wanted.HasField("pin"):
            return await self._keep_warm(wanted, asked, call)
        usage = (await self._compute(asked, call)).usage
        return pb.WarmResponse(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)

    async def _keep_warm(
        self, wanted: pb.WarmRequest, asked: pb.GenerateRequest, call: Call[Any]
    ) -> pb.WarmResponse:
        """A pin that is there is made longer, and nothing is computed; else the prompt is computed and pinned where it was."""
        asked.tenant = tenant = self._tenants.admit(call.caller, asked.tenant)
        check_session(asked.session_id)
        prompt, full, chain = await self._chain(asked)
        hashes = np.frombuffer(chain.block_hashes, np.uint8).reshape(-1, HASH_BYTES)
        quota = self._tenants.max_pinned_tokens(tenant, self._max_pinned_tokens)
        session = session_bytes(tenant, asked.session_id) if asked.session_id else b""
        pin = self._pins.wanted(tenant, session, chain, wanted.pin, quota, full)
        if (renewed := await self._pins.renew(pin, hashes)) is not None:
            return pb.WarmResponse(prompt_tokens=prompt, cached_tokens=renewed.tokens, pin=renewed)
        finished, made = await self._pins.make(pin, partial(self._compute, asked, call))
        return pb.WarmResponse(prompt_tokens=prompt, cached_tokens=finished.usage.cached_tokens, pin=made)

    async def _compute(self, asked: pb.GenerateRequest, call: Call[Any]) -> pb.GenerateFinished:
        finished = pb.GenerateFinished()

        async def take(event: pb.GenerateResponse) -> None:
            if event.HasField("finished"):
                finished.CopyFrom(event.finished)

        await self.serve(asked, call.to(take))
        return finished

    async def _chain(self, request: pb.GenerateRequest) -> tuple[int, int, worker.PrefixChain]:
        """Tokens of a prompt, those of its full blocks, and these; the prompt of ``request`` is token ids from here on."""
        target = self._models.resolve(request.model)
        self._tenants.check_model(request.tenant, target.group.model)
        tokens, _ = await self._tokenize.prompt(request, target.tokenizer, target.group)
        target = self._placed(target, len(tokens), request.tenant, request.priority)
        root, hashes = self._tokenize.hash(tokens, target.group, request.tenant, request.adapter)
        request.token_ids.ids[:] = tokens.tolist()
        full = len(hashes) * target.group.block_tokens
        return len(tokens), full, worker.PrefixChain(block_hashes=hashes.tobytes(), root_hash=root)

    def _placed(self, target: Target, prompt_tokens: int, tenant: str, asked: int) -> Target:
        """The pool that a request goes to, by the priority that its tenant may have. See ``ModelTable.place``."""
        priority = self._tenants.priority(tenant, asked, self._limits.tenant_max_priority)
        return self._models.place(target, prompt_tokens, priority)

    async def Release(self, request: pb.ReleaseRequest | Unparsed, context: Context) -> pb.ReleaseResponse:
        """See the protocol."""
        wanted = parsed(request)
        refuse_unknown_fields(wanted)
        kind = wanted.WhichOneof("target")
        named = wanted.tenant or (wanted.request.tenant if kind == "request" else "")
        tenant = self._tenants.admit(Caller.of(context), named)
        asked = worker.ReleasePrefixRequest(tenant=tenant)
        if kind == "session_id" and wanted.session_id:
            check_session(wanted.session_id)
            self._sessions.forget(tenant, wanted.session_id)
            asked.session = session_bytes(tenant, wanted.session_id)
        elif kind == "pin_id" and wanted.pin_id:
            asked.pin_id = wanted.pin_id
        elif kind == "request":
            refuse_unknown_fields(wanted.request, "request")
            if wanted.request.tenant not in ("", tenant):
                raise TwinpoolError("INVALID_TENANT", "tenant differs from request.tenant", field="tenant")
            wanted.request.tenant = tenant
            _, _, chain = await self._chain(wanted.request)
            if not chain.block_hashes:
                return pb.ReleaseResponse()
            asked.chain.CopyFrom(chain)
        else:
            raise TwinpoolError(
                "INVALID_ARGUMENT",
                "target is not set; the limit is one of session_id, pin_id, request",
                field="target",
            )
        return await self._pins.release(asked)

    async def GetUsage(self, request: pb.GetUsageRequest | Unparsed, context: Context) -> pb.GetUsageResponse:
        """See the protocol."""
        wanted = parsed(request)
        refuse_unknown_fields(wanted)
        tenant = self._tenants.admit(Caller.of(context), wanted.tenant)
        return pb.GetUsageResponse(tenant=tenant, **asdict(self._usage.totals(tenant)))

    async def ListModels(
        self, request: pb.ListModelsRequest | Unparsed, context: Context
    ) -> pb.ListModelsResponse:
        """See the protocol."""
        parsed(request)
        return pb.ListModelsResponse(models=self.models_of(Caller.of(context)))

    def models_of(self, caller: Caller) -> list[pb.Model]:
        """The models that a caller may use."""
        tenant = self._tenants.admit(caller)
        return [model for model in self._models.models() if self._tenants.allowed(tenant, model.name)]
