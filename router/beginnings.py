# SPDX-License-Identifier: Apache-2.0
"""The beginnings that prompts of late had in common, and which workers hold them. Hashes only, of which some memory is kept."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from twinpool._core import RouterCore
from twinpool.router.request import Group, Prepared
from twinpool.worker.heat import Chain, PromptHeat

PROMPTS_KEPT: Final = 256
"""Prompts whose hashes are remembered."""

HASHES_KEPT: Final = 1 << 15
"""Hashes of them altogether: half a megabyte, and some 50 ms to rank them."""


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
        """Finds the ``limit`` ones that saved most, those first."""
        prompts, groups = self._heat.newest(), dict(self._groups)
        return lambda: _rank(self._core, prompts, groups, limit)


def _rank(
    core: RouterCore, prompts: list[Chain], groups: Mapping[bytes, Group], limit: int
) -> list[Beginning]:
    names = [[row.tobytes() for row in prompt.hashes] for prompt in prompts]
    uses = Counter(name for chain in names for name in chain)
    # A beginning ends where some of the prompts that have it part, or where a prompt does.
    ends: dict[bytes, tuple[int, int]] = {}
    for number, chain in enumerate(names):
        for depth, name in enumerate(chain, 1):
            if depth == len(chain) or uses[chain[depth]] < uses[name]:
                ends.setdefault(name, (number, depth))
    # The most worth first: what later prompts needed not compute.
    ranked = sorted(ends, key=lambda name: (-(uses[name] - 1) * ends[name][1], -uses[name], ends[name]))
    found: list[Beginning] = []
    for name in ranked:
        number, depth = ends[name]
        prompt = prompts[number]
        if len(found) < limit and prompt.root in groups:
            hashes = prompt.hashes[:depth]
            holders = sorted(core.longest_prefix(hashes), key=lambda one: (-one[1], one[0]))
            found.append(Beginning(groups[prompt.root], hashes, uses[name], holders))
    return found
