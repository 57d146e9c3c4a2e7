# SPDX-License-Identifier: Apache-2.0
"""Where a text may be cut so that its parts tokenise to what the whole does.

A tokenizer first looks for added tokens such as ``<|im_start|>`` in the raw text and takes what lies between them one piece
at a time: no normaliser, pre-tokenizer or merge ever sees two pieces. So a cut right before an added token is exact, if the
token takes nothing from its left, and if the part begins *with* the token, because some tokenizers treat the first piece of
a text in a way of its own. Tokenizers for which this does not hold are found by trying, when they are loaded.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers

MIN_PART_CHARS: Final = 256
"""A part has so many characters at least: shorter ones cost more to keep than to tokenise."""

_TRIALS: Final = 64
_WORDS: Final = (
    "The quick", " brown", " fox.\n", "\n\n", "  ", "\t", " don't", "naïve", "日本語", "한국어", "😀🏳️‍🌈", "e\u0301",
    "1234567", " 3.14", "return x", "\r\n", "_", " ", "A", "", "▁", "Ġ", "\u00a0", "<", "|", ">", "</s", "[",
)  # fmt: skip

EncodeParts = Callable[[list[str]], list[NDArray[np.int32]]]


class Boundaries:
    """Use :meth:`of`. Thread-safe: holds nothing of a text."""

    def __init__(self, passes: Sequence[Sequence[str]], safe: Iterable[str]) -> None:
        """``passes``: added tokens that are looked for first, then those that are looked for in what is left, and so on;
        ``safe``: those before which a cut is exact."""
        self._safe = frozenset(safe)
        self._passes = [re.compile(any_of(tokens)) for tokens in passes if tokens]

    @classmethod
    def of(cls, backend: Backend, encode_parts: EncodeParts) -> "Boundaries | None":
        """The boundaries of a tokenizer; None if it has none that hold. ``encode_parts`` adds no special tokens."""
        added = [token for token in backend.get_added_tokens_decoder().values() if token.content]
        # Whether a token that must be a word of its own is one depends on what follows, perhaps behind a cut.
        if any(token.single_word for token in added):
            return None
        # The others are looked for after normalisation. Where that does nothing, they can be found here, too.
        passes = [[token for token in added if not token.normalized]]
        if _normalises_nothing(backend):
            passes.append([token for token in added if token.normalized])
        safe = [token.content for tokens in passes for token in tokens if not token.lstrip]
        if not safe:
            return None
        made = cls([[token.content for token in tokens] for tokens in passes], safe)
        return made if made.hold(encode_parts) else None

    def cuts(self, text: str) -> list[int]:
        """Positions at which ``text`` may be cut, each ``MIN_PART_CHARS`` or more after the one before it (or the start).

        Of a text that begins with another one they begin with the cuts of that one, but for cuts near its end.
        """
        cuts: list[int] = []
        last = 0
        for at, token in self._matches(text, 0, len(text), 0):
            if at - last >= MIN_PART_CHARS and token in self._safe:
                cuts.append(at)
                last = at
        return cuts

    def _matches(self, text: str, start: int, end: int, level: int) -> Iterator[tuple[int, str]]:
        """Added tokens in ``text[start:end]`` with their positions, in order, as the tokenizer finds them."""
        if level == len(self._passes):
            return
        for match in self._passes[level].finditer(text, start, end):
            yield from self._matches(text, start, match.start(), level + 1)
            yield match.start(), match.group()
            start = match.end()
        yield from self._matches(text, start, end, level + 1)

    def split(self, text: str) -> list[str]:
        """``text`` in parts."""
        edges = [0, *self.cuts(text), len(text)]
        return [text[start:end] for start, end in pairwise(edges)]

    def hold(self, encode_parts: EncodeParts) -> bool:
        """Whether cutting gives what the whole gives, on texts that are made to break it."""
        source = random.Random(1)
        tokens = sorted(self._safe)
        for _ in range(_TRIALS):
            words = (
                source.choice(tokens) if source.random() < 0.2 else source.choice(_WORDS)
                for _ in range(source.randint(1, 400))
            )
            text = "".join(words)
            (whole,) = encode_parts([text])
            if not np.array_equal(whole, np.concatenate(encode_parts(self.split(text)))):
                return False
        return True


def any_of(tokens: Iterable[str]) -> str:
    """A pattern that matches one of ``tokens``, of several the longest. Common beginnings are looked at once: a tokenizer
    may have a thousand tokens that begin with the same character."""
    return _pattern(sorted(set(tokens)))


def _pattern(tokens: list[str]) -> str:
    """Of tokens that are sorted and distinct."""
    optional = tokens[0] == ""
    branches: list[str] = []
    at = int(optional)
    while at < len(tokens):
        head = tokens[at][0]
        end = at
        while end < len(tokens) and tokens[end][0] == head:
            end += 1
        group = tokens[at:end]
        shared = _shared_chars(group[0], group[-1])
        rest = [token[shared:] for token in group]
        branches.append(re.escape(group[0][:shared]) + (_pattern(rest) if rest != [""] else ""))
        at = end
    if not branches:
        return ""
    if len(branches) == 1 and not optional:
        return branches[0]
    # Greedy: the shorter one only where no longer one fits.
    return f"(?:{'|'.join(branches)})" + ("?" if optional else "")


def _shared_chars(first: str, last: str) -> int:
    """Of sorted strings the first and the last share what all share."""
    pairs = zip(first, last, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(last)))


def _normalises_nothing(backend: Backend) -> bool:
    normalizer = backend.normalizer
    return normalizer is None or (isinstance(normalizer, normalizers.Sequence) and len(normalizer) == 0)
