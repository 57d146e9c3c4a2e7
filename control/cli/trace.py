# SPDX-License-Identifier: Apache-2.0
"""``twinpool trace``: what happened to a request, and why it was placed where it was."""

from typing import Annotated

import typer
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from rich.table import Table

from twinpool.control.cli.output import EXIT_USAGE, Format, FormatOption, emit_data, fail, out
from twinpool.control.cli.target import (
    ClusterOption,
    EndpointOption,
    router_client,
    router_endpoints,
    run_command,
)
from twinpool.errors import TwinpoolError
from twinpool.v1 import router_pb2 as pb

_TERMS = ("prefill_wait", "fetch", "compute", "transfer", "decode_wait", "harm", "total")


def trace_command(
    request_id: Annotated[
        str, typer.Argument(help="The id that the client gave, or that GenerateStarted returned.")
    ],
    cluster: ClusterOption = "local",
    endpoint: EndpointOption = "",
    output: FormatOption = Format.TABLE,
) -> None:
    """Show what happened to a request: its steps, and for each placement the pairs that were compared."""
    found = run_command(_find(router_endpoints(cluster, endpoint), request_id))
    if found is None:
        raise fail(f"no router has a request {request_id!r} among its last ones", EXIT_USAGE)
    if output is Format.TABLE:
        _print(found)
    elif output is Format.NAME:
        print(found.request_id)
    else:
        emit_data(MessageToDict(found, preserving_proto_field_name=True), output)


async def _find(endpoints: list[str], request_id: str) -> pb.TraceRequestResponse | None:
    for endpoint in endpoints:
        async with router_client(endpoint) as client:
            try:
                return await client.trace(request_id)
            except TwinpoolError as error:
                if error.reason != "REQUEST_NOT_FOUND":
                    raise
    return None


def _print(trace: pb.TraceRequestResponse) -> None:
    ending = f": {trace.cause}" if trace.cause else ""
    out.print(f"[bold]{trace.client_id}[/] {trace.model} {trace.state}{ending}")
    own = f"  router's id {trace.request_id}" if trace.request_id != trace.client_id else ""
    arrived = trace.arrived.ToDatetime().isoformat(timespec="milliseconds")
    out.print(
        f"arrived {arrived}Z  prompt {trace.prompt_tokens} tokens  at most {trace.max_tokens} more{own}"
    )
    if trace.pool:
        reason = f": it {trace.pool_reason}" if trace.pool_reason else ""
        out.print(f"pool {trace.pool}{reason}")
    if trace.obstacle:
        out.print(f"not placed: {trace.obstacle}")
    out.print()
    steps = Table(
        "AT MS", "ATTEMPT", "EVENT", "STATE", "DETAIL", box=None, pad_edge=False, header_style="bold"
    )
    for event in trace.events:
        attempt = str(event.attempt) if event.attempt else "-"
        steps.add_row(_ms(event.at), attempt, event.event, event.state, event.detail)
    out.print(steps)
    for placed in trace.attempts:
        _print_attempt(placed)


def _print_attempt(attempt: pb.TraceAttempt) -> None:
    out.print(
        f"\n[bold]attempt {attempt.number}[/]: {attempt.pairs} pairs were compared; milliseconds predicted"
    )
    table = Table(
        "", "PREFILL", "DECODE", "FROM", "CACHED", "NEW", *(term.replace("_", " ").upper() for term in _TERMS),
        box=None, pad_edge=False, header_style="bold",
    )  # fmt: skip
    rows = [("chosen", attempt.chosen)] if attempt.HasField("chosen") else []
    for mark, one in [*rows, *(("", other) for other in attempt.others)]:
        cached = f"{one.prefill_cached_blocks}+{one.decode_cached_blocks} blocks"
        terms = [_ms(getattr(one, term)) for term in _TERMS]
        prefill = "(local)" if one.local else one.prefill.name
        table.add_row(
            mark,
            prefill,
            one.decode.name,
            one.fetch_from.name or "-",
            cached,
            str(one.uncached_tokens),
            *terms,
        )
    out.print(table)
    if attempt.HasField("locality"):
        known = attempt.locality
        actual = known.actual_tokens if known.HasField("actual_tokens") else "not told"
        out.print(
            f"cached tokens: {known.query_tokens} asked, best {known.best_tokens}, "
            f"expected {known.selected_tokens}, found {actual}"
        )


def _ms(duration: Duration) -> str:
    return f"{duration.ToNanoseconds() / 1e6:.2f}"
