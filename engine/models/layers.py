# SPDX-License-Identifier: Apache-2.0
"""Building blocks that all families share: norms, fused linear layers, the gated MLP."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinpool.engine.kernels import Kernels
from twinpool.engine.kernels.operations import Fp8Linear
from twinpool.engine.models.packed import PackedLinear
from twinpool.engine.models.weights import WeightSlot, parameter


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension."""

    def __init__(self, dim: int, eps: float, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = parameter(dim, dtype=dtype, device=device)
        self.eps = eps
        self.shape = (dim,)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.shape, self.weight, self.eps)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}weight", self.weight)


class FusedLinear(nn.Module):
    """Several linear layers over one input as one product: outputs lie side by side, in the order of ``parts``.

    ``parts`` are (checkpoint name, output size, has a bias); a part without one in a layer with biases has zeros.
    ``rows`` reorders the output rows of the parts it names.
    """

    def __init__(
        self,
        inputs: int,
        parts: Sequence[tuple[str, int, bool]],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        rows: dict[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.rows = rows or {}
        outputs = sum(size for _, size, _ in parts)
        self.weight = parameter(outputs, inputs, dtype=dtype, device=device)
        has_bias = any(bias for _, _, bias in parts)
        self.bias = parameter(outputs, dtype=dtype, device=device, fill=0.0) if has_bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        start = 0
        for name, size, bias in self.parts:
            rows = self.rows.get(name)
            yield WeightSlot(f"{prefix}{name}.weight", self.weight[start : start + size], rows)
            if bias and self.bias is not None:
                yield WeightSlot(f"{prefix}{name}.bias", self.bias[start : start + size], rows)
            start += size


def fused_linear(
    inputs: int,
    parts: Sequence[tuple[str, int, bool]],
    packed: Fp8Linear | None,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    rows: dict[str, Tensor] | None = None,
) -> FusedLinear | PackedLinear:
    """The layer with weights of ``dtype``, or in float8 for the kernel ``packed``."""
    if packed is None:
        return FusedLinear(inputs, parts, dtype=dtype, device=device, rows=rows)
    return PackedLinear(inputs, parts, packed, dtype=dtype, device=device, rows=rows)


class GatedMlp(nn.Module):
    """``down(silu(gate(x)) * up(x))`` with gate and up as one product."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        kernels: Kernels,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        float8: bool = False,
    ) -> None:
        super().__init__()
        self.kernels, self.biased = kernels, bias
        packed = kernels.fp8_linear if float8 else None
        gate_up = [("gate_proj", intermediate, bias), ("up_proj", intermediate, bias)]
        down = [("down_proj", hidden, bias)]
        self.gate_up = fused_linear(hidden, gate_up, packed, dtype=dtype, device=device)
        self.down = fused_linear(intermediate, down, packed, dtype=dtype, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.down(self.kernels.silu_mul(self.gate_up(hidden)))
        return result

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.gate_up.slots(prefix)
        yield from self.down.slots(prefix)
