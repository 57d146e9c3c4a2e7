# SPDX-License-Identifier: Apache-2.0
"""What the rest of the engine knows of a model: its KV layout, the batch of a step, and the decoder itself."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from twinpool.engine.config import ModelConfig

AttentionPath = Literal["latent", "gqa"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one token leaves in the cache of each layer: ``width = latent_dim + rope_dim`` values.

    The latent part comes first and is what attention sums up; key scores use the whole row. For MLA the
    latent is the normed compressed KV and the rotary part the shared rotated key. For GQA the latent is V
    of all KV heads and the rotary part is the rotated K of all KV heads. The bytes do not depend on
    ``kind``, which only names how attention reads them.
    """

    kind: AttentionPath
    layers: int
    latent_dim: int
    rope_dim: int

    @property
    def width(self) -> int:
        return self.latent_dim + self.rope_dim

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Cache bytes of one token over all layers."""
        return self.width * self.layers * dtype.itemsize


@dataclass(slots=True)
class AttentionBatch:
    """The sequences of one step, ragged and without padding; decodes (one query token) come first.

    Query tokens of sequence ``i`` are rows ``q_start[i]:q_start[i + 1]`` of the step's token arrays; they are the
    *last* ``q_len`` of the sequence's ``context[i]`` KV entries (those of this step included). Host copies exist
    because planning in Python must not wait for a device.
    """

    q_start: Tensor  # int32[n + 1]
    context: Tensor  # int32[n], KV length after this step
    block_table: Tensor  # int32[n, max_blocks], padded with -1
    slots: Tensor  # int64[T], block * block_tokens + offset of each query token's KV
    block_tokens: int
    num_decodes: int
    last_rows: Tensor | None  # int64[m]: token rows whose hidden state is wanted; None means all
    host_q_start: NDArray[np.int32]
    host_context: NDArray[np.int32]
    _derived: dict[str, object] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        *,
        q_start: NDArray[np.int32],
        context: NDArray[np.int32],
        block_table: NDArray[np.int32],
        slots: NDArray[np.int64],
        block_tokens: int,
        num_decodes: int,
        last_rows: NDArray[np.int64] | None = None,
        device: torch.device | str = "cpu",
    ) -> "AttentionBatch":
        """Copies a step plan's arrays to ``device``. ``last_rows`` are indices into the step's tokens."""
        # Copies: the plan's arrays may be read-only views that the scheduler reuses.
        q_host, context_host = np.array(q_start, np.int32), np.array(context, np.int32)
        return cls(
            q_start=torch.from_numpy(q_host).to(device),
            context=torch.from_numpy(context_host).to(device),
            block_table=torch.from_numpy(np.array(block_table, np.int32)).to(device),
            slots=torch.from_numpy(np.array(slots, np.int64)).to(device),
            block_tokens=block_tokens,
            num_decodes=num_decodes,
            last_rows=None if last_rows is None else torch.from_numpy(np.array(last_rows, np.int64)).to(device),
            host_q_start=q_host,
            host_context=context_host,
        )

    @property
    def num_sequences(self) -> int:
        return len(self.host_context)

    @property
    def num_tokens(self) -> int:
        return int(self.host_q_start[-1])

    def derived(self, key: str, make: Callable[[], T]) -> T:
        """``make()`` once per batch: what depends on the step but not on the layer (masks, page indices, splits)."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]  # type: ignore[return-value]


class AttentionModule(Protocol):
    """Attention of one layer over the paged cache; writes the step's KV before it reads."""

    def __call__(self, hidden: Tensor, positions: Tensor, pages: Tensor, batch: AttentionBatch) -> Tensor:
        """``hidden[T, hidden]``, ``positions int64[T]``, ``pages[blocks, block_tokens, width]`` -> ``[T, hidden]``."""
        ...


class DecoderModel(nn.Module):
    """A decoder over a paged KV cache. Holds no state between calls besides its weights."""

    config: ModelConfig
    kv_layout: KVLayout

    def forward(self, token_ids: Tensor, positions: Tensor, pool: Tensor, batch: AttentionBatch) -> Tensor:
        """Runs one step and writes its KV into ``pool``.

        ``token_ids int64[T]``, ``positions int64[T]``, ``pool [blocks, layers, block_tokens, width]``. Returns the
        normed hidden states ``[m, hidden]`` of ``batch.last_rows`` (all ``T`` rows if that is None).
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden [m, hidden]`` -> ``float32 [m, vocab]``."""
        raise NotImplementedError
