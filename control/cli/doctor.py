# SPDX-License-Identifier: Apache-2.0
"""``twinpool doctor``: says what this machine or a release on Kubernetes lacks, what follows and what to do."""

import asyncio
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from twinpool.config import TwinpoolConfig
from twinpool.control import state
from twinpool.control.cli.access import access
from twinpool.control.cli.calls import CALL_SECONDS, ask
from twinpool.control.cli.output import EXIT_UNAVAILABLE, Format, FormatOption, emit_rows
from twinpool.control.cli.target import ClusterOption, ControlOption
from twinpool.control.doctor import certificates, clock, machine, ports, software, transfers
from twinpool.control.doctor.finding import Finding, Status, warning
from twinpool.control.doctor.kube import check_kube
from twinpool.control.overview.collect import FRESH_SECONDS
from twinpool.errors import TwinpoolError
from twinpool.v1 import control_pb2 as pb

COLUMNS: Final = ["name", "status", "detail", "matters", "remedy"]
_TALK: Final = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "bold red"}


class Part(StrEnum):
    """What the machine is to run."""

    LOCAL = "local"
    ROUTER = "router"
    WORKER = "worker"
    CONTROL = "control"


_SECTIONS: Final = {
    Part.LOCAL: ("router", "worker", "control", "metrics"),
    Part.ROUTER: ("router", "metrics"),
    Part.WORKER: ("worker", "metrics"),
    Part.CONTROL: ("control",),
}
"""Sections of the configuration whose ports a part binds."""


def doctor(
    part: Annotated[
        Part, typer.Option("--for", help="What this machine is to run; local: a whole cluster.")
    ] = Part.LOCAL,
    port: Annotated[
        list[int] | None, typer.Option("--port", help="Also check that this port is free (repeatable).")
    ] = None,
    kube: Annotated[
        bool, typer.Option("--kube", help="Check a release on Kubernetes through kubectl, not this machine.")
    ] = False,
    values: Annotated[
        list[Path] | None,
        typer.Option(
            "--values",
            "-f",
            help="With --kube: values files of the release, as for helm (repeatable). Default: what helm has of it.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML file.", envvar="TWINPOOL_CONFIG")
    ] = None,
    cluster: ClusterOption = "local",
    control: ControlOption = "",
    output: FormatOption = Format.TABLE,
) -> None:
    """Say what is missing on this machine, or with --kube on Kubernetes, what follows from it and what to do.

    Exit status: 0 if nothing has failed, 3 if something has; warnings do not count.
    """
    way = access()
    if kube:
        found = check_kube(way.kubectl, way.client.release, values or [])
    else:
        found = [*check_machine(way.config, part, port or []), *_clocks(way.config, cluster, control)]
    emit_rows([finding.row() for finding in found], COLUMNS, output)
    if any(finding.status is Status.FAILED for finding in found):
        raise typer.Exit(EXIT_UNAVAILABLE)


def check_machine(config: TwinpoolConfig, part: Part, more_ports: list[int]) -> Iterator[Finding]:
    """What the machine needs to run ``part``."""
    works, local = part in (Part.LOCAL, Part.WORKER), part is Part.LOCAL
    yield software.check_python()
    yield software.check_core()
    if works:
        yield from software.check_torch(config)
        yield from transfers.check_transfers(config)
    if part in (Part.LOCAL, Part.CONTROL):
        yield software.check_ray()
    if local:
        yield software.check_etcd()
        yield machine.check_disk()
    if part is not Part.ROUTER:
        yield machine.check_shm(config, ray=part is not Part.WORKER)
    yield machine.check_files()
    if works:
        yield from machine.check_model(config)
    yield from certificates.check_certificates(config)
    for key, host, number in ports.named_ports(config, _SECTIONS[part]):
        yield ports.check_port(key, host, number)
    for number in more_ports:
        yield ports.check_port("--port", "0.0.0.0", number)


def _clocks(config: TwinpoolConfig, cluster: str, control: str) -> Iterator[Finding]:
    """Of etcd and of the control process, where this machine knows them."""
    local = state.read(cluster)
    running = local is not None and local.alive()
    if "etcd_endpoints" in config.cluster.model_fields_set:
        for endpoint in config.cluster.etcd_endpoints:
            yield clock.check_etcd_clock(config.cluster, endpoint)
    elif local is not None and running and local.store_kind == "etcd":
        yield clock.check_etcd_clock(config.cluster, local.store_endpoint)
    client = access().client
    if control or client.control or client.kube or running:
        yield check_control_clock(cluster, control)


def check_control_clock(cluster: str, control: str) -> Finding:
    """Against the control process."""
    asked = pb.GetOverviewRequest()
    endpoint = ""

    def at() -> float:
        answer = asyncio.run(ask(endpoint, lambda stub: stub.GetOverview(asked, timeout=CALL_SECONDS)))
        return answer.overview.at.ToNanoseconds() / 1e9

    try:
        endpoint = access().control(cluster, control)
        return clock.judge("clock control", f"control {endpoint}", clock.told_offset(at, stale=FRESH_SECONDS))
    except TwinpoolError as error:
        known = access().explained(error)
        name, detail = "clock control", f"not measured: {known.reason}: {known.message}"
        return warning(name, detail, "the skew is not known", known.spec.user_action)
