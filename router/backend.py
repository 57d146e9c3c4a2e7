# SPDX-License-Identifier: Apache-2.0
"""The router behind the front ends that speak protocols of others."""

from twinpool.router.call import Call
from twinpool.router.chat.service import ChatService
from twinpool.router.models import ModelTable
from twinpool.router.service import InferenceService
from twinpool.rpc import Caller
from twinpool.text import Tokenizer
from twinpool.v1 import chat_pb2 as chat
from twinpool.v1 import inference_pb2 as pb


class RouterBackend:
    """Implements ``openai.server.Backend``; KServe's protocol takes it as it is."""

    def __init__(self, inference: InferenceService, chats: ChatService, models: ModelTable) -> None:
        self._inference = inference
        self._chats = chats
        self._models = models

    async def chat(self, request: chat.ChatRequest, call: Call[chat.ChatResponse]) -> None:
        await self._chats.serve(request, call)

    async def generate(self, request: pb.GenerateRequest, call: Call[pb.GenerateResponse]) -> None:
        await self._inference.serve(request, call)

    def models(self, caller: Caller) -> list[pb.Model]:
        return self._inference.models_of(caller)

    def tokenizer(self, model: str) -> Tokenizer:
        return self._models.resolve(model).tokenizer

    def live(self) -> bool:
        # That it answers shows that the event loop turns, which is all that a router does.
        return True

    def ready(self) -> bool:
        return self._models.servable
