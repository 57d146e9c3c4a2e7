# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of grouped-query attention in Triton's interpreter, on CPU tensors, against float64."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # Read when a kernel is defined, hence before the imports below.

import pytest
import torch
from attention_cases import Case, make_case, relative_error, solve
from torch import Tensor

from twinpool.engine.kernels import triton_gqa_launch

HEADS, DIM, SCALE = 6, 10, 0.3
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
EDGES = {
    "decodes of every edge length": ([(1, n) for n in (1, 15, 16, 17, 32, 33, 80)], 7),
    "one long decode": ([(1, 700)], 1),
    "decodes of very unequal length": ([(1, 3), (1, 400), (1, 1), (1, 190), (1, 64)], 5),
    "decode without KV": ([(1, 0), (1, 5), (1, 0)], 3),
    "speculation": ([(1, 200), (4, 300), (2, 65), (3, 64), (4, 2)], 1),
    "chunks over a prefix": ([(65, 90), (8, 16), (1, 33), (70, 170)], 0),
    "more queries than KV": ([(5, 3), (4, 0), (70, 8)], 0),
    "decodes, then prefills": ([(1, 30), (1, 8), (72, 72), (6, 25)], 2),
}


def gqa_case(edge: str, kv_heads: int, dtype: torch.dtype) -> Case:
    shapes, decodes = EDGES[edge]
    return make_case(
        shapes, heads=HEADS, query_dim=DIM, width=2 * kv_heads * DIM, block_tokens=16, decodes=decodes, dtype=dtype
    )  # fmt: skip


def solve_gqa(case: Case, kv_heads: int) -> tuple[Tensor, Tensor]:
    split = [rows.view(-1, 2, kv_heads, DIM).repeat_interleave(HEADS // kv_heads, 2) for rows in case.rows]
    return solve(case, [part[:, 1] for part in split], [part[:, 0] for part in split], SCALE)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("edge", EDGES)
def test_attention_matches_float64(edge: str, dtype: torch.dtype) -> None:
    """The pool holds NaN wherever no context lies: nothing of it may leak."""
    kv_heads = {torch.float32: 2, torch.bfloat16: 6, torch.float16: 1}[dtype]
    case = gqa_case(edge, kv_heads, dtype)
    output, lse = triton_gqa_launch.gqa_paged_attention(
        case.query, case.pages, case.batch, kv_heads=kv_heads, scale=SCALE, with_lse=True
    )
    expected, sums = solve_gqa(case, kv_heads)
    assert output.dtype == dtype
    assert relative_error(output, expected) <= TOLERANCE[dtype]
    assert lse is not None
    torch.testing.assert_close(lse.double(), sums, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert output[sums.isneginf()].eq(0).all()
    plain = triton_gqa_launch.gqa_paged_attention(
        case.query, case.pages, case.batch, kv_heads=kv_heads, scale=SCALE
    )
    assert plain.lse is None
    assert torch.equal(plain.output, output)


@pytest.mark.parametrize("edge", ["one long decode", "chunks over a prefix"])
def test_scores_far_from_zero_keep_their_softmax(edge: str) -> None:
    case = gqa_case(edge, 2, torch.float32)
    case.query *= 1e5
    output, lse = triton_gqa_launch.gqa_paged_attention(
        case.query, case.pages, case.batch, kv_heads=2, scale=SCALE, with_lse=True
    )
    expected, sums = solve_gqa(case, 2)
    assert float(sums.abs().max()) > 1e5
    assert relative_error(output, expected) <= 1e-2
    assert lse is not None
    torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=1e-2)


def test_operands_that_cannot_be_addressed_are_refused() -> None:
    case = gqa_case("one long decode", 2, torch.float32)
    with pytest.raises(ValueError, match="contiguous"):
        triton_gqa_launch.gqa_paged_attention(
            case.query, case.pages.transpose(1, 2), case.batch, kv_heads=2, scale=SCALE
        )
    with pytest.raises(ValueError, match="KV heads"):
        triton_gqa_launch.gqa_paged_attention(case.query, case.pages, case.batch, kv_heads=3, scale=SCALE)
    with pytest.raises(ValueError, match="scale"):
        triton_gqa_launch.gqa_paged_attention(case.query, case.pages, case.batch, kv_heads=2, scale=0.0)


@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_of_the_split_fit_their_share_of_shared_memory(dim: int, itemsize: int) -> None:
    tile = triton_gqa_launch.split_tile(8, dim, itemsize)
    assert tile.tokens >= 16
    assert tile.stages >= 1
    assert tile.stages * 2 * tile.tokens * dim * itemsize <= 96 << 10
