# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache of one worker."""

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from twinpool.engine.kv.memory import aligned_tensor, aligned_uint64


class KVPool:
    """One contiguous block-major tensor ``[blocks, layers, block_tokens, width]`` and a generation for each block.

    All layers of a block lie together, so that a block is one transfer descriptor. On a CPU both start at a memory
    page and are never freed (see ``memory``). ``generations`` is raised by the block manager whenever a block is
    given to new content, and read by peers. The pool does not know which blocks are in use. Where rows are packed
    (``formats``), ``dtype`` is uint8 and ``width`` the bytes of a row.
    """

    def __init__(
        self,
        num_blocks: int,
        layers: int,
        block_tokens: int,
        width: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (
            ("num_blocks", num_blocks),
            ("layers", layers),
            ("block_tokens", block_tokens),
            ("width", width),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not (dtype.is_floating_point or dtype == torch.uint8):
            raise ValueError(f"a KV pool holds floating point values or packed bytes, not {dtype}")
        shape = (num_blocks, layers, block_tokens, width)
        self.device = torch.device(device)
        if self.device.type == "cpu":
            self.tensor: Tensor = aligned_tensor(shape, dtype)
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=self.device)
        self.generations: NDArray[np.uint64] = aligned_uint64(num_blocks)

    @property
    def num_blocks(self) -> int:
        return self.tensor.shape[0]

    @property
    def layers(self) -> int:
        return self.tensor.shape[1]

    @property
    def block_tokens(self) -> int:
        return self.tensor.shape[2]

    @property
    def width(self) -> int:
        return self.tensor.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.layers * self.block_tokens * self.width * self.dtype.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token over all layers."""
        return self.layers * self.width * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def base_address(self) -> int:
        """Address of block 0; block ``i`` starts ``i * block_bytes`` later."""
        return self.tensor.data_ptr()

    @property
    def generations_address(self) -> int:
        """Address of the generation of block 0, 8 bytes each, in host memory."""
        return int(self.generations.ctypes.data)

    def layer(self, index: int) -> Tensor:
        """Pages of one layer, a view ``[blocks, block_tokens, width]``."""
        return self.tensor[:, index]

    def block_bytes_view(self, block: int) -> Tensor:
        """One block as a view ``uint8[block_bytes]``."""
        self._checked([block])
        return self.tensor[block].view(-1).view(torch.uint8)

    def copy_blocks(self, pairs: ArrayLike) -> None:
        """Copies whole blocks; ``pairs`` is ``[m, 2]`` (source, destination). All sources are read before any
        destination is written; a destination given twice is an error (ValueError)."""
        table = np.asarray(pairs, np.int64).reshape(-1, 2)
        if not len(table):
            return
        sources, targets = self._checked(table[:, 0]), self._checked(table[:, 1])
        if len(np.unique(table[:, 1])) != len(table):
            raise ValueError("a block is the destination of two copies")
        self.tensor.index_copy_(0, targets, self.tensor.index_select(0, sources))

    def poison(self, blocks: ArrayLike) -> None:
        """Overwrites whole blocks with bytes 0xFF, a NaN in every floating point type and format, so that any use shows."""
        indices = self._checked(blocks)
        if len(indices):
            self.tensor.view(torch.uint8).index_fill_(0, indices, 0xFF)

    def _checked(self, blocks: ArrayLike) -> Tensor:
        table = np.array(blocks, np.int64).reshape(-1)
        if len(table) and (table.min() < 0 or table.max() >= self.num_blocks):
            raise IndexError(f"block out of range of a pool of {self.num_blocks}")
        return torch.from_numpy(table).to(self.device)
