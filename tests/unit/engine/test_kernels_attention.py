# SPDX-License-Identifier: Apache-2.0
"""Attention kernels of the torch backend against float64, at every edge of length and mask."""

import math
from itertools import pairwise

import pytest
import torch
from attention_cases import Case, make_case, relative_error, solve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.kernels import REGISTRY, AttentionResult, Capability, Kernels

KERNELS = Kernels.select(REGISTRY, Capability("cpu"), torch.float32)
HEADS, LATENT, ROPE = 4, 12, 6
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2, torch.float16: 2e-3}

EDGES = {
    "decodes of every edge length": ([(1, n) for n in (1, 7, 8, 9, 16, 17, 40)], 7),
    "decodes of very unequal length": ([(1, 3), (1, 200), (1, 1), (1, 190), (1, 64)], 5),
    "decode without KV": ([(1, 0), (1, 5), (1, 0)], 3),
    "only decodes without KV": ([(1, 0), (1, 0)], 2),
    "fresh prompts": ([(1, 1), (7, 7), (8, 8), (9, 9), (150, 150)], 0),
    "chunks over a prefix": ([(5, 21), (8, 16), (1, 33), (40, 170)], 0),
    "more queries than KV": ([(5, 3), (4, 0), (9, 8)], 0),
    "decodes, then prefills": ([(1, 30), (1, 8), (12, 12), (6, 25)], 2),
}


def mla(case: Case, with_lse: bool = True) -> AttentionResult:
    return KERNELS.mla_paged_attention(
        case.query, case.pages, case.batch, latent_dim=LATENT, scale=0.3, with_lse=with_lse
    )


def solve_mla(case: Case, heads: int = HEADS) -> tuple[Tensor, Tensor]:
    keys = [rows[:, None, :].expand(-1, heads, -1) for rows in case.rows]
    return solve(case, keys, [key[..., :LATENT] for key in keys], 0.3)


