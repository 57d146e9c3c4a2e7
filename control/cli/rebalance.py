# SPDX-License-Identifier: Apache-2.0
"""``twinpool rebalance``: splits a pool's workers anew between prefill and decode, or lets the pool do so by itself."""

from enum import StrEnum
from typing import Annotated

import typer

from twinpool.control.cli.calls import CALL_SECONDS, ask, ended
from twinpool.control.cli.drain import COLUMNS, WaitOption, YesOption, confirm, row_of
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
    control_endpoint,
    run_command,
)
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2

MOVES = ["worker", "to", "reason"]


class Switch(StrEnum):
    """What --auto takes."""

    ON = "on"
    OFF = "off"


def rebalance(
    pool: Annotated[str, typer.Argument(help="The pool; empty: the only one.")] = "",
    prefill: Annotated[
        int | None, typer.Option(help="Prefill workers that it shall have. Default: the rest.", min=1)
    ] = None,
    decode: Annotated[
        int | None, typer.Option(help="Decode workers that it shall have. Default: the rest.", min=1)
    ] = None,
    auto: Annotated[
        Switch | None, typer.Option(help="Whether the pool rebalances itself from now on.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")] = False,
    wait: WaitOption = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=86400,
            help="How long each worker's requests may take, in seconds. Default: worker.drain_timeout_seconds.",
        ),
    ] = None,
    yes: YesOption = False,
    cluster: ClusterOption = "local",
    control: ControlOption = "",
    output: FormatOption = Format.TABLE,
) -> None:
    """Change how a pool's workers are split between its roles. Without numbers the load decides. Nothing fails: workers change
    their roles one after the other, each once nothing runs there."""
    if auto is not None and (prefill is not None or decode is not None):
        raise fail("--auto and numbers exclude one another", EXIT_USAGE)
    request = pb.RebalancePoolRequest(pool=pool, prefill=prefill, decode=decode, dry_run=dry_run)
    if auto is not None:
        request.auto = auto is Switch.ON
    if timeout is not None:
        request.timeout.FromNanoseconds(int(timeout * 1e9))
    endpoint = control_endpoint(cluster, control)
    if not dry_run and auto is None and not yes:
        # Whoever is asked sees what the answer is about.
        _show(_look(endpoint, request), Format.TABLE)
        confirm("Do that?", yes)
    answer = run_command(_run(endpoint, request, wait))
    _show(answer, output)
    if answer.operation.state == pb.OPERATION_STATE_FAILED:
        raise fail(answer.operation.error, EXIT_FAILED)


def _look(endpoint: str, request: pb.RebalancePoolRequest) -> pb.RebalancePoolResponse:
    """The plan alone."""
    asked = pb.RebalancePoolRequest()
    asked.CopyFrom(request)
    asked.dry_run = True
    return run_command(_run(endpoint, asked, False))


async def _run(endpoint: str, request: pb.RebalancePoolRequest, wait: bool) -> pb.RebalancePoolResponse:
    answer = await ask(endpoint, lambda stub: stub.RebalancePool(request, timeout=CALL_SECONDS))
    if wait and answer.HasField("operation"):
        answer.operation.CopyFrom(await ended(endpoint, answer.operation))
    return answer


def data_of(answer: pb.RebalancePoolResponse) -> dict[str, object]:
    """An answer for programs."""
    plan = answer.plan
    data: dict[str, object] = {
        "auto": answer.auto,
        "prefill": plan.prefill,
        "decode": plan.decode,
        "added": plan.added,
        "reason": plan.reason,
        "moves": [
            {"worker": move.worker.name, "to": _role(move.target_role), "reason": move.reason}
            for move in plan.moves
        ],
        "effect": None,
        "operation": row_of(answer.operation) if answer.HasField("operation") else None,
    }
    if plan.HasField("effect"):
        effect = plan.effect
        data["effect"] = {
            "prefill_utilisation": [effect.prefill_utilisation, effect.prefill_utilisation_after],
            "decode_utilisation": [effect.decode_utilisation, effect.decode_utilisation_after],
            "served": [effect.served, effect.served_after],
            "seconds": effect.duration.ToNanoseconds() / 1e9,
        }
    return data


def _show(answer: pb.RebalancePoolResponse, output: Format) -> None:
    plan = answer.plan
    if output is Format.NAME:
        print(answer.operation.id)
        return
    if output is not Format.TABLE:
        emit_data(data_of(answer), output)
        return
    rows = [
        {"worker": move.worker.name, "to": _role(move.target_role), "reason": move.reason}
        for move in plan.moves
    ]
    if rows:
        emit_rows(rows, MOVES, output)
    err.print(f"{plan.prefill} prefill, {plan.decode} decode ({_auto(answer.auto)}): {plan.reason}")
    if plan.added:
        err.print(f"{abs(plan.added)} workers {'more' if plan.added > 0 else 'fewer'}")
    if plan.HasField("effect"):
        effect = plan.effect
        err.print(
            f"prefill {effect.prefill_utilisation:.0%} -> {effect.prefill_utilisation_after:.0%}, decode "
            f"{effect.decode_utilisation:.0%} -> {effect.decode_utilisation_after:.0%}, capacity for {effect.served:.0%} -> "
            f"{effect.served_after:.0%} of requests after {effect.duration.ToNanoseconds() / 1e9:.0f} s"
        )
    if answer.HasField("operation"):
        emit_rows([row_of(answer.operation)], COLUMNS, output)


def _auto(on: bool) -> str:
    return "it rebalances itself" if on else "it does not rebalance itself"


def _role(role: "worker_pb2.Role.ValueType") -> str:
    return worker_pb2.Role.Name(role).removeprefix("ROLE_").lower()
