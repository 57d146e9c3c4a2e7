# SPDX-License-Identifier: Apache-2.0
"""How a module tells the loader where each tensor of a checkpoint goes."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One tensor of a checkpoint: its name, and the (often partial) weight that it fills.

    ``rows`` reorders the tensor's rows on the way, ``int64[shape[0]]``. ``repeat``: the tensor is one row, which
    fills every row of the target.
    """

    name: str
    target: Tensor
    rows: Tensor | None = None
    repeat: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that the tensor must have in the checkpoint."""
        return tuple(self.target.shape[1:] if self.repeat else self.target.shape)

    def fill(self, tensor: Tensor) -> None:
        """Copies a tensor of the slot's shape, converting its dtype."""
        self.target.copy_(
            tensor if self.rows is None else tensor.index_select(0, self.rows.to(tensor.device))
        )


def parameter(
    *shape: int, dtype: torch.dtype, device: torch.device | str = "cpu", fill: float | None = None
) -> nn.Parameter:
    """A weight without gradient; uninitialised (the loader fills every one) unless ``fill`` is given."""
    data = torch.empty(shape, dtype=dtype, device=device)
    if fill is not None:
        data.fill_(fill)
    return nn.Parameter(data, requires_grad=False)
