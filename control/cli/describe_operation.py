# SPDX-License-Identifier: Apache-2.0
"""``twinpool describe operation``: how far a change of the cluster is or was, what it is a part of, and what to do if it failed."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Final

import typer
from google.protobuf.timestamp_pb2 import Timestamp

from twinpool.control.cli.calls import CALL_SECONDS, Stub, ask
from twinpool.control.cli.drain import COLUMNS, row_of
from twinpool.control.cli.events import COLUMNS as EVENT_COLUMNS
from twinpool.control.cli.events import event_row
from twinpool.control.cli.output import Format, FormatOption, Row, emit_data, emit_rows, out
from twinpool.control.cli.target import ClusterOption, ControlOption, control_endpoint, run_command
from twinpool.errors import TABLE
from twinpool.v1 import control_pb2 as pb

STEP_COLUMNS: Final = ["step", "began", "done", "seconds", "waits_for"]

EVENTS_SHOWN: Final = 20


def operation(
    name: Annotated[
        str, typer.Argument(metavar="ID", help="Id of the operation; see `twinpool get operations`.")
    ],
    cluster: ClusterOption = "local",
    control: ControlOption = "",
    output: FormatOption = Format.TABLE,
) -> None:
    """Show an operation: its steps with their times, what it waits for, its parts, its events, and what to do if it failed."""

    async def gather(stub: Stub) -> tuple[pb.Operation, list[pb.Operation], list[pb.Event]]:
        found = await stub.GetOperation(pb.GetOperationRequest(id=name), timeout=CALL_SECONDS)
        listed = await stub.ListOperations(pb.ListOperationsRequest(), timeout=CALL_SECONDS)
        events = await stub.ListEvents(pb.ListEventsRequest(subject=name), timeout=CALL_SECONDS)
        return found.operation, list(listed.operations), list(events.events)

    found, others, events = run_command(ask(control_endpoint(cluster, control), gather))
    if output is Format.NAME:
        print(found.id)
        return
    data = data_of(found, others, events)
    if output is not Format.TABLE:
        emit_data(data, output)
    else:
        _show(found, data, others)


def data_of(
    found: pb.Operation, others: Sequence[pb.Operation], events: Sequence[pb.Event]
) -> dict[str, object]:
    """An operation for programs. ``others``: all that are known. Times are RFC 3339, in UTC; null: not yet."""
    return {
        **row_of(found),
        "created": _at(found.created_at),
        "ended": _at(found.ended_at) if found.HasField("ended_at") else None,
        "timeout_seconds": found.timeout.ToNanoseconds() / 1e9,
        "what_to_do": what_to_do(found),
        "released": found.released,
        "steps": [step_row(step) for step in found.steps],
        "children": [row_of(child) for child in children_of(found, others)],
        "events": [event_row(event) for event in events[-EVENTS_SHOWN:]],
    }


def children_of(found: pb.Operation, others: Sequence[pb.Operation]) -> list[pb.Operation]:
    """The operations that are parts of one, the oldest first."""
    mine = [other for other in others if other.parent == found.id]
    return sorted(mine, key=lambda child: child.created_at.ToNanoseconds())


def step_row(step: pb.OperationStep) -> dict[str, object]:
    """A step as commands print it."""
    done = step.HasField("done_at")
    until = step.done_at.ToNanoseconds() if done else time.time_ns()
    return {
        "step": step.name,
        "began": _at(step.began_at),
        "done": _at(step.done_at) if done else None,
        "seconds": round((until - step.began_at.ToNanoseconds()) / 1e9, 3),
        "waits_for": "" if done else step.detail,
    }


def what_to_do(found: pb.Operation) -> str:
    """What the table of errors advises about how it ended; "" if it has not failed."""
    spec = TABLE.get(found.error.partition(":")[0])
    return spec.user_action if spec is not None else ""


def _show(found: pb.Operation, data: Row, others: Sequence[pb.Operation]) -> None:
    shown = {key: value for key, value in data.items() if not isinstance(value, list)}
    out.print("[bold]operation[/]")
    for key, value in shown.items():
        if value not in ("", None):
            out.print(f"  {key:<20} {value}", markup=False)
    emit_rows([step_row(step) for step in found.steps], STEP_COLUMNS, Format.TABLE, title="steps")
    parents = [other for other in others if other.id == found.parent]
    for title, related in (("parent", parents), ("children", children_of(found, others))):
        if related:
            emit_rows([row_of(other) for other in related], COLUMNS, Format.TABLE, title=title)
    events = data["events"]
    if isinstance(events, list) and events:
        emit_rows(events, EVENT_COLUMNS, Format.TABLE, title="events")


def _at(stamp: Timestamp) -> str:
    at = datetime.fromtimestamp(stamp.ToNanoseconds() / 1e9, tz=UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
