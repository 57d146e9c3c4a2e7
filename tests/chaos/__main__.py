# SPDX-License-Identifier: Apache-2.0
"""The command line of a chaos run: progress on stderr, one JSON object on stdout, status 1 if anything was lost."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tests.chaos.run import Options, State, run
from twinpool import logs

PLAIN_SECONDS = 15.0
"""Between two lines where stderr is no terminal."""


class Display:
    """A bar with the counts where there is a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[counts]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None, counts="")
        self._last = ("", 0.0)

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def tell(self, stage: str, state: State) -> None:
        counts = _counts(state)
        self._progress.update(
            self._task,
            description=stage,
            total=state.of if state.seconds else None,
            completed=min(state.seconds, state.of),
            counts=counts,
        )
        if self._console.is_terminal:
            return
        now = time.monotonic()
        kind = stage.rstrip("0123456789 of").rstrip()
        if kind != self._last[0] or now - self._last[1] > PLAIN_SECONDS:
            self._last = (kind, now)
            print(f"{state.seconds:5.0f} s  {stage}  {counts}", file=sys.stderr, flush=True)


def _counts(state: State) -> str:
    if state.tally is None:
        return ""
    tally = state.tally
    faults = sum((state.applied or {}).values())
    return (
        f"{faults} faults, {state.restarts} restarts, {tally.streams} streams ({state.running} running), "
        f"{tally.resumed} resumed, {tally.lost.total()} lost, {len(tally.wrong)} wrong"
    )


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="of a run to repeat; new and printed if it is not given")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=Options.clients)
    parser.add_argument("--questions", type=int, default=Options.questions)
    parser.add_argument("--longest", type=int, default=Options.longest, help="most tokens of an answer")
    parser.add_argument("--links", choices=("auto", "namespaces", "none"), default="auto")
    parser.add_argument("--directory", type=Path, help="for the logs; a temporary one if it is not given")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    options = Options(seed, given.seconds, given.clients, given.questions, given.longest, given.links)
    logs.setup("error", False)
    print(f"seed {seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="twinpool-chaos-") as temporary, Display() as display:
        directory = given.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        # Ray says on stdout that a worker was killed.
        with contextlib.redirect_stdout(sys.stderr):
            result = run(options, directory, display.tell)
    print(json.dumps(result))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
