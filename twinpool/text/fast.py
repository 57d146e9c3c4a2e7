# SPDX-License-Identifier: Apache-2.0
"""A second implementation of a tokenizer, several times as fast, where it gives the same ids.

``fastokens`` is optional. It is used for a tokenizer after it has given the reference's ids for every text of a corpus that
is made to find differences; and where it refuses a text that the reference takes, the reference takes it.
"""

import importlib
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend

from twinpool.logs import get_logger

log = get_logger(__name__)

_MODULE: Final = "fastokens"
_TEXTS: Final = 400
_WORDS_A_TEXT: Final = 40
_RANGES: Final = (
    (0x00, 0x20), (0x20, 0x7F), (0x7F, 0x180), (0x300, 0x370), (0x400, 0x460), (0x590, 0x5F0), (0x620, 0x660),
    (0x900, 0x980), (0xE00, 0xE60), (0x1100, 0x1120), (0x2000, 0x2070), (0x3040, 0x30FF), (0x4E00, 0x4F00),
    (0xAC00, 0xAC80), (0xE000, 0xE010), (0xFB00, 0xFB10), (0xFE00, 0xFE10), (0xFF00, 0xFF60), (0x10000, 0x10050),
    (0x1F1E6, 0x1F200), (0x1F3FB, 0x1F640),
)  # fmt: skip
_WORDS: Final = (
    "hello", " world", "\n\n", "  ", "\t", " don't", "'LL", "123456", "3.14", "  \n  ", "\r\n", "ﬁ", "e\u0301", "한국어",
    "\u200d", "\ufeff", " \u00a0", "DEF__x", "http://a.b/c?d=e", "    return x\n", "=====", "\uff0c\u3002", "\x00", "</s>", "<|",
)  # fmt: skip

Reference = Callable[[list[str]], list[list[int]]]


class FastEncoder:
    """Use :func:`fast_encoder`. Thread-safe; leaves the GIL to others while it works."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def encode(self, texts: list[str]) -> list[NDArray[np.int32]] | None:
        """Token ids of each text, without special tokens around it; None if it does not take one of them."""
        try:
            raw, offsets = self._native.encode_batch_flat(texts, add_special_tokens=False)
        except ValueError:
            return None
        ids = np.frombuffer(raw, np.uint32).astype(np.int32)
        edges = np.frombuffer(offsets, np.uint64).astype(np.int64)
        return [ids[start:end] for start, end in pairwise(edges)]


def fast_encoder(backend: Backend, reference: Reference) -> FastEncoder | None:
    """The fast twin of ``backend``; None if the package is not installed, does not know this kind, or differs.

    ``reference``: token ids of texts without special tokens around them, by ``backend``.
    """
    try:
        module: Any = importlib.import_module(_MODULE)
        made = FastEncoder(module.Tokenizer.from_json_str(backend.to_str()))
    except ImportError:
        log.debug("fast_tokenizer_not_installed", package=_MODULE)
        return None
    except Exception as error:
        # Whatever it raises for a kind that it does not know.
        log.info("fast_tokenizer_not_usable", package=_MODULE, error=type(error).__name__)
        return None
    texts = corpus([token.content for token in backend.get_added_tokens_decoder().values()])
    refused = 0
    for text, expected in zip(texts, reference(texts), strict=True):
        found = made.encode([text])
        if found is None:
            refused += 1
        elif found[0].tolist() != expected:
            log.warning("fast_tokenizer_differs", package=_MODULE, chars=len(text))
            return None
    log.info("fast_tokenizer_used", package=_MODULE, texts=len(texts), refused=refused)
    return made


def corpus(added: list[str]) -> list[str]:
    """Texts over many scripts, odd spaces, broken sequences and the tokenizer's own added tokens; always the same."""
    source = random.Random(7)
    pieces = [*_WORDS, *added[:200]]
    texts = ["", " ", "a", *_WORDS, *(token + "x" + token for token in added[:50])]
    for _ in range(_TEXTS):
        words = (
            source.choice(pieces) if source.random() < 0.5 else chr(source.randrange(*source.choice(_RANGES)))
            for _ in range(source.randint(1, _WORDS_A_TEXT))
        )
        texts.append("".join(words))
    return texts
