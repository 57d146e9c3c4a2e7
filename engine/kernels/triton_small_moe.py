# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""The mixture of experts of a decode step of one token, in three launches; see ``triton_small``.

There is no list of pairs and no launch that chooses: every program looks up in the scores which expert it works for.
"""

import triton
import triton.language as tl

from twinpool.engine.kernels.triton_small import begin, normed


@triton.jit
def scores_small(
    HIDDEN, DELTA, NORM, WEIGHT, SUM, NORMED, LOGITS, eps,
    EXPERTS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (run of experts): residual, norm and the router's product; the first one stores the sum and the norm."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    held = (row < EXPERTS)[:, None] & (column < SIZE)[None, :]
    weight = tl.load(WEIGHT + row[:, None] * SIZE + column[None, :], mask=held, other=0.0)
    scale = tl.load(NORM + column, mask=column < SIZE, other=0.0).to(tl.float32)
    begin(PDL)
    for m in tl.static_range(TOKENS):
        first = tl.program_id(0) == 0
        x = normed(HIDDEN, DELTA, SUM, scale, m, column, eps, first, SIZE, 1)
        tl.store(NORMED + m * SIZE + column, x.to(NORMED.dtype.element_ty), mask=(column < SIZE) & first)
        tl.store(LOGITS + m * EXPERTS + row, tl.sum(weight * x[None, :], 1), mask=row < EXPERTS)


@triton.jit
def _choose(
    LOGITS, m, rank, scaling, EXPERTS: tl.constexpr, PAD: tl.constexpr, CHOSEN: tl.constexpr, NORMALIZE: tl.constexpr
):
    """The ``rank``-th best expert of token ``m``, and its weight."""
    expert = tl.arange(0, PAD)
    scores = tl.load(LOGITS + m * EXPERTS + expert, mask=expert < EXPERTS, other=float("-inf"))
    scores = tl.exp(scores - tl.max(scores, 0))
    left = scores / tl.sum(scores, 0)
    found = 0
    weight = 0.0
    total = 0.0
    for turn in tl.static_range(CHOSEN):
        best = tl.argmax(left, 0)
        most = tl.max(left, 0)
        total += most
        found = tl.where(rank == turn, best, found)
        weight = tl.where(rank == turn, most, weight)
        left = tl.where(expert == best, -1.0, left)
    if NORMALIZE:
        weight = weight / (total + 1e-20)
    return found, weight * scaling


@triton.jit
def _prefetch(lines, real, inner, END: tl.constexpr, STEP: tl.constexpr):
    """Has ``END`` columns of the rows at ``lines`` on their way into the L2 cache, 128 bytes at a time."""
    for start in tl.range(0, END, STEP * 64):
        column = start + inner * 64
        place = lines[:, None] + column[None, :]
        # Past the end of a row: its beginning once more.
        place = tl.where(real[:, None] & (column < END)[None, :], place, lines[:, None] + inner[None, :] * 0)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def gate_up_small(
    NORMED, WEIGHT, SHARED, LOGITS, ACTIVE, scaling,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, PAD: tl.constexpr, CHOSEN: tl.constexpr,
    EXTRA: tl.constexpr, NORMALIZE: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (run of columns, part): the shared experts come first, then the token's; ``ACTIVE [CHOSEN + EXTRA, WIDTH]``.

    Weights of shared experts are on their way while the scores are taken.
    """
    row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    inner = tl.arange(0, STEP)
    real = row < WIDTH
    lines = row * SIZE
    gates = SHARED + part * WIDTH * SIZE
    ups = gates + EXTRA * WIDTH * SIZE
    if PDL:  # noqa: SIM102
        if part < EXTRA:
            lane = tl.arange(0, 32)
            _prefetch(gates + lines, real, lane, SIZE, 32)
            _prefetch(ups + lines, real, lane, SIZE, 32)
    begin(PDL)
    slot = CHOSEN + part
    if part >= EXTRA:
        slot = part - EXTRA
        expert, _weight = _choose(LOGITS, 0, slot, scaling, EXPERTS, PAD, CHOSEN, NORMALIZE)
        gates = WEIGHT + expert.to(tl.int64) * 2 * WIDTH * SIZE
        ups = gates + WIDTH * SIZE
    gate = tl.zeros([COLUMNS, STEP], tl.float32)
    up = tl.zeros([COLUMNS, STEP], tl.float32)
    for start in tl.range(0, SIZE, STEP, num_stages=STAGES):
        column = start + inner
        inside = column < SIZE
        held = real[:, None] & inside[None, :]
        place = lines[:, None] + column[None, :]
        x = tl.load(NORMED + column, mask=inside, other=0.0).to(tl.float32)
        gate += tl.load(gates + place, mask=held, other=0.0).to(tl.float32) * x[None, :]
        up += tl.load(ups + place, mask=held, other=0.0).to(tl.float32) * x[None, :]
    total = tl.sum(gate, 1)
    active = total / (1.0 + tl.exp(-total)) * tl.sum(up, 1)
    tl.store(ACTIVE + slot * WIDTH + row, active.to(ACTIVE.dtype.element_ty), mask=real)


@triton.jit
def down_small(
    ACTIVE, WEIGHT, SHARED, LOGITS, OUT, scaling,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, PAD: tl.constexpr, CHOSEN: tl.constexpr,
    EXTRA: tl.constexpr, NORMALIZE: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (run of columns, part): ``OUT [CHOSEN + EXTRA, SIZE]``, scaled by the expert's weight.

    The scores are older than the launch before, so the weights are on their way into the cache while that one runs.
    """
    row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    inner = tl.arange(0, STEP)
    real = row < SIZE
    matrix = SHARED + (part - CHOSEN) * WIDTH
    pitch = EXTRA * WIDTH
    weight = 1.0
    if part < CHOSEN:
        expert, weight = _choose(LOGITS, 0, part, scaling, EXPERTS, PAD, CHOSEN, NORMALIZE)
        matrix = WEIGHT + expert.to(tl.int64) * SIZE * WIDTH
        pitch = WIDTH
    if WIDTH % 16 == 0:
        # Which the branch hides; without it loads would be narrow.
        pitch = tl.multiple_of(pitch, 16)
        matrix = tl.multiple_of(matrix, 16)
    lines = matrix + row * pitch
    if PDL:
        _prefetch(lines, real, tl.arange(0, 32), WIDTH, 32)
    begin(PDL)
    acc = tl.zeros([COLUMNS, STEP], tl.float32)
    for start in tl.range(0, WIDTH, STEP, num_stages=STAGES):
        column = start + inner
        inside = column < WIDTH
        x = tl.load(ACTIVE + part * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        held = real[:, None] & inside[None, :]
        acc += tl.load(lines[:, None] + column[None, :], mask=held, other=0.0).to(tl.float32) * x[None, :]
    result = tl.sum(acc, 1) * weight
    tl.store(OUT + part * SIZE + row, result.to(OUT.dtype.element_ty), mask=real)