def check(found: AttentionResult, expected: tuple[Tensor, Tensor], tolerance: float) -> None:
    assert relative_error(found.output, expected[0]) <= tolerance
    if found.lse is not None:
        torch.testing.assert_close(found.lse.double(), expected[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("edge", EDGES)
def test_mla_matches_float64(edge: str, dtype: torch.dtype) -> None:
    shapes, decodes = EDGES[edge]
    case = make_case(
        shapes, heads=HEADS, query_dim=LATENT + ROPE, width=LATENT + ROPE, decodes=decodes, dtype=dtype
    )
    found = mla(case)
    assert found.output.dtype == dtype
    check(found, solve_mla(case), TOLERANCE[dtype])
    plain = mla(case, with_lse=False)
    assert plain.lse is None
    assert torch.equal(plain.output, found.output)


@pytest.mark.parametrize("edge", EDGES)
def test_queries_that_see_nothing_are_zero_with_minus_infinity(edge: str) -> None:
    shapes, decodes = EDGES[edge]
    case = make_case(shapes, heads=HEADS, query_dim=LATENT + ROPE, width=LATENT + ROPE, decodes=decodes)
    output, lse = mla(case)
    assert lse is not None
    blind = torch.tensor(
        [context - count + j < 0 for count, context in shapes for j in range(count)], dtype=torch.bool
    )
    assert output[blind].eq(0).all()
    assert lse[blind].isneginf().all()
    assert lse[~blind].isfinite().all()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("edge", EDGES)
def test_gqa_matches_float64(edge: str, kv_heads: int) -> None:
    shapes, decodes = EDGES[edge]
    dim = 6
    case = make_case(shapes, heads=HEADS, query_dim=dim, width=2 * kv_heads * dim, decodes=decodes)
    found = KERNELS.gqa_paged_attention(
        case.query, case.pages, case.batch, kv_heads=kv_heads, scale=0.4, with_lse=True
    )
    split = [rows.view(-1, 2, kv_heads, dim).repeat_interleave(HEADS // kv_heads, 2) for rows in case.rows]
    check(found, solve(case, [part[:, 1] for part in split], [part[:, 0] for part in split], 0.4), 1e-5)


@pytest.mark.parametrize("edge", EDGES)
def test_expanded_matches_float64_and_the_absorbed_form(edge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two heads at a time, so that runs of heads are part of the test.
    monkeypatch.setattr("twinpool.engine.kernels.torch_backend._EXPANDED_BYTES", 1)
    shapes, decodes = EDGES[edge]
    nope, value = 5, 7
    generator = torch.Generator().manual_seed(9)
    keys = torch.randn(HEADS, nope, LATENT, generator=generator)
    values = torch.randn(HEADS, value, LATENT, generator=generator)
    case = make_case(shapes, heads=HEADS, query_dim=nope + ROPE, width=LATENT + ROPE, decodes=decodes)
    found = KERNELS.mla_expanded_attention(
        case.query, case.pages, case.batch, expand_keys=keys, expand_values=values, scale=0.1, with_lse=True
    )
    full_keys, full_values = [], []
    for rows in case.rows:
        latent, rotary = rows[:, :LATENT].double(), rows[:, LATENT:].double()
        plain = torch.einsum("hnc,kc->khn", keys.double(), latent)
        full_keys.append(torch.cat((plain, rotary[:, None].expand(-1, HEADS, -1)), -1))
        full_values.append(torch.einsum("hvc,kc->khv", values.double(), latent))
    check(found, solve(case, full_keys, full_values, 0.1), 1e-5)

    absorbed_query = torch.cat(
        (torch.einsum("thn,hnc->thc", case.query[..., :nope], keys), case.query[..., nope:]), -1
    )
    absorbed = KERNELS.mla_paged_attention(
        absorbed_query, case.pages, case.batch, latent_dim=LATENT, scale=0.1, with_lse=True
    )
    output = torch.einsum("thc,hvc->thv", absorbed.output, values)
    torch.testing.assert_close(output, found.output, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(absorbed.lse, found.lse, rtol=1e-4, atol=1e-5)


def test_columns_of_zero_queries_can_be_left_out_of_the_scores() -> None:
    case = make_case([(1, 20), (5, 9)], heads=HEADS, query_dim=LATENT + ROPE, width=LATENT + ROPE, decodes=1)
    case.query[..., :LATENT] = 0.0
    full = mla(case)
    skipped = KERNELS.mla_paged_attention(
        case.query, case.pages, case.batch, latent_dim=LATENT, scale=0.3, score_from=LATENT
    )
    torch.testing.assert_close(skipped.output, full.output, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("offset", [-5e5, 5e5])
def test_scores_far_from_zero_keep_their_softmax(offset: float) -> None:
    # Equal scores of this size: weights are equal and the sum is the score plus log(count).
    case = make_case([(1, 21), (3, 9)], heads=HEADS, query_dim=LATENT + ROPE, width=LATENT + ROPE, decodes=1)
    case.query.zero_()
    case.query[..., -1] = offset / 0.3
    for block in range(case.pages.shape[0]):
        valid = ~case.pages[block, :, -1].isnan()
        case.pages[block, valid, -1] = 1.0
    for rows in case.rows:
        rows[:, -1] = 1.0
    output, lse = mla(case)
    assert lse is not None
    expected = torch.stack(
        [case.rows[0][:21, :LATENT].mean(0)] + [case.rows[1][:n, :LATENT].mean(0) for n in (7, 8, 9)]
    )
    torch.testing.assert_close(output, expected[:, None].expand_as(output), rtol=1e-5, atol=1e-5)
    assert lse[:, 0].tolist() == pytest.approx([offset + math.log(n) for n in (21, 7, 8, 9)], rel=1e-6)


@pytest.mark.parametrize("parts", [2, 3, 5, 8])
def test_parts_of_a_long_context_merge_to_one_pass(parts: int) -> None:
    """LSE is natural: a wrong base shows here, and grows with the context."""
    context, tokens = 4096, 64
    whole = make_case([(1, context)], heads=HEADS, query_dim=LATENT + ROPE, width=LATENT + ROPE,
                      block_tokens=tokens, decodes=1)  # fmt: skip
    whole.query.mul_(3.0)
    expected = solve_mla(whole)
    blocks, batch = context // tokens, whole.batch
    bounds = [round(blocks * part / parts) for part in range(parts + 1)]
    pieces = []
    for first, last in pairwise(bounds):
        whole.batch = AttentionBatch.build(
            q_start=batch.host_q_start,
            context=batch.host_context * 0 + (last - first) * tokens,
            block_table=batch.host_block_table[:, first:last],
            slots=batch.slots.numpy(),
            block_tokens=tokens,
            num_decodes=1,
        )
        pieces.append(mla(whole))
    sums = [piece.lse for piece in pieces if piece.lse is not None]
    merged = KERNELS.merge_attention(torch.stack([piece.output for piece in pieces]), torch.stack(sums))
    check(merged, expected, 1e-5)


def test_an_empty_part_changes_nothing_whatever_it_holds() -> None:
    case = make_case([(1, 20), (3, 9)], heads=HEADS, query_dim=LATENT + ROPE, width=LATENT + ROPE, decodes=1)
    output, lse = mla(case)
    assert lse is not None
    nothing, minus = torch.full_like(output, float("nan")), torch.full_like(lse, float("-inf"))
    for order in ([0, 1], [1, 0]):
        outputs, sums = [[output, nothing][i] for i in order], [[lse, minus][i] for i in order]
        merged = KERNELS.merge_attention(torch.stack(outputs), torch.stack(sums))
        assert torch.equal(merged.output, output)
        assert torch.equal(merged.lse, lse)  # type: ignore[arg-type]
    empty = KERNELS.merge_attention(torch.stack([nothing, nothing]), torch.stack([minus, minus]))
    assert empty.output.eq(0).all()
    assert empty.lse is not None
    assert empty.lse.isneginf().all()


@settings(max_examples=40, deadline=None)
@given(
    decodes=st.lists(st.integers(0, 70), max_size=6),
    prefills=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 90)), max_size=3),
    block_tokens=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 1000),
)
def test_any_ragged_batch_matches_float64(
    decodes: list[int], prefills: list[tuple[int, int]], block_tokens: int, seed: int
) -> None:
    shapes = [(1, context) for context in decodes] + prefills
    if not shapes:
        return
    case = make_case(shapes, heads=2, query_dim=LATENT + ROPE, width=LATENT + ROPE,
                     block_tokens=block_tokens, decodes=len(decodes), seed=seed)  # fmt: skip
    check(mla(case), solve_mla(case, heads=2), 1e-5)


def test_write_touches_the_slots_and_nothing_else() -> None:
    case = make_case([(3, 11)], heads=1, query_dim=4, width=4)
    before = case.pages.clone()
    tokens = case.batch.block_tokens
    block = int(case.batch.block_table[0, 1])
    case.batch.slots = torch.tensor([block * tokens + offset for offset in (0, 2, 5)])
    KERNELS.write_kv(case.pages, torch.arange(12.0).view(3, 4), case.batch)
    assert case.pages[block, [0, 2, 5]].flatten().tolist() == list(range(12))
    before[block, [0, 2, 5]] = case.pages[block, [0, 2, 5]]
    torch.testing.assert_close(case.pages, before, rtol=0, atol=0, equal_nan=True)
