# SPDX-License-Identifier: Apache-2.0
"""ChatService: the next turn of a conversation, with calls of tools.

A chat is a request of InferenceService whose prompt is made of a conversation (``prompt``) and whose answer is read here
(``stream``). How it is read follows from the request and the tokens alone, so any router can go on with it.
"""

from typing import Any, Final

import grpc
import grpc.aio

from twinpool.config import RouterSection
from twinpool.errors import TwinpoolError
from twinpool.router.call import Call
from twinpool.router.chat.position import check_positions
from twinpool.router.chat.prompt import AskedTurn, TurnPlanner
from twinpool.router.chat.stream import TurnStream
from twinpool.router.service import InferenceService
from twinpool.router.utf8 import Unparsed, add_leniently, parsed, refuse_unknown_fields
from twinpool.v1 import chat_pb2 as chat
from twinpool.v1 import inference_pb2 as pb

SERVICE: Final = chat.DESCRIPTOR.services_by_name["ChatService"].full_name

ChatCall = Call[chat.ChatResponse]


class ChatService:
    """See the module. Raises TwinpoolError; the server turns it into a status."""

    def __init__(self, inference: InferenceService, limits: RouterSection) -> None:
        """Raises ConfigError."""
        self._inference = inference
        self._limits = limits
        self._planner = TurnPlanner(limits)

    async def Chat(
        self,
        request: chat.ChatRequest | Unparsed,
        context: grpc.aio.ServicerContext[Any, chat.ChatResponse],
    ) -> None:
        """See the protocol."""
        await self.serve(parsed(request), Call.of(context))

    async def serve(self, request: chat.ChatRequest, call: ChatCall) -> None:
        """Serves one turn."""
        refuse_unknown_fields(request)
        check_positions(request.positions, self._limits)
        if request.request.WhichOneof("prompt") != "chat":
            raise TwinpoolError(
                "EMPTY_PROMPT", "request.chat is not set; the limit is a conversation", field="request.chat"
            )
        if request.request.HasField("prompt_logprobs"):
            raise TwinpoolError(
                "UNSUPPORTED_FIELD",
                "request.prompt_logprobs is not supported in a chat: Generate takes a chat as its prompt",
                field="request.prompt_logprobs",
            )
        stream = TurnStream(call.write, request.positions)
        asked = AskedTurn(request, self._planner, stream)
        await self._inference.serve(request.request, call.to(stream.write), asked)

    async def Resume(
        self,
        request: chat.ChatServiceResumeRequest | Unparsed,
        context: grpc.aio.ServicerContext[Any, chat.ChatServiceResumeResponse],
    ) -> None:
        """See the protocol."""
        wanted, call = parsed(request), Call.of(context)
        refuse_unknown_fields(wanted)
        check_positions(wanted.positions, self._limits)

        async def write(event: chat.ChatResponse) -> None:
            await context.write(chat.ChatServiceResumeResponse(response=event))

        stream = TurnStream(write, wanted.positions)
        plain = pb.ResumeRequest(token=wanted.token, next_index=stream.next_index, tenant=wanted.tenant)
        await self._inference.resume(plain, call.to(stream.write), stream)


def register(servicer: ChatService, server: grpc.aio.Server) -> None:
    """Adds the service with request parsers that never fail: see ``utf8``."""
    add_leniently(chat.DESCRIPTOR.services_by_name["ChatService"], servicer, server)
