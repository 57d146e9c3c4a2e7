# SPDX-License-Identifier: Apache-2.0
"""The router behind the HTTP server."""

from collections.abc import Awaitable, Callable

from twinpool.router.call import Call
from twinpool.router.chat.service import ChatService
from twinpool.router.models import ModelTable
from twinpool.router.openai.shapes import TokenBytes
from twinpool.router.service import InferenceService
from twinpool.v1 import chat_pb2 as chat
from twinpool.v1 import inference_pb2 as pb


class RouterBackend:
    """Implements ``server.Backend``."""

    def __init__(self, inference: InferenceService, chats: ChatService, models: ModelTable) -> None:
        self._inference = inference
        self._chats = chats
        self._models = models

    async def chat(
        self,
        request: chat.ChatRequest,
        write: Callable[[chat.ChatResponse], Awaitable[None]],
        traceparent: str,
    ) -> None:
        await self._chats.serve(request, Call(write, traceparent=traceparent))

    async def generate(
        self,
        request: pb.GenerateRequest,
        write: Callable[[pb.GenerateResponse], Awaitable[None]],
        traceparent: str,
    ) -> None:
        await self._inference.serve(request, Call(write, traceparent=traceparent))

    def models(self) -> list[pb.Model]:
        return self._models.models()

    def token_bytes(self, model: str) -> TokenBytes:
        return self._models.resolve(model).tokenizer.token_bytes

    def live(self) -> bool:
        # That it answers shows that the event loop turns, which is all that a router does.
        return True

    def ready(self) -> bool:
        return self._models.servable
