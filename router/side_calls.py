# SPDX-License-Identifier: Apache-2.0
"""The calls of InferenceService that make no answer: tokens and text, models, usage, and prompts computed ahead of time."""

from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import Any, Final

import grpc.aio

from twinpool.errors import TwinpoolError
from twinpool.router.call import Call
from twinpool.router.models import ModelTable
from twinpool.router.tenants import Tenants
from twinpool.router.tokenize import TokenizeHop
from twinpool.router.usage import UsageBook
from twinpool.router.utf8 import Unparsed, parsed, refuse_unknown_fields
from twinpool.rpc import Caller
from twinpool.text import UnknownTokenError
from twinpool.v1 import inference_pb2 as pb

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
        self, models: ModelTable, tokenize: TokenizeHop, tenants: Tenants, usage: UsageBook, max_tokens: int
    ) -> None:
        """``max_tokens``: most token ids of one Detokenize."""
        self._models = models
        self._tokenize = tokenize
        self._tenants = tenants
        self._usage = usage
        self._max_detokenized = max_tokens

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
        if len(ids) > self._max_detokenized:
            raise TwinpoolError(
                "PROMPT_TOO_LONG",
                f"token_ids.ids has {len(ids)} ids; the limit is {self._max_detokenized}",
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
        wanted = parsed(request)
        refuse_unknown_fields(wanted)
        asked = pb.GenerateRequest()
        asked.CopyFrom(wanted.request)
        for name in _NOT_WARMED:
            asked.ClearField(name)
        asked.stop.max_tokens = 1
        finished = pb.GenerateFinished()

        async def take(event: pb.GenerateResponse) -> None:
            if event.HasField("finished"):
                finished.CopyFrom(event.finished)

        await self.serve(asked, Call.of(context).to(take))
        usage = finished.usage
        return pb.WarmResponse(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)

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
