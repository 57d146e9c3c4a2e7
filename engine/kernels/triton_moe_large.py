# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Grouped products of a mixture of experts for many tokens: tiles of 128 rows that follow each other, weights by bulk copies.

Every expert has as many tiles as its list needs, one after the other, so that programs without work are few: a program
finds its expert by summing up the lists' lengths. What the first product leaves lies tile by tile, so the second one
reads it in order. The shared experts are one dense MLP here: the device's library multiplies that best.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from twinpool.engine.kernels.triton_launch import overlap
from twinpool.engine.kernels.triton_tiles import tile_of


@triton.jit
def _product(left, right, acc, CAST: tl.constexpr):
    """``acc + left @ right``; the interpreter has no products of bfloat16."""
    if CAST:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["tokens"])
def gate_up_large(
    HIDDEN, WEIGHT, LISTS, COUNT, OUT, tokens,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, PAD: tl.constexpr, CHOSEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, CAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (run of columns, tile): ``OUT [tiles * ROWS, WIDTH]``; WEIGHT describes rows of ``[gate | up]``."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.program_id(1)
    expert, begin, count = tile_of(COUNT, slot, EXPERTS, PAD, ROWS)
    if expert < EXPERTS:
        line = begin + tl.arange(0, ROWS)
        real = line < count
        token = tl.load(LISTS + expert * tokens + line, mask=real, other=0) // CHOSEN
        column = tl.program_id(0) * COLUMNS
        inner = tl.arange(0, STEP)
        rows = HIDDEN + token[:, None].to(tl.int64) * SIZE + inner[None, :]
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        top = expert * 2 * WIDTH + column
        for step in range(0, SIZE, STEP):
            left = tl.load(rows + step, mask=real[:, None] & (step + inner < SIZE)[None, :], other=0.0)
            gate = _product(left, WEIGHT.load([top, step]).T, gate, CAST)
            up = _product(left, WEIGHT.load([top + WIDTH, step]).T, up, CAST)
        active = gate / (1.0 + tl.exp(-gate)) * up
        wide = column + tl.arange(0, COLUMNS)
        place = (slot * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None] * WIDTH + wide[None, :]
        tl.store(OUT + place, active.to(OUT.dtype.element_ty), mask=real[:, None] & (wide < WIDTH)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def down_large(
    ACTIVE, WEIGHT, LISTS, COUNT, WEIGHTS, OUT, tokens,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, PAD: tl.constexpr, CHOSEN: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, CAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (run of columns, tile): ``OUT [tokens, PARTS, SIZE]``, scaled by the pair's weight."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.program_id(1)
    expert, begin, count = tile_of(COUNT, slot, EXPERTS, PAD, ROWS)
    if expert < EXPERTS:
        line = begin + tl.arange(0, ROWS)
        real = line < count
        pair = tl.load(LISTS + expert * tokens + line, mask=real, other=0)
        column = tl.program_id(0) * COLUMNS
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for step in range(0, WIDTH, STEP):
            left = ACTIVE.load([slot * ROWS, step])
            acc = _product(left, WEIGHT.load([expert * SIZE + column, step]).T, acc, CAST)
        weight = tl.load(WEIGHTS + pair, mask=real, other=1.0)
        wide = column + tl.arange(0, COLUMNS)
        target = (pair // CHOSEN * PARTS + pair % CHOSEN).to(tl.int64)[:, None] * SIZE + wide[None, :]
        result = (acc * weight[:, None]).to(OUT.dtype.element_ty)
        tl.store(OUT + target, result, mask=real[:, None] & (wide < SIZE)[None, :])


class LargeTile(NamedTuple):
    """Columns of a program, inner columns of a step, pipeline depth and warps."""

    columns: int
    step: int
    stages: int
    warps: int


ROWS = 128
LARGE = (LargeTile(128, 64, 3, 8), LargeTile(256, 64, 3, 8))
"""For gate and up, and for down. Measured on an H200: see docs/kernels.md."""


def _describe(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, columns])


def routed(
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    lists: tuple[Tensor, Tensor],
    out: Tensor,
    *,
    tiles: tuple[LargeTile, LargeTile] = LARGE,
    rows: int = ROWS,
) -> None:
    """Fills the first parts of ``out [T, parts, size]``, one for each of ``weights [T, k]``.

    ``gate_up [experts, 2 n, size]``, ``down [experts, size, n]``, ``lists`` as ``triton_moe.lists_of`` gives them.
    Rows of all three must be whole 16 bytes.
    """
    tokens, size = hidden.shape
    chosen, experts, width = weights.shape[1], len(down), down.shape[2]
    first, second = tiles
    slots = tokens * chosen // rows + min(experts, tokens * chosen)
    active = hidden.new_empty(slots * rows, width)
    count, pairs = lists
    shape = {
        "SIZE": size, "WIDTH": width, "EXPERTS": experts, "PAD": max(triton.next_power_of_2(experts), 16),
        "CHOSEN": chosen, "ROWS": rows, "CAST": hidden.device.type == "cpu", **overlap(hidden),
    }  # fmt: skip
    gate_up_large[(triton.cdiv(width, first.columns), slots)](
        hidden, _describe(gate_up.flatten(0, 1), first.columns, first.step), pairs, count, active, tokens,
        COLUMNS=first.columns, STEP=first.step, num_warps=first.warps, num_stages=first.stages, **shape,
    )  # fmt: skip
    down_large[(triton.cdiv(size, second.columns), slots)](
        _describe(active, rows, second.step), _describe(down.flatten(0, 1), second.columns, second.step),
        pairs, count, weights, out, tokens, PARTS=out.shape[1],
        COLUMNS=second.columns, STEP=second.step, num_warps=second.warps, num_stages=second.stages, **shape,
    )  # fmt: skip
