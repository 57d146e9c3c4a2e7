# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts as DeepSeek V2 and V3 have it: routing, routed experts, shared experts."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinpool.engine.config import MoeConfig
from twinpool.engine.models.layers import GatedMlp
from twinpool.engine.models.weights import WeightSlot, parameter


class Router(nn.Module):
    """Chooses the experts of each token. Scores are float32 whatever the model's dtype."""

    def __init__(self, config: MoeConfig, hidden: int, *, device: torch.device | str) -> None:
        super().__init__()
        self.config = config
        self.weight = parameter(config.num_experts, hidden, dtype=torch.float32, device=device)
        corrected = config.routing == "noaux_tc"
        self.bias = parameter(config.num_experts, dtype=torch.float32, device=device) if corrected else None

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """``hidden [T, hidden]`` -> weights ``float32[T, k]`` and experts ``int64[T, k]``."""
        config = self.config
        scores = F.linear(hidden.to(torch.float32), self.weight)
        if self.bias is not None:
            scores = scores.sigmoid()
            # The bias steers the choice (it balances load in training); it is no part of the weights.
            choice = self._keep_groups(scores + self.bias, best=2, fill=float("-inf"))
            experts = choice.topk(config.experts_per_token, dim=-1, sorted=False).indices
            weights = scores.gather(1, experts)
        else:
            scores = scores.softmax(dim=-1)
            if config.routing == "group_limited_greedy":
                scores = self._keep_groups(scores, best=1, fill=0.0)
            weights, experts = scores.topk(config.experts_per_token, dim=-1, sorted=False)
        if config.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * config.routed_scaling_factor, experts

    def _keep_groups(self, scores: Tensor, *, best: int, fill: float) -> Tensor:
        """Scores with those outside the token's best groups set to ``fill``; a group counts by the sum of its
        ``best`` highest scores."""
        config = self.config
        by_group = scores.view(len(scores), config.num_groups, config.num_experts // config.num_groups)
        # transformers sums the two best always; a group of one expert has but one.
        worth = by_group.topk(min(best, by_group.shape[-1]), dim=-1).values.sum(dim=-1)
        groups = worth.topk(config.groups_per_token, dim=-1, sorted=False).indices
        kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, groups, True)
        return by_group.masked_fill(~kept[..., None], fill).view_as(scores)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}weight", self.weight)
        if self.bias is not None:
            yield WeightSlot(f"{prefix}e_score_correction_bias", self.bias)


class Experts(nn.Module):
    """Routed experts. Tokens are sorted by expert, so each expert that is hit runs once."""

    def __init__(
        self, config: MoeConfig, hidden: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        count, self.intermediate = config.num_experts, config.intermediate_size
        self.gate_up = parameter(count, 2 * self.intermediate, hidden, dtype=dtype, device=device)
        self.down = parameter(count, hidden, self.intermediate, dtype=dtype, device=device)

    def forward(self, hidden: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """``hidden [T, hidden]``, ``weights float32[T, k]``, ``experts int64[T, k]`` -> ``[T, hidden]``."""
        per_token = experts.shape[1]
        order = experts.reshape(-1).argsort(stable=True)
        counts = torch.bincount(experts.reshape(-1), minlength=len(self.gate_up)).tolist()
        inputs = hidden.index_select(0, order // per_token)
        outputs = torch.empty_like(inputs)
        start = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            rows = slice(start, start + count)
            both = F.linear(inputs[rows], self.gate_up[expert])
            active = F.silu(both[:, : self.intermediate]) * both[:, self.intermediate :]
            outputs[rows] = F.linear(active, self.down[expert])
            start += count
        # Back in the tokens' order, so that the sum over a token's experts does not depend on the others.
        unsorted = torch.empty_like(outputs)
        unsorted[order] = outputs
        shaped = unsorted.view(len(hidden), per_token, hidden.shape[-1])
        return (shaped * weights.to(hidden.dtype)[..., None]).sum(dim=1)

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
        self, config: MoeConfig, hidden: int, *, bias: bool, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.router = Router(config, hidden, device=device)
        self.experts = Experts(config, hidden, dtype=dtype, device=device)
        shared = config.num_shared_experts * config.intermediate_size
        self.shared = GatedMlp(hidden, shared, bias=bias, dtype=dtype, device=device) if shared else None

    def forward(self, hidden: Tensor) -> Tensor:
        weights, experts = self.router(hidden)
        routed: Tensor = self.experts(hidden, weights, experts)
        return routed if self.shared is None else routed + self.shared(hidden)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.router.slots(f"{prefix}gate.")
        yield from self.experts.slots(f"{prefix}experts.")
        if self.shared is not None:
            yield from self.shared.slots(f"{prefix}shared_experts.")
