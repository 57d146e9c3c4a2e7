# SPDX-License-Identifier: Apache-2.0
"""Latent attention over packed rows in Triton's interpreter, on CPU tensors, against float64 over the rounded rows."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # Read when a kernel is defined, hence before the imports below.

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import Case, make_case, relative_error, solve
from torch import Tensor

from twinpool.engine.kernels import torch_fp8, triton_fp8_launch
from twinpool.engine.kernels.operations import MlaStep
from twinpool.engine.kv.formats import Fp8LatentRows

HEADS, SCALE = 3, 0.1
FORMS = {
    "one narrow run": Fp8LatentRows(12, 6),
    "two runs": Fp8LatentRows(200, 4),
    "deepseek_v3": Fp8LatentRows(512, 64),
}
EDGES = {
    "decodes of every edge length": ([(1, n) for n in (1, 15, 16, 17, 65)], 5),
    "decodes of very unequal length": ([(1, 3), (1, 200), (1, 1), (1, 0)], 4),
    "speculation": ([(1, 90), (4, 100), (2, 17), (4, 2)], 1),
    "chunks over a prefix": ([(9, 25), (20, 70)], 0),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def packed_case(edge: str, form: Fp8LatentRows, dtype: torch.dtype) -> tuple[Case, Tensor, list[Tensor]]:
    """A case, its pages packed (poison stays poison), and its rows as they come back."""
    shapes, decodes = EDGES[edge]
    width = form.latent_dim + form.rope_dim
    case = make_case(
        shapes, heads=HEADS, query_dim=width, width=width, block_tokens=16, decodes=decodes, dtype=dtype
    )  # fmt: skip
    blocks, tokens, _ = case.pages.shape
    # Two layers side by side, so that the stride of a block is not the size of a page.
    both = torch.full((blocks, 2, tokens, form.row_bytes), 255, dtype=torch.uint8)
    both[:, 1] = form.pack(case.pages.reshape(-1, width)).view(blocks, tokens, form.row_bytes)
    return case, both[:, 1], [form.unpack(form.pack(rows), torch.float64) for rows in case.rows]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("edge", EDGES)
def test_attention_matches_float64(edge: str, form: str, dtype: torch.dtype) -> None:
    layout = FORMS[form]
    case, pages, rows = packed_case(edge, layout, dtype)
    output, lse = triton_fp8_launch.mla_paged_attention(
        case.query, pages, case.batch, latent_dim=layout.latent_dim, scale=SCALE, with_lse=True
    )
    keys = [row[:, None, :].expand(-1, HEADS, -1) for row in rows]
    expected, sums = solve(case, keys, [key[..., : layout.latent_dim] for key in keys], SCALE)
    assert output.dtype == dtype
    assert relative_error(output, expected) <= TOLERANCE[dtype]
    assert lse is not None
    torch.testing.assert_close(lse.double(), sums, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert output[sums.isneginf()].eq(0).all()
    plain = triton_fp8_launch.mla_paged_attention(
        case.query, pages, case.batch, latent_dim=layout.latent_dim, scale=SCALE
    )
    assert plain.lse is None
    assert torch.equal(plain.output, output)


def make_step(form: Fp8LatentRows, tokens: int, dtype: torch.dtype) -> MlaStep:
    generator = torch.Generator().manual_seed(8)
    nope, rope, latent = 10, form.rope_dim, form.latent_dim
    both = torch.randn(tokens, HEADS * (nope + rope) + latent + rope, generator=generator).to(dtype)
    angle = torch.rand(tokens, 1, rope // 2, generator=generator) * 6
    cos = torch.cat((angle.cos(), angle.cos()), -1).to(dtype)
    sin = torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    query = both[:, : HEADS * (nope + rope)].view(tokens, HEADS, -1)
    weight = torch.randn(latent, generator=generator).to(dtype)
    return MlaStep(query, both[:, HEADS * (nope + rope) :], weight, 1e-6, cos, sin)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", FORMS)
def test_rows_are_packed_as_torch_packs_them(form: str, dtype: torch.dtype) -> None:
    """The interpreter cuts bfloat16 off and loses the carry of some float8, so a few codes differ; nothing else is touched."""
    layout = FORMS[form]
    case, pages, _ = packed_case("decodes of every edge length", layout, dtype)
    case.batch.slots[:] = torch.tensor([3, 16 * 2 + 5, -1, 16 * 4, 16 * 5 + 15])
    step = make_step(layout, 5, dtype)
    found_pages, expected_pages, before = pages.clone(), pages.clone(), pages.clone()
    found = triton_fp8_launch.mla_rows(step, found_pages, case.batch)
    case.batch.slots[2] = 3  # The reference has no padding: another token's slot, written first.
    order = [2, 0, 1, 3, 4]
    case.batch.forget()
    swapped = MlaStep(
        step.query[order], step.kv[order], step.weight, step.eps, step.cos[order], step.sin[order]
    )
    case.batch.slots[:] = case.batch.slots[order]
    expected = torch_fp8.mla_rows(swapped, expected_pages, case.batch)
    rope = layout.latent_dim
    assert relative_error(found[order][..., rope:], expected[..., rope:].double()) <= TOLERANCE[dtype]
    flat = [part.reshape(-1, layout.row_bytes) for part in (found_pages, expected_pages, before)]
    slots, latent = [3, 37, 64, 95], layout.latent_dim
    one, other = (layout.unpack(part[slots], torch.float64) for part in flat[:2])
    if dtype == torch.float32:
        changed = (one - other).abs()[:, :latent] > 1e-3 * other.abs()[:, :latent]
        assert float(changed.double().mean()) <= 0.1
    assert float((one - other)[:, :latent].norm() / other[:, :latent].norm()) <= 0.1
    assert relative_error(one[:, latent:], other[:, latent:]) <= 2.0**-6
    untouched = [slot for slot in range(len(flat[0])) if slot not in slots]
    assert torch.equal(flat[0][untouched], flat[2][untouched])


@pytest.mark.parametrize("backend", [torch_fp8, triton_fp8_launch])
@pytest.mark.parametrize("in_place", [False, True])
def test_queries_are_rotated_in_place_where_that_is_asked_for(backend: Any, in_place: bool) -> None:
    layout = FORMS["two runs"]
    case, pages, _ = packed_case("decodes of every edge length", layout, torch.float32)
    case.batch.slots[:] = torch.arange(5)
    step = replace(make_step(layout, 5, torch.float32), in_place=in_place)
    before, latent = step.query.clone(), layout.latent_dim
    rope = layout.rope_dim
    found = backend.mla_rows(step, pages.clone(), case.batch)
    rotated = found[..., latent:]
    assert not torch.equal(rotated, before[..., -rope:])
    assert torch.equal(step.query[..., -rope:], rotated if in_place else before[..., -rope:])
    assert torch.equal(step.query[..., :-rope], before[..., :-rope])


def test_what_is_not_finite_stays_so() -> None:
    layout = FORMS["two runs"]
    case, pages, _ = packed_case("decodes of every edge length", layout, torch.float32)
    case.batch.slots[:] = torch.arange(5)
    step = make_step(layout, 5, torch.float32)
    step.kv[1, 7] = float("nan")
    pages = pages.clone()
    triton_fp8_launch.mla_rows(step, pages, case.batch)
    rows = layout.unpack(pages.reshape(-1, layout.row_bytes)[:5], torch.float32)
    assert rows[1].isnan().any()
    assert rows[[0, 2, 3, 4]].isfinite().all()


def test_rows_without_alignment_are_left_to_torch() -> None:
    form = Fp8LatentRows(13, 6)
    width = 19
    case = make_case([(1, 5), (1, 20)], heads=HEADS, query_dim=width, width=width, block_tokens=16, decodes=2)
    blocks, tokens, _ = case.pages.shape
    pages = form.pack(case.pages.reshape(-1, width)).view(blocks, tokens, form.row_bytes)
    assert triton_fp8_launch.Packed.of(pages, form) is None
    found = triton_fp8_launch.mla_paged_attention(case.query, pages, case.batch, latent_dim=13, scale=SCALE)
    expected = torch_fp8.mla_paged_attention(case.query, pages, case.batch, latent_dim=13, scale=SCALE)
    assert torch.equal(found.output, expected.output)
