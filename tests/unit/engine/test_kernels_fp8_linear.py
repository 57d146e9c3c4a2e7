# SPDX-License-Identifier: Apache-2.0
"""Products with float8 weights in Triton's interpreter, on CPU tensors, against float64 over the weights as they are."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # Read when a kernel is defined, hence before the imports below.

import pytest
import torch
from torch import Tensor

from twinpool.engine.kernels import REGISTRY, Capability, Kernels, torch_fused, triton_fp8_linear
from twinpool.engine.kernels.triton_fp8_linear import PACK_ROWS

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def make_weight(outputs: int, size: int) -> tuple[Tensor, Tensor]:
    """Codes over their whole range, and scales that differ by orders of magnitude from block to block."""
    codes = (torch.randn(outputs, size) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = 10.0 ** torch.empty(-(-outputs // 128), -(-size // 128)).uniform_(-4, -1)
    return codes, scales


def error_of(found: Tensor, expected: Tensor) -> float:
    assert torch.isfinite(found).all()
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "size"), [(1, 40, 72), (17, 256, 300), (5, 130, 128)])
def test_few_rows_round_nothing_but_the_result(
    rows: int, outputs: int, size: int, bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows)
    codes, scales = make_weight(outputs, size)
    hidden = torch.randn(rows, size).to(dtype)
    added = torch.randn(outputs).to(dtype) if bias else None
    found = triton_fp8_linear.fp8_linear(hidden, codes, scales, added)
    weight = torch_fused.unpack_weight(codes, scales, torch.float64)
    expected = hidden.double() @ weight.T + (0.0 if added is None else added.double())
    assert found.dtype == dtype
    assert found.shape == (rows, outputs)
    assert error_of(found, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("rows", "outputs", "size"), [(PACK_ROWS, 130, 300), (PACK_ROWS + 13, 40, 72)])
def test_many_rows_are_packed_and_keep_their_scale(rows: int, outputs: int, size: int) -> None:
    """Rows of very different size: a scale of their own keeps the small ones."""
    torch.manual_seed(rows)
    codes, scales = make_weight(outputs, size)
    hidden = torch.randn(rows, size) * 10.0 ** torch.linspace(-3, 3, rows)[:, None]
    hidden[3] = 0.0
    found = triton_fp8_linear.fp8_linear(hidden, codes, scales)
    expected = hidden.double() @ torch_fused.unpack_weight(codes, scales, torch.float64).T
    assert found[3].eq(0).all()
    rest = [row for row in range(rows) if row != 3]
    errors = (found.double() - expected)[rest].norm(dim=1) / expected[rest].norm(dim=1)
    # The interpreter loses the carry of some roundings to float8, so the bound is wider than that of the format (4 %).
    assert float(errors.max()) <= 0.15
    assert float(errors.median()) <= 0.08


def test_packed_rows_come_back() -> None:
    torch.manual_seed(1)
    hidden = torch.randn(9, 300)
    hidden[2, 130], hidden[4] = float("nan"), 0.0
    codes, scales = triton_fp8_linear.pack_rows(hidden)
    wide = scales.repeat_interleave(128, 1)[:, :300]
    back = codes.float() * wide
    assert back[2, 128:256].isnan().any()
    assert back[2, :128].isfinite().all()
    assert back[4].eq(0).all()
    assert float(back[0].abs().max()) == pytest.approx(float(hidden[0].abs().max()), rel=1e-6)


def test_every_device_has_the_product() -> None:
    for capability in (Capability("cpu"), Capability("cuda", (9, 0)), Capability("cuda", (7, 5))):
        assert callable(Kernels.select(REGISTRY, capability, torch.bfloat16).fp8_linear)
    # Triton has no conversions of e4m3 for devices that have none.
    for operation in ("fp8_linear", "fp8_moe"):
        for compute, backend in (((8, 0), "torch"), ((8, 9), "triton")):
            found = REGISTRY.select(operation, capability=Capability("cuda", compute), dtype=torch.bfloat16)
            assert found.backend == backend
    codes, scales = make_weight(40, 72)
    hidden = torch.randn(3, 72)
    kernel = Kernels.select(REGISTRY, Capability("cpu"), torch.float32).fp8_linear
    expected = hidden.double() @ torch_fused.unpack_weight(codes, scales, torch.float64).T
    assert error_of(kernel(hidden, codes, scales), expected) <= 1e-5
