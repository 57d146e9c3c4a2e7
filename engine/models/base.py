# SPDX-License-Identifier: Apache-2.0
"""What the rest of the engine knows of a model: its KV layout, the batch of a step, and the decoder itself."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.config import ModelConfig
from twinpool.engine.kv.formats import Fp8LatentRows, KVDtype, PlainRows, RowFormat

__all__ = ["AttentionBatch", "AttentionPath", "DecoderModel", "KVLayout"]

AttentionPath = Literal["latent", "gqa"]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one token leaves in the cache of each layer: ``width = latent_dim + rope_dim`` values.

    The latent part comes first and is what attention sums up; key scores use the whole row. For MLA the
    latent is the normed compressed KV and the rotary part the shared rotated key. For GQA the latent is V
    of all KV heads and the rotary part is the rotated K of all KV heads. The bytes do not depend on
    ``kind``, which only names how attention reads them. Rotary pairs lie ``(i, i + dim / 2)`` in all families.
    """

    kind: AttentionPath
    layers: int
    latent_dim: int
    rope_dim: int

    @property
    def width(self) -> int:
        return self.latent_dim + self.rope_dim

    def rows(self, dtype: torch.dtype, kv_dtype: KVDtype = "auto") -> RowFormat:
        """How a row lies in the pool of a model that runs in ``dtype``."""
        if kv_dtype == "fp8_latent":
            return Fp8LatentRows(self.latent_dim, self.rope_dim)
        return PlainRows(self.width, dtype)

    def bytes_per_token(self, dtype: torch.dtype, kv_dtype: KVDtype = "auto") -> int:
        """Cache bytes of one token over all layers."""
        return self.layers * self.rows(dtype, kv_dtype).row_bytes

    @classmethod
    def of(cls, config: ModelConfig, attention: AttentionPath = "latent") -> "KVLayout":
        """The layout of a model. MLA models have only the latent path, whatever is asked for."""
        if config.mla is not None:
            mla = config.mla
            return cls("latent", config.num_layers, mla.kv_lora_rank, mla.qk_rope_head_dim)
        values = config.num_kv_heads * config.head_dim
        return cls(attention, config.num_layers, values, values)


class DecoderModel(nn.Module, ABC):
    """A decoder over a paged KV cache. Holds no state between calls besides its weights."""

    config: ModelConfig
    kv_layout: KVLayout
    capturable: bool = False
    """Whether a decode step reads lengths and tables on the device alone, so that a CUDA graph of it can be replayed."""
    kv_rows: RowFormat
    """The form of the pool that ``forward`` takes: ``[blocks, layers, block_tokens, kv_rows.columns]`` of its dtype."""

    @abstractmethod
    def forward(self, token_ids: Tensor, positions: Tensor, pool: Tensor, batch: AttentionBatch) -> Tensor:
        """Runs one step and writes its KV into ``pool``.

        ``token_ids int64[T]``, ``positions int64[T]``, ``pool [blocks, layers, block_tokens, columns]`` as ``kv_rows``
        says. Returns the
        normed hidden states ``[m, hidden]`` of ``batch.last_rows`` (all ``T`` rows if that is None).
        """

    @abstractmethod
    def scores(self, hidden: Tensor) -> Tensor:
        """``hidden [m, hidden]`` -> logits ``[m, vocab]`` of the model's dtype."""

    @abstractmethod
    def best(self, scores: Tensor) -> Tensor:
        """The greedy choice from ``scores``, ``int32[2, m]``: see ``operations.Greedy``."""

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden [m, hidden]`` -> ``float32 [m, vocab]``."""
        return self.scores(hidden).to(torch.float32)
