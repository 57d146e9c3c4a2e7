# SPDX-License-Identifier: Apache-2.0
"""A ticket as a reader sees it: parsed once, checked against the owner's pool and the prompt."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool._core import read_ticket
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
    """Checks ``message`` against itself, the owner's pool of ``pool_blocks`` blocks and the prompt.

    The core reads its bytes: Python needs a microsecond for each look into a message, and many for its lists.
    """
    read = read_ticket(
        message.SerializeToString(), pool_blocks, shape.prompt_tokens, shape.block_tokens, LEASE_SECONDS_MAX
    )
    if isinstance(read, str):
        return HandoffFailure.of(HandoffFault.BAD_TICKET, read)
    transfer_id, first_block, blocks, generations, digests, length_tokens, lease_seconds = read
    return Ticket(
        transfer_id=transfer_id,
        attempt=AttemptKey.of(message.id),
        first_block=first_block,
        blocks=blocks,
        generations=generations,
        digests=digests,
        length_tokens=length_tokens,
        lease_seconds=lease_seconds,
    )
