# SPDX-License-Identifier: Apache-2.0
"""The beginnings that prompts of late had in common, and which workers hold them. Hashes only, of which some memory is kept."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from twinpool._core import RouterCore
from twinpool.router.request import Group, Prepared
from twinpool.worker.heat import Chain, PromptHeat, hottest

PROMPTS_KEPT: Final = 256
"""Prompts whose hashes are remembered."""

HASHES_KEPT: Final = 1 << 15
"""Hashes of them altogether: half a megabyte, and some 50 ms to rank them."""

BLOCKS_MAX: Final = 1 << 13
"""Most blocks that the beginnings have together."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """``hashes`` uint8[n, 16] of its blocks. ``uses``: prompts that began with it. ``holders``: worker and leading blocks."""

    group: Group
    hashes: NDArray[np.uint8]
    uses: int
    holders: list[tuple[str, int]]


class Beginnings:
    """The newest prompts of a router. ``saw`` on the event loop; what ``ranked`` returns may run on any thread."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self._heat = PromptHeat(PROMPTS_KEPT, HASHES_KEPT)
        self._groups: dict[bytes, Group] = {}

    def saw(self, prepared: Prepared) -> None:
        """A request was accepted."""
        self._heat.saw(prepared.root, prepared.hashes)
        self._groups[prepared.root] = prepared.group
        if len(self._groups) > PROMPTS_KEPT:
            kept = {chain.root for chain in self._heat.newest()}
            self._groups = {root: group for root, group in self._groups.items() if root in kept}

    def ranked(self, limit: int) -> Callable[[], list[Beginning]]:
        """Finds the ``limit`` most used ones, the most used first."""
        prompts, groups = self._heat.newest(), dict(self._groups)
        return lambda: _rank(self._core, prompts, groups, limit)


def _rank(
    core: RouterCore, prompts: list[Chain], groups: Mapping[bytes, Group], limit: int
) -> list[Beginning]:
    found = []
    for chain in hottest(prompts, BLOCKS_MAX)[:limit]:
        length, last = len(chain.hashes), chain.hashes[-1].tobytes()
        uses = sum(
            len(prompt.hashes) >= length and prompt.hashes[length - 1].tobytes() == last for prompt in prompts
        )
        holders = sorted(core.longest_prefix(chain.hashes), key=lambda one: (-one[1], one[0]))
        if chain.root in groups:
            found.append(Beginning(groups[chain.root], chain.hashes, uses, holders))
    # A chain is ranked by its first block; here by the whole of it.
    return sorted(found, key=lambda one: (-one.uses, -len(one.hashes)))
