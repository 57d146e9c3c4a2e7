# SPDX-License-Identifier: Apache-2.0
"""``twinpool flip``: gives a worker the other role."""

from enum import StrEnum
from typing import Annotated

import typer

from twinpool.control.cli.calls import CALL_SECONDS, Stub
from twinpool.control.cli.drain import (
    WaitOption,
    WorkerArgument,
    YesOption,
    confirm,
    duration_of,
    operate,
)
from twinpool.control.cli.output import Format, FormatOption
from twinpool.control.cli.target import ClusterOption, ControlOption, control_endpoint
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2


class RoleName(StrEnum):
    """What a worker can be."""

    PREFILL = "prefill"
    DECODE = "decode"


ROLES = {RoleName.PREFILL: worker_pb2.ROLE_PREFILL, RoleName.DECODE: worker_pb2.ROLE_DECODE}

ToOption = Annotated[RoleName, typer.Option("--to", help="The role that the worker is to have.")]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        min=0,
        max=86400,
        help="How long the worker may take to become free of work, in seconds; after that it keeps its role. Default: "
        "worker.drain_timeout_seconds.",
    ),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Also if no other worker of its role is left: requests then wait.")
]


def flip(
    worker: WorkerArgument,
    to: ToOption,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    force: ForceOption = False,
    yes: YesOption = False,
    cluster: ClusterOption = "local",
    control: ControlOption = "",
    output: FormatOption = Format.TABLE,
) -> None:
    """Make a prefill worker a decode worker or the other way round, without a restart. Its weights and cached prefixes stay."""
    confirm(f"Make {worker} a {to.value} worker?", yes)
    request = pb.FlipWorkerRequest(worker=worker, role=ROLES[to], timeout=duration_of(timeout), force=force)

    async def begin(stub: Stub) -> pb.Operation:
        return (await stub.FlipWorker(request, timeout=CALL_SECONDS)).operation

    operate(control_endpoint(cluster, control), begin, wait, output)
