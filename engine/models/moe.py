# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts as DeepSeek V2 and V3 have it: routing, routed experts, shared experts."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from twinpool.engine.config import MoeConfig
from twinpool.engine.kernels import Kernels
from twinpool.engine.kernels.operations import ExpertWeights, Fp8ExpertWeights, Fp8Weight, RouterSpec, Routing
from twinpool.engine.models.layers import FusedLinear, GatedMlp
from twinpool.engine.models.packed import PackedExperts, PackedLinear
from twinpool.engine.models.weights import WeightSlot, parameter


class Router(nn.Module):
    """What chooses the experts of each token. Its weights are float32 whatever the model's dtype."""

    def __init__(self, config: MoeConfig, hidden: int, *, device: torch.device | str) -> None:
        super().__init__()
        limited = config.routing != "greedy"
        self.spec = RouterSpec(
            experts_per_token=config.experts_per_token,
            groups=config.num_groups if limited else 1,
            groups_per_token=config.groups_per_token if limited else 1,
            normalize=config.normalize,
            scaling=config.routed_scaling_factor,
        )
        self.weight = parameter(config.num_experts, hidden, dtype=torch.float32, device=device)
        corrected = config.routing == "noaux_tc"
        self.bias = parameter(config.num_experts, dtype=torch.float32, device=device) if corrected else None

    @property
    def plain(self) -> bool:
        """Whether scores are a softmax over all experts."""
        return self.bias is None and self.spec.groups == 1

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}weight", self.weight)
        if self.bias is not None:
            yield WeightSlot(f"{prefix}e_score_correction_bias", self.bias)


class Experts(nn.Module):
    """The weights of the routed experts."""

    def __init__(
        self, config: MoeConfig, hidden: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        count, self.intermediate = config.num_experts, config.intermediate_size
        self.gate_up = parameter(count, 2 * self.intermediate, hidden, dtype=dtype, device=device)
        self.down = parameter(count, hidden, self.intermediate, dtype=dtype, device=device)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        size = self.intermediate
        for expert in range(len(self.gate_up)):
            name = f"{prefix}{expert}."
            yield WeightSlot(f"{name}gate_proj.weight", self.gate_up[expert, :size])
            yield WeightSlot(f"{name}up_proj.weight", self.gate_up[expert, size:])
            yield WeightSlot(f"{name}down_proj.weight", self.down[expert])


class MoeMlp(nn.Module):
    """Routed experts plus the shared ones that every token runs through."""

    def __init__(
        self,
        config: MoeConfig,
        hidden: int,
        kernels: Kernels,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        float8: bool = False,
    ) -> None:
        super().__init__()
        self.kernels = kernels
        self.router = Router(config, hidden, device=device)
        self.experts: Experts | PackedExperts
        if float8:
            self.experts = PackedExperts(config, hidden, device=device)
        else:
            self.experts = Experts(config, hidden, dtype=dtype, device=device)
        shared = config.num_shared_experts * config.intermediate_size
        self.shared: GatedMlp | None = None
        if shared:
            self.shared = GatedMlp(
                hidden, shared, kernels, bias=bias, dtype=dtype, device=device, float8=float8
            )

    def forward(self, hidden: Tensor) -> Tensor:
        """``[T, hidden]`` -> ``[T, hidden]``, or ``[T, parts, hidden]`` to be summed."""
        return self.mix(
            hidden, self.kernels.route(hidden, self.router.weight, self.router.bias, self.router.spec)
        )

    def mix(self, hidden: Tensor, routing: Routing) -> Tensor:
        """What the experts that ``routing`` names make of ``hidden``; as ``forward``."""
        apart = self.shared is not None and self.shared.biased
        experts = None if apart else self.shared
        if isinstance(self.experts, PackedExperts):
            routed = self.kernels.fp8_moe(hidden, routing, _packed_weights(self.experts, experts))
        else:
            routed = self.kernels.moe(hidden, routing, _weights(self.experts, experts))
        return total(routed) + self.shared(hidden) if apart and self.shared is not None else routed

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.router.slots(f"{prefix}gate.")
        yield from self.experts.slots(f"{prefix}experts.")
        if self.shared is not None:
            yield from self.shared.slots(f"{prefix}shared_experts.")


def _weights(experts: Experts, shared: GatedMlp | None) -> ExpertWeights:
    if shared is None:
        return ExpertWeights(experts.gate_up, experts.down)
    assert isinstance(shared.gate_up, FusedLinear)
    assert isinstance(shared.down, FusedLinear)
    return ExpertWeights(experts.gate_up, experts.down, shared.gate_up.weight, shared.down.weight)


def _packed_weights(experts: PackedExperts, shared: GatedMlp | None) -> Fp8ExpertWeights:
    gate_up = Fp8Weight(experts.gate_up, experts.gate_up_scales)
    down = Fp8Weight(experts.down, experts.down_scales)
    if shared is None:
        return Fp8ExpertWeights(gate_up, down)
    assert isinstance(shared.gate_up, PackedLinear)
    assert isinstance(shared.down, PackedLinear)
    return Fp8ExpertWeights(gate_up, down, shared.gate_up.weight, shared.down.weight)


def total(delta: Tensor) -> Tensor:
    """``[T, size]`` of what may still be in parts."""
    return delta if delta.dim() == 2 else delta.sum(dim=1)
