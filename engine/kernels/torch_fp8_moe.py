# SPDX-License-Identifier: Apache-2.0
"""Torch twin of the experts with float8 weights: what they compute, and what serves on a CPU.

Nothing but the weights is rounded to float8: a weight is the float32 product of its code and its scale, rounded to the
activations' dtype, and the products are those of the experts with such weights.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from twinpool.engine.kernels.operations import Fp8ExpertWeights, Fp8Weight, Routing
from twinpool.engine.kernels.registry import REGISTRY
from twinpool.engine.kernels.torch_backend import DTYPES
from twinpool.engine.kernels.torch_fused import FP8_BLOCK, LAYOUTS, grouped, silu_mul, unpack_weight

_TOP = torch.finfo(torch.float8_e4m3fn).max


def unpack_gate_up(weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """``dtype[2 n, hidden]`` of rows ``[gate | up]``, whose halves have blocks of their own."""
    rows, blocks = len(weight.codes) // 2, len(weight.scales) // 2
    gate = unpack_weight(weight.codes[:rows], weight.scales[:blocks], dtype)
    return torch.cat((gate, unpack_weight(weight.codes[rows:], weight.scales[blocks:], dtype)))


@REGISTRY.register(
    "fp8_moe", backend="torch", dtypes=DTYPES, layouts=LAYOUTS, note="unpacks the experts that are hit"
)
def fp8_moe(hidden: Tensor, routing: Routing, experts: Fp8ExpertWeights) -> Tensor:
    """See ``operations.Fp8Moe``."""
    gate_up, down, dtype = experts.gate_up, experts.down, hidden.dtype

    def weights_of(expert: int) -> tuple[Tensor, Tensor]:
        first = Fp8Weight(gate_up.codes[expert], gate_up.scales[expert])
        return unpack_gate_up(first, dtype), unpack_weight(down.codes[expert], down.scales[expert], dtype)

    total = grouped(hidden, routing, len(down.codes), weights_of)
    if experts.shared_gate_up is not None and experts.shared_down is not None:
        active = silu_mul(F.linear(hidden, unpack_gate_up(experts.shared_gate_up, dtype)))
        total = total + F.linear(active, unpack_weight(*experts.shared_down, dtype))
    return total


def pack_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight [outputs, n]`` -> codes of that shape and scales; what is largest in a block gets the largest code."""
    rows, columns = weight.shape
    tall, wide = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
    whole = F.pad(weight.float(), (0, wide * FP8_BLOCK - columns, 0, tall * FP8_BLOCK - rows))
    blocks = whole.view(tall, FP8_BLOCK, wide, FP8_BLOCK)
    scales = (blocks.abs().amax(dim=(1, 3)) / _TOP).clamp_min(torch.finfo(torch.float32).tiny)
    # The largest value may come out a last bit above the largest code, beyond which there are no numbers.
    codes = (blocks / scales[:, None, :, None]).clamp(-_TOP, _TOP).view_as(whole)
    return codes[:rows, :columns].to(torch.float8_e4m3fn).contiguous(), scales
