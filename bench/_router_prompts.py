# SPDX-License-Identifier: Apache-2.0
"""Prompts of router benchmarks: rendered conversations of words, half shared with one of 64 groups, as text and as token ids."""

import random
from pathlib import Path

from tokenizers import Tokenizer

GROUPS = 64
_USER, _ASSISTANT = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"
_TURNS = 10


class Prompts:
    """Deterministic. Words come from the project's own documentation; turns begin with the template's special tokens."""

    def __init__(self, tokenizer: Path, seed: int = 0) -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        self._random = random.Random(seed)
        pages = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
        self._words = [word for page in pages for word in page.read_text().split() if word.isascii()]
        sample = " ".join(self._random.choice(self._words) for _ in range(20_000))
        self._tokens_a_word = len(self.ids(sample)) / 20_000
        self._shared: dict[int, list[str]] = {}

    def ids(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def conversation(self, tokens: int) -> list[str]:
        """The texts of a conversation's first, second, ... tenth prompt; the tenth is ``tokens`` long, give or take 2 %."""
        shared = self._shared.setdefault(tokens, [self._text(tokens // 2) for _ in range(GROUPS)])
        text = _USER + self._random.choice(shared)
        share = tokens - tokens // 2
        prompts = []
        for turn in range(_TURNS):
            text += (_USER if turn else "") + self._text(share // _TURNS) + _ASSISTANT
            prompts.append(text)
        return prompts

    def first(self, tokens: int) -> str:
        """A prompt of so many tokens that nobody has sent before; its first half is its group's."""
        shared = self._shared.setdefault(tokens, [self._text(tokens // 2) for _ in range(GROUPS)])
        return _USER + self._random.choice(shared) + _USER + self._text(tokens - tokens // 2) + _ASSISTANT

    def _text(self, tokens: int) -> str:
        return " ".join(self._random.choices(self._words, k=max(1, round(tokens / self._tokens_a_word))))
