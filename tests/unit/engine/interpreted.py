# SPDX-License-Identifier: Apache-2.0
"""Models of Triton's kernels on this CPU."""

import dataclasses

from twinpool.engine.kernels import REGISTRY, KernelRegistry, Kernels, Requirement


def interpreted() -> KernelRegistry:
    """The built-in kernels, with those of Triton preferred on this CPU."""
    found = KernelRegistry()
    needed = {field.name for field in dataclasses.fields(Kernels)}
    for kernel in REGISTRY.kernels():
        if kernel.operation in needed and kernel.backend == "torch":
            found.add(kernel)
        elif kernel.backend == "triton":
            found.add(dataclasses.replace(kernel, requires=Requirement()))
    return found
