# SPDX-License-Identifier: Apache-2.0
"""``twinpool scale``."""

from typing import Annotated

import typer

from twinpool.control.cli.calls import CALL_SECONDS, ask, ended
from twinpool.control.cli.drain import YesOption, confirm, emit_operation
from twinpool.control.cli.output import EXIT_USAGE, Format, FormatOption, fail
from twinpool.control.cli.target import ClusterOption, ControlOption, control_endpoint, run_command
from twinpool.v1 import control_pb2 as pb


def scale(
    pool: Annotated[str, typer.Argument(help="Name of the pool; see `twinpool get pools`.")],
    prefill: Annotated[
        int | None, typer.Option(help="Prefill workers. Default: as many as now.", min=0)
    ] = None,
    decode: Annotated[
        int | None, typer.Option(help="Decode workers. Default: as many as now.", min=0)
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return only when it is done; 1 if it failed.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0, max=86400, help="How long all of it may take, in seconds. Default: a start and a drain."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Also leave a role without workers.")] = False,
    reason: Annotated[str, typer.Option(help="Why, for whoever reads the events.")] = "",
    yes: YesOption = False,
    cluster: ClusterOption = "local",
    control: ControlOption = "",
    output: FormatOption = Format.TABLE,
) -> None:
    """Change how many workers of each role a pool has. Nothing fails: who has to go is drained."""
    if prefill is None and decode is None:
        raise fail("say --prefill N or --decode N", EXIT_USAGE)
    parts = [
        f"{count} {role}" for count, role in ((prefill, "prefill"), (decode, "decode")) if count is not None
    ]
    confirm(f"Give {pool} {' and '.join(parts)} workers?", yes)
    request = pb.ScalePoolRequest(pool=pool, prefill=prefill, decode=decode, force=force, reason=reason)
    if timeout is not None:
        request.timeout.FromNanoseconds(int(timeout * 1e9))
    endpoint = control_endpoint(cluster, control)

    async def run() -> pb.Operation:
        begun = await ask(endpoint, lambda stub: stub.ScalePool(request, timeout=CALL_SECONDS))
        return await ended(endpoint, begun.operation) if wait else begun.operation

    emit_operation(run_command(run()), output)
