# SPDX-License-Identifier: Apache-2.0
"""Blocks that go to host memory and come back."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from twinpool.engine.kv.host import HostPool
from twinpool.engine.kv.pool import KVPool


def pairs(*values: tuple[int, int]) -> NDArray[np.int32]:
    return np.array(values, np.int32).reshape(-1, 2)


@dataclass
class Swaps:
    swap_out: NDArray[np.int32] = field(default_factory=pairs)
    swap_in: NDArray[np.int32] = field(default_factory=pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_block_comes_back_bit_by_bit(dtype: torch.dtype) -> None:
    pool = KVPool(6, 2, 4, 8, dtype)
    host = HostPool(pool, 3)
    pool.tensor.view(torch.uint8).random_(0, 255)
    before = pool.tensor.view(torch.uint8).clone()
    host.swap(Swaps(swap_out=pairs((4, 0), (1, 2))))
    pool.poison([1, 4])
    host.swap(Swaps(swap_in=pairs((2, 5), (0, 1))))
    after = pool.tensor.view(torch.uint8)
    assert after[5].equal(before[1])
    assert after[1].equal(before[4])
    assert after[0].equal(before[0])
    assert (after[4] == 0xFF).all()


def test_what_goes_out_is_read_before_anything_comes_in() -> None:
    pool = KVPool(2, 1, 1, 1)
    host = HostPool(pool, 2)
    pool.tensor[0] = 1.0
    host.swap(Swaps(swap_out=pairs((0, 0))))
    pool.tensor[1] = 2.0
    host.swap(Swaps(swap_out=pairs((1, 1)), swap_in=pairs((0, 1))))
    assert pool.tensor.flatten().tolist() == [1.0, 1.0]
    assert host.tensor.flatten().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("name", ["swap_out", "swap_in"])
@pytest.mark.parametrize("wrong", [(0, 3), (3, 0), (-1, 0), (0, -1)])
def test_a_block_out_of_range_is_refused(name: str, wrong: tuple[int, int]) -> None:
    pool = KVPool(2, 1, 1, 1)
    with pytest.raises(IndexError, match="out of range of 2"):
        HostPool(pool, 2).swap(Swaps(**{name: pairs(wrong)}))


def test_a_host_pool_has_blocks() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        HostPool(KVPool(2, 1, 1, 1), 0)
