# SPDX-License-Identifier: Apache-2.0
"""The launches of very small decode steps in Triton's interpreter, on CPU tensors, against the torch kernels in float64."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # Read when a kernel is defined, hence before the imports below.

import pytest
import torch
from attention_cases import make_case
from torch import Tensor

from twinpool.engine.kernels import (
    torch_backend,
    torch_fused,
    triton_few_launch,
    triton_launch,
    triton_small_launch,
)
from twinpool.engine.kernels.operations import MlaLayer, MlaStep, RouterSpec
from twinpool.engine.kernels.triton_few_launch import FewTiles
from twinpool.engine.kernels.triton_small_launch import SmallTiles

SIZE, HEADS, NOPE, ROPE, LATENT, VALUE, SCALE, EPS = 40, 3, 10, 6, 24, 7, 0.3, 1e-6
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
TILES = SmallTiles(rows=4, columns=16, tile=16, splits=6)
FEW = FewTiles(dense=(32, 16, 4), wide=(16, 32, 4), values=4, latent=16)


def error_of(found: Tensor, expected: Tensor) -> float:
    assert torch.isfinite(found).all()
    return float((found.double() - expected).norm() / expected.norm())


def make_layer(dtype: torch.dtype) -> MlaLayer:
    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape) * shape[-1] ** -0.5).to(dtype)

    down = draw(HEADS * (NOPE + ROPE) + LATENT + ROPE, SIZE)
    up, output = draw(HEADS, NOPE + VALUE, LATENT), draw(SIZE, HEADS * VALUE)
    return MlaLayer(
        torch.randn(SIZE).to(dtype), EPS, down, torch.randn(LATENT).to(dtype), EPS, up, output, NOPE, ROPE, SCALE
    )  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("parts", [0, 3])
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("lengths", [(1,), (120, 1, 33), (5,) * 17])
def test_attention_matches_the_torch_kernels(
    lengths: tuple[int, ...], few: bool, parts: int, dtype: torch.dtype
) -> None:
    """Residual, norm, projections, rotation, store, attention and output of one layer; the pool holds NaN elsewhere."""
    torch.manual_seed(7)
    count = len(lengths)
    case = make_case(
        [(1, n) for n in lengths], heads=HEADS, query_dim=LATENT + ROPE, width=LATENT + ROPE, block_tokens=16,
        decodes=count, dtype=dtype,
    )  # fmt: skip
    for index, length in enumerate(lengths):
        block = int(case.batch.host_block_table[index, (length - 1) // 16])
        case.batch.slots[index] = block * 16 + (length - 1) % 16
    layer = make_layer(dtype)
    hidden = torch.randn(count, SIZE).to(dtype)
    delta = torch.randn(count, parts, SIZE).to(dtype) if parts else None
    angle = torch.rand(count, 1, ROPE // 2) * 6
    cos = torch.cat((angle.cos(), angle.cos()), -1).to(dtype)
    sin = torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    pages, wide_pages = case.pages.clone(), case.pages.double()
    operands = hidden, delta, layer, cos, sin, pages, case.batch
    if few:
        attend = triton_launch.mla_paged_attention
        total, attended = triton_few_launch.mla_small(*operands, attend, FEW)
        attended = attended.sum(1) if attended.dim() == 3 else attended
    else:
        total, attended = triton_small_launch.mla_small(*operands, TILES)
    summed, normed = torch_fused.add_norm(
        hidden.double(), None if delta is None else delta.double(), layer.norm.double(), EPS
    )
    down = normed @ layer.down.double().T
    columns = HEADS * (NOPE + ROPE)
    query = down[:, :columns].view(count, HEADS, -1)
    step = MlaStep(query, down[:, columns:], layer.kv_norm.double(), EPS, cos.double(), sin.double())
    rotated = torch_fused.mla_rows(step, wide_pages, case.batch)
    up = layer.up.double()
    rotated[..., :LATENT] = torch.einsum("thn,hnc->thc", query[..., :NOPE], up[:, :NOPE])
    found = torch_backend.mla_paged_attention(
        rotated, wide_pages, case.batch, latent_dim=LATENT, scale=SCALE
    ).output
    expected = torch.einsum("thc,hvc->thv", found, up[:, NOPE:]).flatten(1) @ layer.output.double().T
    assert error_of(total, summed) <= TOLERANCE[dtype]
    assert error_of(attended, expected) <= TOLERANCE[dtype]
    place = case.batch.slots // 16, case.batch.slots % 16
    assert error_of(pages[place], wide_pages[place]) <= TOLERANCE[dtype]
    pages[place] = case.pages[place]
    torch.testing.assert_close(pages, case.pages, rtol=0, atol=0, equal_nan=True)


def test_padding_of_a_graph_stores_nothing_and_stays_finite() -> None:
    """A sequence without context and with slot -1 fills up a captured batch."""
    torch.manual_seed(2)
    case = make_case([(1, 20), (1, 0)], heads=HEADS, query_dim=LATENT + ROPE, width=LATENT + ROPE, block_tokens=16, decodes=2)  # fmt: skip
    case.batch.slots[:] = torch.tensor([int(case.batch.host_block_table[0, 1]) * 16 + 3, -1])
    before = case.pages.clone()
    hidden, angle = torch.randn(2, SIZE), torch.zeros(2, 1, ROPE)
    _, attended = triton_small_launch.mla_small(
        hidden, None, make_layer(torch.float32), angle + 1, angle, case.pages, case.batch, TILES
    )
    assert attended.isfinite().all()
    changed = (case.pages != before) & ~(case.pages.isnan() & before.isnan())
    assert changed.any(-1).nonzero().tolist() == [[int(case.batch.slots[0]) // 16, 3]]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
def test_routing_matches_the_torch_kernels(tokens: int, normalize: bool) -> None:
    torch.manual_seed(11)
    number = 10
    hidden, delta, norm = torch.randn(tokens, SIZE), torch.randn(tokens, SIZE), torch.randn(SIZE)
    router, spec = torch.randn(number, SIZE), RouterSpec(3, 1, 1, normalize, 1.5)
    total, normed, found = triton_small_launch.route_small(hidden, delta, norm, EPS, router, spec)
    summed, wide = torch_fused.add_norm(hidden.double(), delta.double(), norm.double(), EPS)
    expected = torch_fused.route(wide.float(), router, None, spec)
    assert error_of(total, summed) <= 1e-5
    assert error_of(normed, wide) <= 1e-5
    one, other = (
        torch.zeros(tokens, number).scatter_(1, routing.experts.long(), routing.weights)
        for routing in (found, expected)
    )
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert found.lists is not None
    count, lists, counters = found.lists
    assert not counters.any()
    for expert in range(number):
        pairs = lists[expert * tokens :][: int(count[expert])].tolist()
        owners = (found.experts.reshape(-1) == expert).nonzero().flatten().tolist()
        assert sorted(pairs) == owners
