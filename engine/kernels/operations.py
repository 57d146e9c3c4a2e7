# SPDX-License-Identifier: Apache-2.0
"""The operations that kernels implement: exact signatures, shapes and edge cases.

Common to all: ``pages`` is one layer of the pool, ``[blocks, block_tokens, width]``, whose block stride may be
larger than a page; in the layout ``fp8_latent`` its rows are packed bytes. Causality is aligned at the end: query
token ``j`` of ``q_len`` sees the first
``context - q_len + j + 1`` KV entries. A query that sees nothing (``context`` 0, or ``q_len > context``) has output
0 and LSE ``-inf``. KV entries outside ``context`` may hold anything, NaN included, and never leak into a result.
LSE is the natural logarithm of the sum of exponentials of the scaled scores. Sums are accumulated in float32
(float64 for float64 inputs); outputs have the query's dtype and LSE is float32 (or float64).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from twinpool.engine.batch import AttentionBatch
from twinpool.engine.kernels.registry import BLOCK_MAJOR, Capability, KernelNotFoundError, KernelRegistry


class AttentionResult(NamedTuple):
    """``output [T, heads, dim]``; ``lse [T, heads]`` if it was asked for."""

    output: Tensor
    lse: Tensor | None


class WriteKV(Protocol):
    """Stores ``rows [T, width]`` at ``batch.slots``. The first ``latent_dim`` values are the latent: a layout may store
    them in another form than the rest."""

    def __call__(self, pages: Tensor, rows: Tensor, batch: AttentionBatch, *, latent_dim: int) -> None: ...


class MlaPagedAttention(Protocol):
    """Absorbed attention: every head scores whole cache rows and sums their first ``latent_dim`` values.

    ``query [T, heads, width]`` (not scaled) -> output ``[T, heads, latent_dim]``. The first ``score_from`` values of
    every query are known to be zero, so a kernel may leave those columns out of the scores.
    """

    def __call__(
        self,
        query: Tensor,
        pages: Tensor,
        batch: AttentionBatch,
        *,
        latent_dim: int,
        scale: float,
        score_from: int = 0,
        with_lse: bool = False,
    ) -> AttentionResult: ...


class MlaExpandedAttention(Protocol):
    """The same attention with keys and values expanded from the latent, for prefill: cheaper when queries are many.

    ``query [T, heads, nope + rope]``; ``expand_keys [heads, nope, latent]`` and ``expand_values [heads, v, latent]``
    are the two halves of ``kv_b_proj``; output ``[T, heads, v]``. Equal to the absorbed form up to rounding.
    """

    def __call__(
        self,
        query: Tensor,
        pages: Tensor,
        batch: AttentionBatch,
        *,
        expand_keys: Tensor,
        expand_values: Tensor,
        scale: float,
        with_lse: bool = False,
    ) -> AttentionResult: ...


class GqaPagedAttention(Protocol):
    """Grouped-query attention over rows ``[V of all KV heads | K of all KV heads]``.

    ``query [T, heads, head_dim]`` -> output ``[T, heads, head_dim]``; head ``h`` uses KV head
    ``h // (heads / kv_heads)``.
    """

    def __call__(
        self,
        query: Tensor,
        pages: Tensor,
        batch: AttentionBatch,
        *,
        kv_heads: int,
        scale: float,
        with_lse: bool = False,
    ) -> AttentionResult: ...


class MergeAttention(Protocol):
    """Joins attention over disjoint parts of the context.

    ``outputs [parts, T, heads, dim]``, ``lse [parts, T, heads]`` -> what one pass over all parts would give. An empty
    part (LSE ``-inf``) changes nothing, whatever its output holds.
    """

    def __call__(self, outputs: Tensor, lse: Tensor) -> AttentionResult: ...


@dataclass(frozen=True, slots=True)
class MlaStep:
    """What a step of latent attention starts from.

    ``query [T, heads, nope + rope]`` and ``kv [T, latent + rope]`` as projected; ``weight [latent]`` and ``eps`` of the
    latent's norm; ``cos`` and ``sin [T, 1, rope]`` as in ``rotary.RotaryTables``. ``in_place``: the rotated parts take
    their places in ``query`` too, for attention with expanded keys.
    """

    query: Tensor
    kv: Tensor
    weight: Tensor
    eps: float
    cos: Tensor
    sin: Tensor
    in_place: bool = False


class MlaRows(Protocol):
    """Norms the latents, rotates keys and queries, and stores the cache rows at ``batch.slots``.

    Returns ``[T, heads, latent + rope]`` whose last ``rope`` columns are the rotated queries; the others are left for
    the absorbed ones. A kernel for devices stores nothing for slot -1, which pads the batch of a graph.
    """

    def __call__(self, step: MlaStep, pages: Tensor, batch: AttentionBatch) -> Tensor: ...


class AddNorm(Protocol):
    """``(total, total / rms(total) * weight)`` with ``total = hidden + delta``, rounded, all ``[T, size]``.

    ``delta [T, parts, size]`` is summed over its parts first; None adds nothing, and ``hidden`` itself comes back.
    """

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...


class RotaryTablesOf(Protocol):
    """``positions int64[T]``, ``frequencies float32[rope / 2]`` -> cosines and signed sines times ``scaling``,
    ``[T, 1, rope]`` of ``dtype`` each, as ``rotary.RotaryTables`` holds them. Angles are float32."""

    def __call__(
        self, positions: Tensor, frequencies: Tensor, scaling: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]: ...


class Greedy(Protocol):
    """``logits [m, vocab]`` -> ``int32[2, m]``: the first token of the greatest logit, and 1 if that is finite and no logit
    NaN, else 0 (then the token means nothing)."""

    def __call__(self, logits: Tensor) -> Tensor: ...


class SiluMul(Protocol):
    """``both [T, 2 n]`` -> ``silu(both[:, :n]) * both[:, n:]``."""

    def __call__(self, both: Tensor) -> Tensor: ...


class Fp8Weight(NamedTuple):
    """Weights in float8, as DeepSeek's checkpoints hold them: a weight is its code times the scale of its block of 128 rows
    and columns, and the last block of each may be partial.

    ``codes float8_e4m3fn[.., outputs, n]`` and ``scales float32[.., outputs / 128, n / 128]``, both rounded up. Where the rows
    are ``[gate | up]``, so are the rows of the scales, each half rounded up by itself.
    """

    codes: Tensor
    scales: Tensor


class Fp8Linear(Protocol):
    """``hidden [T, n]`` times ``Fp8Weight`` -> ``[T, outputs]`` of its dtype. A kernel may round ``hidden`` to float8 too, a
    scale for each 128 values of a row."""

    def __call__(
        self, hidden: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How experts are chosen; see ``config.MoeConfig``. One group means none."""

    experts_per_token: int
    groups: int
    groups_per_token: int
    normalize: bool
    scaling: float


