# SPDX-License-Identifier: Apache-2.0
"""``twinpool simulate``: a trace through a cluster in virtual time."""

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import typer

from twinpool._core import AdmissionConfig, CoreError
from twinpool.control.cli.output import EXIT_USAGE, Format, FormatOption, emit_data, emit_rows, err, fail
from twinpool.control.cli.progress import Stages, stages
from twinpool.control.cli.simulate_rebalance import (
    FlipSecondsOption,
    RebalanceOption,
    SetOption,
    plot_use,
    section_of,
    show_flips,
    show_use,
)
from twinpool.control.cli.trace_options import (
    Requests,
    Seed,
    Sessions,
    SloItl,
    SloTtft,
    Speed,
    Spread,
    ThinkLimit,
    TraceArgument,
    TraceFormat,
    chosen_trace,
)
from twinpool.control.replay.figures import Objectives
from twinpool.control.replay.load import Selection
from twinpool.control.replay.trace import Trace
from twinpool.control.simulate.faults import Fault, parse_faults
from twinpool.control.simulate.model import PRESETS, WorkerModel
from twinpool.control.simulate.plot import PlotError, write_plot
from twinpool.control.simulate.policies import POLICIES
from twinpool.control.simulate.results import Figures, Run, simulate
from twinpool.control.simulate.setup import Setup
from twinpool.control.simulate.sweep import best, sweep

_COLUMNS = ["goodput_per_s", "in_time", "ttft_p50", "ttft_p90", "ttft_p99", "itl_p50", "itl_p99"]
_COST_COLUMNS = ["hit_rate", "of_infinite", "imbalance", "kv_moved_gb", "rejected", "failed"]


def simulate_command(
    trace: TraceArgument,
    prefill: Annotated[int, typer.Option(help="Prefill workers.", min=1)] = 4,
    decode: Annotated[int, typer.Option(help="Decode workers.", min=1)] = 4,
    policy: Annotated[
        list[str] | None,
        typer.Option(help=f"A policy (repeatable), or all: {', '.join(POLICIES)}. Default: ours."),
    ] = None,
    preset: Annotated[str, typer.Option(help=f"Worker model: {', '.join(PRESETS)}.")] = "h200-v3",
    blocks: Annotated[
        int, typer.Option(help="Blocks of a prefill worker; 0: what the model's memory holds.")
    ] = 0,
    decode_blocks: Annotated[int, typer.Option(help="Blocks of a decode worker; 0: as above.")] = 0,
    block_tokens: Annotated[int, typer.Option(help="Tokens of a block; 0: as in the trace.", min=0)] = 0,
    slo_ttft: SloTtft = None,
    slo_itl: SloItl = None,
    format: TraceFormat = "auto",
    speed: Speed = 1.0,
    requests: Requests = None,
    sessions: Sessions = None,
    spread: Spread = None,
    think_limit: ThinkLimit = 60.0,
    horizon: Annotated[
        float | None, typer.Option(help="Send nothing that comes later, in virtual seconds.", min=0)
    ] = None,
    open_loop: Annotated[
        bool, typer.Option("--open", help="Keep the recorded arrivals even where requests follow answers.")
    ] = False,
    faults: Annotated[
        Path | None,
        typer.Option(help="Script of faults: lines of `<seconds> kill|start|slow|link <worker>`."),
    ] = None,
    fetch: Annotated[bool, typer.Option(help="Ours: prefill workers may pull cached prefixes.")] = True,
    core: Annotated[
        list[str] | None, typer.Option(help="Ours: an option of the router core, as name=value (repeatable).")
    ] = None,
    sweep_workers: Annotated[
        int | None, typer.Option("--sweep", help="Try every prefill:decode split of so many workers.", min=2)
    ] = None,
    rebalance: RebalanceOption = False,
    rebalance_set: SetOption = None,
    flip_seconds: FlipSecondsOption = 2.0,
    plot: Annotated[
        Path | None, typer.Option(help="With --sweep or --rebalance: write a plot, .svg or .png.")
    ] = None,
    seed: Seed = 0,
    output: FormatOption = Format.TABLE,
) -> None:
    """Run a trace through a simulated cluster, with the real router core or with other systems' rules."""
    model = _model(preset)
    selection = Selection(sessions, spread, think_limit, requests, speed, seed)
    loaded = chosen_trace(trace, format, selection)
    objectives = Objectives(
        model.slo_ttft if slo_ttft is None else slo_ttft, model.slo_itl if slo_itl is None else slo_itl
    )
    setup = Setup(
        model=model,
        prefill=prefill,
        decode=decode,
        block_tokens=block_tokens or loaded.block_tokens or model.block_tokens,
        prefill_blocks=blocks,
        decode_blocks=decode_blocks,
        closed=loaded.closed and not open_loop,
        objectives=objectives,
        rebalance=section_of(rebalance, rebalance_set or [], objectives),
        flip_seconds=flip_seconds,
        faults=_faults(faults),
        core={"prefix_fetch": float(fetch)} | _core_options(core or []),
        horizon=float("inf") if horizon is None else horizon,
        max_new_tokens=max(request.output_length for request in loaded.requests),
    )
    names = list(POLICIES) if policy == ["all"] else policy or ["ours"]
    try:
        if sweep_workers is not None:
            _sweep(loaded, setup, names, sweep_workers, plot, output)
        else:
            _compare(loaded, setup, names, plot if rebalance else None, output)
    except (ValueError, CoreError) as error:
        raise fail(str(error), EXIT_USAGE) from error


