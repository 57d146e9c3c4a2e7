# SPDX-License-Identifier: Apache-2.0
"""The sequences of one step as attention sees them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

T = TypeVar("T")


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
    host_block_table: NDArray[np.int32]
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
        host = [np.array(array, np.int32, ndmin=1) for array in (q_start, context, block_table)]
        return cls(
            q_start=torch.from_numpy(host[0]).to(device),
            context=torch.from_numpy(host[1]).to(device),
            block_table=torch.from_numpy(host[2]).to(device),
            slots=torch.from_numpy(np.array(slots, np.int64)).to(device),
            block_tokens=block_tokens,
            num_decodes=num_decodes,
            last_rows=None
            if last_rows is None
            else torch.from_numpy(np.array(last_rows, np.int64)).to(device),
            host_q_start=host[0],
            host_context=host[1],
            host_block_table=host[2],
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

    def forget(self) -> None:
        """Drops what was derived: for a batch whose tensors have got new content."""
        self._derived.clear()

    def select(self, first: int, last: int) -> "AttentionBatch":
        """The sequences ``first:last`` as a batch of their own (cached). Its rows are
        ``host_q_start[first]:host_q_start[last]`` of this batch; ``last_rows`` is not carried over."""
        if first == 0 and last == self.num_sequences:
            return self
        return self.derived(f"select:{first}:{last}", lambda: self._slice(first, last))

    def _slice(self, first: int, last: int) -> "AttentionBatch":
        begin, end = int(self.host_q_start[first]), int(self.host_q_start[last])
        return AttentionBatch(
            q_start=self.q_start[first : last + 1] - begin,
            context=self.context[first:last],
            block_table=self.block_table[first:last],
            slots=self.slots[begin:end],
            block_tokens=self.block_tokens,
            num_decodes=min(max(self.num_decodes - first, 0), last - first),
            last_rows=None,
            host_q_start=self.host_q_start[first : last + 1] - np.int32(begin),
            host_context=self.host_context[first:last],
            host_block_table=self.host_block_table[first:last],
        )