class Routing(NamedTuple):
    """Weights ``float32[T, k]`` and experts ``int[T, k]``; ``lists`` is what a backend's router leaves for its experts, good
    for one call of ``Moe``."""

    weights: Tensor
    experts: Tensor
    lists: tuple[Tensor, Tensor, Tensor] | None = None


class Route(Protocol):
    """``hidden [T, n]``, ``weight float32[experts, n]`` -> the experts of each token.

    Scores are float32: a softmax, or sigmoids with ``bias float32[experts]``, which steers the choice alone.
    """

    def __call__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: RouterSpec) -> Routing: ...


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """``gate_up [experts, 2 n, hidden]`` and ``down [experts, hidden, n]``, rows ``[gate | up]``; the shared experts, which
    every token runs through, as one MLP ``[2 m, hidden]`` and ``[hidden, m]``, or None."""

    gate_up: Tensor
    down: Tensor
    shared_gate_up: Tensor | None = None
    shared_down: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MlaLayer:
    """What a layer of latent attention multiplies with: ``norm [size]``, ``down [heads (nope + rope) + latent + rope,
    size]``, ``kv_norm [latent]``, ``up [heads, nope + v, latent]``, ``output [size, heads v]``; and its numbers."""

    norm: Tensor
    norm_eps: float
    down: Tensor
    kv_norm: Tensor
    kv_eps: float
    up: Tensor
    output: Tensor
    nope: int
    rope: int
    scale: float


class MlaSmall(Protocol):
    """Residual, norm and latent attention of a layer for few tokens, one of each sequence.

    ``hidden [T, size]`` and parts still to be added, ``[T, parts, size]`` or ``[T, size]``, None for none -> their sum and
    what attention adds to it, again maybe in parts. Stores the tokens' cache rows, none for slot -1. ``cos`` and ``sin``
    as in ``MlaStep``; ``attention`` serves where no kernel is fitted in.
    """

    def __call__(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        layer: MlaLayer,
        cos: Tensor,
        sin: Tensor,
        pages: Tensor,
        batch: AttentionBatch,
        attention: MlaPagedAttention,
    ) -> tuple[Tensor, Tensor]: ...


