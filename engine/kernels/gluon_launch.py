# SPDX-License-Identifier: Apache-2.0
"""Launches the Hopper MLA decode kernel; what it is not made for goes to the portable kernel."""

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

    ``soon`` lets the products of a page begin after the left half of the next page's scores, not after all of them.
    ``fuse`` joins divided sequences in the same launch. ``pdl`` lets the launch begin while the one before it ends.
    """

    soon: bool = False
    fuse: bool = True
    pdl: bool = True


MANY_ROWS = Variant()
FEW_ROWS = Variant()


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


def blocks_of(batch: AttentionBatch, processors: int, groups: int) -> int:
    """Blocks of the schedule: one for each processor and run of rows, but no more than there are units of work."""
    pages = -(-batch.host_context.astype(np.int64) // PAGE)
    return max(min(processors // groups, int(pages.sum()) + OVERHEAD * len(pages)), 1)


def counts_of(batch: AttentionBatch, groups: int) -> Tensor:
    """Counters by which blocks wait for each other, ``int32[sequences x groups]``. Every launch leaves them at 0."""

    def make() -> Tensor:
        return torch.zeros(batch.num_sequences * groups, dtype=torch.int32, device=batch.context.device)

    return batch.derived(f"gluon_counts:{groups}", make)


def join_tile(blocks: int, sequences: int) -> tuple[int, int, int]:
    """(parts, runs, columns) that a block joins at a time, 8,192 values: many parts when many blocks share a sequence.

    Only two forms, since each is a kernel to build.
    """
    return (64, 1, 128) if blocks // sequences > 5 else (4, 4, LATENT)


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
    largest = triton_launch.most_rows(batch, heads)
    groups = triton.cdiv(largest, ROWS)
    built = variant or (MANY_ROWS if largest > ROWS else FEW_ROWS)
    blocks = blocks_of(batch, triton_launch.device_of(query).processors, groups)
    schedule = triton_launch.schedule_of(batch, blocks)
    part, part_lse = triton_launch.parts_of(batch, blocks, largest, LATENT)
    kv_desc, rope_desc = descriptors(pages)
    parts, runs, columns = join_tile(blocks, batch.num_sequences)
    options = {"launch_pdl": True} if built.pdl else {}
    mla_decode[(blocks * groups,)](
        kv_desc, rope_desc, query, batch.block_table, batch.context, batch.q_start, schedule.plan,
        counts_of(batch, groups), output, part_lse if lse is None else lse, part, part_lse,
        scale * triton_launch.LOG2_E, batch.block_table.stride(0), pages.stride(0) // WIDTH, part.shape[1],
        HEADS=heads, GROUPS=groups, MULTI=batch.num_tokens > batch.num_sequences, WITH_LSE=lse is not None,
        FUSE=built.fuse and blocks > 1, PARTS=parts, RUNS=runs, COLUMNS=columns, SOON=built.soon, PDL=built.pdl,
        num_warps=4, **options,
    )  # fmt: skip
    if blocks > 1 and not built.fuse:
        merge(part, part_lse, schedule, batch.q_start, output, lse, heads=heads, rows=largest, pdl=built.pdl)


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
