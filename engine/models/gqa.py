# SPDX-License-Identifier: Apache-2.0
"""Attention of the Llama and Qwen families, as itself or through the latent path."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.config import ModelConfig
from twinpool.engine.kernels import Kernels
from twinpool.engine.models.base import AttentionPath
from twinpool.engine.models.layers import fused_linear
from twinpool.engine.models.paths import PrefillPath
from twinpool.engine.models.rotary import RotaryTables
from twinpool.engine.models.weights import WeightSlot, parameter


class GqaAttention(nn.Module):
    """Grouped-query attention; a cache row is ``[V of all KV heads | rotated K of all KV heads]``.

    Through the latent path a decode runs the absorbed MLA kernel: the latent is V, the shared rotary part is K, a
    head's query is zero outside the columns of its KV head, and the value projection selects its KV head's columns.
    That is exact and needs no training. A prefill takes the expanded form, which for these projections is plain GQA.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        attention: AttentionPath,
        prefill: PrefillPath,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.kernels, self.attention, self.prefill = kernels, attention, prefill
        self.scale = self.head_dim**-0.5
        self.eps = config.rms_norm_eps
        values = self.kv_heads * self.head_dim
        parts = [
            ("q_proj", self.heads * self.head_dim, config.qkv_bias),
            ("k_proj", values, config.qkv_bias),
            ("v_proj", values, config.qkv_bias),
        ]
        packed = kernels.fp8_linear if config.float8_weights else None
        self.qkv = fused_linear(config.hidden_size, parts, packed, dtype=dtype, device=device)
        output = [("o_proj", config.hidden_size, config.output_bias)]
        self.output = fused_linear(self.heads * self.head_dim, output, packed, dtype=dtype, device=device)
        # One weight per head, so that queries and keys are normed in one call.
        self.qk_norm = (
            parameter(self.heads + self.kv_heads, self.head_dim, dtype=dtype, device=device)
            if config.qk_norm
            else None
        )
        own_group = torch.eye(self.kv_heads, dtype=dtype, device=device).view(
            self.kv_heads, 1, self.kv_heads, 1
        )
        self.register_buffer("own_group", own_group, persistent=False)
        self.own_group: Tensor

    def forward(self, hidden: Tensor, rotary: RotaryTables, pages: Tensor, batch: AttentionBatch) -> Tensor:
        """``hidden [T, hidden]`` -> ``[T, hidden]``; writes the step's KV into ``pages`` first."""
        total, queries = len(hidden), self.heads
        qkv = self.qkv(hidden)
        rotated_columns = (queries + self.kv_heads) * self.head_dim
        heads = qkv[:, :rotated_columns].view(total, queries + self.kv_heads, self.head_dim)
        if self.qk_norm is not None:
            heads = F.rms_norm(heads, (self.head_dim,), None, self.eps) * self.qk_norm
        heads = rotary.rotate(heads)
        rows = torch.cat((qkv[:, rotated_columns:], heads[:, queries:].reshape(total, -1)), dim=-1)
        self.kernels.write_kv(pages, rows, batch, latent_dim=self.kv_heads * self.head_dim)
        result: Tensor = self.output(self._attend(heads[:, :queries], pages, batch))
        return result

    def _attend(self, query: Tensor, pages: Tensor, batch: AttentionBatch) -> Tensor:
        """``query [T, heads, head_dim]`` -> ``[T, heads * head_dim]``."""
        decodes, sequences = batch.num_decodes, batch.num_sequences
        if self.attention == "gqa" or (decodes == 0 and self.prefill != "absorbed"):
            return self._plain(query, pages, batch)
        if decodes == sequences or self.prefill == "absorbed":
            return self._absorbed(query, pages, batch)
        return torch.cat(
            (
                self._absorbed(query[:decodes], pages, batch.select(0, decodes)),
                self._plain(query[decodes:], pages, batch.select(decodes, sequences)),
            )
        )

    def _plain(self, query: Tensor, pages: Tensor, batch: AttentionBatch) -> Tensor:
        found = self.kernels.gqa_paged_attention(
            query, pages, batch, kv_heads=self.kv_heads, scale=self.scale
        )
        return found.output.reshape(len(query), -1)

    def _absorbed(self, query: Tensor, pages: Tensor, batch: AttentionBatch) -> Tensor:
        total, groups, latent = len(query), self.kv_heads, self.kv_heads * self.head_dim
        sparse = query.view(total, groups, -1, 1, self.head_dim) * self.own_group
        wide = F.pad(sparse.view(total, self.heads, latent), (latent, 0))
        found = self.kernels.mla_paged_attention(
            wide, pages, batch, latent_dim=latent, scale=self.scale, score_from=latent
        )
        by_group = found.output.view(total, groups, -1, groups, self.head_dim)
        own = by_group.diagonal(dim1=1, dim2=3)  # [T, heads of a group, head_dim, groups]
        return own.permute(0, 3, 1, 2).reshape(total, -1)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.qkv.slots(prefix)
        yield from self.output.slots(prefix)
        if self.qk_norm is not None:
            # A head's norm weight is one row in the checkpoint and the same for all heads here.
            yield WeightSlot(f"{prefix}q_norm.weight", self.qk_norm[: self.heads], repeat=True)
            yield WeightSlot(f"{prefix}k_norm.weight", self.qk_norm[self.heads :], repeat=True)
