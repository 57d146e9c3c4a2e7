# SPDX-License-Identifier: Apache-2.0
"""Renders a conversation with the model's own chat template.

The environment offers what templates of published checkpoints rely on: block trimming, loop controls, an unescaped
``tojson``, ``raise_exception``, ``strftime_now`` and the ``generation`` tag. It is sandboxed and immutable: a template
comes with the weights, from people whom the operator may not know.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from twinpool.text.errors import ChatTemplateError, TokenizerLoadError

Message = Mapping[str, Any]

# Private use characters and a space, which a template that trims would take away.
_END_OF_CONTENT: Final = "\ue0fe\ue0ff "


class _GenerationTag(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks the assistant's part for training; here it only renders."""

    tags = {"generation"}  # noqa: RUF012 - the attribute's type is jinja2's

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Macro) -> str:
        return str(caller())


class _GuardedNamespace(Namespace):
    """``namespace()`` without attributes that begin with an underscore, which could reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # As in jinja2, ``self`` is positional only, so that a template may store an attribute of that name.
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not store {name!r} in a namespace")


class _GuardedDict:
    """``dict(...)`` in a template; the type itself stays out of reach."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which would change the prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda pattern: now().strftime(pattern),
        dict=_GuardedDict(),
        namespace=_GuardedNamespace,
    )
    return environment


class ChatTemplate:
    """A compiled chat template with the special tokens that it may name (``bos_token`` and so on)."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        """Raises TokenizerLoadError if ``source`` is not a valid template."""
        try:
            self._template = _environment(now).from_string(source)
        except TemplateSyntaxError as error:
            raise TokenizerLoadError(f"chat template, line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        keep_none: bool = False,
    ) -> str:
        """The prompt's text. ``variables`` go before the special tokens of the same name. With ``continue_final_message`` it ends
        where the content of the last message does, so that the model goes on with it. With ``keep_none`` the template sees
        fields of messages that are None; as in transformers it does not by default.

        Raises ChatTemplateError for an empty conversation and for whatever the template itself refuses. Its message is
        for the caller who sent the conversation, not for logs: a template may quote what it refuses.
        """
        if not messages:
            raise ChatTemplateError("the conversation is empty: at least one message is needed")
        if continue_final_message:
            return self._continued(messages, tools, documents, variables, keep_none)
        context = {**self._special_tokens, **(variables or {})}
        context.update(
            messages=[
                {key: value for key, value in message.items() if keep_none or value is not None}
                for message in messages
            ],
            tools=None if tools is None else [dict(tool) for tool in tools],
            documents=None if documents is None else [dict(document) for document in documents],
            add_generation_prompt=add_generation_prompt,
        )
        try:
            text = self._template.render(context)
            # JSON can hold halves of characters, in a template as in what a client sends; no tokenizer takes them.
            text.encode()
            return text
        except TemplateError as error:
            raise ChatTemplateError(
                f"the model's chat template refused the messages: {error.message}"
            ) from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            # Such an error quotes the value at fault, which may be a user's text: name its type only.
            raise ChatTemplateError(
                f"the model's chat template failed with {type(error).__name__}"
            ) from error

    def _continued(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        keep_none: bool,
    ) -> str:
        # As in transformers: the end of the content is marked, and the text is cut at the mark.
        content = messages[-1].get("content")
        if not isinstance(content, str):
            raise ChatTemplateError("the last message has no text to continue")
        marked = [*messages[:-1], {**messages[-1], "content": content + _END_OF_CONTENT}]
        text = self.render(
            marked,
            add_generation_prompt=False,
            tools=tools,
            documents=documents,
            variables=variables,
            keep_none=keep_none,
        )
        end = text.rfind(_END_OF_CONTENT.strip())
        if end < 0:
            raise ChatTemplateError(
                "the model's chat template leaves out the message that is to be continued"
            )
        # Where the template trims what follows the mark, it trims the end of every content.
        return text[:end] if text.startswith(_END_OF_CONTENT, end) else text[:end].rstrip()
