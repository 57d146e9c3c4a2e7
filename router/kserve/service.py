# SPDX-License-Identifier: Apache-2.0
"""GRPCInferenceService of the Open Inference Protocol: health, what models take and give, and requests over Generate."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio

from twinpool import __version__
from twinpool.config.router import RouterSection
from twinpool.errors import TwinpoolError
from twinpool.router.backend import RouterBackend
from twinpool.router.call import Call
from twinpool.router.kserve.answer import FINAL, OUTPUTS, Answer
from twinpool.router.kserve.parameters import INPUTS
from twinpool.router.kserve.request import VERSION, Asked, check_version, is_version, read_request
from twinpool.router.kserve.stream import InferStream, Send
from twinpool.router.utf8 import Unparsed, add_leniently, parsed, refuse_unknown_fields
from twinpool.router.validate import check_choices, shown
from twinpool.rpc import Caller
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1.kserve import open_inference_pb2 as kserve

SERVICE: Final = kserve.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name

EXTENSIONS: Final = ("parameters", "schedule_policy")
"""Of Triton's extensions, those whose parameters are known here: any, and ``priority`` and ``timeout``."""

Context = grpc.aio.ServicerContext[Any, Any]


class KserveService:
    """See the module. Raises TwinpoolError; the server turns it into a status."""

    def __init__(self, backend: RouterBackend, limits: RouterSection) -> None:
        self._backend = backend
        self._limits = limits
        self._draining = asyncio.Event()

    def drain(self) -> None:
        """From now on streams end with their last running request."""
        self._draining.set()

    # --- the server and its models --------------------------------------------------------

    async def ServerLive(
        self, request: kserve.ServerLiveRequest | Unparsed, context: Context
    ) -> kserve.ServerLiveResponse:
        """See the protocol. For probes, which show no key."""
        refuse_unknown_fields(parsed(request))
        return kserve.ServerLiveResponse(live=self._backend.live())

    async def ServerReady(
        self, request: kserve.ServerReadyRequest | Unparsed, context: Context
    ) -> kserve.ServerReadyResponse:
        """See the protocol. For probes, which show no key."""
        refuse_unknown_fields(parsed(request))
        return kserve.ServerReadyResponse(ready=self._backend.ready() and not self._draining.is_set())

    async def ModelReady(
        self, request: kserve.ModelReadyRequest | Unparsed, context: Context
    ) -> kserve.ModelReadyResponse:
        """See the protocol."""
        wanted = parsed(request)
        refuse_unknown_fields(wanted)
        found = self._model(wanted.name, context)
        ready = found is not None and found.ready and is_version(wanted.version)
        return kserve.ModelReadyResponse(ready=ready)

    async def ServerMetadata(
        self, request: kserve.ServerMetadataRequest | Unparsed, context: Context
    ) -> kserve.ServerMetadataResponse:
        """See the protocol."""
        refuse_unknown_fields(parsed(request))
        # Nobody but a tenant is told anything, where there are tenants.
        self._backend.models(Caller.of(context))
        return kserve.ServerMetadataResponse(name="twinpool", version=__version__, extensions=EXTENSIONS)

    async def ModelMetadata(
        self, request: kserve.ModelMetadataRequest | Unparsed, context: Context
    ) -> kserve.ModelMetadataResponse:
        """See the protocol."""
        wanted = parsed(request)
        refuse_unknown_fields(wanted)
        found = self._model(wanted.name, context)
        if found is None:
            raise TwinpoolError(
                "MODEL_NOT_FOUND", f"name is {shown(wanted.name)}; no such model is served", field="name"
            )
        check_version(wanted.version, "version")
        response = kserve.ModelMetadataResponse(name=found.name, versions=[VERSION], platform="twinpool")
        for name, spec in INPUTS.items():
            response.inputs.add(name=name, datatype=spec.datatypes[0], shape=[-1 if spec.many else 1])
        for name, (datatype, shape) in OUTPUTS.items():
            response.outputs.add(name=name, datatype=datatype, shape=shape)
        return response

    # --- requests -------------------------------------------------------------------------

    async def ModelInfer(
        self, request: kserve.ModelInferRequest | Unparsed, context: Context
    ) -> kserve.ModelInferResponse:
        """See the protocol."""
        asked = self._read(request)
        if asked.stream:
            raise TwinpoolError(
                "INVALID_ARGUMENT",
                "stream is true; the limit is false but in ModelStreamInfer",
                field="stream",
            )
        answer = Answer(asked, self._backend.tokenizer)

        async def gather(event: pb.GenerateResponse) -> None:
            answer.add(event)

        await self._generate(asked, replace(Call.of(context), write=gather))
        return answer.whole()

    async def ModelStreamInfer(
        self, requests: AsyncIterator[kserve.ModelInferRequest | Unparsed], context: Context
    ) -> None:
        """See the protocol."""
        call: Call[Any] = Call.of(context)
        # Who is no tenant is told so once, and not by each response.
        self._backend.models(call.caller)
        stream = InferStream(
            partial(self._one, call),
            context.write,
            max_requests=self._limits.max_stream_requests,
            stall_seconds=self._limits.client_stall_seconds,
        )
        await stream.run(aiter(requests), self._draining)

    # --- inside ---------------------------------------------------------------------------

    async def _one(self, call: Call[Any], request: kserve.ModelInferRequest | Unparsed, send: Send) -> None:
        """Serves one request of a stream."""
        call = replace(call, arrival=time.monotonic())
        asked = self._read(request)
        answer = Answer(asked, self._backend.tokenizer)

        async def gather(event: pb.GenerateResponse) -> None:
            answer.add(event)

        async def pass_on(event: pb.GenerateResponse) -> None:
            if (response := answer.piece(event)) is not None:
                await send(response)

        await self._generate(asked, replace(call, write=pass_on if asked.stream else gather))
        if not asked.stream:
            response = answer.whole()
            response.parameters[FINAL].bool_param = True
            await send(response)

    def _read(self, request: kserve.ModelInferRequest | Unparsed) -> Asked:
        asked = read_request(parsed(request))
        # An answer has room for each choice before anything else is checked.
        check_choices(asked.request.n, self._limits)
        return asked

    async def _generate(self, asked: Asked, call: Call[pb.GenerateResponse]) -> None:
        if asked.timeout_seconds is not None:
            call = replace(call, deadline=call.deadline.earlier(asked.timeout_seconds))
        await self._backend.generate(asked.request, call)

    def _model(self, name: str, context: Context) -> pb.Model | None:
        """The model of that name that the caller may use; of no name, the only one."""
        found = [model for model in self._backend.models(Caller.of(context)) if name in ("", model.name)]
        return found[0] if len(found) == 1 else None


def register(servicer: KserveService, server: grpc.aio.Server) -> None:
    """Adds the service with request parsers that never fail: see ``utf8``."""
    add_leniently(kserve.DESCRIPTOR.services_by_name["GRPCInferenceService"], servicer, server)
