# SPDX-License-Identifier: Apache-2.0
"""Kernels are registered, not imported: chosen by what the machine can do and by priority, and explainable."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

BLOCK_MAJOR = "block_major"
"""Pages of one layer are ``[blocks, block_tokens, width]`` with any block stride; a page is contiguous."""

FP8_LATENT = "fp8_latent"
"""As ``BLOCK_MAJOR``, with rows packed: pages are ``uint8[blocks, block_tokens, row_bytes]``, see
``engine.kv.formats.Fp8LatentRows``."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Capability:
    """What a device can do. ``compute`` is CUDA's (major, minor), ``(0, 0)`` elsewhere."""

    device: str
    compute: tuple[int, int] = (0, 0)
    features: frozenset[str] = frozenset()

    @classmethod
    def of(cls, device: torch.device | str) -> "Capability":
        """Asks torch about ``device``."""
        found = torch.device(device)
        if found.type == "cuda":
            return cls("cuda", torch.cuda.get_device_capability(found))
        return cls(found.type)

    def __str__(self) -> str:
        compute = f" sm_{self.compute[0]}{self.compute[1]}" if self.compute != (0, 0) else ""
        return f"{self.device}{compute}"


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a kernel needs. An empty ``devices`` means any; ``max_compute`` is for instructions that later devices lack."""

    devices: frozenset[str] = frozenset()
    min_compute: tuple[int, int] = (0, 0)
    features: frozenset[str] = frozenset()
    max_compute: tuple[int, int] | None = None

    def unmet(self, capability: Capability) -> str | None:
        """Why ``capability`` is not enough; None if it is."""
        if self.devices and capability.device not in self.devices:
            return f"needs device {' or '.join(sorted(self.devices))}, this is {capability.device}"
        if capability.compute < self.min_compute:
            return f"needs sm_{self.min_compute[0]}{self.min_compute[1]} or later, this is {capability}"
        if self.max_compute is not None and capability.compute > self.max_compute:
            return f"needs sm_{self.max_compute[0]}{self.max_compute[1]} or earlier, this is {capability}"
        missing = self.features - capability.features
        return f"needs {', '.join(sorted(missing))}" if missing else None


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of an operation. Higher ``priority`` wins among those that fit."""

    operation: str
    backend: str
    requires: Requirement
    dtypes: frozenset[torch.dtype]
    layouts: frozenset[str]
    priority: int
    function: Callable[..., Any]
    note: str = ""

    def unmet(self, capability: Capability, dtype: torch.dtype, layout: str) -> str | None:
        """Why this kernel does not fit; None if it does."""
        if dtype not in self.dtypes:
            return f"no {str(dtype).removeprefix('torch.')}"
        if layout not in self.layouts:
            return f"no layout {layout}"
        return self.requires.unmet(capability)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of an explanation."""

    kernel: Kernel
    chosen: bool
    reason: str


class KernelNotFoundError(LookupError):
    """No registered kernel fits; the message says why for each."""


class KernelRegistry:
    """All kernels of a process. Registration order does not matter."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[str, str], Kernel] = {}

    def add(self, kernel: Kernel) -> None:
        """Raises ValueError if the operation already has a kernel of that backend."""
        key = (kernel.operation, kernel.backend)
        if key in self._kernels:
            raise ValueError(f"kernel {kernel.operation} of backend {kernel.backend} is registered twice")
        self._kernels[key] = kernel

    def register(
        self,
        operation: str,
        *,
        backend: str,
        dtypes: Iterable[torch.dtype],
        requires: Requirement | None = None,
        layouts: Iterable[str] = (BLOCK_MAJOR,),
        priority: int = 0,
        note: str = "",
    ) -> Callable[[F], F]:
        """Decorator form of ``add``."""

        def wrap(function: F) -> F:
            needs = requires or Requirement()
            kinds, forms = frozenset(dtypes), frozenset(layouts)
            self.add(Kernel(operation, backend, needs, kinds, forms, priority, function, note))
            return function

        return wrap

    def operations(self) -> list[str]:
        """Names of all operations that have a kernel."""
        return sorted({operation for operation, _ in self._kernels})

    def kernels(self) -> list[Kernel]:
        """All of them, by operation, the preferred ones first."""
        return sorted(self._kernels.values(), key=lambda k: (k.operation, -k.priority, k.backend))

    def explain(
        self,
        operation: str,
        *,
        capability: Capability,
        dtype: torch.dtype,
        layout: str = BLOCK_MAJOR,
        backend: str | None = None,
    ) -> list[Verdict]:
        """Every kernel of the operation, the chosen one first, each with the reason. ``backend`` admits only that one."""
        candidates = [kernel for kernel in self._kernels.values() if kernel.operation == operation]
        candidates.sort(key=lambda kernel: (-kernel.priority, kernel.backend))
        verdicts: list[Verdict] = []
        winner: Kernel | None = None
        for kernel in candidates:
            reason = kernel.unmet(capability, dtype, layout)
            if reason is None and backend is not None and kernel.backend != backend:
                reason = f"backend {backend} was asked for"
            if reason is None and winner is not None:
                reason = f"priority {kernel.priority} is not above {winner.backend}'s {winner.priority}"
            if reason is None:
                winner = kernel
                reason = f"highest priority that fits {capability}" if backend is None else "asked for"
            verdicts.append(Verdict(kernel, kernel is winner, reason))
        return sorted(verdicts, key=lambda verdict: not verdict.chosen)

    def select(
        self,
        operation: str,
        *,
        capability: Capability,
        dtype: torch.dtype,
        layout: str = BLOCK_MAJOR,
        backend: str | None = None,
    ) -> Kernel:
        """The kernel to use. Raises KernelNotFoundError saying why each candidate was refused."""
        verdicts = self.explain(operation, capability=capability, dtype=dtype, layout=layout, backend=backend)
        if verdicts and verdicts[0].chosen:
            return verdicts[0].kernel
        why = (
            "; ".join(f"{verdict.kernel.backend}: {verdict.reason}" for verdict in verdicts)
            or "none registered"
        )
        raise KernelNotFoundError(f"no kernel for {operation} on {capability} with {dtype}: {why}")

    def find(
        self, operation: str, capability: Capability, dtype: torch.dtype, layout: str = BLOCK_MAJOR
    ) -> Callable[..., Any] | None:
        """The kernel of highest priority that fits, for an operation that nobody depends on; None if there is none."""
        verdicts = self.explain(operation, capability=capability, dtype=dtype, layout=layout)
        return verdicts[0].kernel.function if verdicts and verdicts[0].chosen else None


REGISTRY = KernelRegistry()
"""The process's kernels. Import ``twinpool.engine.kernels`` to have the built-in ones in it."""
