# SPDX-License-Identifier: Apache-2.0
"""The digest kernel for device memory, in Triton's interpreter, against the core's digest of host memory."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # Read when a kernel is defined, hence before the imports below.

import numpy as np
import pytest
import torch

from twinpool.engine.kernels.triton_digest import STEPS, TILE, device_digest
from twinpool.transfer.base import PoolMemory
from twinpool.transfer.digest import pool_digest

PIECE = TILE * STEPS


@pytest.mark.parametrize(
    "words", [1, 2, TILE - 1, TILE, TILE + 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7]
)
def test_device_and_host_agree(words: int) -> None:
    random = torch.Generator().manual_seed(words)
    pool = torch.randint(0, 256, (4, words * 8), dtype=torch.uint8, generator=random)
    blocks = np.array([3, 0, 2], np.int32)
    assert device_digest(pool)(blocks) == pool_digest(PoolMemory.of_tensor(pool))(blocks)


def test_every_dtype_is_taken_as_bytes() -> None:
    pool = torch.randn(3, 2, 4, 6, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    pool[1] = float("nan")
    blocks = np.arange(3, dtype=np.int32)
    assert device_digest(pool)(blocks) == pool_digest(PoolMemory.of_tensor(pool))(blocks)


def test_one_bit_or_two_swapped_words_change_it() -> None:
    pool = torch.zeros(1, 512, dtype=torch.uint8)
    pool[0, 7], pool[0, 8] = 1, 2
    digest, only = device_digest(pool), np.zeros(1, np.int32)
    seen = digest(only)
    pool[0, 100] ^= 1
    changed = digest(only)
    pool[0, 100] ^= 1
    pool[0, :16] = torch.cat((pool[0, 8:16], pool[0, :8]))
    assert len({*seen, *changed, *digest(only)}) == 3


def test_what_cannot_be_digested_is_refused() -> None:
    with pytest.raises(ValueError, match="12 bytes"):
        device_digest(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="outside the pool of 2"):
        device_digest(torch.zeros(2, 8))(np.array([2], np.int32))
    assert device_digest(torch.zeros(2, 8))(np.empty(0, np.int32)) == []
