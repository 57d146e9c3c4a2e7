# SPDX-License-Identifier: Apache-2.0
"""A real block manager that is used at random, over a small tree of prompts so that everything collides."""

import random
from dataclasses import dataclass, field

import numpy as np

from twinpool._core import BlockManager, hash_blocks, root_hash
from twinpool.kv_events.hashes import split
from twinpool.worker.kv_events.shadow import RawEvent
from twinpool.worker.kv_events.tap import CacheTap

BLOCK_TOKENS = 16
DEPTH = 6
BRANCHES = 2
ROOTS = [root_hash(b"fingerprint", tenant, b"") for tenant in (b"", b"a")]


def _chains() -> list[tuple[bytes, np.ndarray]]:
    """(root, uint8[DEPTH, 16]) of every path of the tree, for each root."""
    found = []
    for root in ROOTS:
        for path in range(BRANCHES**3):
            # The first three blocks branch, the others follow from them.
            words = [path // BRANCHES ** (2 - at) for at in range(3)] + [path] * (DEPTH - 3)
            tokens = np.repeat(np.array([word * 31 + at for at, word in enumerate(words)]), BLOCK_TOKENS)
            found.append((root, hash_blocks(root, tokens.astype(np.int32), BLOCK_TOKENS)))
    return found


CHAINS = _chains()


@dataclass
class Sequence:
    """Holds ``blocks`` of a chain, of which the first ``committed`` are published (by it or by another)."""

    chain: int
    blocks: list[int] = field(default_factory=list)
    committed: int = 0


class CacheWorld:
    """``step`` does one thing at random; ``events`` collects what the tap hands over."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.blocks = BlockManager(num_blocks, BLOCK_TOKENS, np.zeros(num_blocks, np.uint64))
        self.sequences: list[Sequence] = []
        self.events: list[list[RawEvent]] = []
        self.tap = CacheTap(self.blocks, self.events.append)

    def step(self) -> None:
        """Starts, extends or ends a sequence, or drops the cache."""
        action = self.random.random()
        if action < 0.35 or not self.sequences:
            self._begin()
        elif action < 0.7:
            self._extend(self.random.choice(self.sequences))
        elif action < 0.99:
            self._end()
        else:
            self.blocks.reset_cache()

    def drained(self) -> list[list[RawEvent]]:
        """What the tap hands over now, in its lists."""
        self.tap.drain()
        found = list(self.events)
        self.events.clear()
        return found

    def findable(self, chain: int) -> int:
        """The truth: how many leading blocks of a chain a new sequence would find."""
        return self.blocks.lookup(CHAINS[chain][1])

    def whole(self) -> set[bytes]:
        """The truth: every hash that can be found."""
        return {
            name for at in range(len(CHAINS)) for name in split(CHAINS[at][1][: self.findable(at)].tobytes())
        }

    def _begin(self) -> None:
        chain = self.random.randrange(len(CHAINS))
        self.tap.saw_root(CHAINS[chain][0])
        # Now and then without a look at the cache: two that started at the same moment compute the same blocks.
        found = self.blocks.acquire_prefix(CHAINS[chain][1]) if self.random.random() < 0.6 else []
        sequence = Sequence(chain, [int(block) for block in found], len(found))
        self.sequences.append(sequence)

    def _extend(self, sequence: Sequence) -> None:
        root, hashes = CHAINS[sequence.chain]
        if len(sequence.blocks) == DEPTH:
            return
        given = self.blocks.allocate(self.random.randint(1, DEPTH - len(sequence.blocks)))
        if given is None:
            return
        sequence.blocks += [int(block) for block in given]
        if self.random.random() < 0.8:
            at = sequence.committed
            parent = hashes[at - 1].tobytes() if at else root
            self.blocks.commit(
                np.array(sequence.blocks[at:], np.int32), hashes[at : len(sequence.blocks)], parent
            )
            sequence.committed = len(sequence.blocks)

    def _end(self) -> None:
        sequence = self.sequences.pop(self.random.randrange(len(self.sequences)))
        if sequence.blocks:
            self.blocks.release(np.array(sequence.blocks, np.int32))
