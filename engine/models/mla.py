# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention of DeepSeek V2 and V3."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.config import MlaConfig, ModelConfig
from twinpool.engine.kernels import Kernels
from twinpool.engine.kernels.operations import MlaLayer, MlaStep
from twinpool.engine.models.layers import FusedLinear, RMSNorm, fused_linear
from twinpool.engine.models.packed import PackedLinear
from twinpool.engine.models.paths import PrefillPath, expand_is_cheaper
from twinpool.engine.models.rotary import RotaryTables, deinterleave, softmax_scale
from twinpool.engine.models.weights import WeightSlot, parameter

# Not config.rms_norm_eps: the norms of the compressed queries and KV have a constant of their own in both families.
_LATENT_NORM_EPS = 1e-6


class MlaAttention(nn.Module):
    """A cache row is ``[normed latent | rotated key shared by all heads]``.

    Decodes run absorbed: ``kv_b_proj`` moves into the queries and the output, so scores are taken on cache rows as
    they lie. Prefills run absorbed or with expanded keys and values, whichever costs less. Of float8 weights ``kv_b_proj``
    alone is widened to the model's dtype when it is loaded: its halves are factors of products with queries and latents.
    """

    def __init__(
        self,
        config: ModelConfig,
        mla: MlaConfig,
        kernels: Kernels,
        prefill: PrefillPath,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.config, self.heads, self.kernels, self.prefill = mla, config.num_heads, kernels, prefill
        self.scale = softmax_scale(config.rope, mla.qk_head_dim)
        query_rows, kv_rows = _row_orders(mla, self.heads)
        queries = ("q_proj", self.heads * mla.qk_head_dim, False)
        if mla.q_lora_rank is not None:
            queries = ("q_a_proj", mla.q_lora_rank, config.qkv_bias)
        compressed = ("kv_a_proj_with_mqa", mla.kv_lora_rank + mla.qk_rope_head_dim, config.qkv_bias)
        self.query_columns = queries[1]
        orders = {"q_proj": query_rows, "q_b_proj": query_rows, "kv_a_proj_with_mqa": kv_rows}
        rows = {name: order for name, order in orders.items() if order is not None}
        self.float8 = config.float8_weights
        packed = kernels.fp8_linear if self.float8 else None
        self.down = fused_linear(
            config.hidden_size, [queries, compressed], packed, dtype=dtype, device=device, rows=rows
        )
        self.query_norm: RMSNorm | None = None
        self.query_up: FusedLinear | PackedLinear | None = None
        if mla.q_lora_rank is not None:
            self.query_norm = RMSNorm(mla.q_lora_rank, _LATENT_NORM_EPS, dtype=dtype, device=device)
            up = [("q_b_proj", self.heads * mla.qk_head_dim, False)]
            self.query_up = fused_linear(mla.q_lora_rank, up, packed, dtype=dtype, device=device, rows=rows)
        self.kv_norm = RMSNorm(mla.kv_lora_rank, _LATENT_NORM_EPS, dtype=dtype, device=device)
        self.kv_up = parameter(
            self.heads, mla.qk_nope_head_dim + mla.v_head_dim, mla.kv_lora_rank, dtype=dtype, device=device
        )
        output = [("o_proj", config.hidden_size, config.output_bias)]
        self.output = fused_linear(self.heads * mla.v_head_dim, output, packed, dtype=dtype, device=device)

    def forward(self, hidden: Tensor, rotary: RotaryTables, pages: Tensor, batch: AttentionBatch) -> Tensor:
        """``hidden [T, hidden]`` -> ``[T, hidden]``; writes the step's KV into ``pages`` first."""
        mla, down = self.config, self.down(hidden)
        query, kv = down[:, : self.query_columns], down[:, self.query_columns :]
        if self.query_norm is not None and self.query_up is not None:
            query = self.query_up(self.query_norm(query))
        query = query.view(len(hidden), self.heads, mla.qk_head_dim)
        norm = self.kv_norm
        fresh = batch.num_decodes < batch.num_sequences
        step = MlaStep(query, kv, norm.weight, norm.eps, rotary.cos, rotary.sin, in_place=fresh)
        rotated = self.kernels.mla_rows(step, pages, batch)
        result: Tensor = self.output(self._attend(query, rotated, pages, batch))
        return result

    def _attend(self, query: Tensor, rotated: Tensor, pages: Tensor, batch: AttentionBatch) -> Tensor:
        """``query [T, heads, nope + rope]`` as projected, rotated in place if there are prefills, and ``rotated [T, heads,
        latent + rope]`` -> ``[T, heads * v]``."""
        plain = query[..., : self.config.qk_nope_head_dim]
        decodes, sequences = batch.num_decodes, batch.num_sequences
        if decodes == sequences:
            return self._absorbed(plain, rotated, pages, batch)
        prefills = batch.select(decodes, sequences)
        expand = self.prefill == "expanded" or (
            self.prefill == "auto" and expand_is_cheaper(prefills, self.config)
        )
        if not expand:
            return self._absorbed(plain, rotated, pages, batch)
        fresh = self._expanded(query[decodes:], pages, prefills)
        if not decodes:
            return fresh
        running = self._absorbed(plain[:decodes], rotated[:decodes], pages, batch.select(0, decodes))
        return torch.cat((running, fresh))

    def _absorbed(self, plain: Tensor, rotated: Tensor, pages: Tensor, batch: AttentionBatch) -> Tensor:
        nope, latent = self.config.qk_nope_head_dim, self.config.kv_lora_rank
        product_into(rotated[..., :latent].transpose(0, 1), plain.transpose(0, 1), self.kv_up[:, :nope])
        found = self.kernels.mla_paged_attention(rotated, pages, batch, latent_dim=latent, scale=self.scale)
        values = plain.new_empty(len(plain), self.heads, self.config.v_head_dim)
        product_into(
            values.transpose(0, 1), found.output.transpose(0, 1), self.kv_up[:, nope:].transpose(1, 2)
        )
        return values.view(len(plain), -1)

    def _expanded(self, query: Tensor, pages: Tensor, batch: AttentionBatch) -> Tensor:
        nope = self.config.qk_nope_head_dim
        found = self.kernels.mla_expanded_attention(
            query,
            pages,
            batch,
            expand_keys=self.kv_up[:, :nope],
            expand_values=self.kv_up[:, nope:],
            scale=self.scale,
        )
        return found.output.reshape(len(query), -1)

    def whole(self, norm: RMSNorm) -> MlaLayer | None:
        """The layer with the norm before it, for kernels that take both; None if it has biases, compressed queries or float8
        weights."""
        if not isinstance(self.down, FusedLinear) or not isinstance(self.output, FusedLinear):
            return None
        if self.query_up is not None or self.down.bias is not None or self.output.bias is not None:
            return None
        mla = self.config
        return MlaLayer(
            norm.weight, norm.eps, self.down.weight, self.kv_norm.weight, self.kv_norm.eps, self.kv_up,
            self.output.weight, mla.qk_nope_head_dim, mla.qk_rope_head_dim, self.scale,
        )  # fmt: skip

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.down.slots(prefix)
        if self.query_norm is not None and self.query_up is not None:
            yield from self.query_norm.slots(f"{prefix}q_a_layernorm.")
            yield from self.query_up.slots(prefix)
        yield from self.kv_norm.slots(f"{prefix}kv_a_layernorm.")
        kv_up = self.kv_up.view(-1, self.kv_up.shape[-1])
        yield WeightSlot(f"{prefix}kv_b_proj.weight", kv_up, form="widened" if self.float8 else "plain")
        yield from self.output.slots(prefix)


def product_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """``out[...] = left @ right`` for batches of matrices, without a copy where the device's library can store so."""
    if out.device.type == "cuda":
        torch.bmm(left, right, out=out)
    else:
        out.copy_(torch.bmm(left, right))


def _row_orders(mla: MlaConfig, heads: int) -> tuple[Tensor | None, Tensor | None]:
    """Orders of the query and compressed KV rows that bring rotary pairs from ``(2i, 2i + 1)`` to
    ``(i, i + rope / 2)``; None where the checkpoint has them so. Done once here, it costs nothing at run time."""
    if not mla.rope_interleave:
        return None, None
    order = deinterleave(mla.qk_rope_head_dim)
    head = torch.cat((torch.arange(mla.qk_nope_head_dim), mla.qk_nope_head_dim + order))
    starts = torch.arange(heads) * mla.qk_head_dim
    queries = (starts[:, None] + head[None, :]).reshape(-1)
    return queries, torch.cat((torch.arange(mla.kv_lora_rank), mla.kv_lora_rank + order))
