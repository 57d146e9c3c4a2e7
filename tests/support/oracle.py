# SPDX-License-Identifier: Apache-2.0
"""The oracle: greedy tokens of ``transformers`` on the same weights, in this process."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers


class Greedy(Protocol):
    """Whoever knows the answers."""

    def greedy(
        self, prompt: Sequence[int], max_tokens: int, *, stop: Sequence[int] = (), ignore_eos: bool = False
    ) -> list[int]: ...


class Oracle:
    """Greedy continuation by the reference implementation, float32, batch 1."""

    def __init__(self, path: Path) -> None:
        torch.set_num_threads(2)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(path), dtype=torch.float32, attn_implementation="eager"
        ).eval()
        eos = self.model.generation_config.eos_token_id
        if eos is None:
            eos = self.model.config.eos_token_id
        self._answers: dict[tuple[tuple[int, ...], int, frozenset[int]], list[int]] = {}
        self.eos: set[int] = set(eos) if isinstance(eos, list) else {eos} if eos is not None else set()

    @torch.inference_mode()
    def greedy(
        self, prompt: Sequence[int], max_tokens: int, *, stop: Sequence[int] = (), ignore_eos: bool = False
    ) -> list[int]:
        """Token ids up to and including the one that stops, at most ``max_tokens``."""
        ends = frozenset(stop) | (frozenset() if ignore_eos else frozenset(self.eos))
        key = (tuple(prompt), max_tokens, ends)
        if key not in self._answers:
            self._answers[key] = self._generate(prompt, max_tokens, ends)
        return list(self._answers[key])

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """``float64 [n, vocab]``: row ``i`` is what follows the first ``i + 1`` tokens."""
        logits: torch.Tensor = self.model(input_ids=torch.tensor([list(tokens)])).logits[0]
        return logits.double().log_softmax(-1)

    def _generate(self, prompt: Sequence[int], max_tokens: int, ends: frozenset[int]) -> list[int]:
        ids = torch.tensor([list(prompt)])
        cache_state = None
        produced: list[int] = []
        while len(produced) < max_tokens:
            result = self.model(input_ids=ids, past_key_values=cache_state, use_cache=True, logits_to_keep=1)
            token = int(result.logits[0, -1].argmax())
            produced.append(token)
            if token in ends:
                break
            cache_state = result.past_key_values
            ids = torch.tensor([[token]])
        return produced


@cache
def oracle(path: Path) -> Oracle:
    """One oracle a checkpoint and test process."""
    return Oracle(path)
