# SPDX-License-Identifier: Apache-2.0
"""``twinpool get prefixes`` and ``twinpool get conditions``: what routers know of caches, and what they do not trust."""

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from twinpool.control.cli.output import Format, FormatOption, emit_rows, err
from twinpool.control.cli.target import (
    ClusterOption,
    EndpointOption,
    router_client,
    router_endpoints,
    run_command,
)
from twinpool.router_client import RouterClient
from twinpool.v1 import router_pb2 as pb
from twinpool.v1 import worker_pb2

T = TypeVar("T")
Row = dict[str, object]

_COLUMNS = [
    "router",
    "worker",
    "role",
    "state",
    "cause",
    "blocks",
    "indexed",
    "sequence",
    "heard_seconds",
    "resyncs",
]


def prefixes(
    cluster: ClusterOption = "local",
    endpoint: EndpointOption = "",
    prompt: Annotated[str, typer.Option("--prompt", help="Who holds the beginning of this text?")] = "",
    model: Annotated[str, typer.Option("--model", help="Its model, where there are several.")] = "",
    tenant: Annotated[str, typer.Option("--tenant", help="Whose prefixes.")] = "",
    output: FormatOption = Format.TABLE,
) -> None:
    """Show what the routers know of the workers' caches, or who holds the beginning of a prompt."""
    endpoints = router_endpoints(cluster, endpoint)
    if prompt:
        request = pb.LookupPrefixRequest(text=prompt, model=model, tenant=tenant)
        found = run_command(_each(endpoints, lambda client: client.lookup(request)))
        rows = [row for name, answer in found for row in _holders(name, answer)]
        emit_rows(rows, ["router", "worker", "role", "blocks", "tokens", "share"], output)
        return
    views = run_command(_each(endpoints, lambda client: client.inspect()))
    emit_rows([row for _, view in views for row in _workers(view)], _COLUMNS, output)
    if output is Format.TABLE:
        for _, view in views:
            for one in view.conditions:
                err.print(f"[bold yellow]{view.router}: {one.type}:[/] {one.cause}: {one.detail}")


def conditions(
    cluster: ClusterOption = "local", endpoint: EndpointOption = "", output: FormatOption = Format.TABLE
) -> None:
    """Show what the routers say is not as it should be, such as LocalityDegraded."""
    views = run_command(_each(router_endpoints(cluster, endpoint), lambda client: client.inspect()))
    rows: list[Row] = [
        {
            "router": view.router,
            "type": one.type,
            "cause": one.cause,
            "detail": one.detail,
            "prediction_error": round(view.prediction_error, 4),
            "predictions": view.predictions,
        }
        for _, view in views
        for one in view.conditions
    ]
    emit_rows(rows, ["router", "type", "cause", "detail"], output)
    if not rows and output is Format.TABLE:
        err.print("all is well")


async def _each(endpoints: list[str], ask: Callable[[RouterClient], Awaitable[T]]) -> list[tuple[str, T]]:
    answers = []
    for endpoint in endpoints:
        async with router_client(endpoint) as client:
            answers.append((endpoint, await ask(client)))
    return answers


def _workers(view: pb.InspectRouterResponse) -> list[Row]:
    return [
        {
            "router": view.router,
            "worker": worker.worker.name,
            "incarnation": f"{worker.worker.incarnation:016x}",
            "role": _role(worker.role),
            "state": worker.locality.state or "-",
            "cause": worker.locality.cause,
            "blocks": worker.locality.blocks,
            "indexed": worker.locality.indexed_blocks,
            "sequence": worker.locality.next_sequence,
            "heard_seconds": round(worker.locality.heard.ToNanoseconds() / 1e9, 2)
            if worker.locality.HasField("heard")
            else None,
            "resyncs": worker.locality.resyncs,
            "failures": worker.locality.failures,
        }
        for worker in view.workers
    ]


def _holders(endpoint: str, answer: pb.LookupPrefixResponse) -> list[Row]:
    return [
        {
            "router": endpoint,
            "worker": holder.worker.name,
            "role": _role(holder.role),
            "blocks": holder.blocks,
            "tokens": holder.tokens,
            "share": round(holder.tokens / max(1, answer.prompt_tokens), 3),
        }
        for holder in answer.holders
    ]


def _role(role: "worker_pb2.Role.ValueType") -> str:
    return worker_pb2.Role.Name(role).removeprefix("ROLE_").lower()
