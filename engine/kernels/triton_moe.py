# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Routing and grouped products of a mixture of experts, for decode and prefill alike.

Four launches: scores, split over the hidden size; the choice, which puts every (token, expert) pair on its expert's
list; gate and up with the activation; down, scaled by the pair's weight. The sum over a token's pairs is left to what
follows (``AddNorm`` takes parts). A list has room for every token, so that nothing has to be sorted or summed up, and
the order of a list, in which blocks arrive, has no influence on a value. The shared experts are further experts, each
a slice of the shared MLP, whose lists hold every token.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twinpool.engine.kernels import torch_fused, triton_fused, triton_moe_large
from twinpool.engine.kernels.operations import ExpertWeights, RouterSpec, Routing
from twinpool.engine.kernels.triton_launch import device_of, overlap


@triton.jit
def scores_kernel(
    HIDDEN, WEIGHT, PART, COUNT, tokens,
    SIZE: tl.constexpr, EXPERTS: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (run of tokens, split): ``PART [SPLIT, tokens, EXPERTS]``; the first one also empties the lists."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, PAD)
    inner = tl.arange(0, STEP)
    real, known = row < tokens, expert < EXPERTS
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(COUNT + expert, tl.zeros([PAD], tl.int32), mask=known)
    acc = tl.zeros([ROWS, PAD], tl.float32)
    for begin in range(tl.program_id(1) * STEP, SIZE, SPLIT * STEP):
        column = begin + inner
        inside = column < SIZE
        left = tl.load(
            HIDDEN + row[:, None].to(tl.int64) * SIZE + column[None, :], mask=real[:, None] & inside[None, :], other=0.0
        )
        right = tl.load(WEIGHT + expert[None, :] * SIZE + column[:, None], mask=known[None, :] & inside[:, None], other=0.0)
        # Three products of the matrix unit a pair: float32 but for its last bits.
        acc += tl.dot(left.to(tl.float32), right, input_precision="tf32x3")
    place = (tl.program_id(1) * tokens + row[:, None]) * EXPERTS + expert[None, :]
    tl.store(PART + place, acc, mask=real[:, None] & known[None, :])


@triton.jit
def choose_kernel(
    PART, WEIGHTS, CHOICE, COUNT, LISTS, tokens, scaling,
    EXPERTS: tl.constexpr, PAD: tl.constexpr, CHOSEN: tl.constexpr, SPLIT: tl.constexpr, NORMALIZE: tl.constexpr,
    SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token): softmax of its scores, the best ``CHOSEN`` of them, and its places on their lists, which are empty
    before unless it is the ``SINGLE`` one."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0)
    expert = tl.arange(0, PAD)
    split = tl.arange(0, SPLIT)
    known = expert < EXPERTS
    place = (split[:, None] * tokens + token) * EXPERTS + expert[None, :]
    scores = tl.sum(tl.load(PART + place, mask=known[None, :], other=0.0), 0)
    scores = tl.where(known, scores, float("-inf"))
    scores = tl.exp(scores - tl.max(scores, 0))
    scores = scores / tl.sum(scores, 0)
    left = scores
    chosen = tl.zeros([PAD], tl.int32)
    total = 0.0
    for _ in tl.static_range(CHOSEN):
        best = tl.argmax(left, 0)
        total += tl.max(left, 0)
        chosen = tl.where(expert == best, 1, chosen)
        left = tl.where(expert == best, -1.0, left)
    if NORMALIZE:
        scores = scores / (total + 1e-20)
    rank = tl.cumsum(chosen, 0) - 1
    taken = chosen == 1
    tl.store(WEIGHTS + token * CHOSEN + rank, scores * scaling, mask=taken)
    tl.store(CHOICE + token * CHOSEN + rank, expert, mask=taken)
    if SINGLE:
        tl.store(COUNT + expert, chosen, mask=known)
        tl.store(LISTS + expert, rank, mask=taken)
    else:
        at = tl.atomic_add(COUNT + expert, chosen, mask=taken, sem="relaxed")
        tl.store(LISTS + expert * tokens + at, token * CHOSEN + rank, mask=taken)


@triton.jit
def assign_kernel(CHOICE, COUNT, LISTS, tokens, total, BLOCK: tl.constexpr):
    """Program (run of pairs): puts pairs that another router chose on their experts' lists."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = pair < total
    expert = tl.load(CHOICE + pair, mask=real, other=0).to(tl.int32)
    at = tl.atomic_add(COUNT + expert, tl.full([BLOCK], 1, tl.int32), mask=real, sem="relaxed")
    tl.store(LISTS + expert * tokens + at, pair, mask=real)


@triton.jit
def _rows_of(
    LISTS, COUNT, index, tiles, tokens, ROWS: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
    SINGLE: tl.constexpr,
):  # fmt: skip
    """The expert of the ``index``-th tile, its pairs, whether each is real, where its row of results lies, and whether there
    is any. For a ``SINGLE`` token there is a tile for each expert that it goes to, and LISTS says which."""
    if SINGLE:
        row = tl.arange(0, ROWS)
        expert = EXPERTS + index - CHOSEN
        if index < CHOSEN:
            expert = tl.load(LISTS + index).to(tl.int32)
        return expert, row * 0 + index, row * 0, row * 0 + index, row < 1, True
    expert = index // tiles
    tile = index % tiles
    row = tile * ROWS + tl.arange(0, ROWS)
    count = tokens
    if expert < EXPERTS:
        count = tl.load(COUNT + expert)
    real = row < count
    pair = tl.load(LISTS + expert * tokens + row, mask=real & (expert < EXPERTS), other=0)
    token = tl.where(expert < EXPERTS, pair // CHOSEN, tl.where(real, row, 0))
    part = tl.where(expert < EXPERTS, pair % CHOSEN, CHOSEN + expert - EXPERTS)
    return expert, pair, token, part, real, tile * ROWS < count


@triton.jit
def _product(left, right, acc, CAST: tl.constexpr):
    """``acc + left @ right``; the interpreter has no products of bfloat16."""
    if CAST:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit
def gate_up_kernel(
    HIDDEN, WEIGHT, SHARED, LISTS, COUNT, OUT, tokens, tiles,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, EXTRA: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, CAST: tl.constexpr, SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (run of columns, tile of an expert's list): ``silu(gate) * up`` of ``WIDTH`` columns."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, _pair, token, part, real, some = _rows_of(
        LISTS, COUNT, tl.program_id(1), tiles, tokens, ROWS, EXPERTS, CHOSEN, SINGLE
    )
    if some:
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inner = tl.arange(0, STEP)
        wide = column < WIDTH
        gates = WEIGHT + expert.to(tl.int64) * 2 * WIDTH * SIZE
        ups = gates + WIDTH * SIZE
        if expert >= EXPERTS:
            gates = SHARED + (expert - EXPERTS).to(tl.int64) * WIDTH * SIZE
            ups = gates + EXTRA * WIDTH * SIZE
        rows = HIDDEN + token[:, None].to(tl.int64) * SIZE + inner[None, :]
        place = column[None, :] * SIZE + inner[:, None]
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, SIZE, STEP):
            inside = begin + inner < SIZE
            held = inside[:, None] & wide[None, :]
            left = tl.load(rows + begin, mask=real[:, None] & inside[None, :], other=0.0)
            gate = _product(left, tl.load(gates + place + begin, mask=held, other=0.0), gate, CAST)
            up = _product(left, tl.load(ups + place + begin, mask=held, other=0.0), up, CAST)
        active = gate / (1.0 + tl.exp(-gate)) * up
        target = (token.to(tl.int64) * (CHOSEN + EXTRA) + part)[:, None] * WIDTH + column[None, :]
        tl.store(OUT + target, active.to(OUT.dtype.element_ty), mask=real[:, None] & wide[None, :])


@triton.jit
def down_kernel(
    ACTIVE, WEIGHT, SHARED, LISTS, COUNT, WEIGHTS, OUT, tokens, tiles,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, EXTRA: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, CAST: tl.constexpr, SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (run of columns, tile of an expert's list): ``OUT [tokens, parts, SIZE]``, scaled by the pair's weight."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, pair, token, part, real, some = _rows_of(
        LISTS, COUNT, tl.program_id(1), tiles, tokens, ROWS, EXPERTS, CHOSEN, SINGLE
    )
    if some:
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inner = tl.arange(0, STEP)
        wide = column < SIZE
        line = token.to(tl.int64) * (CHOSEN + EXTRA) + part
        rows = ACTIVE + line[:, None] * WIDTH + inner[None, :]
        matrix = WEIGHT + expert.to(tl.int64) * SIZE * WIDTH
        pitch = WIDTH
        if expert >= EXPERTS:
            matrix = SHARED + (expert - EXPERTS) * WIDTH
            pitch = EXTRA * WIDTH
        place = column[None, :] * pitch + inner[:, None]
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, WIDTH, STEP):
            inside = begin + inner < WIDTH
            left = tl.load(rows + begin, mask=real[:, None] & inside[None, :], other=0.0)
            right = tl.load(matrix + place + begin, mask=inside[:, None] & wide[None, :], other=0.0)
            acc = _product(left, right, acc, CAST)
        weight = tl.load(WEIGHTS + pair, mask=real & (expert < EXPERTS), other=1.0)
        target = line[:, None] * SIZE + column[None, :]
        tl.store(OUT + target, (acc * weight[:, None]).to(OUT.dtype.element_ty), mask=real[:, None] & wide[None, :])


def route(hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: RouterSpec) -> Routing:
    """See ``operations.Route``. Groups and sigmoids are left to torch."""
    if bias is not None or spec.groups > 1:
        return torch_fused.route(hidden, weight, bias, spec)
    hidden = hidden.contiguous()
    tokens, size = hidden.shape
    experts = len(weight)
    pad = max(triton.next_power_of_2(experts), 16)
    # Few tokens: many splits, to have the processors at work. Many: few partial sums.
    split = 32 if tokens <= 64 else 16
    part = torch.empty(split, tokens, experts, dtype=torch.float32, device=hidden.device)
    lists = _new_lists(part)
    scores_kernel[(triton.cdiv(tokens, 16), split)](
        hidden, weight, part, lists[0], tokens,
        SIZE=size, EXPERTS=experts, PAD=pad, ROWS=16, STEP=64, SPLIT=split, num_warps=4, **overlap(hidden),
    )  # fmt: skip
    return choose(part, spec, lists)


def _new_lists(part: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the lists of scores ``[split, T, experts]``."""
    _, tokens, experts = part.shape
    whole = torch.empty(experts * (tokens + 1), dtype=torch.int32, device=part.device)
    return whole[:experts], whole[experts:]


def choose(part: Tensor, spec: RouterSpec, lists: tuple[Tensor, Tensor] | None = None) -> Routing:
    """The experts of each token by scores in parts, ``float32[split, T, experts]``; ``lists`` whose counts are 0, unless
    there is but one token."""
    split, tokens, experts = part.shape
    chosen = spec.experts_per_token
    if lists is None:
        lists = _new_lists(part)
        if tokens > 1:
            lists[0].zero_()
    weights = torch.empty(tokens, chosen, dtype=torch.float32, device=part.device)
    choice = torch.empty(tokens, chosen, dtype=torch.int32, device=part.device)
    choose_kernel[(tokens,)](
        part, weights, choice, *lists, tokens, spec.scaling, EXPERTS=experts,
        PAD=max(triton.next_power_of_2(experts), 16), CHOSEN=chosen, SPLIT=split, NORMALIZE=spec.normalize,
        SINGLE=tokens == 1, num_warps=1, **overlap(part),
    )  # fmt: skip
    return Routing(weights, choice, lists)


def lists_of(routing: Routing, experts: int) -> tuple[Tensor, Tensor]:
    """How many pairs each expert has, and which: ``int32[experts]`` and ``int32[experts, T]``."""
    if routing.lists is not None:
        return routing.lists
    tokens, total = len(routing.experts), routing.experts.numel()
    count = torch.zeros(experts, dtype=torch.int32, device=routing.experts.device)
    lists = torch.empty(experts * tokens, dtype=torch.int32, device=routing.experts.device)
    assign_kernel[(triton.cdiv(total, 256),)](routing.experts.contiguous(), count, lists, tokens, total, BLOCK=256)
    return count, lists


class Tile(NamedTuple):
    """Columns of a program, inner columns of a step, pipeline depth and warps."""

    columns: int
    step: int
    stages: int
    warps: int


TILES = {
    16: (Tile(64, 128, 3, 4), Tile(128, 128, 3, 4)),
    32: (Tile(64, 128, 3, 4), Tile(128, 64, 4, 4)),
    64: (Tile(64, 64, 3, 4), Tile(128, 64, 3, 4)),
    128: (Tile(64, 64, 4, 8), Tile(128, 64, 4, 8)),
}
"""By rows of a tile, for gate and up and for down. Measured on an H200 but for the last: see docs/kernels.md."""

SINGLE_TILES = (Tile(32, 128, 4, 4), Tile(64, 128, 4, 4))
"""As ``TILES``, for one token: its experts alone have to keep all processors busy."""


def tile_rows(pairs: int, experts: int) -> int:
    """Rows of a tile for an expert's mean share of the pairs, with room for the larger ones."""
    mean = pairs / experts
    return 16 if mean <= 8 else 32 if mean <= 16 else 64 if mean <= 64 else 128


MANY = 128
"""Pairs an expert from which its rows are put into tiles of their own. Measured on an H200: see docs/kernels.md."""


def _is_for_many(hidden: Tensor, pairs: int, down: Tensor) -> bool:
    """Bulk copies need rows of whole 16 bytes."""
    able = device_of(hidden).overlaps_launches and hidden.itemsize == 2
    return able and pairs >= MANY * len(down) and hidden.shape[1] % 8 == 0 and down.shape[2] % 8 == 0


def _many(hidden: Tensor, routing: Routing, experts: ExpertWeights) -> Tensor:
    """The shared experts are one MLP, so they are one part."""
    tokens, size = hidden.shape
    chosen, number = routing.experts.shape[1], len(experts.down)
    out = hidden.new_empty(tokens, chosen + (experts.shared_down is not None), size)
    weights = routing.weights.contiguous()
    triton_moe_large.routed(
        hidden, experts.gate_up, experts.down, weights, lists_of(routing, number), out
    )  # fmt: skip
    if experts.shared_gate_up is not None and experts.shared_down is not None:
        active = triton_fused.silu_mul(F.linear(hidden, experts.shared_gate_up))
        torch.mm(active, experts.shared_down.T, out=out[:, chosen])
    return out


def moe(hidden: Tensor, routing: Routing, experts: ExpertWeights) -> Tensor:
    """See ``operations.Moe``: ``[T, parts, size]``."""
    hidden = hidden.contiguous()
    if _is_for_many(hidden, routing.experts.numel(), experts.down):
        return _many(hidden, routing, experts)
    tokens, size = hidden.shape
    number, width = experts.down.shape[0], experts.down.shape[2]
    chosen = routing.experts.shape[1]
    extra = 0 if experts.shared_down is None else experts.shared_down.shape[1] // width
    shared_gate_up = experts.gate_up if experts.shared_gate_up is None else experts.shared_gate_up
    shared_down = experts.down if experts.shared_down is None else experts.shared_down
    single = tokens == 1
    count, lists = (routing.experts, routing.experts) if single else lists_of(routing, number)
    rows = tile_rows(tokens * chosen, number)
    tiles = triton.cdiv(tokens, rows)
    active = hidden.new_empty(tokens, chosen + extra, width)
    out = hidden.new_empty(tokens, chosen + extra, size)
    shape = {
        "SIZE": size, "WIDTH": width, "EXPERTS": number, "CHOSEN": chosen, "EXTRA": extra, "ROWS": rows,
        "CAST": hidden.device.type == "cpu", "SINGLE": single, **overlap(hidden),
    }  # fmt: skip
    grid = chosen + extra if single else (number + extra) * tiles
    first, second = SINGLE_TILES if single else TILES[rows]
    gate_up_kernel[(triton.cdiv(width, first.columns), grid)](
        hidden, experts.gate_up, shared_gate_up, lists, count, active, tokens, tiles,
        COLUMNS=first.columns, STEP=first.step, num_warps=first.warps, num_stages=first.stages, **shape,
    )  # fmt: skip
    down_kernel[(triton.cdiv(size, second.columns), grid)](
        active, experts.down, shared_down, lists, count, routing.weights.contiguous(), out, tokens, tiles,
        COLUMNS=second.columns, STEP=second.step, num_warps=second.warps, num_stages=second.stages, **shape,
    )  # fmt: skip
    return out
