# SPDX-License-Identifier: Apache-2.0
"""Every step of every operation, and a control process that sends a signal exactly there: SIGKILL to itself, or another one to etcd or
to a worker.

``ENTRY`` runs a control process; the file that ``KILL_VARIABLE`` names says where one of those that share it does so: kind, step and
moment, as ``arm`` writes them. It is gone before the signal is sent. The moments: "begun", the step is recorded and nothing of it
was done; "done", all of it was done and nothing of that is recorded.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

from twinpool.control.operations import Operations
from twinpool.v1 import control_pb2 as pb

KILL_VARIABLE: Final = "TWINPOOL_TEST_KILL"

ENTRY: Final = """
import sys
from tests.support.kill_points import install
from twinpool.config import load_config
from twinpool.launch import run_process
install()
sys.exit(run_process("control", load_config()))
"""

STEPS: Final[Mapping[str, tuple[str, ...]]] = {
    "drain": ("ask", "leave", "end"),
    "restart": ("ask", "leave", "end", "start", "ready"),
    "flip": ("write", "ask", "drain", "commit"),
    "scale": ("write", "converge"),
    "rebalance": ("flip", "scale"),
}
"""A test holds it against the code: a new step needs its cases."""

MOMENTS: Final = ("begun", "done")

POINTS: Final = [
    (kind, step, moment) for kind, steps in STEPS.items() for step in steps for moment in MOMENTS
]

Step = Callable[[pb.Operation], Awaitable[None]]


def kind_name(kind: int) -> str:
    """As ``STEPS`` has it."""
    return pb.OperationKind.Name(kind).removeprefix("OPERATION_KIND_").lower()  # type: ignore[arg-type]


def arm(path: Path, kind: str, step: str, moment: str, pid: int = 0, number: int = signal.SIGKILL) -> None:
    """The next control process that comes there sends a signal: to ``pid``, or to itself (0)."""
    part = path.with_suffix(".part")
    part.write_text(f"{kind} {step} {moment} {pid} {number}")
    part.rename(path)


def install() -> None:
    """Makes all control processes of this Python end where they are told to."""
    spawn = Operations._spawn
    wrapped: set[int] = set()

    def spawn_wrapped(self: Operations, operation: pb.Operation) -> None:
        if id(self) not in wrapped:
            wrapped.add(id(self))
            for kind, steps in self._steps.items():
                self._steps[kind] = {name: _killing(kind_name(kind), name, do) for name, do in steps.items()}
        spawn(self, operation)

    Operations._spawn = spawn_wrapped  # type: ignore[method-assign]


def _killing(kind: str, name: str, do: Step) -> Step:
    async def step(operation: pb.Operation) -> None:
        _signal_at(kind, name, "begun")
        await do(operation)
        _signal_at(kind, name, "done")

    return step


def _signal_at(*here: str) -> None:
    path = Path(os.environ[KILL_VARIABLE])
    words = path.read_text().split() if path.exists() else []
    if words[:3] == list(here):
        path.unlink()
        os.kill(int(words[3]) or os.getpid(), int(words[4]))
