# SPDX-License-Identifier: Apache-2.0
"""Blocks that are neighbours: what reading them takes, and how many pieces a prompt's blocks are in a pool that prompts of all lengths
have come to and left for long."""

from __future__ import annotations

import random
import statistics

import numpy as np

from bench._common import Figures
from bench._handoff import Copy, Product, Raw, Setting
from twinpool._core import BlockManager, hash_blocks, root_hash
from twinpool.transfer.base import Blocks

POOL_BLOCKS = 8192
BLOCK_TOKENS = 64
TURNS = 4000
RUNNING = 48


def neighbours(count: int, num_blocks: int, seed: int) -> tuple[Blocks, Blocks]:
    """``count`` physical blocks of each side, one run of neighbours at a random place."""
    random = np.random.default_rng([seed, count])
    remote, local = (
        np.arange(count, dtype=np.int32) + np.int32(random.integers(num_blocks - count + 1)) for _ in range(2)
    )
    return remote, local


def measure_runs(side: Product | Raw | Copy, setting: Setting, count: int, repeats: int) -> Figures:
    """As ``bench._handoff.measure``, of neighbours."""
    seconds = statistics.median(
        side.read(*neighbours(count, setting.num_blocks, seed)) for seed in range(repeats)
    )
    return {"us": seconds * 1e6, "GB_per_s": count * setting.block_bytes / seconds / 1e9}


def pieces() -> Figures:
    """Mean pieces and blocks of prompts of 1 to 256 blocks, each new, after the pool has been given out many times: 48 run at a time
    and end in any order, grow by 1 to 8 blocks meanwhile, and stay in the cache until they are evicted."""
    draw = random.Random(1)
    generations = np.zeros(POOL_BLOCKS, np.uint64)
    blocks = BlockManager(POOL_BLOCKS, BLOCK_TOKENS, generations)
    root = root_hash(b"bench", b"", b"")
    running: list[list[np.ndarray]] = []
    counts, found = list[int](), list[int]()
    for turn in range(TURNS):
        if len(running) == RUNNING:
            held = running.pop(draw.randrange(RUNNING))
            blocks.release(np.concatenate(held))
        length = int(2 ** draw.uniform(0, 8))
        ids = blocks.allocate(length)
        assert ids is not None
        tokens = np.full(length * BLOCK_TOKENS, turn, np.int32)
        blocks.commit(ids, hash_blocks(root, tokens, BLOCK_TOKENS), root)
        running.append([ids])
        more = blocks.allocate(draw.randint(1, 8))
        assert more is not None
        draw.choice(running).append(more)
        if turn >= TURNS // 2:
            counts.append(length)
            found.append(1 + int(np.count_nonzero(np.diff(ids) != 1)))
    return {
        "pieces of a prompt's blocks": statistics.mean(found),
        "blocks of a prompt": statistics.mean(counts),
        "blocks a piece": sum(counts) / sum(found),
    }
