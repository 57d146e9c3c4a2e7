# SPDX-License-Identifier: Apache-2.0
"""How one token's cache row lies in the pool: as values of the model's type, or packed.

``fp8_latent`` is the layout that FlashMLA and its users know: the latent as float8 e4m3 with one float32 scale for each
128 values, then the rotary part as bfloat16. DeepSeek-V3's 576 values take 512 + 4 * 4 + 64 * 2 = 656 bytes. The latent
is normed, so 8 bits and a scale hold it well; rotated keys are not, and errors in them turn into errors of position.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

import torch
from torch import Tensor

KVDtype = Literal["auto", "fp8_latent"]

GROUP = 128
"""Latent values that share a scale."""

SCALE_BYTES = 4
ROTARY_BYTES = 2

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
# A group of zeros has no scale of its own; this one keeps the division finite.
_LEAST_SCALE = torch.finfo(torch.float32).tiny


class RowFormat(Protocol):
    """The form of a row. A pool's tensor has ``columns`` elements of ``dtype`` a token and layer."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def columns(self) -> int: ...

    @property
    def row_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PlainRows:
    """``columns`` values, as the model computes them."""

    columns: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in one layer."""
        return self.columns * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Fp8LatentRows:
    """``[latent_dim float8 | a float32 scale for each group | rope_dim bfloat16]``, as bytes."""

    latent_dim: int
    rope_dim: int

    @classmethod
    def of_bytes(cls, row_bytes: int, latent_dim: int) -> "Fp8LatentRows":
        """The format of rows of ``row_bytes`` bytes. Raises ValueError if there is none with this latent."""
        rotary = row_bytes - latent_dim - _groups(latent_dim) * SCALE_BYTES
        if rotary < 0 or rotary % ROTARY_BYTES:
            raise ValueError(f"no row of {row_bytes} bytes has a latent of {latent_dim} values")
        return cls(latent_dim, rotary // ROTARY_BYTES)

    @property
    def dtype(self) -> torch.dtype:
        """Of the pool's elements."""
        return torch.uint8

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in one layer."""
        return self.latent_dim + _groups(self.latent_dim) * SCALE_BYTES + self.rope_dim * ROTARY_BYTES

    def pack(self, rows: Tensor) -> Tensor:
        """``rows [n, latent_dim + rope_dim]`` of any floating type -> ``uint8 [n, row_bytes]``. What is not finite stays
        not finite."""
        count, groups = len(rows), _groups(self.latent_dim)
        latent = rows.new_zeros(count, groups * GROUP, dtype=torch.float32)
        latent[:, : self.latent_dim] = rows[:, : self.latent_dim]
        latent = latent.view(count, groups, GROUP)
        scales = (latent.abs().amax(dim=-1) / FP8_MAX).clamp_min(_LEAST_SCALE)
        # Rounding the scale may put the largest value a little over the range, which float8 answers with NaN.
        values = (latent / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).view(count, groups * GROUP)
        packed = values[:, : self.latent_dim].to(torch.float8_e4m3fn).view(torch.uint8)
        rotary = _copy(rows[:, self.latent_dim :].to(torch.bfloat16)).view(torch.uint8)
        return torch.cat((packed, scales.view(torch.uint8), rotary), dim=-1)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """``uint8 [n, row_bytes]`` -> ``dtype [n, latent_dim + rope_dim]``. Bytes 0xFF throughout are NaN throughout."""
        count, groups = len(packed), _groups(self.latent_dim)
        end = self.latent_dim + groups * SCALE_BYTES
        # Copies: a slice of one row counts as contiguous, wherever it starts.
        scales = _copy(packed[:, self.latent_dim : end]).view(torch.float32)
        wide = torch.repeat_interleave(scales, GROUP, dim=-1)[:, : self.latent_dim]
        codes = packed[:, : self.latent_dim].reshape(-1).to(torch.int32)
        latent = _float8_values(packed.device).index_select(0, codes).view(count, self.latent_dim) * wide
        rotary = _copy(packed[:, end:]).view(torch.bfloat16)
        rows = latent.new_empty(count, self.latent_dim + self.rope_dim, dtype=dtype)
        rows[:, : self.latent_dim] = latent
        rows[:, self.latent_dim :] = rotary
        return rows


def _copy(part: Tensor) -> Tensor:
    return part.clone(memory_format=torch.contiguous_format)


@cache
def _float8_values(device: torch.device) -> Tensor:
    """The value of each float8 code. Looking up takes a fifth of torch's own conversion on a CPU."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def _groups(latent_dim: int) -> int:
    return -(-latent_dim // GROUP)
