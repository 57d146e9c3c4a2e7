# SPDX-License-Identifier: Apache-2.0
"""``twinpool drain``, ``twinpool restart`` and ``twinpool get operations``."""

import sys
import time
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer
from google.protobuf.duration_pb2 import Duration

from twinpool.control.cli.calls import CALL_SECONDS, Stub, ask, ended
from twinpool.control.cli.output import (
    EXIT_FAILED,
    EXIT_USAGE,
    Format,
    FormatOption,
    emit_data,
    emit_rows,
    fail,
)
from twinpool.control.cli.target import (
    ClusterOption,
    ControlOption,
    control_endpoint,
    run_command,
)
from twinpool.control.flips import ROLES
from twinpool.v1 import control_pb2 as pb

COLUMNS = ["id", "kind", "subject", "to", "state", "step", "seconds", "reason", "error"]

WorkerArgument = Annotated[str, typer.Argument(help="Name of the worker; see `twinpool get workers`.")]
WaitOption = Annotated[bool, typer.Option("--wait", help="Return only when it is done; 1 if it failed.")]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        min=0,
        max=86400,
        help="How long requests on the worker may take, in seconds; then what is left goes on elsewhere or fails. Default: "
        "worker.drain_timeout_seconds.",
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def drain(
    worker: WorkerArgument,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    yes: YesOption = False,
    cluster: ClusterOption = "local",
    control: ControlOption = "",
    output: FormatOption = Format.TABLE,
) -> None:
    """Take a worker out for good. Nothing fails: what runs there finishes or moves, and others take its cached prefixes."""
    confirm(f"Take {worker} out for good?", yes)
    request = pb.DrainWorkerRequest(worker=worker, timeout=duration_of(timeout))

    async def begin(stub: Stub) -> pb.Operation:
        return (await stub.DrainWorker(request, timeout=CALL_SECONDS)).operation

    operate(control_endpoint(cluster, control), begin, wait, output)


def restart(
    worker: WorkerArgument,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    yes: YesOption = False,
    cluster: ClusterOption = "local",
    control: ControlOption = "",
    output: FormatOption = Format.TABLE,
) -> None:
    """Drain a worker, then start another one under its name. Brings back one that was drained for good, too."""
    confirm(f"Restart {worker}?", yes)
    request = pb.RestartWorkerRequest(worker=worker, timeout=duration_of(timeout))

    async def begin(stub: Stub) -> pb.Operation:
        return (await stub.RestartWorker(request, timeout=CALL_SECONDS)).operation

    operate(control_endpoint(cluster, control), begin, wait, output)


def operations(
    cluster: ClusterOption = "local", control: ControlOption = "", output: FormatOption = Format.TABLE
) -> None:
    """List what is changed, and what was, the newest first."""

    asked = pb.ListOperationsRequest()
    endpoint = control_endpoint(cluster, control)
    answer = run_command(ask(endpoint, lambda stub: stub.ListOperations(asked, timeout=CALL_SECONDS)))
    emit_rows([row_of(found) | {"name": found.id} for found in answer.operations], COLUMNS, output)


def row_of(operation: pb.Operation) -> dict[str, object]:
    """An operation as commands print it."""
    began, steps = operation.created_at.ToNanoseconds(), operation.steps
    scales = operation.kind == pb.OPERATION_KIND_SCALE
    running = operation.state == pb.OPERATION_STATE_RUNNING
    ended = time.time_ns() if running else max(began, operation.ended_at.ToNanoseconds())
    return {
        "id": operation.id,
        "kind": pb.OperationKind.Name(operation.kind).removeprefix("OPERATION_KIND_").lower(),
        "subject": operation.worker.name or operation.pool,
        "pool": operation.pool,
        "worker": operation.worker.name,
        "incarnation": f"{operation.worker.incarnation:016x}",
        "to": ROLES.get(operation.target_role, ""),
        "state": pb.OperationState.Name(operation.state).removeprefix("OPERATION_STATE_").lower(),
        "step": steps[-1].name if steps else "",
        "seconds": round((ended - began) / 1e9, 3),
        "waits_for": steps[-1].detail if steps and running else "",
        "reason": operation.reason,
        "error": operation.error,
        "parent": operation.parent,
        "prefill": operation.prefill if scales else None,
        "decode": operation.decode if scales else None,
        "successor": f"{operation.successor.incarnation:016x}" if operation.HasField("successor") else "",
    }


def confirm(question: str, yes: bool) -> None:
    """Asks, unless ``yes``; ends the command if the answer is no or there is nobody to ask."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise fail("there is no terminal to ask: pass --yes", EXIT_USAGE)
    if not typer.confirm(question, err=True):
        raise typer.Exit(EXIT_FAILED)


def operate(
    endpoint: str, begin: Callable[[Stub], Awaitable[pb.Operation]], wait: bool, output: Format
) -> None:
    """Begins an operation, waits for its end if that is wanted, and prints it. Ends the command with 1 if it has failed."""

    async def run() -> pb.Operation:
        operation = await ask(endpoint, begin)
        return await ended(endpoint, operation) if wait else operation

    emit_operation(run_command(run()), output)


def emit_operation(operation: pb.Operation, output: Format) -> None:
    """Prints an operation, and ends the command as failed if it has."""
    row = row_of(operation)
    if output is Format.TABLE:
        emit_rows([row], COLUMNS, output)
    elif output is Format.NAME:
        print(operation.id)
    else:
        emit_data(row, output)
    if operation.state == pb.OPERATION_STATE_FAILED:
        raise fail(operation.error, EXIT_FAILED)


def duration_of(seconds: float | None) -> Duration | None:
    """What a request says; None: nothing."""
    if seconds is None:
        return None
    message = Duration()
    message.FromNanoseconds(int(seconds * 1e9))
    return message
