# SPDX-License-Identifier: Apache-2.0
"""Streaming forms of the decoders that a ``tokenizer.json`` can name.

A decoder of the ``tokenizers`` library maps a *list* of token strings to text. Each stage here does the same for a list
that arrives token by token, and returns text as early as no later token can change it. Whatever the cut, the joined
output equals the library's output for the whole list.

A stage reads *pieces*: token strings, or, behind a stage that joins them (``fused``), fragments of one string.
"""

import codecs
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from twinpool.text.errors import TokenizerLoadError


class Stage(Protocol):
    """One step from tokens to text."""

    def feed(self, piece: str) -> list[str]:
        """The pieces that ``piece`` settles."""
        ...

    def end(self) -> list[str]:
        """The pieces that were held back until the end."""
        ...


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes printable Latin-1 bytes as themselves and the others as characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_BYTES = _byte_alphabet()


def token_bytes(token: str) -> bytes:
    """The bytes that a byte-level token stands for; a token with any other character stands for its own UTF-8."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "surrogatepass")


class ByteLevel:
    """Joins bytes; incomplete UTF-8 waits, invalid UTF-8 becomes U+FFFD once that is certain."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, piece: str) -> list[str]:
        return self.feed_bytes(token_bytes(piece))

    def feed_bytes(self, data: bytes) -> list[str]:
        text = self._decoder.decode(data)
        return [text] if text else []

    def end(self) -> list[str]:
        text = self._decoder.decode(b"", final=True)
        return [text] if text else []


class Replace:
    """Replaces a string inside each piece."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content = pattern, content

    def feed(self, piece: str) -> list[str]:
        return [piece.replace(self._pattern, self._content)]

    def end(self) -> list[str]:
        return []


class ByteFallback:
    """Turns runs of ``<0xE2>``-like tokens into text.

    A run is decoded as a whole: if any part of it is invalid UTF-8, each of its bytes becomes U+FFFD. So a run waits
    until another token ends it.
    """

    _TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>", re.ASCII)

    def __init__(self) -> None:
        self._run = bytearray()

    def feed(self, piece: str) -> list[str]:
        match = self._TOKEN.fullmatch(piece)
        if match is not None:
            self._run.append(int(match[1], 16))
            return []
        return [*self.end(), piece]

    def end(self) -> list[str]:
        if not self._run:
            return []
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = "�" * len(self._run)
        self._run.clear()
        return [text]


class Fuse:
    """Joins all tokens. Its pieces are fragments of one string from here on."""

    def feed(self, piece: str) -> list[str]:
        return [piece]

    def end(self) -> list[str]:
        return []


class StripEach:
    """Strips up to ``start`` and ``stop`` characters off the ends of each piece."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop

    def feed(self, piece: str) -> list[str]:
        begin, end = 0, len(piece)
        while begin < min(self._start, len(piece)) and piece[begin] == self._content:
            begin += 1
        while len(piece) - end < min(self._stop, len(piece)) and piece[end - 1] == self._content:
            end -= 1
        return [piece[begin : max(begin, end)]]

    def end(self) -> list[str]:
        return []


class StripStart:
    """Strips up to ``count`` characters off the beginning of the joined string."""

    def __init__(self, content: str, count: int) -> None:
        self._content, self._left = content, count

    def feed(self, piece: str) -> list[str]:
        if not self._left:
            return [piece]
        begin = 0
        while begin < len(piece) and self._left and piece[begin] == self._content:
            begin += 1
            self._left -= 1
        if begin < len(piece):
            self._left = 0
        return [piece[begin:]]

    def end(self) -> list[str]:
        return []


class Metaspace:
    """Writes the replacement character as a space; in the first token it is dropped unless ``keep_first``."""

    def __init__(self, replacement: str, keep_first: bool) -> None:
        self._replacement, self._keep = replacement, keep_first

    def feed(self, piece: str) -> list[str]:
        text = piece.replace(self._replacement, " " if self._keep else "")
        self._keep = True
        return [text]

    def end(self) -> list[str]:
        return []


class SpaceJoin:
    """What the library does where ``tokenizer.json`` has no decoder: tokens joined by single spaces."""

    def __init__(self) -> None:
        self._first = True

    def feed(self, piece: str) -> list[str]:
        text = piece if self._first else " " + piece
        self._first = False
        return [text]

    def end(self) -> list[str]:
        return []


StageFactory = Callable[[], Stage]
_SUPPORTED = "ByteLevel, ByteFallback, Fuse, Metaspace, Replace, Sequence, Strip"


def compile_decoder(spec: Mapping[str, Any] | None) -> list[StageFactory]:
    """Factories of the stages for the ``decoder`` of a ``tokenizer.json`` (None: no decoder).

    Raises TokenizerLoadError for a decoder whose output can't be streamed exactly here.
    """
    if spec is None:
        return [SpaceJoin]
    stages: list[StageFactory] = []
    fused = False
    for part in _flatten(spec):
        stage, fused = _stage(part, fused)
        stages.append(stage)
    return stages


def _flatten(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if spec.get("type") != "Sequence":
        return [spec]
    return [part for child in spec.get("decoders", []) for part in _flatten(child)]


def _stage(spec: Mapping[str, Any], fused: bool) -> tuple[StageFactory, bool]:
    kind = spec.get("type")
    if kind == "Fuse":
        return Fuse, True
    if kind == "Replace":
        pattern, content = spec.get("pattern", {}).get("String"), spec.get("content", "")
        # Behind a join a longer pattern could lie across two fragments.
        if isinstance(pattern, str) and (len(pattern) == 1 or (pattern and not fused)):
            return (lambda: Replace(pattern, content)), fused
        raise TokenizerLoadError(
            f"tokenizer.json: decoder Replace with pattern {spec.get('pattern')} is not supported"
        )
    if kind == "Strip":
        return _strip(
            str(spec.get("content", "")), int(spec.get("start", 0)), int(spec.get("stop", 0)), fused
        ), fused
    if not fused and kind == "ByteLevel":
        return ByteLevel, True
    if not fused and kind == "ByteFallback":
        return ByteFallback, False
    if not fused and kind == "Metaspace":
        replacement, keep = str(spec.get("replacement", "▁")), spec.get("prepend_scheme", "always") == "never"
        return (lambda: Metaspace(replacement, keep)), False
    where = " behind a decoder that joins tokens" if fused else ""
    raise TokenizerLoadError(
        f"tokenizer.json: decoder {kind}{where} is not supported; supported are {_SUPPORTED}"
    )


def _strip(content: str, start: int, stop: int, fused: bool) -> StageFactory:
    if not fused:
        return lambda: StripEach(content, start, stop)
    if stop:
        raise TokenizerLoadError(
            "tokenizer.json: decoder Strip at the end of the joined text is not supported"
        )
    return lambda: StripStart(content, start)
