# SPDX-License-Identifier: Apache-2.0
"""Launches the portable Triton attention: tile sizes from the device's limits, schedule and scratch memory per batch."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.kernels.operations import AttentionResult
from twinpool.engine.kernels.triton_merge import merge
from twinpool.engine.kernels.triton_mla_decode import mla_split
from twinpool.engine.kernels.triton_schedule import OVERHEAD, Schedule, make_schedule

LOG2_E = 1.4426950408889634
UNIT = 64
"""Tokens of one unit of the schedule."""
_RESERVED_SHARED = 10 << 10
"""Left to the compiler for reductions and layout changes."""


@dataclass(frozen=True, slots=True)
class Device:
    """What launches need to know about a device. The CPU stands for the interpreter."""

    processors: int
    shared: int
    compute: tuple[int, int]

    @property
    def overlaps_launches(self) -> bool:
        """Whether a launch may start while the one before it ends (programmatic dependent launch)."""
        return self.compute >= (9, 0)


@cache
def _cuda_device(index: int) -> Device:
    # torch's stub lacks the opt-in size.
    found: Any = torch.cuda.get_device_properties(index)
    return Device(
        found.multi_processor_count, found.shared_memory_per_block_optin, (found.major, found.minor)
    )


def device_of(tensor: Tensor) -> Device:
    """The device that holds ``tensor``."""
    if tensor.device.type == "cuda":
        return _cuda_device(tensor.device.index or 0)
    return Device(processors=3, shared=227 << 10, compute=(0, 0))


def overlap(tensor: Tensor) -> dict[str, bool]:
    """Options of a launch that may begin while the one before it ends, where the device can: the kernel waits itself."""
    return {"PDL": True, "launch_pdl": True} if device_of(tensor).overlaps_launches else {"PDL": False}


@dataclass(frozen=True, slots=True)
class Tiles:
    """Query rows and tokens of one step of the inner loop, its pipeline depth and the warps of a program."""

    rows: int
    tokens: int
    stages: int
    warps: int


@cache
def choose_tiles(rows: int, row_bytes: int, shared: int) -> Tiles:
    """The largest tiles whose operands fit: ``rows`` wanted query rows, ``row_bytes`` of one padded cache row.

    Raises ValueError if nothing fits.
    """
    wanted = min(64, max(16, triton.next_power_of_2(rows)))
    for size in (wanted, 32, 16):
        for tokens, stages in ((64, 2), (32, 2), (32, 1), (16, 2), (16, 1)):
            if size <= wanted and (size + tokens * stages) * row_bytes <= shared - _RESERVED_SHARED:
                return Tiles(size, tokens, stages, 8 if size > 32 else 4)
    raise ValueError(f"cache rows of {row_bytes} bytes do not fit {shared} bytes of shared memory")


def schedule_of(
    batch: AttentionBatch, blocks: int, overhead: int = OVERHEAD, even: int | None = None
) -> Schedule:
    """The batch's schedule over ``blocks`` thread blocks, made once per batch."""

    def make() -> Schedule:
        return make_schedule(batch.context, batch.block_table, blocks, UNIT, overhead, even)

    return batch.derived(f"triton_schedule:{blocks}:{overhead}", make)


def parts_of(batch: AttentionBatch, blocks: int, rows: int, dim: int) -> tuple[Tensor, Tensor]:
    """Scratch memory for partial results, ``[2 blocks, rows, dim]`` and ``[2 blocks, rows]``; one per batch, since its
    layers run one after the other."""

    def make() -> tuple[Tensor, Tensor]:
        device = batch.context.device
        part = torch.empty(2 * blocks, rows, dim, dtype=torch.float32, device=device)
        return part, torch.empty(2 * blocks, rows, dtype=torch.float32, device=device)

    return batch.derived(f"triton_parts:{blocks}:{rows}:{dim}", make)


def most_rows(batch: AttentionBatch, heads: int) -> int:
    """Query rows (tokens x heads) of the batch's largest sequence."""
    host = batch.host_q_start
    return int((host[1:] - host[:-1]).max()) * heads


def check(query: Tensor, pages: Tensor, scale: float) -> Tensor:
    """The query, contiguous. Raises ValueError if the kernels can't address the operands."""
    if pages.stride(2) != 1 or pages.stride(1) != pages.shape[2]:
        raise ValueError(f"a page must be contiguous, not of strides {pages.stride()}")
    if query.shape[-1] != pages.shape[-1] or query.dtype != pages.dtype:
        raise ValueError(f"query {list(query.shape)} {query.dtype}, pages {list(pages.shape)} {pages.dtype}")
    if not scale > 0:
        raise ValueError(f"scale must be positive, not {scale}")
    return query.contiguous()


def attend(
    query: Tensor,
    pages: Tensor,
    batch: AttentionBatch,
    output: Tensor,
    lse: Tensor | None,
    *,
    scale: float,
) -> None:
    """Fills ``output [T, heads, latent]`` and ``lse [T, heads]`` of all sequences of ``batch`` in one launch and a merge."""
    heads, width = query.shape[1:]
    latent = output.shape[-1]
    device = device_of(query)
    latent_pad = max(triton.next_power_of_2(latent), 16)
    rope_pad = max(triton.next_power_of_2(max(width - latent, 1)), 16)
    largest = most_rows(batch, heads)
    tiles = choose_tiles(largest, (latent_pad + rope_pad) * query.itemsize, device.shared)
    groups = triton.cdiv(largest, tiles.rows)
    blocks = max(device.processors * (2 if tiles.rows <= 16 else 1) // groups, 1)
    schedule = schedule_of(batch, blocks)
    part, part_lse = parts_of(batch, blocks, largest if blocks > 1 else 1, latent)
    interpreted = query.device.type == "cpu"
    mla_split[(blocks, groups)](
        query, pages, batch.block_table, batch.context, batch.q_start, schedule.plan, output,
        part_lse if lse is None else lse, part, part_lse, scale * LOG2_E, batch.block_table.stride(0), pages.stride(0),
        part.shape[1], HEADS=heads, LATENT=latent, WIDTH=width, LATENT_PAD=latent_pad, ROPE_PAD=rope_pad,
        PAGE=batch.block_tokens, TILE=schedule.tile, ROWS=tiles.rows, TOKENS=tiles.tokens, STAGES=tiles.stages,
        WITH_LSE=lse is not None, CAST=interpreted, PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps,
    )  # fmt: skip
    if blocks > 1:
        merge(part, part_lse, schedule, batch.q_start, output, lse, heads=heads, rows=largest, pdl=False)


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
    """See ``operations.MlaPagedAttention``. Columns before ``score_from`` are multiplied by their zeros."""
    query = check(query, pages, scale)
    total, heads, _ = query.shape
    output = query.new_empty(total, heads, latent_dim)
    lse = torch.empty(total, heads, dtype=torch.float32, device=query.device) if with_lse else None
    for first, last in ((0, batch.num_decodes), (batch.num_decodes, batch.num_sequences)):
        if first < last:
            rows = slice(int(batch.host_q_start[first]), int(batch.host_q_start[last]))
            some = batch.select(first, last)
            if some.num_tokens:
                attend(
                    query[rows], pages, some, output[rows], None if lse is None else lse[rows], scale=scale
                )
    return AttentionResult(output, lse)
