# SPDX-License-Identifier: Apache-2.0
"""Options that ``replay`` and ``simulate`` share: which part of a trace, how fast, under which objectives."""

from pathlib import Path
from typing import Annotated

import typer

from twinpool.control.cli.output import EXIT_USAGE, fail
from twinpool.control.replay.formats import READERS
from twinpool.control.replay.load import Selection, load_trace
from twinpool.control.replay.trace import Trace, TraceError

TraceArgument = Annotated[Path, typer.Argument(help="A trace file.", exists=True, dir_okay=False)]
TraceFormat = Annotated[
    str, typer.Option("--format", help=f"auto, or one of: {', '.join(READERS)}.", show_default=True)
]
Speed = Annotated[float, typer.Option(help="Divides arrival and think times.", min=1e-6)]
Requests = Annotated[
    int | None, typer.Option("--requests", "-n", help="First requests by arrival; default: all.", min=1)
]
Sessions = Annotated[int | None, typer.Option(help="Whole sessions, chosen at random; default: all.", min=1)]
Spread = Annotated[
    float | None,
    typer.Option(
        help="Start sessions at random within so many seconds (recordings that all start at 0).", min=0
    ),
]
ThinkLimit = Annotated[
    float, typer.Option(help="With --spread: longest pause of a session, in seconds.", min=0)
]
Seed = Annotated[int, typer.Option(help="Seed of all random choices.")]
SloTtft = Annotated[
    float | None, typer.Option("--slo-ttft", help="Objective: time to first token, in seconds.", min=0)
]
SloItl = Annotated[
    float | None,
    typer.Option("--slo-itl", help="Objective: mean time between an answer's tokens, in seconds.", min=0),
]


def chosen_trace(path: Path, format: str, selection: Selection) -> Trace:
    """The trace to run; a bad file ends the command."""
    try:
        return load_trace(path, format, selection)
    except TraceError as error:
        raise fail(str(error), EXIT_USAGE) from error
