# SPDX-License-Identifier: Apache-2.0
"""The decoder of every family: embedding, layers of attention and MLP, final norm, logits."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.config import ModelConfig
from twinpool.engine.kernels import Kernels
from twinpool.engine.kv.formats import KVDtype
from twinpool.engine.models.base import AttentionPath, DecoderModel, KVLayout
from twinpool.engine.models.gqa import GqaAttention
from twinpool.engine.models.layers import GatedMlp, RMSNorm
from twinpool.engine.models.mla import MlaAttention
from twinpool.engine.models.moe import MoeMlp
from twinpool.engine.models.paths import PrefillPath
from twinpool.engine.models.rotary import RotaryEmbedding, RotaryTables
from twinpool.engine.models.weights import WeightSlot, parameter

FEW = 64
"""Decodes of a step up to which attention takes the kernels for few tokens. Measured on an H200: see docs/kernels.md."""
SMALL = 1
"""The same for residual, norm and routing in one."""


class DecoderLayer(nn.Module):
    """Attention and MLP, each over a norm and added to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        kernels: Kernels,
        attention: AttentionPath,
        prefill: PrefillPath,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        hidden, eps, mla, moe = config.hidden_size, config.rms_norm_eps, config.mla, config.moe
        self.kernels, float8 = kernels, config.float8_weights
        self.attention: GqaAttention | MlaAttention
        if mla is not None:
            self.attention = MlaAttention(config, mla, kernels, prefill, dtype=dtype, device=device)
        else:
            self.attention = GqaAttention(config, kernels, attention, prefill, dtype=dtype, device=device)
        self.mlp: GatedMlp | MoeMlp
        if moe is not None and moe.is_moe_layer(layer):
            self.mlp = MoeMlp(
                moe, hidden, kernels, bias=config.mlp_bias, dtype=dtype, device=device, float8=float8
            )
        else:
            size, bias = config.intermediate_size, config.mlp_bias
            self.mlp = GatedMlp(hidden, size, kernels, bias=bias, dtype=dtype, device=device, float8=float8)
        self.input_norm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.mlp_norm = RMSNorm(hidden, eps, dtype=dtype, device=device)

    def forward(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        rotary: RotaryTables,
        pages: Tensor,
        batch: AttentionBatch,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """``hidden [T, hidden]`` and what is still to be added to it -> the same, or only ``rows`` of it (the KV of all
        tokens is written)."""
        decodes = batch.num_tokens == batch.num_decodes
        few, small = (decodes and batch.num_tokens <= most for most in (FEW, SMALL))
        hidden, attended = self._attend(hidden, delta, rotary, pages, batch, few)
        if rows is not None:
            hidden, attended = hidden.index_select(0, rows), attended.index_select(0, rows)
        norm, mlp, route = self.mlp_norm, self.mlp, self.kernels.route_small
        if small and route is not None and isinstance(mlp, MoeMlp) and mlp.router.plain:
            router = mlp.router
            hidden, normed, routing = route(
                hidden, attended, norm.weight, norm.eps, router.weight, router.spec
            )
            return hidden, mlp.mix(normed, routing)
        hidden, normed = self.kernels.add_norm(hidden, attended, norm.weight, norm.eps)
        return hidden, mlp(normed)

    def _attend(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        rotary: RotaryTables,
        pages: Tensor,
        batch: AttentionBatch,
        few: bool,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream and what attention adds to it."""
        norm, attention, whole = self.input_norm, self.attention, self.kernels.mla_small
        if few and whole is not None and isinstance(attention, MlaAttention):
            layer = attention.whole(norm)
            if layer is not None:
                attend = self.kernels.mla_paged_attention
                return whole(hidden, delta, layer, rotary.cos, rotary.sin, pages, batch, attend)
        hidden, normed = self.kernels.add_norm(hidden, delta, norm.weight, norm.eps)
        return hidden, attention(normed, rotary, pages, batch)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.attention.slots(f"{prefix}self_attn.")
        yield from self.mlp.slots(f"{prefix}mlp.")
        yield from self.input_norm.slots(f"{prefix}input_layernorm.")
        yield from self.mlp_norm.slots(f"{prefix}post_attention_layernorm.")


class PagedDecoder(DecoderModel):
    """See ``DecoderModel``. Weights are uninitialised until the loader has filled every slot."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        *,
        attention: AttentionPath = "latent",
        prefill: PrefillPath = "auto",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kv_dtype: KVDtype = "auto",
    ) -> None:
        """``kv_dtype``: the form of cache rows, which ``kernels`` have to be for."""
        super().__init__()
        self.config, self.kernels = config, kernels
        products = (kernels.fp8_linear, kernels.fp8_moe) if config.float8_weights else (kernels.moe,)
        used = (
            kernels.mla_paged_attention,
            kernels.mla_rows,
            kernels.rotary_tables,
            kernels.greedy,
            kernels.add_norm,
            kernels.silu_mul,
            kernels.route,
            *products,
        )
        self.capturable = config.mla is not None and all(
            getattr(kernel, "capturable", False) for kernel in used
        )
        self.kv_layout = KVLayout.of(config, attention)
        self.kv_rows = self.kv_layout.rows(dtype, kv_dtype)
        self.embedding = parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(config.rope, device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, kernels, attention, prefill, dtype=dtype, device=device)
            for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        tied = config.tie_word_embeddings
        self.head = self.embedding if tied else parameter(*self.embedding.shape, dtype=dtype, device=device)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, pool: Tensor, batch: AttentionBatch) -> Tensor:
        """See ``DecoderModel.forward``."""
        hidden = F.embedding(token_ids, self.embedding)
        rotary = self.rotary.tables(positions, hidden.dtype, self.kernels.rotary_tables)
        final = len(self.layers) - 1
        delta: Tensor | None = None
        for index, layer in enumerate(self.layers):
            # Past the last attention only the wanted rows matter.
            rows = batch.last_rows if index == final else None
            hidden, delta = layer(hidden, delta, rotary, pool[:, index], batch, rows)
        return self.kernels.add_norm(hidden, delta, self.norm.weight, self.norm.eps)[1]

    @torch.inference_mode()
    def scores(self, hidden: Tensor) -> Tensor:
        """See ``DecoderModel.scores``."""
        return F.linear(hidden, self.head)

    @torch.inference_mode()
    def best(self, scores: Tensor) -> Tensor:
        """See ``DecoderModel.best``."""
        return self.kernels.greedy(scores)

    def slots(self, prefix: str = "") -> Iterator[WeightSlot]:
        """Every tensor that a checkpoint of this model must hold."""
        yield WeightSlot(f"{prefix}model.embed_tokens.weight", self.embedding)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from layer.slots(f"{prefix}model.layers.{index}.")
        yield from self.norm.slots(f"{prefix}model.norm.")
        if self.head is not self.embedding:
            yield WeightSlot(f"{prefix}lm_head.weight", self.head)
