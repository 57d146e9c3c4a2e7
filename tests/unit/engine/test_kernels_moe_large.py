# SPDX-License-Identifier: Apache-2.0
"""Grouped products of many tokens in Triton's interpreter, on CPU tensors, against the torch kernels."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # Read when a kernel is defined, hence before the imports below.

import pytest
import torch

from twinpool.engine.kernels import torch_fused, triton_moe, triton_moe_large
from twinpool.engine.kernels.operations import ExpertWeights, Routing
from twinpool.engine.kernels.triton_moe_large import LargeTile

EXPERTS, CHOSEN, WIDTH, SIZE, ROWS = 10, 3, 16, 64, 16


def make_routing(tokens: int, favourite: int | None = None) -> Routing:
    """Random experts; with a favourite, every token goes to that one too, and some experts have nothing."""
    scores = torch.rand(tokens, EXPERTS)
    if favourite is not None:
        scores[:, favourite] = 2.0
        scores[:, 5:] -= 3.0
        scores[:, favourite] += 3.0
    weights, experts = scores.topk(CHOSEN)
    return Routing(weights, experts.to(torch.int32))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("favourite", [None, 7])
@pytest.mark.parametrize("tokens", [1, 19, 60])
def test_grouped_products_match_the_torch_kernels(
    tokens: int, favourite: int | None, dtype: torch.dtype, limit: float
) -> None:
    torch.manual_seed(tokens)
    gate_up = (torch.randn(EXPERTS, 2 * WIDTH, SIZE) * 0.2).to(dtype)
    down = (torch.randn(EXPERTS, SIZE, WIDTH) * 0.2).to(dtype)
    hidden, routing = torch.randn(tokens, SIZE).to(dtype), make_routing(tokens, favourite)
    out = torch.full((tokens, CHOSEN + 1, SIZE), float("nan"), dtype=dtype)
    tiles = LargeTile(16, 32, 1, 4), LargeTile(32, 16, 1, 4)
    triton_moe_large.routed(
        hidden, gate_up, down, routing.weights, triton_moe.lists_of(routing, EXPERTS)[:2], out, tiles=tiles, rows=ROWS
    )  # fmt: skip
    expected = torch_fused.moe(hidden.double(), routing, ExpertWeights(gate_up.double(), down.double()))
    found = out[:, :CHOSEN].double().sum(1)
    assert float((found - expected).norm() / expected.norm()) <= limit
    assert out[:, CHOSEN].isnan().all()
