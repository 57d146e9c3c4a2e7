# SPDX-License-Identifier: Apache-2.0
"""Launches the grouped products of many tokens on Hopper."""

import triton.experimental.gluon.language as gl
from torch import Tensor, bfloat16
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from twinpool.engine.kernels import triton_moe
from twinpool.engine.kernels.gluon_moe import grouped_product
from twinpool.engine.kernels.operations import ExpertWeights, Routing
from twinpool.engine.kernels.triton_launch import device_of
from twinpool.engine.kernels.triton_moe_tiles import gather, make_tiles

ROWS, HALF, STEP, STAGES = 128, 128, 64, 4


def supports(hidden: Tensor, down: Tensor) -> bool:
    """Whether the kernel is made for these sizes: ``hidden [T, size]``, ``down [experts, size, n]``."""
    size, width = down.shape[1:]
    return hidden.dtype == down.dtype == bfloat16 and size % (2 * HALF) == 0 and width % HALF == 0


def _describe(matrix: Tensor, rows: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for([rows, STEP], gl.bfloat16)
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, STEP], layout)


def routed(
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    lists: tuple[Tensor, Tensor],
    out: Tensor,
    *,
    stages: int = STAGES,
) -> None:
    """Fills the first parts of ``out [T, parts, size]``, one for each of ``weights [T, k]``; see
    ``triton_moe_large.routed``. Operands that ``supports`` accepts."""
    tokens, size = hidden.shape
    chosen, width = weights.shape[1], down.shape[2]
    tiles = make_tiles(lists[0], tokens * chosen, ROWS)
    gathered = gather(hidden, lists, tiles, chosen)
    active = hidden.new_empty(len(gathered), width)
    blocks = device_of(hidden).processors
    common = (tiles.expert, tiles.begin, tiles.count, lists[0], lists[1], weights)
    grouped_product[(blocks,)](
        _describe(gathered, ROWS // 2), _describe(gate_up.flatten(0, 1), HALF), *common, active, size // STEP, tokens,
        OUTPUTS=2 * width, RUNS=width // HALF, NEXT=HALF, SECOND=width, CHOSEN=chosen, PARTS=out.shape[1], SIZE=width,
        ACTIVATE=True, STAGES=stages, num_warps=4,
    )  # fmt: skip
    grouped_product[(blocks,)](
        _describe(active, ROWS // 2), _describe(down.flatten(0, 1), HALF), *common, out, width // STEP, tokens,
        OUTPUTS=size, RUNS=size // (2 * HALF), NEXT=2 * HALF, SECOND=HALF, CHOSEN=chosen, PARTS=out.shape[1], SIZE=size,
        ACTIVATE=False, STAGES=stages, num_warps=4,
    )  # fmt: skip


def moe(hidden: Tensor, routing: Routing, experts: ExpertWeights) -> Tensor:
    """See ``operations.Moe``. Few tokens are left to ``triton_moe``."""
    hidden = hidden.contiguous()
    pairs = routing.experts.numel()
    if supports(hidden, experts.down) and triton_moe.is_for_many(hidden, pairs, experts.down):
        return triton_moe.moe_of_many(hidden, routing, experts, routed)
    return triton_moe.moe(hidden, routing, experts)