def _compare(trace: Trace, setup: Setup, names: list[str], plot: Path | None, output: Format) -> None:
    rows: list[Figures] = []
    runs: list[Run] = []
    with stages(output is Format.TABLE) as progress:
        for name in names:
            progress.stage(f"simulating {name}", f"{len(trace.requests)} requests")
            run, figures = _timed(trace, setup, name)
            rows.append(figures)
            runs.append(run)
    if plot is not None:
        plot_use(plot, runs[0], trace.name)
    if output is Format.TABLE:
        emit_rows([{"policy": row["policy"]} | _row(row) for row in rows], ["policy", *_COLUMNS], output)
        emit_rows([{"policy": row["policy"]} | _row(row) for row in rows], ["policy", *_COST_COLUMNS], output)
        if setup.rebalance is not None:
            show_flips(rows[0], output)
            show_use(runs[0])
        infinite = rows[0]["infinite_hit_rate"]
        err.print(f"[dim]an infinite cache would hit {_percent(infinite)}; model: {setup.model.source}[/]")
        return
    emit_data({"trace": trace.name, "setup": _described(setup), "policies": rows}, output)


def _timed(trace: Trace, setup: Setup, policy: str) -> tuple[Run, Figures]:
    start = time.perf_counter()
    run = simulate(trace, setup, policy)
    return run, run.figures | {"run_seconds": time.perf_counter() - start}


def _sweep(
    trace: Trace, setup: Setup, names: list[str], workers: int, plot: Path | None, output: Format
) -> None:
    tried: dict[str, list[Figures]] = {}
    with stages(output is Format.TABLE) as progress:
        for name in names:
            tried[name] = _sweep_one(trace, setup, name, workers, progress)
    found = {name: best(rows) for name, rows in tried.items()}
    if plot is not None:
        lines = {
            name: [(_number(row["prefill"]), _number(row["goodput_per_second"])) for row in rows]
            for name, rows in tried.items()
        }
        title = f"{trace.name}: goodput of {workers} workers"
        try:
            write_plot(plot, title, "prefill workers", "requests in time a second", lines)
        except (PlotError, OSError) as error:
            raise fail(str(error)) from error
    if output is not Format.TABLE:
        document = {"trace": trace.name, "setup": _described(setup), "splits": tried, "best": found}
        emit_data(document, output)
        return
    columns = ["prefill", "decode", *_COLUMNS, *_COST_COLUMNS[:2], "best"]
    for name, rows in tried.items():
        table = [
            {"prefill": row["prefill"], "decode": row["decode"], "best": "*" if row is found[name] else ""}
            | _row(row)
            for row in rows
        ]
        emit_rows(table, columns, output, title=name)


def _sweep_one(trace: Trace, setup: Setup, name: str, workers: int, progress: Stages) -> list[Figures]:
    return sweep(
        trace,
        setup,
        name,
        workers,
        lambda prefill, decode: progress.stage(f"simulating {name}", f"{prefill}:{decode} of {workers}"),
    )


def _row(figures: Figures) -> dict[str, object]:
    """What the tables show."""
    ttft, itl = figures["ttft_seconds"], figures["itl_seconds"]
    assert isinstance(ttft, dict)
    assert isinstance(itl, dict)
    return {
        "goodput_per_s": figures["goodput_per_second"],
        "in_time": _percent(figures["attainment"]),
        **{f"ttft_{share}": _seconds(ttft.get(share)) for share in ("p50", "p90", "p99")},
        **{f"itl_{share}": _seconds(itl.get(share)) for share in ("p50", "p99")},
        "hit_rate": _percent(figures["block_hit_rate"]),
        "of_infinite": _percent(figures["share_of_infinite"]),
        "imbalance": figures["imbalance_seconds"],
        "kv_moved_gb": _number(figures["transfer_bytes"]) / 1e9,
        "rejected": figures["rejected"],
        "failed": figures["failed"],
    }


def _described(setup: Setup) -> dict[str, object]:
    """The setup for JSON: infinity has no place there."""
    data = dataclasses.asdict(setup)
    data["rebalance"] = None if setup.rebalance is None else setup.rebalance.model_dump()
    data["faults"] = [dataclasses.asdict(fault) for fault in setup.faults]
    data["horizon"] = None if setup.horizon == float("inf") else setup.horizon
    data["core"] = dict(setup.core)
    return data


def _percent(value: object) -> str:
    return f"{_number(value) * 100:.1f} %"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def _model(preset: str) -> WorkerModel:
    if preset not in PRESETS:
        raise fail(f"unknown preset {preset!r}; known: {', '.join(PRESETS)}", EXIT_USAGE)
    return PRESETS[preset]


def _faults(path: Path | None) -> list[Fault]:
    if path is None:
        return []
    try:
        return parse_faults(path.read_text())
    except (OSError, ValueError) as error:
        raise fail(f"{path}: {error}", EXIT_USAGE) from error


def _core_options(settings: list[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise fail(f"--core {setting!r}; expected name=number", EXIT_USAGE)
    try:
        AdmissionConfig(**found)
    except CoreError as error:
        raise fail(str(error), EXIT_USAGE) from error
    return found
