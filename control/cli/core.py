# SPDX-License-Identifier: Apache-2.0
"""``twinpool core``: looks at the router's deterministic core from outside."""

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from twinpool import _core
from twinpool.control.cli.access import App
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
from twinpool.control.cli.progress import Stages, stages
from twinpool.control.cli.target import (
    ClusterOption,
    EndpointOption,
    router_client,
    router_endpoints,
    run_command,
)

app = App(help="Look at the router's deterministic core.", no_args_is_help=True)

LogArgument = Annotated[
    Path, typer.Argument(help="A log of `twinpool core record`.", exists=True, dir_okay=False)
]
LinesOption = Annotated[bool, typer.Option("--lines", help="Print each call and its outcome.")]
# Elsewhere --output is the format; here it is what the command makes.
LogOption = Annotated[Path, typer.Option("--output", help="The file to write.", dir_okay=False)]
RecordFormatOption = Annotated[
    Format, typer.Option("--format", "-o", help="How to print.", envvar="TWINPOOL_OUTPUT")
]


@app.command()
def record(
    log: LogOption,
    cluster: ClusterOption = "local",
    endpoint: EndpointOption = "",
    output: RecordFormatOption = Format.TABLE,
) -> None:
    """Fetch what a router's core was called with and what it decided, for ``twinpool core replay``.

    The router keeps its newest calls in router.record_bytes. The log holds block hashes, request ids, tenants and
    names of workers and adapters; no text of a prompt or an answer, and no token ids.
    """
    endpoints = router_endpoints(cluster, endpoint)
    if len(endpoints) > 1:
        raise fail(f"each router has a log of its own: name one of {', '.join(endpoints)}", EXIT_USAGE)
    part = log.with_name(f"{log.name}.part")
    started = time.perf_counter()
    try:
        with stages(output is Format.TABLE) as progress:
            size = run_command(_fetch(endpoints[0], part, progress))
        os.replace(part, log)
    except OSError as error:
        raise fail(f"{log}: {error.strerror}", EXIT_USAGE) from error
    finally:
        part.unlink(missing_ok=True)
    if output is Format.TABLE:
        out.print(f"{log}: {size} bytes")
    elif output is Format.NAME:
        print(log)
    else:
        seconds = time.perf_counter() - started
        row = {"router": endpoints[0], "log": str(log), "bytes": size, "seconds": seconds}
        emit_data(row, output)


async def _fetch(endpoint: str, path: Path, progress: Stages) -> int:
    """Writes the log piece by piece; its size in bytes."""
    size = 0
    progress.stage(f"fetching the log of {endpoint}")
    # Pieces are a megabyte at most: a write is shorter than what a thread for it would cost.
    with path.open("wb") as file:
        async with router_client(endpoint) as client:
            async for piece in client.recording():
                size += file.write(piece.data)
                progress.stage(f"fetching the log of {endpoint}", f"{size} of {piece.total_bytes} bytes")
    return size


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
        verdict = "all decisions are equal" if report.equal else "the last one led to another decision"
        out.print(
            f"{report.calls} calls made again, {report.placements} placements, {seconds:.2f} s: {verdict}"
        )
    else:
        fields = ("calls", "placements", "equal", "mismatch")
        emit_data({name: getattr(report, name) for name in fields} | {"seconds": seconds}, output)
    if not report.equal:
        err.print(report.mismatch)
        raise typer.Exit(EXIT_FAILED)


def _print_line(line: str) -> None:
    print(line)
