# SPDX-License-Identifier: Apache-2.0
"""The torch reference over packed rows (layout ``fp8_latent``): unpacks what it gathers, then computes as ever.

Prefill reads back what it has written, so both roles attend to the same rounded rows.
"""

from torch import Tensor

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.kernels import torch_backend, torch_fused
from twinpool.engine.kernels.operations import AttentionResult, MlaStep
from twinpool.engine.kernels.registry import FP8_LATENT, REGISTRY
from twinpool.engine.kernels.torch_backend import DTYPES
from twinpool.engine.kv.formats import Fp8LatentRows

_BACKEND = "torch_fp8"
_LAYOUTS = (FP8_LATENT,)


@REGISTRY.register("write_kv", backend=_BACKEND, dtypes=DTYPES, layouts=_LAYOUTS, note="packs, indexed store")
def write_kv(pages: Tensor, rows: Tensor, batch: AttentionBatch, *, latent_dim: int) -> None:
    """See ``operations.WriteKV``."""
    form = Fp8LatentRows(latent_dim, rows.shape[-1] - latent_dim)
    torch_backend.write_kv(pages, form.pack(rows), batch)


@REGISTRY.register(
    "mla_rows", backend=_BACKEND, dtypes=DTYPES, layouts=_LAYOUTS, note="norm, rotation, packs"
)
def mla_rows(step: MlaStep, pages: Tensor, batch: AttentionBatch) -> Tensor:
    """See ``operations.MlaRows``."""
    queries, rows = torch_fused.mla_queries(step)
    write_kv(pages, rows, batch, latent_dim=step.weight.shape[0])
    return queries


@REGISTRY.register("mla_paged_attention", backend=_BACKEND, dtypes=DTYPES, layouts=_LAYOUTS, note="unpacks")
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
    form = Fp8LatentRows.of_bytes(pages.shape[-1], latent_dim)
    keys, values = slice(score_from, query.shape[-1]), slice(0, latent_dim)
    return torch_backend.attend(
        query[..., score_from:], pages, batch, keys, values, 1, scale, with_lse, packed=form
    )


@REGISTRY.register("gqa_paged_attention", backend=_BACKEND, dtypes=DTYPES, layouts=_LAYOUTS, note="unpacks")
def gqa_paged_attention(
    query: Tensor,
    pages: Tensor,
    batch: AttentionBatch,
    *,
    kv_heads: int,
    scale: float,
    with_lse: bool = False,
) -> AttentionResult:
    """See ``operations.GqaPagedAttention``."""
    latent = kv_heads * query.shape[-1]
    form = Fp8LatentRows.of_bytes(pages.shape[-1], latent)
    keys, values = slice(latent, 2 * latent), slice(0, latent)
    return torch_backend.attend(query, pages, batch, keys, values, kv_heads, scale, with_lse, packed=form)


@REGISTRY.register(
    "mla_expanded_attention", backend=_BACKEND, dtypes=DTYPES, layouts=_LAYOUTS, note="unpacks"
)
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
    return torch_backend.mla_expanded_attention(
        query,
        pages,
        batch,
        expand_keys=expand_keys,
        expand_values=expand_values,
        scale=scale,
        with_lse=with_lse,
        packed=Fp8LatentRows.of_bytes(pages.shape[-1], expand_keys.shape[2]),
    )


@REGISTRY.register("merge_attention", backend=_BACKEND, dtypes=DTYPES, layouts=_LAYOUTS, note="has no pages")
def merge_attention(outputs: Tensor, lse: Tensor) -> AttentionResult:
    """See ``operations.MergeAttention``."""
    return torch_backend.merge_attention(outputs, lse)
