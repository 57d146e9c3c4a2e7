# SPDX-License-Identifier: Apache-2.0
"""ChatService: the next turn of a conversation, with calls of tools.

A chat is a request of InferenceService whose prompt is rendered here and whose text is read here. A turn that must call a tool
begins with the call: its beginning stands in the prompt, and a grammar says how it goes on.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc
import grpc.aio

from twinpool.errors import ConfigError, TwinpoolError
from twinpool.router.call import Call, Rendered
from twinpool.router.chat.forced import forced_grammar
from twinpool.router.chat.turn import Turn
from twinpool.router.models import ModelTable
from twinpool.router.service import InferenceService
from twinpool.router.tenants import Tenants
from twinpool.router.tokenize import TokenizeHop
from twinpool.router.utf8 import Unparsed, lenient, parsed, refuse_unknown_fields
from twinpool.text import ChatStyle, ChatTemplateError, Tokenizer
from twinpool.text.calls import THINK_END, Format, find_format, formats
from twinpool.v1 import chat_pb2 as chat
from twinpool.v1 import inference_pb2 as pb

SERVICE: Final = chat.DESCRIPTOR.services_by_name["ChatService"].full_name

ChatCall = Call[chat.ChatResponse]


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a turn is to be made and read."""

    conversation: pb.ChatMessages
    calls: Format | None
    opening: str = ""
    grammar: str = ""


class ChatService:
    """See the module. Raises TwinpoolError; the server turns it into a status."""

    def __init__(
        self,
        inference: InferenceService,
        models: ModelTable,
        tokenize: TokenizeHop,
        tenants: Tenants,
        call_format: str,
    ) -> None:
        """``call_format``: how the models write calls; "": as their chat templates show. Raises ConfigError for an unknown one."""
        self._inference = inference
        self._models = models
        self._tokenize = tokenize
        self._tenants = tenants
        try:
            self._format = find_format(call_format) if call_format else None
        except KeyError:
            known = ", ".join(formats())
            raise ConfigError(
                f"router.call_format: {call_format[:64]!r} is not one of {known}", key="router.call_format"
            ) from None

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
        asked = request.request
        if asked.WhichOneof("prompt") != "chat":
            raise TwinpoolError(
                "EMPTY_PROMPT", "request.chat is not set; the limit is a conversation", field="request.chat"
            )
        if asked.HasField("prompt_logprobs"):
            raise TwinpoolError(
                "UNSUPPORTED_FIELD",
                "request.prompt_logprobs is not supported in a chat: Generate takes a chat as its prompt",
                field="request.prompt_logprobs",
            )
        self._inference.check_choices(asked.n)
        # Before anything is told of the models, or rendered.
        asked.tenant = self._tenants.admit(call.caller, asked.tenant)
        tokenizer = self._models.resolve(asked.model).tokenizer
        template = _template(tokenizer, asked.chat)
        plan = self._plan(request, template)
        text = await self._tokenize.render(plan.conversation, tokenizer)
        thinking = None if request.raw_reasoning else template.thinking(text)
        if thinking is not None and thinking.open and (plan.grammar or asked.HasField("structured")):
            # What has a form has no room for reasoning: it ends before it begins.
            text += f"{THINK_END}\n\n"
            thinking = None
        turn = Turn(
            asked.n or 1,
            plan.calls,
            None if plan.opening else thinking,
            opening=plan.opening,
            single_call=request.single_call,
        )
        generate = pb.GenerateRequest()
        generate.CopyFrom(asked)
        generate.stop.stop_strings.extend(turn.stop_strings)
        kept = plan.calls.markers if plan.calls is not None else ()
        await self._inference.serve(
            generate,
            replace(call, write=_written(turn, call.write)),  # type: ignore[arg-type]
            Rendered(text + plan.opening, kept, plan.grammar),
        )

    def _plan(self, request: chat.ChatRequest, template: ChatStyle) -> _Plan:
        conversation = request.request.chat
        forced = bool(request.tool_name) or request.tool_choice == chat.TOOL_CHOICE_MODE_REQUIRED
        if request.tool_choice == chat.TOOL_CHOICE_MODE_NONE or not conversation.tools:
            if forced or request.tool_name:
                raise _refusal("tool_choice asks for a call; the limit is what chat.tools holds: none")
            plain = pb.ChatMessages()
            plain.CopyFrom(conversation)
            plain.ClearField("tools")
            return _Plan(plain, None)
        calls = self._format or template.calls
        if not forced:
            if request.request.HasField("structured"):
                raise _refusal("structured cannot be used with tools that the model is free to call")
            return _Plan(conversation, calls)
        return self._forced(request, calls)

    def _forced(self, request: chat.ChatRequest, calls: Format | None) -> _Plan:
        conversation, name = request.request.chat, request.tool_name
        if name and request.tool_choice:
            raise _refusal("tool_name and tool_choice are both set; the limit is one of them")
        if request.request.HasField("structured"):
            raise _refusal("structured cannot be used with a call that is asked for")
        if calls is None:
            raise _refusal("tool_choice asks for a call; it is not known how this model writes one")
        tools = [tool for tool in conversation.tools if not name or tool.name == name]
        if not tools:
            raise _refusal("tool_name names no tool of chat.tools")
        if conversation.continue_final_message:
            raise _refusal("tool_choice asks for a call; a message that is continued cannot begin with one")
        return _Plan(conversation, calls, calls.opening(name), forced_grammar(calls, tools, bool(name)))


def register(servicer: ChatService, server: grpc.aio.Server) -> None:
    """Adds the service with a request parser that never fails: see ``utf8``."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Chat": grpc.unary_stream_rpc_method_handler(
            servicer.Chat,
            request_deserializer=lenient(chat.ChatRequest),
            response_serializer=chat.ChatResponse.SerializeToString,
        )
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _template(tokenizer: Tokenizer, conversation: pb.ChatMessages) -> ChatStyle:
    try:
        return tokenizer.chat(bool(conversation.tools))
    except ChatTemplateError as error:
        raise TwinpoolError("INVALID_CHAT", f"chat.messages: {error}", field="chat.messages") from error


def _written(
    turn: Turn, write: Callable[[chat.ChatResponse], Awaitable[None]]
) -> Callable[[pb.GenerateResponse], Awaitable[None]]:
    async def take(event: pb.GenerateResponse) -> None:
        for response in turn.responses(event):
            await write(response)

    return take


def _refusal(text: str) -> TwinpoolError:
    return TwinpoolError("INVALID_TOOLS", text, field="tool_choice")
