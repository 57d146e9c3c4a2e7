# SPDX-License-Identifier: Apache-2.0
"""What ``twinpool top`` knows, and what a key does to it. No terminal and no network: both are beside it."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from twinpool.control.cli.top_view import (
    COLUMNS,
    headline,
    operations_table,
    pools_table,
    routers_table,
    sort_workers,
    workers_table,
)
from twinpool.v1 import control_pb2 as pb


@dataclass(frozen=True, slots=True)
class Act:
    """Something that can be done to the chosen worker. ``rpc``: the method, whose request is RPC + "Request"."""

    key: str
    rpc: str
    label: str
    question: str


ACTS: Final = (
    Act("d", "DrainWorker", "drain", "Take {worker} out for good?"),
    Act("R", "RestartWorker", "restart", "Restart {worker}?"),
    Act("f", "FlipWorker", "flip", "Turn {worker} into a {other} worker?"),
    Act("c", "CordonWorker", "cordon", "Give {worker} no new work?"),
    Act("u", "UncordonWorker", "uncordon", "Give {worker} work again?"),
)

UP, DOWN = "\x1b[A", "\x1b[B"
_LINES_AROUND = 3
# The footer, and an empty line after each table but the last.


@dataclass(slots=True)
class Asked:
    """An act that waits for a yes."""

    act: Act
    worker: pb.WorkerStatus


@dataclass(slots=True)
class Top:
    """One screen. ``methods``: the RPCs that there are."""

    methods: Collection[str]
    overview: pb.Overview | None = None
    column: int = 0
    reverse: bool = False
    chosen: str = ""
    notice: str = ""
    lost: str = ""
    asked: Asked | None = None
    over: bool = False
    _shown: list[pb.WorkerStatus] = field(default_factory=list)

    @property
    def acts(self) -> list[Act]:
        """What the control process can be asked for."""
        return [act for act in ACTS if act.rpc in self.methods]

    def take(self, overview: pb.Overview) -> None:
        """A new overview has come."""
        self.overview, self.lost = overview, ""
        names = [worker.record.worker.name for worker in self.workers]
        if self.chosen not in names:
            self.chosen = names[0] if names else ""

    @property
    def workers(self) -> list[pb.WorkerStatus]:
        """In the order of the screen."""
        return sort_workers(self.overview, self.column, self.reverse) if self.overview is not None else []

    def press(self, key: str) -> Asked | None:
        """A key was pressed. Returns what is to be done, once somebody has said yes to it."""
        if self.asked is not None:
            asked, self.asked = self.asked, None
            if key in ("y", "Y"):
                return asked
            self.notice = "nothing was done"
            return None
        self.notice = ""
        if key in ("q", "\x03", "\x04"):
            self.over = True
        elif key in (UP, "k"):
            self._move(-1)
        elif key in (DOWN, "j"):
            self._move(1)
        elif key in ("s", "S"):
            self.column = (self.column + (1 if key == "s" else -1)) % len(COLUMNS)
        elif key == "r":
            self.reverse = not self.reverse
        else:
            self._ask(key)
        return None

    def render(self, width: int, height: int) -> RenderableType:
        """The screen, of at most so many columns and lines."""
        if self.overview is None:
            return Group(Text(self.lost or "waiting for the control process", style="yellow"), self._footer())
        others: list[Table] = [routers_table(self.overview, width)]
        if self.overview.operations:
            others.append(operations_table(self.overview, width))
        pools = pools_table(self.overview, width)
        taken = 3 + _LINES_AROUND + sum(table.row_count + 2 for table in (pools, *others))
        workers = self._window(max(1, height - taken - 1))
        head = headline(self.overview)
        head.no_wrap, head.overflow = True, "ellipsis"
        parts: list[RenderableType] = [head, "", pools, ""]
        parts.append(workers_table(workers, self.chosen, self.column, self.reverse, width))
        for table in others:
            parts += ["", table]
        return Group(*parts, "", self._footer())

    def _move(self, by: int) -> None:
        names = [worker.record.worker.name for worker in self.workers]
        if names:
            at = names.index(self.chosen) if self.chosen in names else 0
            self.chosen = names[max(0, min(len(names) - 1, at + by))]

    def _window(self, rows: int) -> list[pb.WorkerStatus]:
        """As many workers as there is room for, the chosen one among them."""
        workers = self.workers
        at = next((at for at, one in enumerate(workers) if one.record.worker.name == self.chosen), 0)
        first = max(0, min(at - rows // 2, len(workers) - rows))
        return workers[first : first + rows]

    def _ask(self, key: str) -> None:
        act = next((act for act in self.acts if act.key == key), None)
        worker = next((one for one in self.workers if one.record.worker.name == self.chosen), None)
        if act is not None and worker is not None:
            self.asked = Asked(act, worker)

    def _footer(self) -> Text:
        if self.asked is not None:
            question = self.asked.act.question.format(
                worker=self.asked.worker.record.worker.name, other=other_role(self.asked.worker)
            )
            return Text(f"{question} [y/n]", style="bold reverse")
        keys = [("↑↓", "worker"), ("s", "sort"), ("r", "reverse"), *((act.key, act.label) for act in self.acts), ("q", "quit")]  # fmt: skip
        line = Text()
        for key, label in keys:
            line.append(f"{key} ", style="bold")
            line.append(f"{label}  ", style="dim")
        if self.lost or self.notice:
            line.append(self.lost or self.notice, style="bold yellow")
        return line


def other_role(worker: pb.WorkerStatus) -> str:
    """What a worker would become."""
    return "decode" if worker.record.role == 1 else "prefill"
