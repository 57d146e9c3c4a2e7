# SPDX-License-Identifier: Apache-2.0
"""A ticket as a reader sees it: parsed once, checked against the owner's pool and the prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twinpool.transfer.base import AttemptKey, Blocks, Generations
from twinpool.transfer.fence import HandoffFailure, HandoffFault
from twinpool.v1 import handoff_pb2

LEASE_SECONDS_MAX = 86_400
"""The longest lease that a reader believes."""


@dataclass(frozen=True, slots=True)
class PromptShape:
    """What a reader expects: ``first_block`` is the first prompt block that it does not hold already."""

    prompt_tokens: int
    block_tokens: int
    first_block: int

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.block_tokens < 1:
            raise ValueError(f"a prompt of {self.prompt_tokens} tokens in blocks of {self.block_tokens}")
        if not 0 <= self.first_block <= self.prompt_blocks:
            raise ValueError(f"first block {self.first_block} is not in 0..{self.prompt_blocks}")

    @property
    def prompt_blocks(self) -> int:
        """Blocks of the prompt, a partial last one included."""
        return -(-self.prompt_tokens // self.block_tokens)

    @property
    def wanted_blocks(self) -> int:
        """Blocks that have to be pulled."""
        return self.prompt_blocks - self.first_block

    def tokens_at(self, block: int) -> int:
        """Prompt tokens before the end of the first ``block`` blocks."""
        return min(block * self.block_tokens, self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Blocks to pull: ``blocks[i]`` of the owner holds prompt block ``first_block + i``."""

    transfer_id: int
    attempt: AttemptKey
    first_block: int
    blocks: Blocks
    generations: Generations
    digests: tuple[int, ...]
    length_tokens: int
    lease_seconds: float

    @property
    def end_block(self) -> int:
        return self.first_block + len(self.blocks)


def parse_ticket(
    message: handoff_pb2.Ticket, *, pool_blocks: int, shape: PromptShape
) -> Ticket | HandoffFailure:
    """Checks ``message`` against itself, the owner's pool of ``pool_blocks`` blocks and the prompt."""
    # A message's lists and its lease are read once: each look into them costs microseconds, and a prompt waits.
    lease_nanos = message.lease.seconds * 1_000_000_000 + message.lease.nanos
    problem = _size_problem(message, shape)
    blocks: list[int] = []
    if problem is None:
        blocks = list(message.blocks)
        problem = _problem(message, blocks, lease_nanos, pool_blocks, shape)
    if problem is not None:
        return HandoffFailure.of(HandoffFault.BAD_TICKET, problem)
    return Ticket(
        transfer_id=message.transfer_id,
        attempt=AttemptKey.of(message.id),
        first_block=message.first_block,
        blocks=np.array(blocks, dtype=np.int32),
        generations=np.array(list(message.generations), dtype=np.uint64),
        digests=tuple(message.digests),
        length_tokens=message.length_tokens,
        lease_seconds=lease_nanos / 1e9,
    )


def _size_problem(message: handoff_pb2.Ticket, shape: PromptShape) -> str | None:
    """What can be said before anything that takes time with the number of blocks."""
    count = len(message.blocks)
    end = message.first_block + count
    if message.transfer_id == 0:
        return "transfer id 0"
    if end > shape.prompt_blocks:
        return f"blocks up to {end} for a prompt of {shape.prompt_blocks}"
    if len(message.generations) != count:
        return f"{len(message.generations)} generations for {count} blocks"
    if len(message.digests) not in (0, count):
        return f"{len(message.digests)} digests for {count} blocks"
    return None


def _problem(
    message: handoff_pb2.Ticket, blocks: list[int], lease_nanos: int, pool_blocks: int, shape: PromptShape
) -> str | None:
    count = len(blocks)
    end = message.first_block + count
    if count and max(blocks) >= pool_blocks:
        return f"block {max(blocks)} is outside the owner's pool of {pool_blocks}"
    if len(set(blocks)) != count:
        return "a block is named twice"
    if message.length_tokens != shape.tokens_at(end):
        return (
            f"{message.length_tokens} tokens up to block {end}, the prompt has {shape.tokens_at(end)} there"
        )
    if not 0 < lease_nanos <= LEASE_SECONDS_MAX * 1_000_000_000:
        return f"the lease is not positive, or longer than {LEASE_SECONDS_MAX} s"
    return None
