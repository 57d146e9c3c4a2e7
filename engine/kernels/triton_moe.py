# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Routing of a mixture of experts, for decode and prefill alike, and which kernels its products take.

Two launches: scores, split over the hidden size, and the choice, which puts every (token, expert) pair on its expert's
list. The sum over a token's pairs is left to what follows the products (``AddNorm`` takes parts). A list has room for
every token, so that nothing has to be sorted or summed up, and the order of a list, in which blocks arrive, has no
influence on a value. Beside the lists' lengths lie counters for the products, which want zeros (``triton_experts``); so
what a router returns is good for one call.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twinpool.engine.kernels import torch_fused, triton_fused, triton_moe_large
from twinpool.engine.kernels.operations import ExpertWeights, RouterSpec, Routing
from twinpool.engine.kernels.triton_experts import products, sync_size, tile_rows
from twinpool.engine.kernels.triton_launch import device_of, overlap

Lists = tuple[Tensor, Tensor, Tensor]
"""How many pairs each expert has, which, and counters of the products: ``int32[experts]``, ``int32[experts * T]``, ``int32[n]``."""


@triton.jit
def scores_kernel(
    HIDDEN, WEIGHT, PART, ZERO, tokens, zeros,
    SIZE: tl.constexpr, EXPERTS: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (run of tokens, split): ``PART [SPLIT, tokens, EXPERTS]``; the first one also fills ZERO with zeros."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, PAD)
    inner = tl.arange(0, STEP)
    real, known = row < tokens, expert < EXPERTS
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        for begin in range(0, zeros, PAD):
            tl.store(ZERO + begin + expert, tl.zeros([PAD], tl.int32), mask=begin + expert < zeros)
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
def choose_many(
    PART, WEIGHTS, CHOICE, COUNT, LISTS, tokens, scaling,
    EXPERTS: tl.constexpr, PAD: tl.constexpr, CHOSEN: tl.constexpr, SPLIT: tl.constexpr, NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``choose_kernel``, a program for ``ROWS`` tokens: they take their places on a list together, since the counters of
    all lists lie in a few lines of the cache, where one token after the other would wait."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, PAD)
    real, known = (row < tokens)[:, None], (expert < EXPERTS)[None, :]
    scores = tl.zeros([ROWS, PAD], tl.float32)
    for split in tl.static_range(SPLIT):
        place = (split * tokens + row[:, None]) * EXPERTS + expert[None, :]
        scores += tl.load(PART + place, mask=real & known, other=0.0)
    scores = tl.where(known, scores, float("-inf"))
    scores = tl.exp(scores - tl.max(scores, 1)[:, None])
    scores = scores / tl.sum(scores, 1)[:, None]
    left = scores
    chosen = tl.zeros([ROWS, PAD], tl.int32)
    total = tl.zeros([ROWS], tl.float32)
    for _ in tl.static_range(CHOSEN):
        best = expert[None, :] == tl.argmax(left, 1)[:, None]
        total += tl.max(left, 1)
        chosen = tl.where(best, 1, chosen)
        left = tl.where(best, -1.0, left)
    if NORMALIZE:
        scores = scores / (total + 1e-20)[:, None]
    pair = row[:, None] * CHOSEN + tl.cumsum(chosen, 1) - 1
    chosen = tl.where(real, chosen, 0)
    taken = chosen == 1
    tl.store(WEIGHTS + pair, scores * scaling, mask=taken)
    tl.store(CHOICE + pair, tl.broadcast_to(expert[None, :], [ROWS, PAD]), mask=taken)
    several = tl.sum(chosen, 0)
    first = tl.atomic_add(COUNT + expert, several, mask=several > 0, sem="relaxed")
    at = first[None, :] + tl.cumsum(chosen, 0) - chosen
    tl.store(LISTS + expert[None, :] * tokens + at, pair, mask=taken)


@triton.jit
def assign_kernel(CHOICE, COUNT, LISTS, tokens, total, BLOCK: tl.constexpr):
    """Program (run of pairs): puts pairs that another router chose on their experts' lists."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = pair < total
    expert = tl.load(CHOICE + pair, mask=real, other=0).to(tl.int32)
    at = tl.atomic_add(COUNT + expert, tl.full([BLOCK], 1, tl.int32), mask=real, sem="relaxed")
    tl.store(LISTS + expert * tokens + at, pair, mask=real)


MANY_ROWS = 512
"""Tokens from which on programs of the router take 64 at a time: the scores' to read its weights less often, the choice's
to count once for all."""


def route(hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: RouterSpec) -> Routing:
    """See ``operations.Route``. Groups and sigmoids are left to torch."""
    if bias is not None or spec.groups > 1:
        return torch_fused.route(hidden, weight, bias, spec)
    hidden = hidden.contiguous()
    tokens, size = hidden.shape
    experts = len(weight)
    pad = max(triton.next_power_of_2(experts), 16)
    # Few tokens: many splits, to have the processors at work. Many: few partial sums.
    rows = 16 if tokens <= MANY_ROWS else 64
    tiles = triton.cdiv(tokens, rows)
    split = 32 if tokens <= 64 else max(1, min(16, triton.next_power_of_2(512 // tiles)))
    part = torch.empty(split, tokens, experts, dtype=torch.float32, device=hidden.device)
    lists, zero = new_lists(part, spec)
    scores_kernel[(tiles, split)](
        hidden, weight, part, zero, tokens, len(zero),
        SIZE=size, EXPERTS=experts, PAD=pad, ROWS=rows, STEP=64, SPLIT=split, num_warps=4, **overlap(hidden),
    )  # fmt: skip
    return choose(part, spec, lists)


def new_lists(part: Tensor, spec: RouterSpec) -> tuple[Lists, Tensor]:
    """Room for the lists of scores ``[split, T, experts]``, and what of it has to be zeros."""
    _, tokens, experts = part.shape
    zeros = experts + sync_size(tokens, spec.experts_per_token, experts)
    whole = torch.empty(zeros + experts * tokens, dtype=torch.int32, device=part.device)
    return (whole[:experts], whole[zeros:], whole[experts:zeros]), whole[:zeros]


def choose(part: Tensor, spec: RouterSpec, lists: Lists) -> Routing:
    """The experts of each token by scores in parts, ``float32[split, T, experts]``; counts and counters of ``lists`` are 0."""
    split, tokens, experts = part.shape
    chosen = spec.experts_per_token
    weights = torch.empty(tokens, chosen, dtype=torch.float32, device=part.device)
    choice = torch.empty(tokens, chosen, dtype=torch.int32, device=part.device)
    operands = part, weights, choice, lists[0], lists[1], tokens, spec.scaling
    shape = {
        "EXPERTS": experts, "PAD": max(triton.next_power_of_2(experts), 16), "CHOSEN": chosen, "SPLIT": split,
        "NORMALIZE": spec.normalize, **overlap(part),
    }  # fmt: skip
    if tokens > MANY_ROWS:
        rows = max(4096 // shape["PAD"], 1)
        choose_many[(triton.cdiv(tokens, rows),)](*operands, ROWS=rows, num_warps=8, **shape)
    else:
        choose_kernel[(tokens,)](*operands, SINGLE=tokens == 1, num_warps=1, **shape)
    return Routing(weights, choice, lists)


def lists_of(routing: Routing, experts: int) -> Lists:
    """What the router left, or else lists made of its choice."""
    if routing.lists is not None:
        return routing.lists
    tokens, chosen = routing.experts.shape
    zeros = experts + sync_size(tokens, chosen, experts)
    zero = torch.zeros(zeros, dtype=torch.int32, device=routing.experts.device)
    pairs = torch.empty(experts * tokens, dtype=torch.int32, device=zero.device)
    total = routing.experts.numel()
    assign_kernel[(triton.cdiv(total, 256),)](routing.experts.contiguous(), zero, pairs, tokens, total, BLOCK=256)
    return zero[:experts], pairs, zero[experts:]


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
        hidden, experts.gate_up, experts.down, weights, lists_of(routing, number)[:2], out
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
    number, width = experts.down.shape[0], experts.down.shape[2]
    extra = 0 if experts.shared_down is None else experts.shared_down.shape[1] // width
    lists = lists_of(routing, number)
    slots = (number + extra) * triton.cdiv(len(hidden), tile_rows(routing.experts.numel(), number))
    if len(lists[2]) <= slots:
        lists = (*lists[:2], torch.zeros(1 + slots, dtype=torch.int32, device=hidden.device))
    out = hidden.new_empty(len(hidden), routing.experts.shape[1] + extra, hidden.shape[1])
    products(hidden, routing, experts, lists, out)
    return out
