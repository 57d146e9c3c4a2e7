# SPDX-License-Identifier: Apache-2.0
"""The pool's layout, addresses and block operations."""

import mmap

import numpy as np
import pytest
import torch

from twinpool.engine.config import ModelConfig
from twinpool.engine.kv.pool import KVPool
from twinpool.engine.models.base import KVLayout

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_lie_where_their_address_says(dtype: torch.dtype) -> None:
    pool = KVPool(num_blocks=5, layers=3, block_tokens=4, width=6, dtype=dtype)
    assert pool.tensor.shape == (5, 3, 4, 6)
    assert pool.tensor.is_contiguous()
    assert pool.base_address % mmap.PAGESIZE == 0
    assert pool.block_bytes == 3 * 4 * 6 * dtype.itemsize
    assert pool.nbytes == pool.tensor.nbytes == 5 * pool.block_bytes
    assert pool.tensor[2].data_ptr() == pool.base_address + 2 * pool.block_bytes
    assert pool.block_bytes_view(2).data_ptr() == pool.tensor[2].data_ptr()
    assert pool.block_bytes_view(2).numel() == pool.block_bytes
    assert not pool.tensor.view(torch.uint8).any()


def test_generations_are_page_aligned_zeroes_that_can_be_raised_in_place() -> None:
    pool = KVPool(7, 1, 4, 6)
    assert pool.generations.dtype == np.uint64
    assert pool.generations.shape == (7,)
    assert pool.generations_address % mmap.PAGESIZE == 0
    assert pool.generations.flags.writeable
    pool.generations[3] += 1
    assert pool.generations.tolist() == [0, 0, 0, 1, 0, 0, 0]


def test_layer_is_a_view_of_pages() -> None:
    pool = KVPool(4, 3, 2, 5)
    pool.layer(1).fill_(2.0)
    assert pool.layer(1).shape == (4, 2, 5)
    assert pool.tensor[:, 1].eq(2.0).all()
    assert pool.tensor[:, [0, 2]].eq(0.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_is_nan_in_every_dtype_and_touches_nothing_else(dtype: torch.dtype) -> None:
    pool = KVPool(6, 2, 4, 3, dtype)
    pool.poison(np.array([1, 4], np.int32))
    bad = pool.tensor.float().isnan().flatten(1)
    assert bad.all(dim=1).tolist() == [False, True, False, False, True, False]
    assert not bad[[0, 2, 3, 5]].any()
    pool.poison([])


def test_copies_read_all_sources_first() -> None:
    pool = KVPool(4, 2, 2, 3)
    for block in range(4):
        pool.tensor[block] = float(block)
    pool.copy_blocks(np.array([[0, 1], [1, 2]], np.int32))
    assert pool.tensor.flatten(1)[:, 0].tolist() == [0.0, 0.0, 1.0, 3.0]
    pool.copy_blocks(np.empty((0, 2), np.int32))
    with pytest.raises(ValueError, match="destination of two copies"):
        pool.copy_blocks([[0, 2], [1, 2]])


@pytest.mark.parametrize("block", [-1, 4])
def test_blocks_out_of_range_are_refused(block: int) -> None:
    pool = KVPool(4, 1, 2, 3)
    for action in (lambda: pool.poison([block]), lambda: pool.copy_blocks([[0, block]])):
        with pytest.raises(IndexError, match="pool of 4"):
            action()


@pytest.mark.parametrize("name", ["num_blocks", "layers", "block_tokens", "width"])
def test_sizes_must_be_positive(name: str) -> None:
    sizes = {"num_blocks": 1, "layers": 1, "block_tokens": 1, "width": 1} | {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
        KVPool(**sizes)
    with pytest.raises(ValueError, match="holds floating point values"):
        KVPool(1, 1, 1, 1, torch.int8)


def test_deepseek_v3_keeps_576_values_a_token_and_layer() -> None:
    # What transformers assumes for a silent config.json is DeepSeek-V3 itself.
    layout = KVLayout.of(ModelConfig.from_dict({"model_type": "deepseek_v3"}))
    assert (layout.latent_dim, layout.rope_dim, layout.width, layout.layers) == (512, 64, 576, 61)
    for dtype in (torch.bfloat16, torch.float32):
        assert layout.bytes_per_token(dtype) == 576 * 61 * dtype.itemsize
    assert layout.bytes_per_token(torch.bfloat16) == 70_272
    pool = KVPool(2, layout.layers, 64, layout.width, torch.bfloat16)
    assert pool.kv_bytes_per_token == 70_272
    assert pool.block_bytes == 64 * 70_272
