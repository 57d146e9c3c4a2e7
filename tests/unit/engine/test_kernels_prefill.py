# SPDX-License-Identifier: Apache-2.0
"""The Triton prefill kernel in Triton's interpreter, on CPU tensors, against float64."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # Read when a kernel is defined, hence before the imports below.

import pytest
import torch
from attention_cases import make_case, relative_error, solve

from twinpool.engine.kernels import triton_prefill

HEADS, LATENT, ROPE, NOPE, VALUE, SCALE = 3, 12, 6, 10, 7, 0.3
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
EDGES = {
    "fresh prompts": [(1, 1), (15, 15), (16, 16), (17, 17), (50, 50)],
    "chunks over a prefix": [(5, 21), (8, 16), (33, 70), (20, 170)],
    "more queries than KV": [(5, 3), (4, 0), (20, 18)],
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("edge", EDGES)
def test_prefill_matches_float64(edge: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool holds NaN wherever no context lies. Runs of one head at a time, so that runs are part of the test."""
    if dtype == torch.float32:
        monkeypatch.setattr(triton_prefill, "EXPANDED_BYTES", 1)
    torch.manual_seed(4)
    keys = (torch.randn(HEADS, NOPE, LATENT) * LATENT**-0.5).to(dtype)
    values = (torch.randn(HEADS, VALUE, LATENT) * LATENT**-0.5).to(dtype)
    case = make_case(
        EDGES[edge], heads=HEADS, query_dim=NOPE + ROPE, width=LATENT + ROPE, block_tokens=16, dtype=dtype
    )
    output, lse = triton_prefill.mla_expanded_attention(
        case.query, case.pages, case.batch, expand_keys=keys, expand_values=values, scale=SCALE, with_lse=True
    )
    full_keys, full_values = [], []
    for rows in case.rows:
        latent, rotary = rows[:, :LATENT].double(), rows[:, LATENT:].double()
        plain = torch.einsum("hnc,kc->khn", keys.double(), latent)
        full_keys.append(torch.cat((plain, rotary[:, None].expand(-1, HEADS, -1)), -1))
        full_values.append(torch.einsum("hvc,kc->khv", values.double(), latent))
    expected, sums = solve(case, full_keys, full_values, SCALE)
    assert output.dtype == dtype
    assert relative_error(output, expected) <= TOLERANCE[dtype]
    assert lse is not None
    limit = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(lse.double(), sums, rtol=limit, atol=limit)
    assert output[sums.isneginf()].eq(0).all()
    plain_output = triton_prefill.mla_expanded_attention(
        case.query, case.pages, case.batch, expand_keys=keys, expand_values=values, scale=SCALE
    )
    assert plain_output.lse is None
    assert torch.equal(plain_output.output, output)


def test_operands_that_cannot_be_addressed_are_refused() -> None:
    case = make_case([(4, 4)], heads=2, query_dim=NOPE + ROPE, width=LATENT + ROPE)
    keys, values = torch.randn(2, NOPE, LATENT), torch.randn(2, VALUE, LATENT)
    with pytest.raises(ValueError, match="scale"):
        triton_prefill.mla_expanded_attention(
            case.query, case.pages, case.batch, expand_keys=keys, expand_values=values, scale=0.0
        )
