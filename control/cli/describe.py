# SPDX-License-Identifier: Apache-2.0
"""``twinpool describe``: all that is known of a pool, a worker or an operation."""

from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict

from twinpool.control.cli.access import App
from twinpool.control.cli.calls import CALL_SECONDS, Stub, ask
from twinpool.control.cli.describe_operation import operation
from twinpool.control.cli.drain import COLUMNS as OPERATION_COLUMNS
from twinpool.control.cli.drain import WorkerArgument, row_of
from twinpool.control.cli.events import COLUMNS as EVENT_COLUMNS
from twinpool.control.cli.events import event_row
from twinpool.control.cli.output import Format, FormatOption, Row, emit_data, emit_rows, out
from twinpool.control.cli.pools import COLUMNS as POOL_COLUMNS
from twinpool.control.cli.pools import pool_data, pool_rows, replica_row, worker_row
from twinpool.control.cli.target import ClusterOption, ControlOption, control_endpoint, run_command
from twinpool.v1 import control_pb2 as pb

EVENTS_SHOWN = 20
OPERATIONS_SHOWN = 20
REPLICA_COLUMNS = ["name", "role", "phase", "seconds", "cordoned", "crashes", "cause"]

app = App(help="Show all that is known of a pool, a worker or an operation.", no_args_is_help=True)
app.command()(operation)


@app.command()
def pool(
    name: Annotated[str, typer.Argument(help="Name of the pool; see `twinpool get pools`.")],
    cluster: ClusterOption = "local",
    control: ControlOption = "",
    output: FormatOption = Format.TABLE,
) -> None:
    """Show what a pool shall be and is, its workers, its operations and its last events."""

    async def gather(stub: Stub) -> tuple[pb.PoolStatus, list[pb.Operation], list[pb.Event]]:
        found = await stub.ListPools(pb.ListPoolsRequest(pool=name), timeout=CALL_SECONDS)
        operations = await stub.ListOperations(pb.ListOperationsRequest(), timeout=CALL_SECONDS)
        events = await stub.ListEvents(pb.ListEventsRequest(pool=name), timeout=CALL_SECONDS)
        mine = [op for op in operations.operations if op.pool == name][:OPERATIONS_SHOWN]
        return found.pools[0], mine, list(events.events)[-EVENTS_SHOWN:]

    status, operations, events = run_command(ask(control_endpoint(cluster, control), gather))
    if output is not Format.TABLE:
        _emit(pool_data(status), name, operations, events, output)
        return
    _table("pool", pool_rows(status), POOL_COLUMNS)
    _table("workers", [replica_row(replica) for replica in status.replicas], REPLICA_COLUMNS)
    _table("operations", [row_of(op) for op in operations], OPERATION_COLUMNS)
    _table("events", [event_row(event) for event in events], EVENT_COLUMNS)


@app.command()
def worker(
    name: WorkerArgument,
    cluster: ClusterOption = "local",
    control: ControlOption = "",
    output: FormatOption = Format.TABLE,
) -> None:
    """Show what a worker has registered, its own counts, its operations, its last events and the end of its log."""
    request = pb.DescribeWorkerRequest(worker=name)
    endpoint = control_endpoint(cluster, control)
    found = run_command(ask(endpoint, lambda stub: stub.DescribeWorker(request, timeout=CALL_SECONDS)))
    record: Row = worker_row(found.record) if found.HasField("record") else {"name": name}
    counts = {
        key: value
        for key, value in MessageToDict(
            found.counts, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        ).items()
        if key not in ("worker", "role")
    }
    if output is not Format.TABLE:
        data: dict[str, object] = {**record, "counts": counts if found.HasField("counts") else None}
        data["replica"] = replica_row(found.replica) if found.HasField("replica") else None
        data["log"] = list(found.log)
        _emit(data, name, list(found.operations), list(found.events), output)
        return
    out.print("[bold]worker[/]")
    for key, value in record.items():
        out.print(f"  {key:<20} {value}", markup=False)
    if found.HasField("replica"):
        _table("replica", [replica_row(found.replica)], REPLICA_COLUMNS)
    if found.HasField("counts"):
        out.print("[bold]counts[/]")
        for key, value in counts.items():
            out.print(f"  {key:<20} {value}", markup=False)
    _table("operations", [row_of(op) for op in found.operations], OPERATION_COLUMNS)
    _table("events", [event_row(event) for event in found.events], EVENT_COLUMNS)
    if found.log:
        out.print("[bold]end of its log[/]")
        for line in found.log:
            out.print(f"  {line}", markup=False)


def _emit(
    data: dict[str, object], name: str, operations: list[pb.Operation], events: list[pb.Event], output: Format
) -> None:
    if output is Format.NAME:
        print(name)
        return
    data["operations"] = [row_of(op) for op in operations]
    data["events"] = [event_row(event) for event in events]
    emit_data(data, output)


def _table(title: str, rows: list[dict[str, object]], columns: list[str]) -> None:
    if rows:
        emit_rows(rows, columns, Format.TABLE, title=title)