class RouteSmall(Protocol):
    """``AddNorm`` of ``delta [T, size]`` and ``Route`` by a softmax without groups, for very few tokens: the sum, its norm,
    and the experts."""

    def __call__(
        self, hidden: Tensor, delta: Tensor, norm: Tensor, eps: float, router: Tensor, spec: RouterSpec
    ) -> tuple[Tensor, Tensor, Routing]: ...


class Moe(Protocol):
    """``hidden [T, size]`` -> ``[T, size]``, or ``[T, parts, size]`` to be summed over its parts (see ``AddNorm``)."""

    def __call__(self, hidden: Tensor, routing: Routing, experts: ExpertWeights) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Fp8ExpertWeights:
    """As ``ExpertWeights``, in float8. The blocks of each expert begin at its own first row."""

    gate_up: Fp8Weight
    down: Fp8Weight
    shared_gate_up: Fp8Weight | None = None
    shared_down: Fp8Weight | None = None


class Fp8Moe(Protocol):
    """As ``Moe`` with weights in float8. A kernel may round what it multiplies them with to float8 too, as ``Fp8Linear``."""

    def __call__(self, hidden: Tensor, routing: Routing, experts: Fp8ExpertWeights) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels that a model runs with, one for each operation; None for a shortcut that no kernel offers."""

    write_kv: WriteKV
    mla_paged_attention: MlaPagedAttention
    mla_expanded_attention: MlaExpandedAttention
    gqa_paged_attention: GqaPagedAttention
    merge_attention: MergeAttention
    mla_rows: MlaRows
    rotary_tables: RotaryTablesOf
    greedy: Greedy
    add_norm: AddNorm
    silu_mul: SiluMul
    fp8_linear: Fp8Linear
    route: Route
    moe: Moe
    fp8_moe: Fp8Moe
    mla_small: MlaSmall | None = None
    route_small: RouteSmall | None = None

    @classmethod
    def select(
        cls,
        registry: KernelRegistry,
        capability: Capability,
        dtype: torch.dtype,
        *,
        layout: str = BLOCK_MAJOR,
        backend: str | None = None,
    ) -> "Kernels":
        """The kernels of ``backend`` where it has one that fits, the others by priority; None: all by priority.

        Raises KernelNotFoundError if an operation has no kernel that fits, or ``backend`` none for any.
        """
        refused: list[str] = []
        taken = 0

        def find(operation: str) -> object:
            nonlocal taken
            if backend is not None:
                verdicts = registry.explain(
                    operation, capability=capability, dtype=dtype, layout=layout, backend=backend
                )
                if verdicts and verdicts[0].chosen:
                    taken += 1
                    return verdicts[0].kernel.function
                refused.extend(verdict.reason for verdict in verdicts if verdict.kernel.backend == backend)
            return registry.select(operation, capability=capability, dtype=dtype, layout=layout).function

        def shortcut(operation: str) -> object:
            verdicts = registry.explain(
                operation, capability=capability, dtype=dtype, layout=layout, backend=backend
            )
            return verdicts[0].kernel.function if verdicts and verdicts[0].chosen else None

        found = replace(
            cls._of(find),
            mla_small=cast(MlaSmall | None, shortcut("mla_small")),
            route_small=cast(RouteSmall | None, shortcut("route_small")),
        )
        if backend is not None and not taken:
            why = "; ".join(dict.fromkeys(refused)) or "none registered"
            raise KernelNotFoundError(f"backend {backend} has no kernel that fits {capability}: {why}")
        return found

    @classmethod
    def _of(cls, find: Callable[[str], object]) -> "Kernels":
        return cls(
            write_kv=cast(WriteKV, find("write_kv")),
            mla_paged_attention=cast(MlaPagedAttention, find("mla_paged_attention")),
            mla_expanded_attention=cast(MlaExpandedAttention, find("mla_expanded_attention")),
            gqa_paged_attention=cast(GqaPagedAttention, find("gqa_paged_attention")),
            merge_attention=cast(MergeAttention, find("merge_attention")),
            mla_rows=cast(MlaRows, find("mla_rows")),
            rotary_tables=cast(RotaryTablesOf, find("rotary_tables")),
            greedy=cast(Greedy, find("greedy")),
            add_norm=cast(AddNorm, find("add_norm")),
            silu_mul=cast(SiluMul, find("silu_mul")),
            fp8_linear=cast(Fp8Linear, find("fp8_linear")),
            route=cast(Route, find("route")),
            moe=cast(Moe, find("moe")),
            fp8_moe=cast(Fp8Moe, find("fp8_moe")),
        )
