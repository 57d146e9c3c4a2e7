# SPDX-License-Identifier: Apache-2.0
"""``twinpool get requests``: what runs, and what ended of late, without prompts and answers."""

from typing import Annotated

import grpc
import typer

from twinpool.control.cli.output import Format, FormatOption, emit_rows, err
from twinpool.control.cli.target import (
    ClusterOption,
    ControlOption,
    control_channel,
    control_endpoint,
    run_command,
)
from twinpool.control.overview.plain import Plain, plain
from twinpool.errors import from_rpc_error
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import control_pb2_grpc, telemetry_pb2

CALL_SECONDS = 15.0
COLUMNS = [
    "request",
    "state",
    "age_seconds",
    "prompt",
    "cached",
    "output",
    "prefill",
    "decode",
    "ttft_ms",
    "hop",
    "tenant",
    "cause",
]


def requests(
    state: Annotated[
        str, typer.Option("--state", help="live, ended, or a state such as Queued, Decoding or Failed.")
    ] = "",
    pool: Annotated[str, typer.Option("--pool", help="Only this pool's.")] = "",
    router: Annotated[str, typer.Option("--router", help="Only this router's.")] = "",
    limit: Annotated[int, typer.Option("--limit", help="Most requests to list.", min=1, max=1000)] = 50,
    cluster: ClusterOption = "local",
    control: ControlOption = "",
    output: FormatOption = Format.TABLE,
) -> None:
    """List requests that run and those that ended of late, the newest first; see `twinpool trace` for one of them."""
    asked = pb.ListRequestsRequest(state=state, pool=pool, router=router, limit=limit)
    answer = run_command(_ask(control_endpoint(cluster, control), asked))
    emit_rows([row_of(one) for one in answer.requests], COLUMNS, output)
    for name in answer.unreachable:
        err.print(f"[bold yellow]warning:[/] router {name} did not answer; its requests are missing")
    if output is Format.TABLE and answer.found > len(answer.requests):
        err.print(f"{len(answer.requests)} of {answer.found}; see --limit")


def row_of(request: telemetry_pb2.RequestSummary) -> Plain:
    """A request as commands print it."""
    row = plain(request)
    ttft = next((hop["ended"] for hop in row["hops"] if hop["name"] == "prefill"), None)
    return row | {
        "name": request.client_id,
        "request": request.client_id,
        "age_seconds": round(row["age"], 3),
        "prompt": request.prompt_tokens,
        "cached": row["cached_tokens"],
        "output": request.output_tokens,
        "prefill": request.prefill.name or None,
        "decode": request.decode.name or None,
        "ttft_ms": round(1e3 * ttft, 1) if ttft is not None else None,
        "hop": row["hops"][-1]["name"] if request.live and row["hops"] else "",
    }


async def _ask(endpoint: str, asked: pb.ListRequestsRequest) -> pb.ListRequestsResponse:
    async with control_channel(endpoint) as connection:
        try:
            return await control_pb2_grpc.ControlServiceStub(connection).ListRequests(
                asked, timeout=CALL_SECONDS
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
