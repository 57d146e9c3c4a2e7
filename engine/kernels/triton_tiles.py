# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Which rows of which expert a program of grouped products multiplies, by the lists that ``triton_moe`` makes: how many
(token, expert) pairs each expert has, ``COUNT [experts]``, and which, ``LISTS [experts, tokens]``."""

import triton
import triton.language as tl


@triton.jit
def rows_of(
    LISTS, COUNT, index, tiles, tokens, ROWS: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
    SINGLE: tl.constexpr,
):  # fmt: skip
    """Of the ``index``-th tile, every list having ``tiles``: its expert (those from EXPERTS on are shared and have every
    token), its pairs, their tokens, which part of a token's result each is, which are real, and whether any is. For a
    ``SINGLE`` token there is a tile for each expert that it goes to, and LISTS says which."""
    if SINGLE:
        row = tl.arange(0, ROWS)
        expert = EXPERTS + index - CHOSEN
        if index < CHOSEN:
            expert = tl.load(LISTS + index).to(tl.int32)
        return expert, row * 0 + index, row * 0, row * 0 + index, row < 1, True
    expert = index // tiles
    first = index % tiles * ROWS
    row = first + tl.arange(0, ROWS)
    count = tokens
    if expert < EXPERTS:
        count = tl.load(COUNT + expert)
    real = row < count
    pair = tl.load(LISTS + expert * tokens + row, mask=real & (expert < EXPERTS), other=0)
    token = tl.where(expert < EXPERTS, pair // CHOSEN, tl.where(real, row, 0))
    part = tl.where(expert < EXPERTS, pair % CHOSEN, CHOSEN + expert - EXPERTS)
    return expert, pair, token, part, real, first < count


@triton.jit
def tile_of(COUNT, slot, EXPERTS: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr):
    """Of the ``slot``-th tile, every list having as many as it needs: its expert (``EXPERTS`` past the last), where in the
    expert's list it begins, and how long that list is."""
    expert = tl.arange(0, PAD)
    count = tl.load(COUNT + expert, mask=expert < EXPERTS, other=0)
    tiles = (count + ROWS - 1) // ROWS
    end = tl.cumsum(tiles, 0)
    found = tl.sum(((end <= slot) & (expert < EXPERTS)).to(tl.int32), 0)
    before = tl.sum(tl.where(expert < found, tiles, 0), 0)
    return found, (slot - before) * ROWS, tl.sum(tl.where(expert == found, count, 0), 0)
