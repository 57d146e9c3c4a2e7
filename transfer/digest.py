# SPDX-License-Identifier: Apache-2.0
"""Digests over whole blocks: a second proof beside the fence, for faults that a generation cannot show.

A digest covers all ``block_bytes`` of a block as they lie in the pool. Blocks are moved whole and an offered block is
not written any more, so both sides see the same bytes, also behind the last token of a partial block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np

from twinpool._core import block_digest
from twinpool.transfer.base import Blocks, PoolMemory

Digest: TypeAlias = Callable[[Blocks], list[int]]
"""64-bit digests of physical blocks of this worker's pool, in the order that was asked for."""

DigestPolicy: TypeAlias = Literal["off", "sample", "always"]

SAMPLE_ONE_IN = 16
"""How many transfers share one that carries digests under the policy "sample"."""


def wanted(policy: DigestPolicy, transfer_id: int) -> bool:
    """Whether a transfer carries digests. Ids are random, so their remainder samples evenly."""
    return policy == "always" or (policy == "sample" and transfer_id % SAMPLE_ONE_IN == 0)


def pool_digest(pool: PoolMemory) -> Digest:
    """The digest of a pool in host memory; ``engine.kernels.triton_digest`` has the same for a device's. Raises ValueError
    for device memory."""
    if pool.region.memory_type != "DRAM":
        raise ValueError("this digest reads host memory")
    length = np.array([pool.block_bytes], dtype=np.int64)

    def digest(blocks: Blocks) -> list[int]:
        if len(blocks) and (int(blocks.min()) < 0 or int(blocks.max()) >= pool.num_blocks):
            raise ValueError(f"a block is outside the pool of {pool.num_blocks}")
        return [
            int(
                block_digest(pool.region.address + int(block) * pool.block_bytes, pool.block_bytes, length)[0]
            )
            for block in blocks
        ]

    return digest
