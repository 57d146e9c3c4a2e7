# SPDX-License-Identifier: Apache-2.0
"""Host memory in which preempted sequences keep their KV."""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinpool.engine.kv.pool import KVPool


class SwapPlan(Protocol):
    """The part of ``twinpool._core.StepPlan`` that moves blocks between the pool and host memory."""

    @property
    def swap_out(self) -> NDArray[np.int32]: ...
    @property
    def swap_in(self) -> NDArray[np.int32]: ...


class HostPool:
    """``num_blocks`` blocks of the shape and type of ``pool``'s in host memory, page-locked where the pool is on a GPU.

    Which of them are in use is the scheduler's business (``SchedulerConfig.host_blocks``). Raises MemoryError if they
    can't be allocated.
    """

    def __init__(self, pool: KVPool, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self._pool = pool
        shape = (num_blocks, *pool.tensor.shape[1:])
        try:
            self.tensor: Tensor = torch.empty(
                shape, dtype=pool.dtype, device="cpu", pin_memory=pool.device.type == "cuda"
            )
        except RuntimeError as error:  # what torch raises for memory that it can't get
            raise MemoryError(f"cannot allocate {num_blocks} host blocks: {error}") from error

    @property
    def num_blocks(self) -> int:
        return self.tensor.shape[0]

    def swap(self, plan: SwapPlan) -> None:
        """Copies out what the plan has taken from sequences, then in what it gives back to them.

        To be called before anything else touches the pool, the poisoning of freed blocks included. On return the bytes
        are where they belong. Raises IndexError for a block out of range.
        """
        out, back = plan.swap_out, plan.swap_in
        if len(out):
            source, target = self._indices(out[:, 0], self._pool.num_blocks), self._indices(out[:, 1])
            self.tensor[target] = self._pool.tensor[source.to(self._pool.device)].cpu()
        if len(back):
            source, target = self._indices(back[:, 0]), self._indices(back[:, 1], self._pool.num_blocks)
            self._pool.tensor[target.to(self._pool.device)] = self.tensor[source].to(self._pool.device)

    def _indices(self, blocks: NDArray[np.int32], limit: int | None = None) -> Tensor:
        limit = self.num_blocks if limit is None else limit
        if blocks.min() < 0 or blocks.max() >= limit:
            raise IndexError(f"block out of range of {limit}")
        return torch.from_numpy(blocks.astype(np.int64))
