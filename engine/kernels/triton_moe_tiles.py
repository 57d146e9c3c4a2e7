# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Tiles of rows for the grouped products of many tokens: each of one expert, in the experts' order, and their rows."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def tiles_kernel(
    COUNT, TILE_EXPERT, TILE_BEGIN, TILES,
    EXPERTS: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, SLOTS_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the expert of each tile, where its rows begin in the expert's list, and how many tiles there are."""
    expert = tl.arange(0, PAD)
    tiles = (tl.load(COUNT + expert, mask=expert < EXPERTS, other=0) + ROWS - 1) // ROWS
    end = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    tl.store(TILES, total)
    for begin in range(0, SLOTS_PAD, BLOCK):
        slot = begin + tl.arange(0, BLOCK)
        past = (end[None, :] <= slot[:, None]) & (expert < EXPERTS)[None, :]
        before = tl.sum(tl.where(past, tiles[None, :], 0), 1)
        tl.store(TILE_EXPERT + slot, tl.sum(past.to(tl.int32), 1), mask=slot < total)
        tl.store(TILE_BEGIN + slot, (slot - before) * ROWS, mask=slot < total)


@triton.jit(do_not_specialize=["tokens"])
def gather_kernel(
    HIDDEN, LISTS, COUNT, TILE_EXPERT, TILE_BEGIN, TILES, OUT, tokens,
    SIZE: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr, SOME: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (tile, ``SOME`` of its rows, run of columns): the rows' hidden states, 0 past the end of a list."""
    tile = tl.program_id(0)
    if tile < tl.load(TILES):
        expert = tl.load(TILE_EXPERT + tile)
        row = tl.program_id(1) * SOME + tl.arange(0, SOME)
        line = tl.load(TILE_BEGIN + tile) + row
        real = line < tl.load(COUNT + expert)
        token = tl.load(LISTS + expert * tokens + line, mask=real, other=0) // CHOSEN
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (column < SIZE)[None, :]
        place = token[:, None].to(tl.int64) * SIZE + column[None, :]
        value = tl.load(HIDDEN + place, mask=real[:, None] & inside, other=0.0)
        target = (tile * ROWS + row)[:, None].to(tl.int64) * SIZE + column[None, :]
        tl.store(OUT + target, value, mask=inside)


@dataclass(frozen=True, slots=True)
class Tiles:
    """``expert``, ``begin int32[most]`` of the tiles, ``count int32[1]`` of them; ``most`` is what the host knows."""

    expert: Tensor
    begin: Tensor
    count: Tensor
    most: int
    rows: int


def make_tiles(count: Tensor, pairs: int, rows: int) -> Tiles:
    """Tiles of ``rows`` rows for lists of ``count int32[experts]`` pairs, ``pairs`` in all."""
    experts = len(count)
    most = pairs // rows + min(experts, pairs)
    whole = torch.empty(2 * most + 1, dtype=torch.int32, device=count.device)
    found = Tiles(whole[:most], whole[most : 2 * most], whole[2 * most :], most, rows)
    tiles_kernel[(1,)](
        count, found.expert, found.begin, found.count, EXPERTS=experts, PAD=max(triton.next_power_of_2(experts), 16),
        ROWS=rows, SLOTS_PAD=triton.cdiv(most, 64) * 64, BLOCK=64, num_warps=4,
    )  # fmt: skip
    return found


def gather(hidden: Tensor, lists: tuple[Tensor, Tensor], tiles: Tiles, chosen: int) -> Tensor:
    """``[most * rows, size]``: the hidden states in the order of the tiles."""
    tokens, size = hidden.shape
    out = hidden.new_empty(tiles.most * tiles.rows, size)
    columns = min(triton.next_power_of_2(size), 1024)
    some = 16
    gather_kernel[(tiles.most, tiles.rows // some, triton.cdiv(size, columns))](
        hidden, lists[1], lists[0], tiles.expert, tiles.begin, tiles.count, out, tokens,
        SIZE=size, CHOSEN=chosen, ROWS=tiles.rows, SOME=some, COLUMNS=columns, num_warps=8,
    )  # fmt: skip
    return out
