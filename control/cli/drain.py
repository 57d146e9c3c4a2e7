# SPDX-License-Identifier: Apache-2.0
"""``twinpool drain``, ``twinpool restart`` and ``twinpool get operations``."""

import sys
import time
from typing import Annotated

import typer

from twinpool.control.cli.calls import CALL_SECONDS, ask, ended
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
from twinpool.v1 import control_pb2 as pb

COLUMNS = ["id", "kind", "subject", "state", "step", "seconds", "reason", "error"]

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
    endpoint = control_endpoint(cluster, control)
    _operate(endpoint, pb.OPERATION_KIND_DRAIN, worker, wait, timeout, output)


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
    endpoint = control_endpoint(cluster, control)
    _operate(endpoint, pb.OPERATION_KIND_RESTART, worker, wait, timeout, output)


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
    done = steps[-1].done_at.ToNanoseconds() if steps and steps[-1].HasField("done_at") else 0
    ended = time.time_ns() if running or not done else done
    return {
        "id": operation.id,
        "kind": pb.OperationKind.Name(operation.kind).removeprefix("OPERATION_KIND_").lower(),
        "subject": operation.worker.name or operation.pool,
        "pool": operation.pool,
        "worker": operation.worker.name,
        "incarnation": f"{operation.worker.incarnation:016x}",
        "state": pb.OperationState.Name(operation.state).removeprefix("OPERATION_STATE_").lower(),
        "step": steps[-1].name if steps else "",
        "seconds": round((ended - began) / 1e9, 3),
        "reason": operation.reason,
        "error": operation.error,
        "parent": operation.parent,
        "prefill": operation.prefill if scales else None,
        "decode": operation.decode if scales else None,
        "successor": f"{operation.successor.incarnation:016x}" if operation.HasField("successor") else "",
    }


def confirm(question: str, yes: bool) -> None:
    """Ends the command unless the user agrees."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise fail("there is no terminal to ask: pass --yes", EXIT_USAGE)
    if not typer.confirm(question, err=True):
        raise typer.Exit(EXIT_FAILED)


def _operate(
    endpoint: str,
    kind: "pb.OperationKind.ValueType",
    worker: str,
    wait: bool,
    timeout: float | None,
    output: Format,
) -> None:
    operation = run_command(_run(endpoint, kind, worker, wait, timeout))
    emit_operation(operation, output)


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


async def _run(
    endpoint: str, kind: "pb.OperationKind.ValueType", worker: str, wait: bool, timeout: float | None
) -> pb.Operation:
    if kind == pb.OPERATION_KIND_DRAIN:
        asked = pb.DrainWorkerRequest(worker=worker)
        _set(asked, timeout)
        drained = await ask(endpoint, lambda stub: stub.DrainWorker(asked, timeout=CALL_SECONDS))
        operation = drained.operation
    else:
        wanted = pb.RestartWorkerRequest(worker=worker)
        _set(wanted, timeout)
        begun = await ask(endpoint, lambda stub: stub.RestartWorker(wanted, timeout=CALL_SECONDS))
        operation = begun.operation
    return await ended(endpoint, operation) if wait else operation


def _set(request: pb.DrainWorkerRequest | pb.RestartWorkerRequest, timeout: float | None) -> None:
    if timeout is not None:
        request.timeout.FromNanoseconds(int(timeout * 1e9))
