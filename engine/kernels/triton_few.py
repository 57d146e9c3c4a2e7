# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Products of a decode step of few tokens: bound by weights and by the latency of one launch after the other.

A program holds its weights before it waits for the launch before it; what is left then is to read the tokens, one
product, and a store. So that all weights of a product are on their way at once, the inner size is split too: each split
leaves a part in float32, and whatever reads the result sums the parts up.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _dot(left, right, CAST: tl.constexpr):
    """The interpreter has no products of bfloat16."""
    if CAST:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def product_few(
    X, WEIGHT, OUT, tokens, x_token, x_batch, w_batch, out_token, out_split, out_batch,
    SIZE: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    CAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (run of outputs, split, batch): ``X [tokens, batch, SIZE] @ WEIGHT [batch, OUTPUTS, SIZE].T``, of which a split
    takes ``INNER`` of SIZE, and a program all tokens, at most ``ROWS``."""
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.program_id(1) * INNER + tl.arange(0, INNER)
    batch = tl.program_id(2).to(tl.int64)
    inside, wide = inner < SIZE, output < OUTPUTS
    place = WEIGHT + batch * w_batch + output[None, :] * SIZE + inner[:, None]
    weight = tl.load(place, mask=inside[:, None] & wide[None, :], other=0.0)
    if PDL:
        # In this order: what follows may hold its weights too while all of this waits.
        gdc_launch_dependents()
        gdc_wait()
    held = (row < tokens)[:, None] & inside[None, :]
    x = tl.load(X + batch * x_batch + row[:, None] * x_token + inner[None, :], mask=held, other=0.0)
    y = _dot(x, weight, CAST)
    target = OUT + tl.program_id(1) * out_split + batch * out_batch + row[:, None] * out_token + output[None, :]
    tl.store(target, y.to(OUT.dtype.element_ty), mask=(row < tokens)[:, None] & wide[None, :])


@triton.jit
def _sum(PLACE, held, pitch, PARTS: tl.constexpr):
    """Values at ``PLACE`` and at each further ``pitch``, summed up in float32."""
    total = tl.load(PLACE, mask=held, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(PLACE + part * pitch, mask=held, other=0.0).to(tl.float32)
    return total


@triton.jit
def _store_row(
    KV, WEIGHT, COS, SIN, SLOTS, PAGES, token, eps, page_stride, pitch,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, PAGE: tl.constexpr,
    PARTS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Norms and rotates the cache row of ``token``, whose parts begin at KV, and stores it; none for slot -1."""
    pair = tl.arange(0, HALF_PAD)
    real = pair < HALF
    cos = tl.load(COS + token * 2 * HALF + pair, mask=real, other=0.0).to(tl.float32)
    sin = tl.load(SIN + token * 2 * HALF + HALF + pair, mask=real, other=0.0).to(tl.float32)
    slot = tl.load(SLOTS + token)
    column = tl.arange(0, LATENT_PAD)
    inside = column < LATENT
    latent = _sum(KV + column, inside, pitch, PARTS).to(KIND).to(tl.float32)
    first = _sum(KV + LATENT + pair, real, pitch, PARTS).to(KIND).to(tl.float32)
    second = _sum(KV + LATENT + HALF + pair, real, pitch, PARTS).to(KIND).to(tl.float32)
    norm = tl.rsqrt(tl.sum(latent * latent, 0) / LATENT + eps)
    weight = tl.load(WEIGHT + column, mask=inside, other=0.0).to(tl.float32)
    there = PAGES + (slot // PAGE) * page_stride + (slot % PAGE) * (LATENT + 2 * HALF)
    tl.store(there + column, (latent * norm * weight).to(KIND), mask=inside & (slot >= 0))
    tl.store(there + LATENT + pair, (first * cos - second * sin).to(KIND), mask=real & (slot >= 0))
    tl.store(there + LATENT + HALF + pair, (second * cos + first * sin).to(KIND), mask=real & (slot >= 0))


@triton.jit
def queries_few(
    BOTH, UP, NORM, COS, SIN, SLOTS, PAGES, OUT, tokens, eps, page_stride, up_head, token_stride, pitch,
    HEADS: tl.constexpr, NOPE: tl.constexpr, NOPE_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, COLUMNS: tl.constexpr, RUNS: tl.constexpr, PAGE: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, CAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: first the tokens' cache rows, one each; then (head, run of latent columns, run of tokens) the absorbed
    queries, of which the first columns' programs rotate. ``BOTH`` are ``PARTS`` parts of ``[tokens, HEADS * (nope + rope) +
    latent + rope]``, ``pitch`` apart -> ``OUT [tokens, HEADS, latent + rope]``."""
    width: tl.constexpr = LATENT + 2 * HALF
    kind: tl.constexpr = OUT.dtype.element_ty
    index = tl.program_id(0) - tokens
    tiles = (tokens + ROWS - 1) // ROWS
    head, run = index // (RUNS * tiles), index // tiles % RUNS
    nope = tl.arange(0, NOPE_PAD)
    column = run * COLUMNS + tl.arange(0, COLUMNS)
    held = (nope < NOPE)[:, None] & (column < LATENT)[None, :] & (index >= 0)
    weight = tl.load(UP + head * up_head + nope[:, None] * LATENT + column[None, :], mask=held, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if index < 0:
        token = tl.program_id(0).to(tl.int64)
        _store_row(
            BOTH + token * token_stride + HEADS * (NOPE + 2 * HALF), NORM, COS, SIN, SLOTS, PAGES, token, eps, page_stride,
            pitch, HALF, HALF_PAD, LATENT, LATENT_PAD, PAGE, PARTS, kind,
        )  # fmt: skip
    else:
        row = index % tiles * ROWS + tl.arange(0, ROWS)
        some = (row < tokens)[:, None]
        query = BOTH + row[:, None].to(tl.int64) * token_stride + head * (NOPE + 2 * HALF)
        x = _sum(query + nope[None, :], some & (nope < NOPE)[None, :], pitch, PARTS).to(kind)
        y = _dot(x, weight, CAST)
        target = OUT + (row[:, None].to(tl.int64) * HEADS + head) * width
        tl.store(target + column[None, :], y.to(kind), mask=some & (column < LATENT)[None, :])
        if run == 0:
            pair = tl.arange(0, HALF_PAD)
            real = some & (pair < HALF)[None, :]
            angle = row[:, None] * 2 * HALF + pair[None, :]
            cos = tl.load(COS + angle, mask=real, other=0.0).to(tl.float32)
            sin = tl.load(SIN + angle + HALF, mask=real, other=0.0).to(tl.float32)
            low = _sum(query + NOPE + pair[None, :], real, pitch, PARTS).to(kind).to(tl.float32)
            high = _sum(query + NOPE + HALF + pair[None, :], real, pitch, PARTS).to(kind).to(tl.float32)
            tl.store(target + LATENT + pair[None, :], (low * cos - high * sin).to(kind), mask=real)
            tl.store(target + LATENT + HALF + pair[None, :], (high * cos + low * sin).to(kind), mask=real)
