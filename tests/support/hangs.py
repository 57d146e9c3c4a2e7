# SPDX-License-Identifier: Apache-2.0
"""Loops of a worker that stand still or break when a test says so: what a stuck kernel or a broken transport looks like."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from twinpool._core import StepPlan
from twinpool.engine.begun import BegunStep
from twinpool.engine.runner import SequenceDraw, StepResult
from twinpool.ids import WorkerKey
from twinpool.transfer.base import (
    Blocks,
    Fault,
    Generations,
    PeerDescriptor,
    ReadHandle,
    ReadState,
    TransferAgent,
    TransferError,
)
from twinpool.worker.step_ahead import AheadRunner
from twinpool.worker.step_loop import Runner


class GatedRunner:
    """Runs steps, unless its gate is shut: then the next one stands still until it is opened."""

    def __init__(self, real: Runner) -> None:
        self._real = real
        self.gate = threading.Event()
        self.gate.set()
        self.standing = False

    def swap(self, plan: StepPlan) -> None:
        self._real.swap(plan)

    def step(self, plan: StepPlan, draws: list[SequenceDraw]) -> StepResult:
        self._pass()
        return self._real.step(plan, draws)

    def begin(self, plan: StepPlan, draws: Sequence[SequenceDraw]) -> BegunStep:
        self._pass()
        return self._works_ahead.begin(plan, draws)

    def follow(self, before: BegunStep, plan: StepPlan, draws: Sequence[SequenceDraw]) -> BegunStep:
        self._pass()
        return self._works_ahead.follow(before, plan, draws)

    def may_follow(self, before: BegunStep) -> bool:
        return self._works_ahead.may_follow(before)

    def settle(self) -> None:
        self._works_ahead.settle()

    @property
    def _works_ahead(self) -> AheadRunner:
        assert isinstance(self._real, AheadRunner)
        return self._real

    def _pass(self) -> None:
        self.standing = not self.gate.is_set()
        self.gate.wait()
        self.standing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class BreakableAgent:
    """A :class:`TransferAgent` that ``mode`` breaks: "refuse" (no read is taken any more), "hang" (its thread stands still in
    it), "raise" (its thread dies of it)."""

    def __init__(self, real: TransferAgent) -> None:
        self.real = real
        self.mode = ""
        self.gate = threading.Event()

    @property
    def descriptor(self) -> PeerDescriptor:
        return self.real.descriptor

    def connect(self, peer: PeerDescriptor) -> None:
        self.real.connect(peer)

    def disconnect(self, peer: WorkerKey) -> None:
        self.real.disconnect(peer)

    def connected(self, peer: WorkerKey) -> bool:
        return self.real.connected(peer)

    def read(self, peer: WorkerKey, remote: Blocks, local: Blocks) -> ReadHandle:
        self._check()
        return self.real.read(peer, remote, local)

    def read_generations(self, peer: WorkerKey, remote: Blocks) -> ReadHandle:
        self._check()
        return self.real.read_generations(peer, remote)

    def generations(self, handle: ReadHandle) -> Generations:
        return self.real.generations(handle)

    def poll(self, handle: ReadHandle) -> ReadState:
        return self.real.poll(handle)

    def release(self, handle: ReadHandle) -> None:
        self.real.release(handle)

    def progress(self) -> None:
        if self.mode == "raise":
            raise RuntimeError("the transport broke")
        if self.mode == "hang":
            self.gate.wait()
        self.real.progress()

    def close(self) -> None:
        self.real.close()

    def _check(self) -> None:
        if self.mode == "refuse":
            raise TransferError(Fault.BACKEND, "the transport is broken")
