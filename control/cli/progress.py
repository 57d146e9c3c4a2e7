# SPDX-License-Identifier: Apache-2.0
"""Progress of long work on stderr: one line a stage, with its time, and a spinner on the running one."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.status import Status

from twinpool.control.cli.output import err


class Stages:
    """Prints each stage when the next one starts."""

    def __init__(self, status: Status | None) -> None:
        self._status = status
        self._name = ""
        self._since = time.monotonic()

    def stage(self, name: str, detail: str = "") -> None:
        """Starts a stage, or changes the detail of the running one."""
        if name != self._name:
            self.done()
            self._name, self._since = name, time.monotonic()
            if self._status is not None and not err.is_terminal:
                # No spinner shows in a log: say what is under way before it is done.
                err.print(f"… {name}")
        if self._status is not None:
            self._status.update(f"{name} [dim]{detail}[/]" if detail else name)

    def done(self) -> None:
        """Ends the running stage."""
        if self._name and self._status is not None:
            err.print(f"[green]✓[/] {self._name} [dim]{time.monotonic() - self._since:.1f} s[/]")
        self._name = ""


@contextmanager
def stages(live: bool) -> Iterator[Stages]:
    """A progress line while the block runs; silent if not ``live``."""
    if not live:
        yield Stages(None)
        return
    with err.status("") as status:
        progress = Stages(status)
        yield progress
        progress.done()
