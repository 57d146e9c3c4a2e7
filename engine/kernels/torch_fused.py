# SPDX-License-Identifier: Apache-2.0
"""Torch twins of the fused steps and of the mixture of experts: what they compute, and what serves on a CPU."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.kernels import torch_backend
from twinpool.engine.kernels.operations import ExpertWeights, MlaStep, RouterSpec, Routing
from twinpool.engine.kernels.registry import BLOCK_MAJOR, FP8_LATENT, REGISTRY
from twinpool.engine.kernels.torch_backend import DTYPES

LAYOUTS = (BLOCK_MAJOR, FP8_LATENT)


@REGISTRY.register("add_norm", backend="torch", dtypes=DTYPES, layouts=LAYOUTS, note="two operations")
def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``operations.AddNorm``."""
    if delta is not None:
        hidden = hidden + (delta if delta.dim() == 2 else delta.sum(dim=1).to(hidden.dtype))
    return hidden, F.rms_norm(hidden, hidden.shape[-1:], weight, eps)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates ``[T, n, dim]`` whose pairs are ``(i, i + dim / 2)``; see ``rotary.RotaryTables``."""
    return heads * cos + torch.roll(heads, heads.shape[-1] // 2, dims=-1) * sin


def mla_queries(step: MlaStep) -> tuple[Tensor, Tensor]:
    """The queries with room for their latent part, and the step's cache rows ``[T, latent + rope]``."""
    latent = step.weight.shape[0]
    rope = step.kv.shape[1] - latent
    out = step.query.new_empty(*step.query.shape[:2], latent + rope)
    out[..., latent:] = rotate(step.query[..., -rope:], step.cos, step.sin)
    if step.in_place:
        step.query[..., -rope:] = out[..., latent:]
    normed = F.rms_norm(step.kv[:, :latent], (latent,), step.weight, step.eps)
    return out, torch.cat((normed, rotate(step.kv[:, None, latent:], step.cos, step.sin)[:, 0]), dim=-1)


@REGISTRY.register("rotary_tables", backend="torch", dtypes=DTYPES, layouts=LAYOUTS, note="an operation each")
def rotary_tables(
    positions: Tensor, frequencies: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See ``operations.RotaryTablesOf``."""
    angles = positions.to(torch.float32)[:, None] * frequencies
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    tables = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return tables[0].to(dtype)[:, None, :], tables[1].to(dtype)[:, None, :]


@REGISTRY.register("greedy", backend="torch", dtypes=DTYPES, layouts=LAYOUTS, note="arg max")
def greedy(logits: Tensor) -> Tensor:
    """See ``operations.Greedy``."""
    tokens = logits.argmax(-1)  # the first of equals; NaN is the maximum of any row that holds it
    healthy = logits.gather(1, tokens[:, None])[:, 0].isfinite()
    return torch.stack((tokens, healthy)).to(torch.int32)


@REGISTRY.register("silu_mul", backend="torch", dtypes=DTYPES, layouts=LAYOUTS, note="two operations")
def silu_mul(both: Tensor) -> Tensor:
    """See ``operations.SiluMul``."""
    size = both.shape[-1] // 2
    return F.silu(both[..., :size]) * both[..., size:]


FP8_BLOCK = 128
"""Rows and columns of a weight that share a scale."""


def unpack_weight(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights that ``operations.Fp8Linear`` multiplies with, ``dtype[outputs, n]``."""
    wide = scales.repeat_interleave(FP8_BLOCK, 0)[: codes.shape[0]]
    wide = wide.repeat_interleave(FP8_BLOCK, 1)[:, : codes.shape[1]]
    return (codes.to(torch.float32) * wide).to(dtype)


@REGISTRY.register("fp8_linear", backend="torch", dtypes=DTYPES, layouts=LAYOUTS, note="unpacks the weights")
def fp8_linear(hidden: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """See ``operations.Fp8Linear``."""
    return F.linear(hidden, unpack_weight(codes, scales, hidden.dtype), bias)


def _keep_groups(scores: Tensor, spec: RouterSpec, *, best: int, fill: float) -> Tensor:
    """Scores with those outside the token's best groups set to ``fill``; a group counts by the sum of its ``best``
    highest scores."""
    by_group = scores.view(len(scores), spec.groups, scores.shape[1] // spec.groups)
    # transformers sums the two best always; a group of one expert has but one.
    worth = by_group.topk(min(best, by_group.shape[-1]), dim=-1).values.sum(dim=-1)
    groups = worth.topk(spec.groups_per_token, dim=-1, sorted=False).indices
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, groups, True)
    return by_group.masked_fill(~kept[..., None], fill).view_as(scores)


@REGISTRY.register("route", backend="torch", dtypes=DTYPES, layouts=LAYOUTS, note="float32 scores, topk")
def route(hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: RouterSpec) -> Routing:
    """See ``operations.Route``."""
    scores = F.linear(hidden.to(torch.float32), weight)
    if bias is not None:
        scores = scores.sigmoid()
        # The bias steers the choice (it balances load in training); it is no part of the weights.
        choice = _keep_groups(scores + bias, spec, best=2, fill=float("-inf"))
        experts = choice.topk(spec.experts_per_token, dim=-1, sorted=False).indices
        weights = scores.gather(1, experts)
    else:
        scores = scores.softmax(dim=-1)
        if spec.groups > 1:
            scores = _keep_groups(scores, spec, best=1, fill=0.0)
        weights, experts = scores.topk(spec.experts_per_token, dim=-1, sorted=False)
    if spec.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return Routing(weights * spec.scaling, experts)


@REGISTRY.register(
    "moe", backend="torch", dtypes=DTYPES, layouts=LAYOUTS, note="one product an expert that is hit"
)
def moe(hidden: Tensor, routing: Routing, experts: ExpertWeights) -> Tensor:
    """See ``operations.Moe``."""
    total = grouped(
        hidden, routing, len(experts.down), lambda expert: (experts.gate_up[expert], experts.down[expert])
    )
    if experts.shared_gate_up is not None and experts.shared_down is not None:
        total = total + F.linear(silu_mul(F.linear(hidden, experts.shared_gate_up)), experts.shared_down)
    return total


def grouped(
    hidden: Tensor, routing: Routing, experts: int, weights_of: Callable[[int], tuple[Tensor, Tensor]]
) -> Tensor:
    """What the routed experts make of ``hidden [T, size]``, ``weights_of`` an expert being ``[2 n, size]`` and ``[size, n]``.
    Tokens are sorted by expert, so each expert that is hit runs once."""
    per_token = routing.experts.shape[1]
    flat = routing.experts.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts).tolist()
    inputs = hidden.index_select(0, order // per_token)
    outputs = torch.empty_like(inputs)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            gate_up, down = weights_of(expert)
            outputs[rows] = F.linear(silu_mul(F.linear(inputs[rows], gate_up)), down)
            start += count
    # Back in the tokens' order, so that the sum over a token's experts does not depend on the others.
    unsorted = torch.empty_like(outputs)
    unsorted[order] = outputs
    shaped = unsorted.view(len(hidden), per_token, hidden.shape[-1])
    return (shaped * routing.weights.to(hidden.dtype)[..., None]).sum(dim=1)


@REGISTRY.register("mla_rows", backend="torch", dtypes=DTYPES, note="norm, rotation, indexed store")
def mla_rows(step: MlaStep, pages: Tensor, batch: AttentionBatch) -> Tensor:
    """See ``operations.MlaRows``."""
    queries, rows = mla_queries(step)
    torch_backend.write_kv(pages, rows, batch)
    return queries
