# SPDX-License-Identifier: Apache-2.0
"""``twinpool replay``: a trace against a running cluster."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from twinpool.control.cli.output import (
    EXIT_FAILED,
    EXIT_USAGE,
    Format,
    FormatOption,
    emit_data,
    emit_rows,
    err,
    fail,
)
from twinpool.control.cli.target import ClusterOption, client, router_endpoint, run_command
from twinpool.control.cli.trace_options import (
    Requests,
    Seed,
    Sessions,
    SloItl,
    SloTtft,
    Speed,
    Spread,
    ThinkLimit,
    TraceArgument,
    TraceFormat,
    chosen_trace,
)
from twinpool.control.replay.figures import Objectives
from twinpool.control.replay.live import Limits, Progress, Replay, Tell, replay_figures
from twinpool.control.replay.load import Selection
from twinpool.control.replay.trace import Trace
from twinpool.v1 import inference_pb2 as pb


class Mode(StrEnum):
    """When requests are sent."""

    AUTO = "auto"
    OPEN = "open"
    CLOSED = "closed"


def replay_command(
    trace: TraceArgument,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(help="A router, host:port (repeatable; they take turns). Default: the local cluster's."),
    ] = None,
    cluster: ClusterOption = "local",
    model: Annotated[str, typer.Option(help="Served name; default: the only one.")] = "",
    mode: Annotated[
        Mode,
        typer.Option(
            help="open: recorded arrivals; closed: after the answers they followed; auto: as recorded."
        ),
    ] = Mode.AUTO,
    slo_ttft: SloTtft = None,
    slo_itl: SloItl = None,
    format: TraceFormat = "auto",
    speed: Speed = 1.0,
    requests: Requests = 200,
    sessions: Sessions = None,
    spread: Spread = None,
    think_limit: ThinkLimit = 60.0,
    max_seconds: Annotated[float, typer.Option(help="Send nothing later than this.", min=1)] = 600.0,
    max_in_flight: Annotated[int, typer.Option(help="Most requests at a time.", min=1)] = 256,
    timeout: Annotated[float, typer.Option(help="Longest wait for one answer, in seconds.", min=0.1)] = 120.0,
    seed: Seed = 0,
    output: FormatOption = Format.TABLE,
) -> None:
    """Send a trace's requests to a cluster and measure latency, goodput and cache hits."""
    loaded = chosen_trace(trace, format, Selection(sessions, spread, think_limit, requests, speed, seed))
    if mode is Mode.CLOSED and not loaded.closed:
        raise fail(f"{trace.name}: no request follows an answer; --mode open replays it", EXIT_USAGE)
    closed = loaded.closed if mode is Mode.AUTO else mode is Mode.CLOSED
    objectives = Objectives(
        float("inf") if slo_ttft is None else slo_ttft, float("inf") if slo_itl is None else slo_itl
    )
    endpoints = endpoint or [router_endpoint(cluster, "")]
    limits = Limits(max_in_flight, max_seconds, timeout)
    with _bar(output is Format.TABLE, len(loaded.requests)) as tell:
        figures = run_command(_run(loaded, endpoints, model, closed, limits, objectives, seed, tell))
    document = {
        "trace": loaded.name,
        "mode": "closed" if closed else "open",
        "speed": speed,
        "endpoints": endpoints,
        "objectives": {
            name: None if value == float("inf") else value
            for name, value in dataclasses.asdict(objectives).items()
        },
    } | figures
    if output is Format.TABLE:
        emit_rows(
            _rows(document), ["figure", "value"], output, title=f"{loaded.name}, {document['mode']} loop"
        )
    else:
        emit_data(document, output)
    if not figures["served"]:
        err.print(f"[red]nothing was served[/]: {figures['causes'] or 'no request fits the model'}")
        raise typer.Exit(EXIT_FAILED)


async def _run(
    trace: Trace,
    endpoints: list[str],
    model: str,
    closed: bool,
    limits: Limits,
    objectives: Objectives,
    seed: int,
    tell: Tell,
) -> dict[str, object]:
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client(each)) for each in endpoints]
        served = _model(await clients[0].models(), model)
        replay = Replay(trace, clients, served, closed=closed, limits=limits, seed=seed, tell=tell)
        with contextlib.suppress(asyncio.CancelledError):
            # Interrupted, it still says what it has measured so far.
            await replay.run()
        return replay_figures(replay, objectives)


def _model(models: list[pb.Model], name: str) -> pb.Model:
    found = [model for model in models if name in ("", model.name)]
    if len(found) != 1:
        known = ", ".join(model.name for model in models) or "none"
        raise fail(f"--model {name!r} is not one of the cluster's: {known}", EXIT_USAGE)
    return found[0]


@contextlib.contextmanager
def _bar(live: bool, total: int) -> Iterator[Tell]:
    if not live:
        yield lambda progress: None
        return
    columns = (
        TextColumn("replaying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("[dim]{task.fields[more]}[/]"),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=err, transient=True) as bar:
        task = bar.add_task("", total=total, more="")

        def tell(progress: Progress) -> None:
            more = f"{progress.in_flight} in flight"
            if progress.failed:
                more += f", {progress.failed} failed"
            if progress.skipped:
                more += f", {progress.skipped} skipped"
            bar.update(task, completed=progress.served + progress.failed + progress.skipped, more=more)

        yield tell


def _rows(document: dict[str, object]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, value in document.items():
        if isinstance(value, dict):
            parts = [
                f"{key} {part:.4g}" if isinstance(part, float) else f"{key} {part}"
                for key, part in value.items()
            ]
            value = "  ".join(parts)
        elif isinstance(value, list):
            value = ", ".join(str(part) for part in value)
        if value not in ("", None):
            rows.append({"figure": name, "value": value})
    return rows
