# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Digests of whole blocks in device memory: the sum that csrc/hash/digest.h defines, taken in parallel."""

from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

# As signed numbers: products wrap alike, and both the compiler and the interpreter keep them 64 bits wide.
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
FIRST = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
SECOND = tl.constexpr(0x94D049BB133111EB - (1 << 64))

WORD_BYTES = 8
TILE = 1024
STEPS = 16
"""A program sums STEPS tiles of TILE words: 128 KiB, so one block of DeepSeek-V3 is 35 programs."""


@triton.jit
def _mix(value):
    """The finaliser of SplitMix64 on int64; the masks make arithmetic shifts logical ones."""
    value = (value ^ ((value >> 30) & ((1 << 34) - 1))) * FIRST
    value = (value ^ ((value >> 27) & ((1 << 37) - 1))) * SECOND
    return value ^ ((value >> 31) & ((1 << 33) - 1))


@triton.jit(do_not_specialize=["words"])
def digest_kernel(WORDS, BLOCKS, SUMS, words, pieces, TILE: tl.constexpr, STEPS: tl.constexpr):
    """Program (piece, index): the sum over one piece of block ``BLOCKS[index]`` of ``words`` words."""
    piece = tl.program_id(0)
    index = tl.program_id(1)
    base = WORDS + tl.load(BLOCKS + index) * words
    total = tl.zeros([TILE], tl.int64)
    for step in range(STEPS):
        at = (piece * STEPS + step) * TILE + tl.arange(0, TILE).to(tl.int64)
        inside = at < words
        word = tl.load(base + at, mask=inside, other=0)
        total += tl.where(inside, _mix(word + (at + 1) * GOLDEN), 0)
    tl.store(SUMS + index * pieces + piece, tl.sum(total, 0))


def device_digest(pool: Tensor) -> Callable[[NDArray[np.int32]], list[int]]:
    """Digests of blocks ``pool[i]``, 64-bit, in the order that is asked for; runs behind what the device does already.

    Raises ValueError unless ``pool`` is contiguous and its blocks are whole words of 8 bytes.
    """
    block_bytes = pool[0].numel() * pool.element_size()
    if not pool.is_contiguous() or block_bytes % WORD_BYTES:
        raise ValueError(f"no digest of blocks of {block_bytes} bytes, contiguous: {pool.is_contiguous()}")
    words = pool.view(-1).view(torch.int64)
    count, num_blocks = block_bytes // WORD_BYTES, len(pool)
    pieces = triton.cdiv(count, TILE * STEPS)
    length = _mix_length(block_bytes)

    def digest(blocks: NDArray[np.int32]) -> list[int]:
        if not len(blocks):
            return []
        if int(blocks.min()) < 0 or int(blocks.max()) >= num_blocks:
            raise ValueError(f"a block is outside the pool of {num_blocks}")
        wanted = torch.from_numpy(blocks.astype(np.int64)).to(pool.device)
        sums = torch.empty(len(blocks), pieces, dtype=torch.int64, device=pool.device)
        digest_kernel[(pieces, len(blocks))](
            words, wanted, sums, count, pieces, TILE=TILE, STEPS=STEPS, num_warps=4
        )
        total: NDArray[np.uint64] = sums.sum(dim=1).cpu().numpy().view(np.uint64) + length
        return [int(value) for value in total]

    return digest


def _mix_length(length: int) -> np.uint64:
    value, mask = length, (1 << 64) - 1
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> shift)) * factor & mask
    return np.uint64(value ^ (value >> 31))
