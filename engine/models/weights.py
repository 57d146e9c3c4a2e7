# SPDX-License-Identifier: Apache-2.0
"""How a module tells the loader where each tensor of a checkpoint goes."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

FLOAT8 = torch.float8_e4m3fn
"""Type of the codes of float8 weights."""
BLOCK = 128
"""Rows and columns of a float8 weight that share a scale."""
SCALES = "_scale_inv"
"""Ends the name of the tensor that holds the scales of float8 weights: ``x.weight`` has ``x.weight_scale_inv``. A weight is
its code times its block's scale, whatever the name says."""

Form = Literal["plain", "codes", "scales", "widened"]
"""How a slot's tensor lies in the checkpoint. ``widened``: as codes, beside a tensor of scales, and the target takes the
weights that they stand for."""

STORED: dict[Form, tuple[str, ...]] = {
    "plain": ("BF16", "F16", "F32"),
    "codes": ("F8_E4M3",),
    "scales": ("BF16", "F32"),
    "widened": ("F8_E4M3",),
}
"""Types that a tensor of each form may have in the checkpoint, by safetensors' names."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What a tensor must be in the checkpoint."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One tensor of a checkpoint (two if it is ``widened``): its name, and the (often partial) weight that it fills.

    ``rows`` reorders the tensor's rows on the way, ``int64[shape[0]]``. ``repeat``: the tensor is one row, which
    fills every row of the target.
    """

    name: str
    target: Tensor
    rows: Tensor | None = None
    repeat: bool = False
    form: Form = "plain"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that the tensor must have in the checkpoint."""
        return tuple(self.target.shape[1:] if self.repeat else self.target.shape)

    def stored(self) -> dict[str, Stored]:
        """What the checkpoint must hold for this slot, by name."""
        needed = {self.name: Stored(self.shape, STORED[self.form])}
        if self.form == "widened":
            rows, columns = self.shape
            needed[self.name + SCALES] = Stored((blocks_of(rows), blocks_of(columns)), STORED["scales"])
        return needed

    def fill(self, tensor: Tensor) -> None:
        """Copies a tensor of the slot's shape, converting its dtype; codes are copied as they are."""
        target = self.target
        if self.form == "codes":
            tensor, target = tensor.view(torch.uint8), target.view(torch.uint8)
        target.copy_(tensor if self.rows is None else tensor.index_select(0, self.rows.to(tensor.device)))


def blocks_of(size: int) -> int:
    """Blocks of ``size`` rows or columns; the last one may be partial."""
    return -(-size // BLOCK)


def parameter(
    *shape: int, dtype: torch.dtype, device: torch.device | str = "cpu", fill: float | None = None
) -> nn.Parameter:
    """A weight without gradient; uninitialised (the loader fills every one) unless ``fill`` is given."""
    data = torch.empty(shape, dtype=dtype, device=device)
    if fill is not None:
        data.fill_(fill)
    return nn.Parameter(data, requires_grad=False)
