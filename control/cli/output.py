# SPDX-License-Identifier: Apache-2.0
"""How commands print: rich tables for people, JSON or YAML for programs. Data to stdout, talk to stderr."""

import json
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.table import Table

# Without a terminal there is no width to fit: a row must stay a line.
PIPE_WIDTH = 400
out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else PIPE_WIDTH)
err = Console(stderr=True, highlight=False, soft_wrap=True)

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3
EXIT_DENIED = 4

Row = Mapping[str, object]


class Format(StrEnum):
    """Output formats of every command that prints data."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


FormatOption = Annotated[
    Format, typer.Option("--output", "-o", help="How to print.", envvar="TWINPOOL_OUTPUT")
]


def emit_rows(rows: Sequence[Row], columns: Sequence[str], fmt: Format, *, title: str = "") -> None:
    """Prints rows; ``columns`` are the keys that the table shows (JSON and YAML show all)."""
    if fmt is Format.TABLE:
        table = Table(
            title=title or None, title_justify="left", header_style="bold", box=None, pad_edge=False
        )
        for column in columns:
            numeric = bool(rows) and all(isinstance(row.get(column), int | float) for row in rows)
            table.add_column(
                column.replace("_", " ").upper(), justify="right" if numeric else "left", no_wrap=True
            )
        for row in rows:
            table.add_row(*(_cell(row.get(column)) for column in columns))
        out.print(table)
    elif fmt is Format.NAME:
        for row in rows:
            print(row.get("name", ""))
    else:
        emit_data([dict(row) for row in rows], fmt)


def emit_data(data: object, fmt: Format) -> None:
    """Prints one document as JSON or YAML."""
    if fmt is Format.YAML:
        yaml.safe_dump(data, sys.stdout, sort_keys=False)
    else:
        json.dump(data, sys.stdout, indent=2)
        print()


def fail(message: str, code: int = EXIT_FAILED) -> typer.Exit:
    """Prints an error and returns the exception to raise."""
    err.print(f"[bold red]error:[/] {message}", soft_wrap=True)
    return typer.Exit(code)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)
