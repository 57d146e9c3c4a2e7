# SPDX-License-Identifier: Apache-2.0
"""``twinpool serve``: runs one process of a cluster in the foreground."""

from pathlib import Path
from typing import Annotated

import typer

from twinpool.control.cli.config import parse_settings, read_config
from twinpool.launch import run_process

app = typer.Typer(help="Run one process of a cluster in the foreground.", no_args_is_help=True)

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file.", envvar="TWINPOOL_CONFIG")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Any option, as section.key=value (repeatable).")
]
HostOption = Annotated[str | None, typer.Option(help="Address to listen on.")]
PortOption = Annotated[int | None, typer.Option(help="Port; 0: a free one.")]
ModelOption = Annotated[str | None, typer.Option("--model", help="Checkpoint directory.")]
NameOption = Annotated[str | None, typer.Option(help="Stable name of this process.")]


def _serve(process: str, config: Path | None, settings: list[str] | None, flags: dict[str, object]) -> None:
    loaded = read_config(config, flags | parse_settings(settings or []))
    raise typer.Exit(run_process(process, loaded))


@app.command()
def router(
    config: ConfigOption = None,
    setting: SetOption = None,
    host: HostOption = None,
    port: PortOption = None,
    name: NameOption = None,
) -> None:
    """Serve clients: admit, place, stream."""
    _serve("router", config, setting, {"router.host": host, "router.port": port, "router.name": name})


def _worker(
    role: str,
    config: Path | None,
    setting: list[str] | None,
    host: str | None,
    port: int | None,
    name: str | None,
    model: str | None,
) -> None:
    flags: dict[str, object] = {
        "worker.host": host,
        "worker.port": port,
        "worker.name": name,
        "model.path": model,
    }
    _serve(role, config, setting, flags)


@app.command()
def prefill(
    config: ConfigOption = None,
    setting: SetOption = None,
    host: HostOption = None,
    port: PortOption = None,
    name: NameOption = None,
    model: ModelOption = None,
) -> None:
    """Compute prompts."""
    _worker("prefill", config, setting, host, port, name, model)


@app.command()
def decode(
    config: ConfigOption = None,
    setting: SetOption = None,
    host: HostOption = None,
    port: PortOption = None,
    name: NameOption = None,
    model: ModelOption = None,
) -> None:
    """Pull KV and generate."""
    _worker("decode", config, setting, host, port, name, model)


@app.command()
def control(
    config: ConfigOption = None, setting: SetOption = None, host: HostOption = None, port: PortOption = None
) -> None:
    """Run the pools through Ray and serve operators."""
    _serve("control", config, setting, {"control.host": host, "control.port": port})
