# SPDX-License-Identifier: Apache-2.0
"""The fused Triton kernels in Triton's interpreter, on CPU tensors, against float64 and their torch twins."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # Read when a kernel is defined, hence before the imports below.

from pathlib import Path

import pytest
import torch
from attention_cases import make_case, relative_error
from engine_oracle import PagedRun

from tests.unit.engine.interpreted import interpreted
from twinpool.engine.config import Family
from twinpool.engine.kernels import (
    REGISTRY,
    torch_fused,
    triton_ends,
    triton_fused,
    triton_moe,
)
from twinpool.engine.kernels.operations import ExpertWeights, MlaStep, RouterSpec, Routing
from twinpool.engine.loader import load_model
from twinpool.engine.tiny import write_tiny

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("parts", [None, 1, 3])
def test_add_norm(parts: int | None, dtype: torch.dtype) -> None:
    hidden, weight = torch.randn(5, 40).to(dtype), torch.randn(40).to(dtype)
    delta = None if parts is None else torch.randn(5, parts, 40).to(dtype)
    if parts == 1 and delta is not None:
        delta = delta[:, 0]
    total, normed = triton_fused.add_norm(hidden, delta, weight, 1e-6)
    wide = None if delta is None else delta.double()
    summed, expected = torch_fused.add_norm(hidden.double(), wide, weight.double(), 1e-6)
    assert total.dtype == normed.dtype == dtype
    assert relative_error(total, summed) <= TOLERANCE[dtype]
    assert relative_error(normed, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotary_tables(dtype: torch.dtype) -> None:
    positions, frequencies = torch.tensor([0, 1, 77, 131071]), 10.0 ** -torch.rand(6)
    found = triton_ends.rotary_tables(positions, frequencies, 0.7, dtype)
    expected = torch_fused.rotary_tables(positions, frequencies, 0.7, dtype)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_greedy_choice(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of equals, also across chunks; rows that hold NaN, +inf, or nothing but -inf."""
    monkeypatch.setattr(triton_ends, "BLOCK", 16)
    logits = torch.randn(9, 50).to(dtype)
    logits[1, [3, 20, 48]] = logits[2, [15, 16]] = logits[3, 49] = 9.0
    logits[4, 40], logits[5, 7], logits[6] = float("nan"), float("inf"), float("-inf")
    logits[7, 1:] = float("-inf")
    wide = torch.cat((logits, logits.new_full((9, 4), 99.0)), 1)[:, :50]
    for operand in (logits, wide):
        found, expected = triton_ends.greedy(operand), torch_fused.greedy(logits)
        assert found.dtype == expected.dtype == torch.int32
        assert found[1].tolist() == expected[1].tolist() == [1, 1, 1, 1, 0, 0, 0, 1, 1]
        healthy = found[1] == 1
        assert found[0][healthy].tolist() == expected[0][healthy].tolist()
    assert found[0, 1:4].tolist() == [3, 15, 49]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_silu_mul(dtype: torch.dtype) -> None:
    both = (torch.randn(3, 2 * 1100) * 4).to(dtype)
    assert (
        relative_error(triton_fused.silu_mul(both), torch_fused.silu_mul(both.double())) <= TOLERANCE[dtype]
    )


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_mla_rows_stores_and_rotates(dtype: torch.dtype, in_place: bool) -> None:
    heads, nope, rope, latent = 3, 10, 6, 12
    case = make_case(
        [(1, 20), (1, 16), (1, 1)], heads=heads, query_dim=nope + rope, width=latent + rope, block_tokens=16,
        decodes=3, dtype=dtype,
    )  # fmt: skip
    angle = torch.rand(3, 1, rope // 2) * 6
    cos = torch.cat((angle.cos(), angle.cos()), -1).to(dtype)
    sin = torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    both = torch.randn(3, heads * (nope + rope) + latent + rope).to(dtype)
    query, kv = both[:, : heads * (nope + rope)].view(3, heads, -1), both[:, heads * (nope + rope) :]
    step = MlaStep(query, kv, torch.randn(latent).to(dtype), 1e-6, cos, sin, in_place)
    case.batch.slots[1] = -1
    before = case.pages.clone()
    wide = MlaStep(
        query.double(), kv.double(), step.weight.double(), 1e-6, cos.double(), sin.double(), in_place
    )
    whole = query.clone()
    found = triton_fused.mla_rows(step, case.pages, case.batch)
    expected, rows = torch_fused.mla_queries(wide)
    assert relative_error(found[..., latent:], expected[..., latent:]) <= TOLERANCE[dtype]
    assert torch.equal(query[..., :nope], whole[..., :nope])
    assert torch.equal(query[..., nope:], found[..., latent:] if in_place else whole[..., nope:])
    # The wide queries are a copy of these, so that their twin has rotated it in the same places.
    assert torch.equal(
        wide.query[..., nope:], expected[..., latent:] if in_place else whole[..., nope:].double()
    )
    places = {int(slot): row for slot, row in zip(case.batch.slots, rows, strict=True) if slot >= 0}
    flat, old = case.pages.reshape(-1, latent + rope), before.reshape(-1, latent + rope)
    for slot in range(len(flat)):
        if slot in places:
            assert relative_error(flat[slot], places[slot]) <= TOLERANCE[dtype]
        else:
            torch.testing.assert_close(flat[slot], old[slot], rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ValueError, match="strides"):
        triton_fused.mla_rows(
            MlaStep(query.transpose(1, 2), kv, step.weight, 1e-6, cos, sin), case.pages, case.batch
        )


def dense(weights: torch.Tensor, experts: torch.Tensor, number: int) -> torch.Tensor:
    return torch.zeros(len(experts), number).scatter_(1, experts.long(), weights.float())


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("tokens", [1, 19, 700])
def test_routing_and_its_lists(tokens: int, normalize: bool) -> None:
    """With 700 tokens a program chooses for many, and not all programs are full."""
    spec = RouterSpec(3, 1, 1, normalize, 2.5)
    hidden, weight = torch.randn(tokens, 70).to(torch.bfloat16), torch.randn(10, 70)
    found = triton_moe.route(hidden, weight, None, spec)
    expected = torch_fused.route(hidden, weight, None, spec)
    torch.testing.assert_close(
        dense(found.weights, found.experts, 10),
        dense(expected.weights, expected.experts, 10),
        rtol=1e-5,
        atol=1e-6,
    )
    assert found.lists is not None
    other = triton_moe.lists_of(Routing(found.weights, found.experts), 10)
    for count, lists, counters in (found.lists, other):
        assert not counters.any()
        for expert in range(10):
            pairs = lists[expert * tokens :][: int(count[expert])].tolist()
            assert sorted(pairs) == (found.experts.reshape(-1) == expert).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("tokens", [1, 40])
def test_experts_match_float64(tokens: int, shared: int, dtype: torch.dtype) -> None:
    """With 40 tokens on 4 experts some lists are longer than a tile."""
    size, width, number = 36, 20, 4
    weights = [torch.randn(number, 2 * width, size) * 0.2, torch.randn(number, size, width) * 0.2]
    if shared:
        weights += [torch.randn(2 * shared * width, size) * 0.2, torch.randn(size, shared * width) * 0.2]
    narrow = [weight.to(dtype) for weight in weights]
    hidden = torch.randn(tokens, size).to(dtype)
    chosen = torch.stack([torch.randperm(number)[:2] for _ in range(tokens)]).to(torch.int32)
    chosen[:, 0] = torch.where(chosen[:, 1] == 1, 0, 1)
    share = torch.rand(tokens, 2)
    found = triton_moe.moe(hidden, Routing(share, chosen), ExpertWeights(*narrow))
    expected = torch_fused.moe(
        hidden.double(), Routing(share.double(), chosen.long()), ExpertWeights(*(w.double() for w in narrow))
    )
    assert found.shape == (tokens, 2 + shared, size)
    assert relative_error(found.double().sum(1), expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_a_model_of_fused_kernels_gives_the_same_logits(tmp_path: Path, family: Family) -> None:
    """Prefill, then decode steps: the sums in parts go through all layers."""
    path = write_tiny(tmp_path, family)
    found = []
    for registry in (REGISTRY, interpreted()):
        model = load_model(path, registry=registry)
        run = PagedRun(model)
        for sequence, prompt in enumerate(([5, 9, 11, 3], [7] * 18)):
            run.add(sequence, [*prompt, 4, 8])
        rows = [
            run.step([(0, 4)]),
            run.step([(0, 1), (1, 18)]),
            run.step([(0, 1), (1, 1)]),
            run.step([(1, 1)]),
        ]
        found.append((torch.cat(rows), run.written(1)))
    for one, other in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
