# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels in Triton's interpreter, on CPU tensors, against float64."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # Read when a kernel is defined, hence before the imports below.

import numpy as np
import pytest
import torch
from attention_cases import Case, make_case, relative_error, solve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twinpool.engine.kernels import triton_launch
from twinpool.engine.kernels.triton_schedule import FIELDS, make_schedule

HEADS, LATENT, ROPE, SCALE = 4, 12, 6, 0.3
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}

EDGES = {
    "decodes of every edge length": ([(1, n) for n in (1, 15, 16, 17, 32, 33, 80)], 7),
    "one long decode": ([(1, 700)], 1),
    "decodes of very unequal length": ([(1, 3), (1, 400), (1, 1), (1, 190), (1, 64)], 5),
    "decode without KV": ([(1, 0), (1, 5), (1, 0)], 3),
    "only decodes without KV": ([(1, 0), (1, 0)], 2),
    "speculation": ([(1, 200), (4, 300), (2, 65), (3, 64), (4, 2)], 1),
    "chunks over a prefix": ([(5, 21), (8, 16), (1, 33), (20, 170)], 0),
    "more queries than KV": ([(5, 3), (4, 0), (9, 8)], 0),
}


def attention_case(edge: str, dtype: torch.dtype = torch.float32, heads: int = HEADS) -> Case:
    shapes, decodes = EDGES[edge]
    return make_case(
        shapes,
        heads=heads,
        query_dim=LATENT + ROPE,
        width=LATENT + ROPE,
        block_tokens=16,
        decodes=decodes,
        dtype=dtype,
    )


def solve_mla(case: Case, heads: int = HEADS) -> tuple[Tensor, Tensor]:
    keys = [rows[:, None, :].expand(-1, heads, -1) for rows in case.rows]
    return solve(case, keys, [key[..., :LATENT] for key in keys], SCALE)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("edge", EDGES)
def test_attention_matches_float64(edge: str, dtype: torch.dtype) -> None:
    """The pool holds NaN wherever no context lies: nothing of it may leak."""
    case = attention_case(edge, dtype)
    output, lse = triton_launch.mla_paged_attention(
        case.query, case.pages, case.batch, latent_dim=LATENT, scale=SCALE, with_lse=True
    )
    expected, sums = solve_mla(case)
    assert output.dtype == dtype
    assert relative_error(output, expected) <= TOLERANCE[dtype]
    assert lse is not None
    torch.testing.assert_close(lse.double(), sums, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    blind = sums.isneginf()
    assert output[blind].eq(0).all()


def test_without_lse_the_output_is_the_same() -> None:
    case = attention_case("decodes of very unequal length")
    both = [
        triton_launch.mla_paged_attention(
            case.query, case.pages, case.batch, latent_dim=LATENT, scale=SCALE, with_lse=flag
        )
        for flag in (False, True)
    ]
    assert both[0].lse is None
    assert torch.equal(both[0].output, both[1].output)


def test_scores_far_from_zero_keep_their_softmax() -> None:
    case = attention_case("one long decode")
    case.query[..., LATENT:] *= 4e5
    output, lse = triton_launch.mla_paged_attention(
        case.query, case.pages, case.batch, latent_dim=LATENT, scale=SCALE, with_lse=True
    )
    expected, sums = solve_mla(case)
    assert float(sums.abs().max()) > 1e5
    assert relative_error(output, expected) <= 1e-3
    assert lse is not None
    torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=1e-2)


def test_operands_that_cannot_be_addressed_are_refused() -> None:
    case = attention_case("one long decode")
    with pytest.raises(ValueError, match="contiguous"):
        triton_launch.mla_paged_attention(
            case.query, case.pages.transpose(1, 2), case.batch, latent_dim=LATENT, scale=SCALE
        )
    with pytest.raises(ValueError, match="scale"):
        triton_launch.mla_paged_attention(case.query, case.pages, case.batch, latent_dim=LATENT, scale=0.0)


def reference_plan(context: list[int], blocks: int, tile: int, overhead: int) -> list[tuple[int, int]]:
    """Where each block begins, unit by unit."""
    axis: list[tuple[int, int]] = []
    for sequence, length in enumerate(context):
        axis += [(sequence, 0)] * overhead + [(sequence, page) for page in range(-(-length // tile))]
    axis.append((len(context), 0))
    return [axis[block * (len(axis) - 1) // blocks] for block in range(blocks + 1)]


@settings(max_examples=60, deadline=None)
@given(
    context=st.lists(st.integers(0, 40), min_size=1, max_size=130),
    blocks=st.integers(1, 140),
    overhead=st.integers(1, 3),
    spared=st.integers(0, 5),
    equal=st.booleans(),
)
def test_every_page_is_walked_once(
    context: list[int], blocks: int, overhead: int, spared: int, equal: bool
) -> None:
    """Equal sequences use fewer blocks; the others are idle."""
    if equal:
        context = [context[0]] * len(context)
    even = min(len(context), blocks) if spared == 5 else max(blocks - spared, 1)
    tile, count = 4, len(context)
    table = torch.arange(count * 11, dtype=torch.int32).view(count, 11)
    found = make_schedule(torch.tensor(context, dtype=torch.int32), table, blocks, tile, overhead, even)
    plan = found.plan.numpy()
    rows = plan[: FIELDS.value * blocks].reshape(blocks, FIELDS.value)
    used = blocks
    if len({-(-length // tile) for length in context}) == 1:
        used = even
        overhead = 1 if used % count == 0 or count % used == 0 else overhead
    expected = reference_plan(context, used, tile, overhead) + [(count, 0)] * (blocks - used)
    begins = [tuple(row) for row in rows[:, :2].tolist()]
    begins.append(tuple(rows[-1, 2:4].tolist()))
    assert begins == expected
    assert [tuple(row) for row in rows[:, 2:4].tolist()] == expected[1:]
    first, last = plan[FIELDS.value * blocks :][:count], plan[FIELDS.value * blocks + count :]
    for row, (sequence, page) in zip(rows.tolist(), expected, strict=False):
        if sequence < count:
            assert row[4:7] == [context[sequence], first[sequence], last[sequence] - first[sequence] + 1]
            assert row[8] == (table[sequence, page] if page * tile < context[sequence] else 0)
        if row[2] < count:
            assert row[7] == last[row[2]] - first[row[2]] + 1
    owners: list[list[int]] = [[] for _ in context]
    walked = np.zeros(blocks, np.int64)
    for block in range(blocks):
        for sequence in range(begins[block][0], begins[block + 1][0] + (begins[block + 1][1] > 0)):
            pages = -(-context[sequence] // tile)
            low = begins[block][1] if sequence == begins[block][0] else 0
            high = begins[block + 1][1] if sequence == begins[block + 1][0] else pages
            assert 0 <= low <= high <= pages
            walked[block] += high - low
            owners[sequence] += [block] * (high - low)
    for sequence, blocks_of in enumerate(owners):
        assert len(blocks_of) == -(-context[sequence] // tile)
        if blocks_of:
            assert (first[sequence], last[sequence]) == (blocks_of[0], blocks_of[-1])
        else:
            assert first[sequence] == last[sequence]
    assert walked.max() <= -(-(sum(map(len, owners)) + overhead * count) // used) + 1
