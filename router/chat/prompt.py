# SPDX-License-Identifier: Apache-2.0
"""From a conversation to the prompt of its next turn, and how the answer to it is to be read.

A turn that must call a tool begins with the call: its beginning stands in the prompt, and a grammar says how it goes on.
"""

from dataclasses import dataclass
from typing import Final

from twinpool.config import RouterSection
from twinpool.errors import ConfigError, TwinpoolError
from twinpool.router.chat.conversation import check_conversation
from twinpool.router.chat.forced import forced_grammar
from twinpool.router.chat.stream import TurnStream
from twinpool.text import ChatStyle, ChatTemplateError, Tokenizer
from twinpool.text.calls import THINK_END, Format, find_format, formats
from twinpool.v1 import chat_pb2 as chat
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1.resume_pb2 import TurnForm

_ENDED_REASONING: Final = f"{THINK_END}\n\n"


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """How a turn is to be made. ``has_form``: whether the client wants a form of the answer as a whole."""

    conversation: pb.ChatMessages
    style: ChatStyle
    calls: Format | None
    opening: str = ""
    grammar: str = ""
    has_form: bool = False
    raw_reasoning: bool = False
    single_call: bool = False

    @property
    def kept_tokens(self) -> tuple[str, ...]:
        """Special tokens that are part of the answer's text."""
        return self.calls.markers if self.calls is not None else ()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """What ends the turn besides what its client asked for."""
        end = self.calls.end if self.calls is not None and self.single_call else ""
        return (end,) if end else ()

    def completed(self, text: str) -> tuple[str, TurnForm]:
        """The whole prompt, of the conversation's own text, and how its answer is read."""
        thinking = None if self.raw_reasoning else self.style.thinking(text)
        if thinking is not None and thinking.open and (self.grammar or self.has_form):
            # What has a form has no room for reasoning: it ends before it begins.
            text += _ENDED_REASONING
            thinking = None
        if self.opening:
            thinking = None
        form = TurnForm(
            call_format=self.calls.name if self.calls is not None else "",
            opening=self.opening,
            reasons=thinking is not None,
            reasoning_open=thinking is not None and thinking.open,
            single_call=self.single_call,
        )
        return text + self.opening, form


class TurnPlanner:
    """One a router."""

    def __init__(self, limits: RouterSection) -> None:
        """Raises ConfigError for an unknown ``router.call_format``; without one calls are as the models' chat templates show."""
        self._limits = limits
        name = limits.call_format
        try:
            self._format = find_format(name) if name else None
        except KeyError:
            known = ", ".join(formats())
            raise ConfigError(
                f"router.call_format: {name[:64]!r} is not one of {known}", key="router.call_format"
            ) from None

    def plan(self, request: chat.ChatRequest, tokenizer: Tokenizer) -> TurnPlan:
        """Raises for a conversation that cannot be, and for a choice of tools that it does not allow."""
        conversation = request.request.chat
        check_conversation(conversation, self._limits)
        style = _style(tokenizer, conversation)
        forced = bool(request.tool_name) or request.tool_choice == chat.TOOL_CHOICE_MODE_REQUIRED
        has_form = request.request.HasField("structured")
        if request.tool_choice == chat.TOOL_CHOICE_MODE_NONE or not conversation.tools:
            if forced:
                raise _refusal("tool_choice asks for a call; the limit is what chat.tools holds: none")
            plain = pb.ChatMessages()
            plain.CopyFrom(conversation)
            plain.ClearField("tools")
            return TurnPlan(plain, style, None, has_form=has_form, raw_reasoning=request.raw_reasoning)
        calls = self._format or style.calls
        if has_form:
            if forced:
                raise _refusal("structured cannot be used with a call that is asked for")
            raise _refusal("structured cannot be used with tools that the model is free to call")
        opening, grammar = _forced(request, calls) if forced else ("", "")
        return TurnPlan(
            conversation,
            style,
            calls,
            opening,
            grammar,
            raw_reasoning=request.raw_reasoning,
            single_call=request.single_call,
        )


@dataclass(frozen=True, slots=True)
class AskedTurn:
    """A chat on its way through InferenceService. Its answer goes to ``stream``."""

    request: chat.ChatRequest
    planner: TurnPlanner
    stream: TurnStream


def _forced(request: chat.ChatRequest, calls: Format | None) -> tuple[str, str]:
    """How a turn that must call begins, and the grammar of the rest."""
    conversation, name = request.request.chat, request.tool_name
    if name and request.tool_choice:
        raise _refusal("tool_name and tool_choice are both set; the limit is one of them")
    if calls is None:
        raise _refusal("tool_choice asks for a call; it is not known how this model writes one")
    tools = [tool for tool in conversation.tools if not name or tool.name == name]
    if not tools:
        raise _refusal("tool_name names no tool of chat.tools")
    if conversation.continue_final_message:
        raise _refusal("tool_choice asks for a call; a message that is continued cannot begin with one")
    return calls.opening(name), forced_grammar(calls, tools, bool(name))


def _style(tokenizer: Tokenizer, conversation: pb.ChatMessages) -> ChatStyle:
    try:
        return tokenizer.chat(bool(conversation.tools))
    except ChatTemplateError as error:
        raise TwinpoolError("INVALID_CHAT", f"chat.messages: {error}", field="chat.messages") from error


def _refusal(text: str) -> TwinpoolError:
    return TwinpoolError("INVALID_TOOLS", text, field="tool_choice")
