# SPDX-License-Identifier: Apache-2.0
"""Registers the Triton kernels, and those for Hopper alone. Their modules are imported when first called."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from twinpool.engine.kernels.registry import BLOCK_MAJOR, FP8_LATENT, REGISTRY, Kernel, Requirement

_CUDA = Requirement(frozenset({"cuda"}), (8, 0))
_HOPPER = Requirement(frozenset({"cuda"}), (9, 0), max_compute=(9, 0))
_PACKING = Requirement(frozenset({"cuda"}), (8, 9))
"""What converts float8 in hardware."""
_ANY = frozenset({torch.bfloat16, torch.float16, torch.float32})
_PAGES = frozenset({BLOCK_MAJOR})
_EVERY = frozenset({BLOCK_MAJOR, FP8_LATENT})


@cache
def _find(module: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(import_module(f"twinpool.engine.kernels.{module}"), name)
    return found


def _later(module: str, name: str) -> Callable[..., Any]:
    def call(*operands: Any, **options: Any) -> Any:
        return _find(module, name)(*operands, **options)

    # A CUDA graph of it can be replayed: it plans on the device.
    call.capturable = True  # type: ignore[attr-defined]
    return call


def _add(
    operation: str, module: str, layouts: frozenset[str], note: str, requires: Requirement = _CUDA
) -> None:
    function = _later(module, operation)
    REGISTRY.add(Kernel(operation, "triton", requires, _ANY, layouts, 10, function, note))


_add("mla_paged_attention", "triton_launch", _PAGES, "balanced split, merge")
_add("mla_expanded_attention", "triton_prefill", _PAGES, "expands runs of heads, online softmax")
_add("gqa_paged_attention", "triton_gqa_launch", _PAGES, "balanced split and merge, or tiles of queries")
_add("mla_rows", "triton_fused", _PAGES, "norm, rotation and store in one launch")
_add("rotary_tables", "triton_ends", _EVERY, "one launch")
_add("greedy", "triton_ends", _EVERY, "two launches")
_add("add_norm", "triton_fused", _EVERY, "one launch")
_add("silu_mul", "triton_fused", _EVERY, "one launch")
_add("fp8_linear", "triton_fp8_linear", _EVERY, "codes widened on chip; many rows packed too", _PACKING)
_add("mla_small", "triton_few_launch", _PAGES, "a layer's attention in five launches for one token, seven for more")
_add("route_small", "triton_small_launch", _EVERY, "residual, norm and scores in one launch, choice in another")
_add("route", "triton_moe", _EVERY, "scores, choice and lists in two launches")
_add("moe", "triton_moe", _EVERY, "grouped products in two launches")
_add("fp8_moe", "triton_fp8_moe", _EVERY, "codes widened on chip; many rows packed too", _PACKING)


def _add_hopper(operation: str, module: str, note: str) -> None:
    narrow = frozenset({torch.bfloat16})
    function = _later(module, operation)
    REGISTRY.add(Kernel(operation, "hopper", _HOPPER, narrow, _PAGES, 20, function, note))


_add_hopper("mla_paged_attention", "gluon_launch", "three warpgroups, bulk copies")
_add_hopper("mla_expanded_attention", "gluon_prefill", "two warpgroups and a loader, bulk copies")


def _add_packed(operation: str, note: str) -> None:
    # A backend has one kernel of an operation, and these are for the other layout.
    function = _later("triton_fp8_launch", operation)
    packed = frozenset({FP8_LATENT})
    REGISTRY.add(Kernel(operation, "triton_fp8", _PACKING, _ANY, packed, 10, function, note))


_add_packed("mla_paged_attention", "balanced split over packed rows, merge")
_add_packed("mla_expanded_attention", "unpacks, expands runs of heads, online softmax")
_add_packed("mla_rows", "norm, rotation, packing and store in one launch")
