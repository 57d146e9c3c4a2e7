# SPDX-License-Identifier: Apache-2.0
"""Turns a stream of token ids into a stream of text."""

import json
from collections.abc import Collection, Iterable

from tokenizers import Tokenizer as Backend

from twinpool.text.decoders import ByteLevel, Stage, compile_decoder, token_bytes
from twinpool.text.errors import UnknownTokenError


class DetokenizerFactory:
    """What all streams of one tokenizer share: the decoder's plan and the pieces of the tokens seen so far."""

    def __init__(self, backend: Backend) -> None:
        """Raises TokenizerLoadError if the tokenizer's decoder can't be streamed exactly."""
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        # As in the library, a token is special by its text, whichever id it has.
        self._special = frozenset(token.content for token in added.values() if token.special)
        # The pickling state of a decoder is its JSON; the whole tokenizer's JSON would hold the vocabulary too.
        decoder = backend.decoder
        self._stages = compile_decoder(None if decoder is None else json.loads(decoder.__getstate__()))
        self._byte_level = self._stages == [ByteLevel]
        self._tokens: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}
        self._vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return self._vocab_size

    def create(
        self, *, skip_special_tokens: bool = True, keep: Collection[str] = frozenset()
    ) -> "Detokenizer":
        """A detokenizer for one stream. Special tokens in ``keep`` are not skipped."""
        if not skip_special_tokens:
            return Detokenizer(self, frozenset(), plain=False)
        if self._special.isdisjoint(keep):
            return Detokenizer(self, self._special, plain=True)
        return Detokenizer(self, self._special.difference(keep), plain=False)

    def token(self, token_id: int) -> str:
        """The token's string. Raises UnknownTokenError."""
        token = self._tokens.get(token_id)
        if token is None:
            found = self._backend.id_to_token(token_id) if 0 <= token_id < self._vocab_size else None
            if found is None:
                raise UnknownTokenError(token_id, self._vocab_size)
            token = self._tokens[token_id] = str(found)
        return token

    def plain_bytes(self, token_id: int) -> bytes:
        """The bytes of a byte-level token, none for a special one. Raises UnknownTokenError."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self.token(token_id)
            data = self._bytes[token_id] = b"" if token in self._special else token_bytes(token)
        return data

    def bytes_of(self, token_id: int) -> bytes:
        """What a token adds to a text by itself; nothing for a special one. Raises UnknownTokenError."""
        if self._byte_level:
            return self.plain_bytes(token_id)
        stream = self.create()
        return (stream.push((token_id,)) + stream.flush()).encode()

    @property
    def byte_level(self) -> bool:
        """True if the decoder is byte-level alone, which has a shorter way."""
        return self._byte_level

    def stages(self) -> list[Stage]:
        """Fresh stages for one stream."""
        return [make() for make in self._stages]


class Detokenizer:
    """One stream of tokens. The texts that ``push`` and ``flush`` return join to the library's ``decode`` of all ids.

    Text is returned as soon as no later token can change it: incomplete UTF-8 waits for its other bytes.
    """

    def __init__(self, factory: DetokenizerFactory, skipped: Collection[str], *, plain: bool) -> None:
        """``plain``: all special tokens are skipped, for which there is a shorter way."""
        self._factory = factory
        self._skipped = skipped
        self._plain = plain
        self._stages = factory.stages()
        self._bytes = (
            self._stages[0] if factory.byte_level and isinstance(self._stages[0], ByteLevel) else None
        )

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens settle. Raises UnknownTokenError; the stream is then of no further use."""
        if self._bytes is not None and self._plain:
            data = b"".join([self._factory.plain_bytes(token_id) for token_id in token_ids])
            return "".join(self._bytes.feed_bytes(data))
        out: list[str] = []
        for token_id in token_ids:
            token = self._factory.token(token_id)
            if token not in self._skipped:
                out += _run(self._stages, [token])
        return "".join(out)

    def flush(self) -> str:
        """The end of the stream: returns what was held back (an incomplete character becomes U+FFFD)."""
        out: list[str] = []
        for i, stage in enumerate(self._stages):
            out += _run(self._stages[i + 1 :], stage.end())
        return "".join(out)


def _run(stages: list[Stage], pieces: list[str]) -> list[str]:
    for stage in stages:
        pieces = [settled for piece in pieces for settled in stage.feed(piece)]
    return pieces
