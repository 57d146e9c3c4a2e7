# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Device functions of the Hopper kernels: walking the schedule."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

# fmt: off
# Argument lists of kernels are read in groups.
PAGE = gl.constexpr(64)
LATENT = gl.constexpr(512)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def span(s, s0, p0, s1, p1, CONTEXT):
    """The pages ``[first, end)`` of sequence ``s`` that are this block's, its length and its number of pages."""
    context = gl.load(CONTEXT + s)
    pages = (context + (PAGE - 1)) // PAGE
    first = gl.where(s == s0, p0, 0)
    end = gl.where(s == s1, p1, pages)
    return first, end, context, pages


@gluon.jit
def queries(s, Q_START, MULTI: gl.constexpr):
    """The first query token of sequence ``s`` and how many it has; one each if not MULTI."""
    if MULTI:
        start = gl.load(Q_START + s)
        tokens = gl.load(Q_START + s + 1) - start
    else:
        start = s
        tokens = s - s + 1
    return start, tokens


@gluon.jit
def skip(s, i, end, s1, p1, stop, CONTEXT):
    """The cursor moved over sequences of which no page is left here; past the last page ``i >= end``."""
    while (i >= end) & (s + 1 < stop):
        s += 1
        i = 0
        end = gl.where(s == s1, p1, (gl.load(CONTEXT + s) + (PAGE - 1)) // PAGE)
    return s, i, end


@gluon.jit
def row_of(lane, rows, SPREAD: gl.constexpr):
    """The query row that lies in line ``lane`` of a tile, and whether there is one. At most 16 rows are SPREAD over the
    tile, four to a warp, so that all warps take part when they are stored."""
    if SPREAD:
        row = (lane // 16) * 4 + lane % 16
        real = (lane % 16 < 4) & (row < rows)
    else:
        row = lane
        real = lane < rows
    return row, real
