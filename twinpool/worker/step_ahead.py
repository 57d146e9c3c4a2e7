# SPDX-License-Identifier: Apache-2.0
"""Steps that are begun before the one before them is told: so the device need not wait for the host between two of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from twinpool._core import StepPlan
from twinpool.engine.begun import BegunStep
from twinpool.engine.runner import SequenceDraw

FOLLOWED_MAX: Final = 16
"""Steps in a row that are begun ahead: what a turn does beside its step waits for no more of them."""


@runtime_checkable
class AheadRunner(Protocol):
    """What a loop that works ahead needs of the engine's runner."""

    def begin(self, plan: StepPlan, draws: Sequence[SequenceDraw]) -> BegunStep: ...
    def may_follow(self, before: BegunStep) -> bool: ...
    def follow(self, before: BegunStep, plan: StepPlan, draws: Sequence[SequenceDraw]) -> BegunStep: ...
    def settle(self) -> None: ...


@dataclass(slots=True)
class Flight:
    """A step that has been begun."""

    plan: StepPlan
    draws: Sequence[SequenceDraw]
    step: BegunStep
    began: float
    """When the device could begin with it."""
    plan_seconds: float
    row: int = 0
    """How many in a row were begun ahead, this one included."""
