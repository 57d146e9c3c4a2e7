# SPDX-License-Identifier: Apache-2.0
"""``twinpool core``: looks at the router's deterministic core from outside."""

import time
from pathlib import Path
from typing import Annotated

import typer

from twinpool import _core
from twinpool.control.cli.output import (
    EXIT_FAILED,
    EXIT_USAGE,
    Format,
    FormatOption,
    emit_data,
    err,
    fail,
    out,
)

app = typer.Typer(help="Look at the router's deterministic core.", no_args_is_help=True)

LogArgument = Annotated[
    Path, typer.Argument(help="A log of RouterCore.recorded.", exists=True, dir_okay=False)
]
LinesOption = Annotated[bool, typer.Option("--lines", help="Print each call and its outcome.")]


@app.command()
def replay(log: LogArgument, lines: LinesOption = False, output: FormatOption = Format.TABLE) -> None:
    """Make the calls of a recorded log again: the same decisions must come out.

    Ends with 1 at the first call whose outcome differs, and says what was recorded and what came now.
    """
    started = time.perf_counter()
    try:
        report = _core.replay_log(log.read_bytes(), _print_line if lines else None)
    except _core.CoreError as error:
        raise fail(f"{log}: {error}", EXIT_USAGE) from error
    seconds = time.perf_counter() - started
    if output is Format.TABLE:
        verdict = "the same decisions" if report.equal else "a different decision"
        out.print(f"{report.calls} calls, {report.placements} placements, {seconds:.2f} s: {verdict}")
    else:
        fields = ("calls", "placements", "equal", "mismatch")
        emit_data({name: getattr(report, name) for name in fields} | {"seconds": seconds}, output)
    if not report.equal:
        err.print(report.mismatch)
        raise typer.Exit(EXIT_FAILED)


def _print_line(line: str) -> None:
    print(line)
