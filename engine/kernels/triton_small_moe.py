# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""The mixture of experts of a decode step of very few tokens, in three launches; see ``triton_small``.

There is no list of pairs and no launch that chooses: every program looks up in the scores which expert its pair goes to.
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
def gate_up_small(
    NORMED, WEIGHT, SHARED, LOGITS, ACTIVE, scaling,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, PAD: tl.constexpr,
    CHOSEN: tl.constexpr, EXTRA: tl.constexpr, NORMALIZE: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (run of columns, part): the shared experts for all tokens come first, then the tokens' pairs.

    ``ACTIVE [TOKENS, CHOSEN + EXTRA, WIDTH]``. Weights of shared experts are on their way while the scores are taken.
    """
    row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    extra = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    held = (row < WIDTH)[:, None] & inside[None, :]
    place = row[:, None] * SIZE + column[None, :]
    kind = ACTIVE.dtype.element_ty
    if extra >= EXTRA:
        begin(PDL)
        part = extra - EXTRA
        m = part // CHOSEN
        expert, _weight = _choose(LOGITS, m, part % CHOSEN, scaling, EXPERTS, PAD, CHOSEN, NORMALIZE)
        top = WEIGHT + expert.to(tl.int64) * 2 * WIDTH * SIZE
        gates = tl.load(top + place, mask=held, other=0.0)
        ups = tl.load(top + WIDTH * SIZE + place, mask=held, other=0.0)
        x = tl.load(NORMED + m * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        gate = tl.sum(gates.to(tl.float32) * x[None, :], 1)
        up = tl.sum(ups.to(tl.float32) * x[None, :], 1)
        target = ACTIVE + (m * (CHOSEN + EXTRA) + part % CHOSEN) * WIDTH + row
        tl.store(target, (gate / (1.0 + tl.exp(-gate)) * up).to(kind), mask=row < WIDTH)
    else:
        top = SHARED + extra * WIDTH * SIZE
        gates = tl.load(top + place, mask=held, other=0.0)
        ups = tl.load(top + EXTRA * WIDTH * SIZE + place, mask=held, other=0.0)
        begin(PDL)
        for m in tl.static_range(TOKENS):
            x = tl.load(NORMED + m * SIZE + column, mask=inside, other=0.0).to(tl.float32)
            gate = tl.sum(gates.to(tl.float32) * x[None, :], 1)
            up = tl.sum(ups.to(tl.float32) * x[None, :], 1)
            target = ACTIVE + (m * (CHOSEN + EXTRA) + CHOSEN + extra) * WIDTH + row
            tl.store(target, (gate / (1.0 + tl.exp(-gate)) * up).to(kind), mask=row < WIDTH)


@triton.jit
def down_small(
    ACTIVE, WEIGHT, SHARED, LOGITS, OUT, scaling,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, EXPERTS: tl.constexpr,
    PAD: tl.constexpr, CHOSEN: tl.constexpr, EXTRA: tl.constexpr, NORMALIZE: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (run of columns, part): ``OUT [TOKENS, CHOSEN + EXTRA, SIZE]``, scaled by the pair's weight.

    The scores are older than the launch before, so the weights are on their way while that one runs. A row of weights
    is read as ``FIRST`` and ``REST`` columns.
    """
    row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    real = row < SIZE
    routed = part < TOKENS * CHOSEN
    extra = tl.maximum(part - TOKENS * CHOSEN, 0)
    token = tl.where(routed, part // CHOSEN, 0)
    expert, weight = _choose(LOGITS, token, part % CHOSEN, scaling, EXPERTS, PAD, CHOSEN, NORMALIZE)
    matrix = WEIGHT + expert.to(tl.int64) * SIZE * WIDTH
    pitch = WIDTH
    if part >= TOKENS * CHOSEN:
        matrix = SHARED + extra.to(tl.int64) * WIDTH
        pitch = EXTRA * WIDTH
        weight = 1.0
    a = tl.arange(0, FIRST)
    b = FIRST + tl.arange(0, REST)
    lines = matrix + row[:, None] * pitch
    w0 = tl.load(lines + a[None, :], mask=real[:, None] & (a < WIDTH)[None, :], other=0.0)
    w1 = tl.load(lines + b[None, :], mask=real[:, None] & (b < WIDTH)[None, :], other=0.0)
    begin(PDL)
    for turn in tl.static_range(TOKENS):
        if (part >= TOKENS * CHOSEN) | (turn == 0):
            m = tl.where(routed, token, turn)
            slot = m * (CHOSEN + EXTRA) + tl.where(routed, part % CHOSEN, CHOSEN + extra)
            line = ACTIVE + slot * WIDTH
            x0 = tl.load(line + a, mask=a < WIDTH, other=0.0).to(tl.float32)
            x1 = tl.load(line + b, mask=b < WIDTH, other=0.0).to(tl.float32)
            y = tl.sum(w0.to(tl.float32) * x0[None, :], 1) + tl.sum(w1.to(tl.float32) * x1[None, :], 1)
            tl.store(OUT + slot * SIZE + row, (y * weight).to(OUT.dtype.element_ty), mask=real)
