# SPDX-License-Identifier: Apache-2.0
"""``twinpool get``: lists what the cluster has."""

import grpc
import typer

from twinpool.client import Client
from twinpool.control.cli import drain, prefixes, requests
from twinpool.control.cli.output import Format, FormatOption, emit_rows
from twinpool.control.cli.target import (
    ClusterOption,
    ControlOption,
    EndpointOption,
    control_channel,
    control_endpoint,
    router_endpoint,
    run_command,
)
from twinpool.errors import from_rpc_error
from twinpool.v1 import control_pb2, control_pb2_grpc, worker_pb2

app = typer.Typer(help="List what the cluster has.", no_args_is_help=True)
app.command()(prefixes.prefixes)
app.command()(prefixes.conditions)
app.command()(drain.operations)
app.command()(requests.requests)


@app.command()
def workers(
    cluster: ClusterOption = "local", control: ControlOption = "", output: FormatOption = Format.TABLE
) -> None:
    """List the workers that are registered."""
    records = run_command(_workers(control_endpoint(cluster, control)))
    columns = ["name", "role", "state", "model", "blocks", "endpoint", "incarnation"]
    emit_rows([_row(record) for record in records], columns, output)


@app.command()
def models(
    cluster: ClusterOption = "local", endpoint: EndpointOption = "", output: FormatOption = Format.TABLE
) -> None:
    """List the models that are served."""

    async def ask() -> list[dict[str, object]]:
        async with Client(router_endpoint(cluster, endpoint)) as client:
            return [
                {
                    "name": model.name,
                    "family": model.family,
                    "context": model.max_context_tokens,
                    "vocab": model.vocab_size,
                    "block_tokens": model.block_tokens,
                    "prefill_workers": model.prefill_workers,
                    "decode_workers": model.decode_workers,
                    "ready": model.ready,
                }
                for model in await client.models()
            ]

    columns = [
        "name",
        "family",
        "context",
        "vocab",
        "block_tokens",
        "prefill_workers",
        "decode_workers",
        "ready",
    ]
    emit_rows(run_command(ask()), columns, output)


async def _workers(endpoint: str) -> list[control_pb2.WorkerRecord]:
    async with control_channel(endpoint) as connection:
        stub = control_pb2_grpc.ControlServiceStub(connection)
        try:
            return list((await stub.ListWorkers(control_pb2.ListWorkersRequest(), timeout=10)).workers)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error


def _row(record: control_pb2.WorkerRecord) -> dict[str, object]:
    return {
        "name": record.worker.name,
        "pool": record.pool,
        "role": worker_pb2.Role.Name(record.role).removeprefix("ROLE_").lower(),
        "state": control_pb2.WorkerState.Name(record.state).removeprefix("WORKER_STATE_").lower(),
        "model": record.model,
        "blocks": record.num_blocks,
        "block_tokens": record.block_tokens,
        "kv_bytes_per_token": record.kv_bytes_per_token,
        "endpoint": record.endpoint,
        "incarnation": f"{record.worker.incarnation:016x}",
        "fingerprint": record.fingerprint,
        "pid": record.pid,
    }
