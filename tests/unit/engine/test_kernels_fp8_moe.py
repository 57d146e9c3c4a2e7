# SPDX-License-Identifier: Apache-2.0
"""Experts with float8 weights in Triton's interpreter, on CPU tensors, against float64 over the weights as they are."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # Read when a kernel is defined, hence before the imports below.

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton.language as tl
from attention_cases import relative_error
from engine_oracle import PagedRun
from torch import Tensor
from triton.runtime import interpreter

from tests.support.float8 import widen
from tests.unit.engine.interpreted import interpreted
from twinpool.engine.config import Family
from twinpool.engine.kernels import (
    REGISTRY,
    Capability,
    Kernels,
    torch_fp8_moe,
    triton_fp8_linear,
    triton_fp8_moe,
    triton_fp8_moe_large,
    triton_moe,
)
from twinpool.engine.kernels.operations import Fp8ExpertWeights, Fp8Weight, Routing
from twinpool.engine.kernels.triton_fp8_tiles import Tile
from twinpool.engine.loader import load_model
from twinpool.engine.tiny import write_tiny

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
PACKED = 0.04
"""Of values with three bits behind the point and a scale a run: at most 1/16 each, 0.026 in the mean square."""
EXPERTS, CHOSEN = 4, 2


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


def weight_of(*lead: int, parts: int, rows: int, columns: int) -> Fp8Weight:
    """Codes over their whole range; blocks, each part's own, whose scales differ by an order of magnitude."""
    codes = (torch.randn(*lead, parts * rows, columns) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    blocks = (*lead, parts * -(-rows // 128), -(-columns // 128))
    return Fp8Weight(codes, 10.0 ** torch.empty(blocks).uniform_(-4, -3))


def experts_of(size: int, width: int, shared: int) -> Fp8ExpertWeights:
    routed = (
        weight_of(EXPERTS, parts=2, rows=width, columns=size),
        weight_of(EXPERTS, parts=1, rows=size, columns=width),
    )
    if not shared:
        return Fp8ExpertWeights(*routed)
    return Fp8ExpertWeights(
        *routed,
        weight_of(parts=2, rows=shared * width, columns=size),
        weight_of(parts=1, rows=size, columns=shared * width),
    )


def halves(weight: Fp8Weight) -> tuple[Tensor, Tensor]:
    rows, blocks = len(weight.codes) // 2, len(weight.scales) // 2
    gate = widen(weight.codes[:rows], weight.scales[:blocks])
    return gate.double(), widen(weight.codes[rows:], weight.scales[blocks:]).double()


def activate(hidden: Tensor, weight: Fp8Weight) -> Tensor:
    gate, up = halves(weight)
    return F.silu(hidden @ gate.T) * (hidden @ up.T)


def of(weight: Fp8Weight, expert: int) -> Fp8Weight:
    return Fp8Weight(weight.codes[expert], weight.scales[expert])


def reference(hidden: Tensor, routing: Routing, experts: Fp8ExpertWeights) -> Tensor:
    """float64, a pair at a time."""
    hidden = hidden.double()
    total = torch.zeros_like(hidden)
    for token, (shares, chosen) in enumerate(zip(routing.weights, routing.experts, strict=True)):
        for share, expert in zip(shares.tolist(), chosen.tolist(), strict=True):
            active = activate(hidden[token], of(experts.gate_up, expert))
            total[token] += share * (active @ widen(*of(experts.down, expert)).double().T)
    if experts.shared_gate_up is not None and experts.shared_down is not None:
        total += activate(hidden, experts.shared_gate_up) @ widen(*experts.shared_down).double().T
    return total


def routing_of(tokens: int) -> Routing:
    """Expert 1 has every token, so that its list is longer than a tile; expert 3 has none."""
    chosen = torch.stack([torch.ones(tokens), torch.randint(0, 2, (tokens,)) * 2], dim=1)
    return Routing(torch.rand(tokens, CHOSEN), chosen.to(torch.int32))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize(
    ("size", "width", "shared"),
    [(160, 144, 0), (160, 144, 1), (144, 40, 2), (136, 128, 2)],
    ids=["routed alone", "shared, partial blocks", "shared apart", "shared as slices"],
)
def test_few_rows_round_nothing_but_the_results(
    size: int, width: int, shared: int, tokens: int, dtype: torch.dtype
) -> None:
    experts, routing = experts_of(size, width, shared), routing_of(tokens)
    hidden = torch.randn(tokens, size).to(dtype)
    found = triton_fp8_moe.fp8_moe(hidden, routing, experts)
    slices = shared if width % 128 == 0 else min(shared, 1)
    assert found.shape == (tokens, CHOSEN + slices, size)
    assert found.dtype == dtype
    assert relative_error(found.double().sum(1), reference(hidden, routing, experts)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("shared", [0, 1])
def test_the_torch_twin_multiplies_the_widened_weights(shared: int) -> None:
    experts, hidden, routing = experts_of(160, 144, shared), torch.randn(9, 160), routing_of(9)
    found = torch_fp8_moe.fp8_moe(hidden, Routing(routing.weights, routing.experts.long()), experts)
    assert relative_error(found, reference(hidden, routing, experts)) <= 1e-5


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter loses the carry of some roundings to float8; torch rounds as devices do."""
    original = interpreter._convert_float  # pyright: ignore[reportPrivateUsage]

    def convert(values: Any, found: tl.dtype, wanted: tl.dtype, mode: object) -> Any:
        if found == tl.float32 and wanted == tl.float8e4nv:
            return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return original(values, found, wanted, mode)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.mark.usefixtures("rounding")
def test_many_rows_multiply_codes_and_add_up_in_float32() -> None:
    """Each product by itself, against float64 over the codes that it is given: nothing else is rounded."""
    size, width, tokens = 160, 144, 45
    experts, hidden, routing = experts_of(size, width, 0), torch.randn(tokens, size), routing_of(tokens)
    packed = triton_fp8_linear.pack_rows(hidden * 10.0 ** torch.linspace(-2, 1, tokens)[:, None])
    lists = triton_moe.lists_of(routing, EXPERTS)[:2]
    tile = Tile(rows=16, columns=128, warps=4, stages=1)
    codes, scales = triton_fp8_moe_large.first(packed, experts.gate_up, lists, CHOSEN, tile)
    wide = codes.float() * scales.repeat_interleave(128, 1)[:, :width]
    inputs = torch.cat([widen(packed[0][t : t + 1], packed[1][t : t + 1]) for t in range(tokens)]).double()
    out = torch.full((tokens, CHOSEN + 1, size), float("nan"))
    triton_fp8_moe_large.second((codes, scales), experts.down, lists, routing.weights, out, tile)
    begin = 0
    for expert in range(EXPERTS):
        count = int(lists[0][expert])
        pairs = lists[1][expert * tokens :][:count].long()
        active = wide[begin : begin + count].double()
        expected = activate(inputs[pairs // CHOSEN], of(experts.gate_up, expert))
        if count:
            assert 1e-3 < relative_error(active, expected) <= PACKED
        shares = routing.weights.reshape(-1)[pairs].double()
        found = out.view(-1, size)[pairs // CHOSEN * (CHOSEN + 1) + pairs % CHOSEN]
        product = active @ widen(*of(experts.down, expert)).double().T * shares[:, None]
        if count:
            assert relative_error(found, product) <= 1e-5
        begin += -(-count // tile.rows) * tile.rows
    assert out[:, CHOSEN].isnan().all()


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("shared", [0, 2])
def test_from_many_rows_an_expert_up_activations_are_packed(
    shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, hidden, routing = experts_of(160, 144, shared), torch.randn(60, 160), routing_of(60)
    exact = triton_fp8_moe.fp8_moe(hidden, routing, experts).sum(1)
    monkeypatch.setattr(triton_fp8_moe, "PACK_PAIRS", 30)
    found = triton_fp8_moe.fp8_moe(hidden, routing, experts)
    assert found.shape == (60, CHOSEN + (shared > 0), 160)
    error = relative_error(found.double().sum(1), reference(hidden, routing, experts))
    assert 1e-3 < error <= 3 * PACKED  # of what gate and up are made of, and of their product
    assert relative_error(exact, reference(hidden, routing, experts)) <= 1e-5


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_a_model_of_triton_kernels_gives_the_same_logits(tmp_path: Path, family: Family) -> None:
    path = write_tiny(tmp_path, family, float8=True)
    found = []
    for registry in (REGISTRY, interpreted()):
        run = PagedRun(load_model(path, registry=registry))
        for sequence, prompt in enumerate(([5, 9, 11, 3], [7] * 18)):
            run.add(sequence, [*prompt, 4, 8])
        steps = ([(0, 4)], [(0, 1), (1, 18)], [(0, 1), (1, 1)], [(1, 1)])
        found.append(torch.cat([run.step(step) for step in steps]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_every_device_has_the_experts() -> None:
    for capability in (Capability("cpu"), Capability("cuda", (9, 0)), Capability("cuda", (8, 0))):
        assert callable(Kernels.select(REGISTRY, capability, torch.bfloat16).fp8_moe)
