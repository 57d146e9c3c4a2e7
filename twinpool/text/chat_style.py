# SPDX-License-Identifier: Apache-2.0
"""How one model writes conversations: its template, what that expects, and the form of the calls in its answers."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from twinpool.text.calls import THINK_BEGIN, THINK_END, Format, Thinking, format_of_template
from twinpool.text.chat_conventions import ChatConventions
from twinpool.text.chat_template import ChatTemplate, Message
from twinpool.text.errors import ChatTemplateError


class ChatStyle:
    """One chat template and what is known of it."""

    def __init__(self, template: ChatTemplate, *, calls: Format | None, thinks: bool) -> None:
        self._template = template
        self.calls = calls
        """How the model writes calls; None if its template does not show it."""
        self._thinks = thinks

    @classmethod
    def of(cls, source: str, special_tokens: Mapping[str, str]) -> "ChatStyle":
        """Raises TokenizerLoadError if ``source`` is not a valid template."""
        template = ChatTemplate(source, special_tokens)
        return cls(template, calls=format_of_template(source), thinks=THINK_END in source)

    @cached_property
    def conventions(self) -> ChatConventions:
        """What the template expects of tools and calls."""
        return ChatConventions.of(self._template)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt's text. ``tool_calls`` of messages hold their arguments as JSON text.

        Raises ChatTemplateError, also for tools that the template would leave out unsaid.
        """
        calls = any(message.get("tool_calls") for message in messages)
        if tools and not self.conventions.shows_tools:
            raise ChatTemplateError("the model's chat template does not show tools: it was not made for them")
        if calls and not self.conventions.shows_calls:
            raise ChatTemplateError("the model's chat template does not show calls of tools")
        return self._template.render(
            [self.conventions.message(message) for message in messages] if calls else messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools or None,
            documents=documents or None,
            variables=variables,
            continue_final_message=continue_final_message,
            keep_none=calls and self.conventions.keep_none,
        )

    def thinking(self, prompt: str) -> Thinking | None:
        """How the model marks its reasoning in an answer to ``prompt``; None if it does not reason."""
        if not self._thinks:
            return None
        return Thinking(open=prompt.rstrip().endswith(THINK_BEGIN))
