# SPDX-License-Identifier: Apache-2.0
"""Launches the Hopper prefill kernel of latent attention; what it is not made for goes to the portable kernel."""

from dataclasses import dataclass

import triton
import triton.experimental.gluon.language as gl
from torch import Tensor, bfloat16
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.kernels import triton_prefill
from twinpool.engine.kernels.gluon_mla_prefill import mla_prefill
from twinpool.engine.kernels.operations import AttentionResult
from twinpool.engine.kernels.triton_launch import LOG2_E

NOPE, ROPE, DIM, ROWS = 128, 64, 128, 64


@dataclass(frozen=True, slots=True)
class Variant:
    """Keys of a tile, tiles on chip, and whether the consumers order their products by turns."""

    tokens: int = 128
    stages: int = 2
    turns: bool = True


def supports(query: Tensor, keys: Tensor, rows: Tensor, values: Tensor) -> bool:
    """Whether the kernel is made for these operands."""
    shapes = query.shape[2] == NOPE + ROPE and keys.shape[2] == NOPE and values.shape[2] == DIM
    operands = (query, keys, rows, values)
    aligned = all(
        operand.dtype == bfloat16
        and operand.stride(-1) == 1
        and operand.stride(0) * 2 % 16 == 0
        and operand.data_ptr() % 16 == 0
        for operand in operands
    )
    whole = query.stride(1) == NOPE + ROPE and keys.stride(1) == NOPE and values.stride(1) == DIM
    return shapes and aligned and whole


def _describe(operand: Tensor, columns: int, block: list[int]) -> TensorDescriptor:
    """``operand`` as rows of ``columns`` values, read in pieces of ``block``."""
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor(operand, [len(operand), columns], [operand.stride(0), 1], block, layout)


def attend(
    query: Tensor,
    keys: Tensor,
    rows: Tensor,
    values: Tensor,
    output: Tensor,
    lse: Tensor | None,
    *,
    scale: float,
    variant: Variant | None = None,
) -> None:
    """See ``triton_prefill.Attend``."""
    if not supports(query, keys, rows, values):
        triton_prefill.attend(query, keys, rows, values, output, lse, scale=scale)
        return
    built = variant or Variant()
    count, heads, _ = query.shape
    wide = heads * (NOPE + ROPE)
    mla_prefill[(triton.cdiv(count, 2 * ROWS), heads)](
        _describe(query, wide, [ROWS, NOPE]), _describe(query, wide, [ROWS, ROPE]),
        _describe(keys, heads * NOPE, [built.tokens, NOPE]), _describe(rows, rows.shape[1], [built.tokens, ROPE]),
        _describe(values, heads * DIM, [built.tokens, DIM]), output, output if lse is None else lse,
        count, len(keys), scale * LOG2_E, output.stride(0), output.stride(1), 0 if lse is None else lse.stride(0),
        LATENT=rows.shape[1] - ROPE, TOKENS=built.tokens, STAGES=built.stages, WITH_LSE=lse is not None,
        TURNS=built.turns, num_warps=4,
    )  # fmt: skip


def mla_expanded_attention(
    query: Tensor,
    pages: Tensor,
    batch: AttentionBatch,
    *,
    expand_keys: Tensor,
    expand_values: Tensor,
    scale: float,
    with_lse: bool = False,
) -> AttentionResult:
    """See ``operations.MlaExpandedAttention``."""
    return triton_prefill.expand(
        query, pages, batch, attend,
        expand_keys=expand_keys, expand_values=expand_values, scale=scale, with_lse=with_lse,
    )  # fmt: skip
