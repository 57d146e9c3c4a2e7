# SPDX-License-Identifier: Apache-2.0
"""Kernels by operation. Importing this package registers the built-in backends."""

from twinpool.engine.kernels import torch_backend as torch_backend
from twinpool.engine.kernels import torch_fp8 as torch_fp8
from twinpool.engine.kernels import torch_fp8_moe as torch_fp8_moe
from twinpool.engine.kernels import torch_fused as torch_fused
from twinpool.engine.kernels import triton_backend as triton_backend
from twinpool.engine.kernels.operations import AttentionResult, Kernels
from twinpool.engine.kernels.registry import (
    BLOCK_MAJOR,
    FP8_LATENT,
    REGISTRY,
    Capability,
    Kernel,
    KernelNotFoundError,
    KernelRegistry,
    Requirement,
    Verdict,
)

__all__ = [
    "BLOCK_MAJOR",
    "FP8_LATENT",
    "REGISTRY",
    "AttentionResult",
    "Capability",
    "Kernel",
    "KernelNotFoundError",
    "KernelRegistry",
    "Kernels",
    "Requirement",
    "Verdict",
]
