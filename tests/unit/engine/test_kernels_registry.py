# SPDX-License-Identifier: Apache-2.0
"""Kernels are chosen by capability and priority, and every choice can be explained."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from twinpool.engine.kernels import (
    BLOCK_MAJOR,
    REGISTRY,
    Capability,
    Kernel,
    KernelNotFoundError,
    KernelRegistry,
    Kernels,
    Requirement,
    plugins,
)

CPU = Capability("cpu")
H200 = Capability("cuda", (9, 0), frozenset({"triton"}))
L4 = Capability("cuda", (8, 9))
BOTH = frozenset({torch.float32, torch.bfloat16})
PAGES = frozenset({BLOCK_MAJOR})


def registry() -> KernelRegistry:
    found = KernelRegistry()
    hopper = Requirement(frozenset({"cuda"}), (9, 0), frozenset({"triton"}))
    both = [torch.float32, torch.bfloat16]
    for name, backend, needs, dtypes, priority in (
        ("attention", "torch", None, both, 0),
        ("attention", "hopper", hopper, [torch.bfloat16], 20),
        ("attention", "cuda", Requirement(frozenset({"cuda"})), both, 10),
        ("norm", "torch", None, both, 0),
    ):
        found.register(name, backend=backend, requires=needs, dtypes=dtypes, priority=priority)(lambda: None)
    return found


@pytest.mark.parametrize(
    ("capability", "dtype", "backend"),
    [
        (CPU, torch.float32, "torch"),
        (H200, torch.bfloat16, "hopper"),
        (H200, torch.float32, "cuda"),
        (L4, torch.bfloat16, "cuda"),
    ],
)
def test_highest_priority_that_fits_wins(capability: Capability, dtype: torch.dtype, backend: str) -> None:
    assert registry().select("attention", capability=capability, dtype=dtype).backend == backend


def test_explanation_has_a_reason_for_every_candidate() -> None:
    verdicts = registry().explain("attention", capability=L4, dtype=torch.bfloat16)
    assert [(v.kernel.backend, v.chosen) for v in verdicts] == [
        ("cuda", True),
        ("hopper", False),
        ("torch", False),
    ]
    assert verdicts[0].reason == "highest priority that fits cuda sm_89"
    assert verdicts[1].reason == "needs sm_90 or later, this is cuda sm_89"
    assert verdicts[2].reason == "priority 0 is not above cuda's 10"
    bare = Capability("cuda", (9, 0))
    assert "needs triton" in [
        v.reason for v in registry().explain("attention", capability=bare, dtype=torch.bfloat16)
    ]


def test_a_backend_can_be_demanded() -> None:
    chosen = registry().select("attention", capability=H200, dtype=torch.bfloat16, backend="torch")
    assert chosen.backend == "torch"
    with pytest.raises(KernelNotFoundError, match="hopper: needs device cuda, this is cpu"):
        registry().select("attention", capability=CPU, dtype=torch.bfloat16, backend="hopper")


def test_nothing_fits_says_why_for_each() -> None:
    with pytest.raises(KernelNotFoundError, match="torch: no float16") as caught:
        registry().select("attention", capability=CPU, dtype=torch.float16)
    assert "cuda: no float16" in str(caught.value)
    with pytest.raises(KernelNotFoundError, match="torch: no layout layer_major"):
        registry().select("norm", capability=CPU, dtype=torch.float32, layout="layer_major")
    with pytest.raises(KernelNotFoundError, match=r"no kernel for sort .*: none registered"):
        registry().select("sort", capability=CPU, dtype=torch.float32)


def test_a_backend_registers_an_operation_once() -> None:
    found = registry()
    kernel = Kernel("norm", "torch", Requirement(), frozenset(), frozenset(), 5, lambda: None)
    with pytest.raises(ValueError, match="norm of backend torch is registered twice"):
        found.add(kernel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_torch_backend_covers_every_operation(dtype: torch.dtype) -> None:
    needed = {field.name for field in dataclasses.fields(Kernels)}
    assert needed <= set(REGISTRY.operations())
    chosen = Kernels.select(REGISTRY, Capability.of("cpu"), dtype, backend="torch")
    assert Kernels.select(REGISTRY, Capability.of("cpu"), dtype) == chosen


def test_a_preferred_backend_serves_what_it_can() -> None:
    chosen = Kernels.select(REGISTRY, H200, torch.bfloat16)
    preferred = Kernels.select(REGISTRY, H200, torch.bfloat16, backend="triton")
    assert preferred.mla_paged_attention != chosen.mla_paged_attention
    assert preferred.moe == chosen.moe
    assert preferred.gqa_paged_attention == chosen.gqa_paged_attention
    with pytest.raises(
        KernelNotFoundError, match="backend triton has no kernel that fits cpu: needs device cuda"
    ):
        Kernels.select(REGISTRY, CPU, torch.bfloat16, backend="triton")
    with pytest.raises(
        KernelNotFoundError, match="backend abacus has no kernel that fits cpu: none registered"
    ):
        Kernels.select(REGISTRY, CPU, torch.bfloat16, backend="abacus")


def test_plugins_add_their_kernels_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails is left out."""

    class Entry:
        def __init__(self, name: str) -> None:
            self.name = name

        def load(self) -> Callable[[KernelRegistry], None]:
            if self.name == "broken":
                raise ImportError("no such library")
            return lambda found: found.add(Kernel("norm", self.name, Requirement(), BOTH, PAGES, 30, print))

    asked: list[str] = []

    def entries(group: str) -> list[Entry]:
        asked.append(group)
        return [Entry("other"), Entry("broken")]

    monkeypatch.setattr(plugins, "entry_points", entries)
    found = registry()
    plugins.load_plugins(found)
    plugins.load_plugins(found)
    assert asked == ["twinpool.kernels"]
    assert found.select("norm", capability=CPU, dtype=torch.float32).backend == "other"
