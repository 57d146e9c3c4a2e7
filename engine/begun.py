# SPDX-License-Identifier: Apache-2.0
"""A step that runs while the host does something else: its greedy choice stays on the device, where the next step finds it, and
is fetched beside."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twinpool.engine.sampling import Sample
from twinpool.engine.step import StepResult


@dataclass(frozen=True, slots=True)
class BegunStep:
    """What ``ModelRunner.begin`` and ``follow`` return."""

    finish: Callable[[], StepResult]
    """Waits for the step, appends what it has drawn to its draws, and says so as ``ModelRunner.step`` does. To be called once, and
    in the order in which steps were begun."""
    best: Tensor | None = None
    """The greedy choice on the device, valid until one more step is begun; None: nothing can follow."""
    longest: int = 0
    """Tokens of its longest sequence."""


def fetch(best: Tensor) -> Callable[[], Sample]:
    """Orders ``best int32[2, n]`` (``operations.Greedy``) to the host; the result waits for it."""
    if best.device.type == "cpu":
        return lambda: _sample(best)
    host = torch.empty(best.shape, dtype=best.dtype, pin_memory=True)
    host.copy_(best, non_blocking=True)
    fetched = torch.cuda.Event()  # type: ignore[no-untyped-call]
    fetched.record()

    def wait() -> Sample:
        fetched.synchronize()
        return _sample(host)

    return wait


def _sample(best: Tensor) -> Sample:
    chosen, finite = best.numpy()
    failed = finite == 0
    return Sample(np.where(failed, np.int32(0), chosen), None, failed)
