# SPDX-License-Identifier: Apache-2.0
"""Launches the Hopper MLA decode kernel; what it is not made for goes to the portable kernel."""

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.kernels import triton_launch
from twinpool.engine.kernels.gluon_mla_decode import mla_decode
from twinpool.engine.kernels.operations import AttentionResult
from twinpool.engine.kernels.triton_merge import merge
from twinpool.engine.kernels.triton_schedule import OVERHEAD

LATENT, WIDTH, PAGE, ROWS = 512, 576, 64, 64
MAX_GROUPS = 8
"""Runs of 64 query rows of a sequence that are worth their own blocks; longer queries are prefill."""


@dataclass(frozen=True, slots=True)
class Variant:
    """How the kernel is built. See docs/kernels.md for what each got.

    ``soon`` lets the products of a page begin when so many pieces of the next page's scores (of 11) are still on their
    way, not after all of them.
    ``gentle`` orders the second and third page of a block when the first one has come.
    ``early``: so many pages of a block, at most three, are ordered before the launch before this one has ended, if that one
    cannot write to them.
    ``pdl`` lets the launch begin while the one before it ends.
    """

    soon: int = 1
    gentle: bool = True
    early: int = 2
    pdl: bool = True


IDLE = 0.04
"""Share of processors that may idle for the sake of even cuts."""
RAGGED = {False: 12, True: 4}
"""Pages' worth of time that another sequence costs a block, unless cuts are even; with more than 64 query rows, when a
page takes longer, fewer."""


def supports(query: Tensor, pages: Tensor, batch: AttentionBatch, latent_dim: int) -> bool:
    """Whether the kernel is made for these operands."""
    return (
        query.dtype == pages.dtype == torch.bfloat16
        and latent_dim == LATENT
        and query.shape[-1] == WIDTH
        and batch.block_tokens == PAGE
        and pages.stride(0) % WIDTH == 0
        and pages.data_ptr() % 16 == 0
        and triton_launch.most_rows(batch, query.shape[1]) <= MAX_GROUPS * ROWS
    )


def descriptors(pages: Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """``pages [blocks, 64, 576]`` of any block stride as rows of one matrix, for half pages and for rotary columns."""
    rows = (pages.shape[0] - 1) * (pages.stride(0) // WIDTH) + PAGE

    def describe(columns: int) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for([PAGE, columns], gl.bfloat16)
        return TensorDescriptor(pages, [rows, WIDTH], [WIDTH, 1], [PAGE, columns], layout)

    return describe(256), describe(64)


def blocks_of(batch: AttentionBatch, processors: int, rows: int) -> tuple[int, int]:
    """Blocks of the schedule for ``rows`` query rows a sequence, and how many of them sequences of equal length use.

    At most one block for each processor and run of 64 rows. A sequence is not divided so finely that joining its parts
    costs more than the division gains. Where it costs few processors, cuts between equal sequences are even.
    """
    count = batch.num_sequences
    total = int((-(-batch.host_context.astype(np.int64) // PAGE)).sum())
    # Fitted to measured times: a part costs as much as its rows and 70 more.
    worth = math.ceil(math.sqrt(total / count * 3000 / (rows + 70)) * count)
    most = max(min(processors // -(-rows // ROWS), total + OVERHEAD * count, worth), 1)
    even = most - most % count if count <= most else count // -(-count // most)
    return most, even if even > (1 - IDLE) * most else most


def attend(
    query: Tensor,
    pages: Tensor,
    batch: AttentionBatch,
    output: Tensor,
    lse: Tensor | None,
    *,
    scale: float,
    variant: Variant | None = None,
) -> None:
    """Fills ``output [T, heads, 512]`` and ``lse [T, heads]`` for operands that ``supports`` accepts."""
    heads = query.shape[1]
    built = variant or Variant()
    largest = triton_launch.most_rows(batch, heads)
    groups = triton.cdiv(largest, ROWS)
    blocks, even = blocks_of(batch, triton_launch.device_of(query).processors, largest)
    multi = batch.num_tokens > batch.num_sequences
    schedule = triton_launch.schedule_of(batch, blocks, RAGGED[largest > ROWS], even)
    part, part_lse = triton_launch.parts_of(batch, blocks, largest, LATENT)
    kv_desc, rope_desc = descriptors(pages)
    options = {"launch_pdl": True} if built.pdl else {}
    mla_decode[(blocks * groups,)](
        kv_desc, rope_desc, query, batch.block_table, batch.context, batch.q_start, schedule.plan,
        output, part_lse if lse is None else lse, part, part_lse,
        scale * triton_launch.LOG2_E, batch.block_table.stride(0), pages.stride(0) // WIDTH, part.shape[1],
        HEADS=heads, GROUPS=groups, MULTI=multi, WITH_LSE=lse is not None,
        SOON=built.soon, GENTLE=built.gentle, EARLY=0 if multi or not built.pdl else built.early, PDL=built.pdl, num_warps=4, **options,
    )  # fmt: skip
    if blocks > 1:
        merge(
            part, part_lse, schedule, batch.q_start, output, lse, heads=heads, rows=largest, pdl=built.pdl
        )


def mla_paged_attention(
    query: Tensor,
    pages: Tensor,
    batch: AttentionBatch,
    *,
    latent_dim: int,
    scale: float,
    score_from: int = 0,
    with_lse: bool = False,
) -> AttentionResult:
    """See ``operations.MlaPagedAttention``."""
    query = triton_launch.check(query, pages, scale)
    total, heads, _ = query.shape
    output = query.new_empty(total, heads, latent_dim)
    lse = torch.empty(total, heads, dtype=torch.float32, device=query.device) if with_lse else None
    for first, last in ((0, batch.num_decodes), (batch.num_decodes, batch.num_sequences)):
        if first < last:
            rows = slice(int(batch.host_q_start[first]), int(batch.host_q_start[last]))
            some = batch.select(first, last)
            if some.num_tokens:
                launch = attend if supports(query, pages, some, latent_dim) else triton_launch.attend
                launch(
                    query[rows], pages, some, output[rows], None if lse is None else lse[rows], scale=scale
                )
    return AttentionResult(output, lse)
