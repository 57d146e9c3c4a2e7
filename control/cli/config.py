# SPDX-License-Identifier: Apache-2.0
"""``twinpool config``: shows, checks and documents the configuration."""

from pathlib import Path
from typing import Annotated

import typer

from twinpool.config import TwinpoolConfig, config_schema, load_config
from twinpool.control.cli.output import EXIT_USAGE, Format, emit_data, err, fail
from twinpool.errors import ConfigError

app = typer.Typer(
    help="Show, check and document the configuration, and change that of running processes.",
    no_args_is_help=True,
)

FileArgument = Annotated[Path | None, typer.Argument(help="YAML file; default: $TWINPOOL_CONFIG.")]
FormatChoice = Annotated[Format, typer.Option("--output", "-o", help="yaml or json.")]


@app.command()
def show(file: FileArgument = None, output: FormatChoice = Format.YAML) -> None:
    """Print the whole configuration: file, environment and defaults together."""
    emit_data(read_config(file).model_dump(mode="json"), output)


@app.command()
def validate(file: FileArgument = None) -> None:
    """Check a configuration; every fault is named."""
    read_config(file)
    err.print("valid")


@app.command()
def schema() -> None:
    """Print the JSON Schema of the configuration file."""
    emit_data(config_schema(), Format.JSON)


def read_config(file: Path | None = None, overrides: dict[str, object] | None = None) -> TwinpoolConfig:
    """Loads the configuration; ends the command with the faults if there are any."""
    try:
        return load_config(file, overrides)
    except ConfigError as error:
        raise fail(error.message, EXIT_USAGE) from error


def parse_settings(settings: list[str]) -> dict[str, object]:
    """``--set kv.num_blocks=64`` options as overrides."""
    parsed: dict[str, object] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or "." not in key:
            raise fail(f"--set takes section.key=value, not {setting!r}", EXIT_USAGE)
        parsed[key] = value
    return parsed
