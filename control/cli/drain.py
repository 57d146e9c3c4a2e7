# SPDX-License-Identifier: Apache-2.0
"""``twinpool drain``, ``twinpool restart`` and ``twinpool get operations``."""

import asyncio
import sys
import time
from typing import Annotated

import grpc
import typer

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
from twinpool.control.cli.target import (
    ClusterOption,
    ControlOption,
    control_channel,
    control_endpoint,
    run_command,
)
from twinpool.errors import TwinpoolError, from_rpc_error
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import control_pb2_grpc

POLL_SECONDS = 0.1
CALL_SECONDS = 10.0
# Longest wait for a control process that does not answer, which may be restarting.
SILENCE_SECONDS = 60.0
COLUMNS = ["id", "kind", "worker", "state", "step", "seconds", "error"]

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
    """List drains and restarts, the newest first."""

    async def ask() -> list[pb.Operation]:
        async with control_channel(control_endpoint(cluster, control)) as connection:
            stub = control_pb2_grpc.ControlServiceStub(connection)
            try:
                answer = await stub.ListOperations(pb.ListOperationsRequest(), timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from error
            return list(answer.operations)

    emit_rows([row_of(found) | {"name": found.id} for found in run_command(ask())], COLUMNS, output)


def row_of(operation: pb.Operation) -> dict[str, object]:
    """An operation as commands print it."""
    began, steps = operation.created_at.ToNanoseconds(), operation.steps
    running = operation.state == pb.OPERATION_STATE_RUNNING
    done = steps[-1].done_at.ToNanoseconds() if steps and steps[-1].HasField("done_at") else 0
    ended = time.time_ns() if running or not done else done
    return {
        "id": operation.id,
        "kind": pb.OperationKind.Name(operation.kind).removeprefix("OPERATION_KIND_").lower(),
        "worker": operation.worker.name,
        "incarnation": f"{operation.worker.incarnation:016x}",
        "state": pb.OperationState.Name(operation.state).removeprefix("OPERATION_STATE_").lower(),
        "step": steps[-1].name if steps else "",
        "seconds": round((ended - began) / 1e9, 3),
        "error": operation.error,
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


def _operate(
    endpoint: str,
    kind: "pb.OperationKind.ValueType",
    worker: str,
    wait: bool,
    timeout: float | None,
    output: Format,
) -> None:
    operation = run_command(_run(endpoint, kind, worker, wait, timeout))
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
    async with control_channel(endpoint) as connection:
        stub = control_pb2_grpc.ControlServiceStub(connection)
        try:
            if kind == pb.OPERATION_KIND_DRAIN:
                asked = pb.DrainWorkerRequest(worker=worker)
                _set(asked, timeout)
                operation = (await stub.DrainWorker(asked, timeout=CALL_SECONDS)).operation
            else:
                wanted = pb.RestartWorkerRequest(worker=worker)
                _set(wanted, timeout)
                operation = (await stub.RestartWorker(wanted, timeout=CALL_SECONDS)).operation
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        if wait:
            operation = await ended(stub, operation)
        return operation


async def ended(stub: "control_pb2_grpc.ControlServiceAsyncStub", operation: pb.Operation) -> pb.Operation:
    """Follows an operation to its end, also over a restart of the control process."""
    step, heard_at = "", time.monotonic()
    while operation.state == pb.OPERATION_STATE_RUNNING:
        await asyncio.sleep(POLL_SECONDS)
        try:
            asked = pb.GetOperationRequest(id=operation.id)
            operation = (await stub.GetOperation(asked, timeout=CALL_SECONDS)).operation
            heard_at = time.monotonic()
        except grpc.RpcError as error:
            known = from_rpc_error(error)
            if not _passing(known) or time.monotonic() - heard_at > SILENCE_SECONDS:
                raise known from error
        name = operation.steps[-1].name if operation.steps else ""
        if name != step:
            step = name
            err.print(f"{operation.worker.name or operation.pool}: {step}")
    return operation


def _passing(error: TwinpoolError) -> bool:
    return error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def _set(request: pb.DrainWorkerRequest | pb.RestartWorkerRequest, timeout: float | None) -> None:
    if timeout is not None:
        request.timeout.FromNanoseconds(int(timeout * 1e9))
