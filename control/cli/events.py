# SPDX-License-Identifier: Apache-2.0
"""``twinpool events`` and ``twinpool get events``: what has happened to the pools, and what happens."""

import json
import re
from datetime import UTC, datetime
from typing import Annotated

import typer

from twinpool.control.cli.calls import CALL_SECONDS, ask, stream
from twinpool.control.cli.output import EXIT_USAGE, Format, FormatOption, emit_rows, fail, out
from twinpool.control.cli.target import ClusterOption, ControlOption, control_endpoint, run_command
from twinpool.v1 import control_pb2 as pb

COLUMNS = ["at", "warning", "reason", "subject", "message"]
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def events(
    pool: Annotated[str, typer.Option(help="Only of this pool.")] = "",
    subject: Annotated[str, typer.Option(help="Only about this worker or operation.")] = "",
    since: Annotated[
        str, typer.Option(help="Only those that are not older, for instance 90s, 10m, 2h, 1d.")
    ] = "",
    warning: Annotated[bool, typer.Option("--warning", help="Only what somebody should look at.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what happens, until Ctrl-C.")
    ] = False,
    cluster: ClusterOption = "local",
    control: ControlOption = "",
    output: FormatOption = Format.TABLE,
) -> None:
    """List what has happened to the pools, the oldest first."""
    request = pb.ListEventsRequest(pool=pool, subject=subject, warning=warning)
    if since:
        request.since.FromNanoseconds(int(seconds_of(since) * 1e9))
    endpoint = control_endpoint(cluster, control)
    if follow:
        try:
            run_command(_follow(endpoint, request, output))
        except KeyboardInterrupt:
            raise typer.Exit(0) from None
        return
    answer = run_command(ask(endpoint, lambda stub: stub.ListEvents(request, timeout=CALL_SECONDS)))
    emit_rows([event_row(event) for event in answer.events], COLUMNS, output)


async def _follow(endpoint: str, request: pb.ListEventsRequest, output: Format) -> None:
    """A line an event: JSON for programs, words for people."""
    asked = pb.WatchEventsRequest(pool=request.pool, subject=request.subject, warning=request.warning)
    if request.HasField("since"):
        asked.since.CopyFrom(request.since)
    watched = stream(endpoint, lambda stub: aiter(stub.WatchEvents(asked)))
    async for message in watched:
        row = event_row(message.event)
        if output in (Format.JSON, Format.YAML):
            print(json.dumps(row), flush=True)
        elif output is Format.NAME:
            print(row["name"], flush=True)
        else:
            mark = "! " if message.event.warning else "  "
            out.print(
                f"{row['at']}  {mark}{row['reason']:<20} {row['subject']}: {row['message']}", markup=False
            )


def seconds_of(text: str) -> float:
    """Seconds of "90s", "10m", "2h" or "1d"; ends the command for anything else."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text.strip())
    if found is None:
        raise fail(f"{text!r} is not a time like 90s, 10m, 2h or 1d", EXIT_USAGE)
    return float(found[1]) * _UNITS[found[2] or "s"]


def event_row(event: pb.Event) -> dict[str, object]:
    """An event as commands print it."""
    at = datetime.fromtimestamp(event.at.ToNanoseconds() / 1e9, tz=UTC)
    return {
        "name": event.id,
        "at": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "warning": "!" if event.warning else "",
        "pool": event.pool,
        "subject": event.subject,
        "reason": event.reason,
        "message": event.message,
        "operation": event.operation,
    }
