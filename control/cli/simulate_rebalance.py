# SPDX-License-Identifier: Apache-2.0
"""The part of ``twinpool simulate`` that lets workers change their roles."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from twinpool.config import ConfigError, RebalanceSection, load_config
from twinpool.control.cli.output import EXIT_USAGE, Format, emit_rows, err, fail
from twinpool.control.rebalance.telemetry import ROLES
from twinpool.control.replay.figures import Objectives
from twinpool.control.simulate.plot import Line, PlotError, write_plot
from twinpool.control.simulate.results import Figures, Run

COLUMNS = ["at", "worker", "to", "drain", "took", "reason"]

RebalanceOption = Annotated[
    bool,
    typer.Option(
        "--rebalance",
        help="Ours: let workers change their roles, by the policy of the control process; section rebalance of the "
        "configuration, with the objectives of this run.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--rebalance-set", help="With --rebalance: a key of that section, as name=value (repeatable)."
    ),
]
FlipSecondsOption = Annotated[
    float, typer.Option(help="With --rebalance: what a change of role takes once its worker is empty.", min=0)
]


def section_of(wanted: bool, settings: Sequence[str], objectives: Objectives) -> RebalanceSection | None:
    """The rebalancer's settings: the configuration's, the run's objectives, what was set; None if it is not wanted."""
    if not wanted:
        if settings:
            raise fail("--rebalance-set has no meaning without --rebalance", EXIT_USAGE)
        return None
    chosen: dict[str, object] = {
        "rebalance.ttft_seconds": objectives.ttft,
        "rebalance.itl_seconds": objectives.itl,
    }
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise fail(f"--rebalance-set {setting!r}; expected name=value", EXIT_USAGE)
        chosen[f"rebalance.{name}"] = value
    try:
        return load_config(overrides=chosen).rebalance
    except ConfigError as error:
        raise fail(str(error), EXIT_USAGE) from error


def show_flips(figures: Figures, output: Format) -> None:
    """The flips of a run as a table, each with its reason below."""
    flips = figures["flips"]
    assert isinstance(flips, list)
    rows = [
        {
            "at": f"{flip['at']:.0f} s",
            "worker": flip["worker"],
            "to": flip["to"],
            "drain": "-" if flip["drain_seconds"] is None else f"{flip['drain_seconds']:.1f} s",
            "took": "-" if flip["seconds"] is None else f"{flip['seconds']:.1f} s",
            "reason": flip["message"],
        }
        for flip in flips
    ]
    emit_rows(rows, COLUMNS, output, title=f"{len(rows)} flips, {figures['reversals']} of them reversals")


def show_use(run: Run) -> None:
    """How busy the roles were, in tenths of the run."""
    rebalancer = run.cluster.rebalancer
    assert rebalancer is not None
    moments = rebalancer.timeline
    step = max(1, len(moments) // 10)
    for moment in moments[::step]:
        counts = ":".join(str(moment.workers[role]) for role in ROLES)
        used = ", ".join(f"{role} {moment.utilisation[role]:.0%}" for role in ROLES)
        err.print(
            f"[dim]{moment.at:8.0f} s  {counts}  {used}, {moment.queued} queued: {moment.decision.reason}[/]"
        )


def plot_use(path: Path, run: Run, name: str) -> None:
    """Plots workers and load of each role over time."""
    rebalancer = run.cluster.rebalancer
    assert rebalancer is not None
    lines: dict[str, Line] = {}
    for role in ROLES:
        lines[f"{role} workers"] = [(each.at, each.workers[role]) for each in rebalancer.timeline]
        lines[f"{role} needed"] = [
            (each.at, each.utilisation[role] * max(1, each.workers[role])) for each in rebalancer.timeline
        ]
    try:
        write_plot(path, f"{name}: workers of each role", "seconds", "workers", lines)
    except (PlotError, OSError) as error:
        raise fail(str(error)) from error
