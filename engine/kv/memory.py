# SPDX-License-Identifier: Apache-2.0
"""Page-aligned memory that stays mapped for the life of the process."""

import contextlib
import mmap

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_KEPT: list[mmap.mmap] = []
"""Mappings are never undone: a peer that holds our NIXL metadata may read at any time, and reading memory that was
unmapped brings the owner down (UCX over TCP)."""


def _map(length: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, max(length, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    _KEPT.append(mapping)
    return mapping


def aligned_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A zeroed CPU tensor at the start of a memory page, never freed. Raises MemoryError if it can't be mapped."""
    count = 1
    for size in shape:
        count *= size
    try:
        mapping = _map(count * dtype.itemsize)
    except OSError as error:
        raise MemoryError(f"cannot map {count * dtype.itemsize} bytes: {error}") from error
    return torch.frombuffer(mapping, dtype=dtype, count=count).view(shape)


def aligned_uint64(count: int) -> NDArray[np.uint64]:
    """Zeroed ``uint64[count]`` at the start of a memory page, never freed."""
    return np.frombuffer(_map(count * 8), dtype=np.uint64, count=count)
