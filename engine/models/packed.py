# SPDX-License-Identifier: Apache-2.0
"""Linear layers and experts that hold their weights in float8, as DeepSeek's checkpoints do: codes, and a scale for each
block of 128 x 128. They stay so in memory; the registered operations multiply with them."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from twinpool.engine.config import MoeConfig
from twinpool.engine.kernels.operations import Fp8Linear, Fp8Weight
from twinpool.engine.models.weights import BLOCK, FLOAT8, SCALES, WeightSlot, blocks_of, parameter


def packed_slots(
    name: str, codes: Tensor, scales: Tensor, rows: Tensor | None = None
) -> Iterator[WeightSlot]:
    """The two tensors of float8 weights. ``rows`` must leave every row in its block."""
    yield WeightSlot(name, codes, rows, form="codes")
    yield WeightSlot(name + SCALES, scales, form="scales")


class PackedLinear(nn.Module):
    """As ``layers.FusedLinear``, with float8 weights.

    The blocks of each part begin at its own first row. Parts are one product as long as all but its last have rows of
    whole blocks, as they have in the published models, else there are several products. An order of rows that leaves
    each in its block is applied to the codes (the rotary pairs of published models), any other to the outputs.
    """

    def __init__(
        self,
        inputs: int,
        parts: Sequence[tuple[str, int, bool]],
        kernel: Fp8Linear,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        rows: dict[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.parts, self.kernel = tuple(parts), kernel
        outputs = sum(size for _, size, _ in parts)
        self.codes = parameter(outputs, inputs, dtype=FLOAT8, device=device)
        blocks = sum(blocks_of(size) for _, size, _ in parts)
        self.scales = parameter(blocks, blocks_of(inputs), dtype=torch.float32, device=device)
        has_bias = any(bias for _, _, bias in parts)
        self.bias = parameter(outputs, dtype=dtype, device=device, fill=0.0) if has_bias else None
        self.runs = _runs([size for _, size, _ in parts])
        orders = {name: order for name, order in (rows or {}).items() if name in {part[0] for part in parts}}
        self.rows = {name: order for name, order in orders.items() if _keeps_blocks(order)}
        rest = {name: order for name, order in orders.items() if name not in self.rows}
        order = _output_order(self.parts, rest).to(device) if rest else None
        self.register_buffer("order", order, persistent=False)
        self.order: Tensor | None

    def forward(self, hidden: Tensor) -> Tensor:
        found = [
            self.kernel(hidden, self.codes[rows], self.scales[blocks], None if self.bias is None else self.bias[rows])
            for rows, blocks in self.runs
        ]  # fmt: skip
        out = found[0] if len(found) == 1 else torch.cat(found, dim=-1)
        return out if self.order is None else out.index_select(-1, self.order)

    @property
    def weight(self) -> Fp8Weight:
        """For operations that take the whole of it."""
        return Fp8Weight(self.codes, self.scales)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        start = block = 0
        for name, size, bias in self.parts:
            rows, blocks = slice(start, start + size), slice(block, block + blocks_of(size))
            order = self.rows.get(name)
            yield from packed_slots(f"{prefix}{name}.weight", self.codes[rows], self.scales[blocks], order)
            if bias and self.bias is not None:
                yield WeightSlot(f"{prefix}{name}.bias", self.bias[rows], order)
            start, block = rows.stop, blocks.stop


def _runs(sizes: list[int]) -> list[tuple[slice, slice]]:
    """Rows, and blocks of rows, of each product."""
    runs: list[tuple[slice, slice]] = []
    first = first_block = start = block = 0
    for index, size in enumerate(sizes):
        start, block = start + size, block + blocks_of(size)
        if size % BLOCK or index == len(sizes) - 1:
            runs.append((slice(first, start), slice(first_block, block)))
            first, first_block = start, block
    return runs


def _keeps_blocks(order: Tensor) -> bool:
    return bool((order // BLOCK == torch.arange(len(order)) // BLOCK).all())


def _output_order(parts: Sequence[tuple[str, int, bool]], orders: dict[str, Tensor]) -> Tensor:
    """``int64[outputs]``: ``orders`` of the parts that it names, the other parts as they are."""
    found, start = [], 0
    for name, size, _ in parts:
        found.append(start + orders.get(name, torch.arange(size)))
        start += size
    return torch.cat(found)


class PackedExperts(nn.Module):
    """As ``moe.Experts``, with float8 weights; see ``operations.Fp8ExpertWeights``."""

    def __init__(self, config: MoeConfig, hidden: int, *, device: torch.device | str) -> None:
        super().__init__()
        count, self.intermediate = config.num_experts, config.intermediate_size
        rows, columns = blocks_of(self.intermediate), blocks_of(hidden)
        self.gate_up = parameter(count, 2 * self.intermediate, hidden, dtype=FLOAT8, device=device)
        self.gate_up_scales = parameter(count, 2 * rows, columns, dtype=torch.float32, device=device)
        self.down = parameter(count, hidden, self.intermediate, dtype=FLOAT8, device=device)
        self.down_scales = parameter(count, columns, rows, dtype=torch.float32, device=device)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        size, blocks = self.intermediate, blocks_of(self.intermediate)
        for expert in range(len(self.gate_up)):
            name, codes, scales = f"{prefix}{expert}.", self.gate_up[expert], self.gate_up_scales[expert]
            yield from packed_slots(f"{name}gate_proj.weight", codes[:size], scales[:blocks])
            yield from packed_slots(f"{name}up_proj.weight", codes[size:], scales[blocks:])
            yield from packed_slots(f"{name}down_proj.weight", self.down[expert], self.down_scales[expert])
