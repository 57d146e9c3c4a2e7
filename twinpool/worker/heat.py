# SPDX-License-Identifier: Apache-2.0
"""Which prefixes the prompts of late had in common: what a worker that leaves offers to others first."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

PROMPTS_KEPT: Final = 512
"""Prompts whose hashes are kept."""

HASHES_KEPT: Final = 1 << 19
"""Hashes of them altogether: 8 MiB."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The beginning of a prompt: ``hashes`` uint8[n, 16] of its full blocks, ``root`` 16 bytes."""

    root: bytes
    hashes: NDArray[np.uint8]


class PromptHeat:
    """The newest prompts. Owned by the step thread."""

    def __init__(self, prompts: int = PROMPTS_KEPT, hashes: int = HASHES_KEPT) -> None:
        self._prompts: deque[Chain] = deque()
        self._prompts_max, self._hashes_max = prompts, hashes
        self._hashes = 0

    def saw(self, root: bytes, hashes: NDArray[np.uint8]) -> None:
        """A prompt has come; those without a full block have no prefix to share."""
        if len(hashes) == 0 or len(hashes) > self._hashes_max:
            return
        self._prompts.append(Chain(root, hashes))
        self._hashes += len(hashes)
        while len(self._prompts) > self._prompts_max or self._hashes > self._hashes_max:
            self._hashes -= len(self._prompts.popleft().hashes)

    def newest(self) -> list[Chain]:
        """The prompts that are kept, the newest first."""
        return list(reversed(self._prompts))


def hottest(prompts: list[Chain], blocks_max: int) -> list[Chain]:
    """The most used prefixes of at most ``blocks_max`` different blocks, the most used first. ``prompts``: the newest first.

    Blocks are ranked by how many prompts have them, then by the newest of those. A block's ancestors are in every prompt
    that it is in, so they rank no lower: what is chosen is whole from its beginning, wherever the line is drawn.
    """
    uses: Counter[bytes] = Counter()
    newest: dict[bytes, tuple[int, int]] = {}
    names = [[row.tobytes() for row in prompt.hashes] for prompt in prompts]
    for age, chain in enumerate(names):
        for depth, name in enumerate(chain):
            uses[name] += 1
            newest.setdefault(name, (age, depth))
    ranked = sorted(uses, key=lambda name: (-uses[name], newest[name]))
    chosen = set(ranked[:blocks_max])
    lengths = [sum(name in chosen for name in chain) for chain in names]
    # Those that another one goes on from, or that came before.
    done = {
        name for chain, length in zip(names, lengths, strict=True) for name in chain[: max(0, length - 1)]
    }
    chains: list[Chain] = []
    for age in sorted(range(len(names)), key=lambda age: (-uses[names[age][0]], age)):
        length = lengths[age]
        if length and names[age][length - 1] not in done:
            done.add(names[age][length - 1])
            chains.append(Chain(prompts[age].root, prompts[age].hashes[:length]))
    return chains
