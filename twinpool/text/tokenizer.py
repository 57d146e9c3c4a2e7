# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's tokenizer: text and chat messages to token ids, and back.

It reads the files that ``transformers`` reads (``tokenizer.json``, ``tokenizer_config.json``, ``chat_template.jinja``,
``generation_config.json``, ``config.json``) and gives the same ids, without importing it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from twinpool.text.boundaries import Boundaries
from twinpool.text.chat_style import ChatStyle
from twinpool.text.chat_template import Message
from twinpool.text.detokenizer import Detokenizer, DetokenizerFactory
from twinpool.text.errors import ChatTemplateError, TokenizerLoadError, UnknownTokenError
from twinpool.text.fast import FastEncoder, fast_encoder
from twinpool.text.files import (
    TokenizerConfig,
    loading,
    read_added_tokens,
    read_chat_templates,
    read_eos_ids,
    read_json,
    read_special_flags,
    read_special_tokens,
    read_template,
)

Around = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids that a tokenizer puts before and after a text."""


TOKENS_MAX = 1 << 22
"""Most ids of a vocabulary: sixteen times the largest that is in use. Tables are as long as the highest id, so a file that names
a higher one would fill the memory."""


class Tokenizer:
    """Thread-safe after construction and ``prepare``: holds no state of a request.

    ``boundaries``: where a text may be cut; None before ``prepare``, and if there is nowhere. ``around``: what
    ``add_special_tokens`` adds; None if that depends on the text.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        eos_token_ids: Sequence[int],
    ) -> None:
        """Use :meth:`from_pretrained`. ``chat_templates`` by name: "default" and perhaps "tool_use"."""
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._templates = {name: ChatStyle.of(text, special_tokens) for name, text in chat_templates.items()}
        self._eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self._detokenizers = DetokenizerFactory(backend)
        self._fast: FastEncoder | None = None
        self.boundaries: Boundaries | None = None
        self.around: Around | None = None

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, *, chat_template: str | Path | None = None
    ) -> "Tokenizer":
        """Reads a checkpoint's directory. ``chat_template``: a file that takes the place of the checkpoint's own templates.

        Raises TokenizerLoadError, which names the file at fault.
        """
        root = Path(directory)
        with loading(root):
            return cls._read(root, chat_template)

    @classmethod
    def _read(cls, root: Path, chat_template: str | Path | None) -> "Tokenizer":
        path = root / "tokenizer.json"
        if not path.is_file():
            raise TokenizerLoadError(f"{path}: missing; a checkpoint needs its tokenizer in this format")
        with loading(path):
            backend = Backend.from_file(str(path))
        highest = max(backend.get_vocab(with_added_tokens=True).values(), default=0)
        if highest >= TOKENS_MAX:
            raise TokenizerLoadError(f"{path}: a token has id {highest}; the limit is {TOKENS_MAX - 1}")
        backend.no_truncation()
        backend.no_padding()
        config = read_json(root / "tokenizer_config.json", optional=True)
        special_tokens = read_special_tokens(root, config)
        _add_tokens(backend, config, special_tokens)
        eos = read_eos_ids(root)
        if not eos and "eos_token" in special_tokens:
            eos = [_id_of(backend, special_tokens["eos_token"])]
        try:
            return cls(
                backend,
                special_tokens=special_tokens,
                chat_templates=read_chat_templates(root, config)
                if chat_template is None
                else read_template(Path(chat_template)),
                eos_token_ids=eos,
            )
        except TokenizerLoadError as error:
            raise TokenizerLoadError(f"{root}: {error}") from error

    def to_json(self) -> str:
        """tokenizer.json, with the tokens that other files add."""
        return str(self._backend.to_str())

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id, added tokens included. A model's own figure may be larger (padding)."""
        return self._detokenizers.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: of generation_config.json, else of config.json, else the tokenizer's."""
        return self._eos_token_ids

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Named special tokens ("bos_token" ...) as text."""
        return self._special_tokens

    @property
    def has_chat_template(self) -> bool:
        return "default" in self._templates

    def prepare(self) -> None:
        """Looks for what makes it faster, and tries that it changes nothing. Takes a fraction of a second; idempotent.

        Raises TokenizerLoadError if it fails at plain texts.
        """
        with loading("the tokenizer"):
            self.around = _around(self._backend)
            self._fast = fast_encoder(
                self._backend, lambda texts: [ids.tolist() for ids in self._encode_parts(texts)]
            )
            self.boundaries = Boundaries.of(self._backend, self.encode_parts)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> NDArray[np.int32]:
        """Token ids of ``text``, by default with the special tokens that the tokenizer adds around a text."""
        if self._fast is not None and (self.around is not None or not add_special_tokens):
            found = self._fast.encode([text])
            if found is not None:
                before, after = self.around if self.around is not None and add_special_tokens else ((), ())
                return np.concatenate([np.asarray(before, np.int32), found[0], np.asarray(after, np.int32)])
        # Unlike ``encode``, a batch leaves the GIL to others while it works, and this kind of it skips the offsets.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return np.asarray(encoding.ids, np.int32)

    def encode_parts(self, parts: list[str]) -> list[NDArray[np.int32]]:
        """Token ids of several texts, without special tokens around them."""
        found = self._fast.encode(parts) if self._fast is not None else None
        return found if found is not None else self._encode_parts(parts)

    def _encode_parts(self, parts: list[str]) -> list[NDArray[np.int32]]:
        encodings = self._backend.encode_batch_fast(parts, add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> NDArray[np.int32]:
        """Token ids of a conversation under the model's template. Raises ChatTemplateError."""
        text = self.chat(tools is not None).render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools
        )
        # The template writes special tokens itself: adding them again would double the first one.
        return self.encode(text, add_special_tokens=False)

    def chat(self, with_tools: bool = False) -> ChatStyle:
        """How the model wants conversations to look. Raises ChatTemplateError if it has no template."""
        template = self._templates.get("tool_use") if with_tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise ChatTemplateError("this model has no chat template: send text or token ids")
        return template

    def decode(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = True,
        keep: Collection[str] = frozenset(),
    ) -> str:
        """The whole text of ``token_ids``. Raises UnknownTokenError."""
        stream = self.detokenizer(skip_special_tokens=skip_special_tokens, keep=keep)
        return stream.push(token_ids) + stream.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text by itself; nothing for a special one, nor for one that only the model has: its head may be
        padded, so that it rates ids that no token has."""
        try:
            return self._detokenizers.bytes_of(token_id)
        except UnknownTokenError:
            return b""

    def detokenizer(
        self, *, skip_special_tokens: bool = True, keep: Collection[str] = frozenset()
    ) -> Detokenizer:
        """A detokenizer for one stream of tokens. Special tokens in ``keep`` are not skipped."""
        return self._detokenizers.create(skip_special_tokens=skip_special_tokens, keep=keep)


def _add_tokens(backend: Backend, config: TokenizerConfig, special_tokens: Mapping[str, str]) -> None:
    """Makes tokens that only the configuration names known to the backend, as ``transformers`` does at load.

    Its ``add_bos_token`` and ``add_eos_token`` are not read, as there: tokenizer.json says what goes around a text.
    """
    tokens = {token["content"]: token for token in read_added_tokens(config)}
    added = backend.get_added_tokens_decoder().values()
    known = {token.content for token in added} | tokens.keys()
    for token in read_special_flags(config, special_tokens):
        if token["content"] not in known:
            tokens.setdefault(token["content"], token)
    # Once special, a token stays special in the backend, whatever a later declaration says.
    special = {*special_tokens.values(), *(token.content for token in added if token.special)}
    for text, token in tokens.items():
        token["special"] = token.get("special", False) or text in special
    backend.add_tokens([AddedToken(**token) for token in tokens.values()])


def _around(backend: Backend) -> Around | None:
    """What the tokenizer puts around a text, found by asking it; None if it is not the same around different texts."""
    found: set[Around] = set()
    for text in ("a", "hello world", "\n", "日本 1"):
        whole, inner = (backend.encode(text, add_special_tokens=add).ids for add in (True, False))
        at = next(
            (at for at in range(len(whole) - len(inner) + 1) if whole[at : at + len(inner)] == inner), None
        )
        if at is None:
            return None
        found.add((tuple(whole[:at]), tuple(whole[at + len(inner) :])))
    return found.pop() if len(found) == 1 else None


def _id_of(backend: Backend, text: str) -> int:
    token_id = backend.token_to_id(text)
    if token_id is None:
        raise TokenizerLoadError(f"the special token {text!r} is not in the vocabulary")
    return int(token_id)
