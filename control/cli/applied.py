# SPDX-License-Identifier: Apache-2.0
"""``twinpool config apply`` and ``twinpool config live``: the keys that running processes take up."""

import asyncio
import json
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import yaml

from twinpool.control.cli.calls import CALL_SECONDS, POLL_SECONDS, ask
from twinpool.control.cli.config import parse_settings
from twinpool.control.cli.drain import YesOption, confirm
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
from twinpool.control.cli.target import ClusterOption, ControlOption, control_endpoint, run_command
from twinpool.v1 import control_pb2 as pb

WAIT_SECONDS: Final = 30.0
"""How long --wait waits unless it is told otherwise."""

CHANGES: Final = ["key", "before", "after"]
KEYS: Final = ["key", "value", "source", "reloadable"]
PROCESSES: Final = ["kind", "name", "generation", "refused", "refusal"]


def apply(
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="YAML file with the keys to change; - for stdin.")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="A key to change, as section.key=value (repeatable).")
    ] = None,
    reset: Annotated[
        list[str] | None,
        typer.Option("--reset", help="A key to be as each process was started; * for all (repeatable)."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check, and show what would change.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return only when all processes run it; 1 if one refuses it.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, max=86400, help="How long --wait waits, in seconds.")
    ] = WAIT_SECONDS,
    yes: YesOption = False,
    cluster: ClusterOption = "local",
    control: ControlOption = "",
    output: FormatOption = Format.TABLE,
) -> None:
    """Change keys of the configuration of all running processes, without a restart: all of them, or nothing."""
    request = pb.ApplyConfigRequest(reset=reset or [])
    for key, value in _asked(file, setting or []).items():
        request.values.add(key=key, value=_json(key, value))
    if not request.values and not request.reset:
        raise fail("say what to change: --file, --set or --reset", EXIT_USAGE)
    endpoint = control_endpoint(cluster, control)
    look = pb.ApplyConfigRequest(values=request.values, reset=request.reset, dry_run=True)
    if dry_run or not yes:
        # Whoever is asked sees what the answer is about, and that is what is applied.
        found = run_command(_apply(endpoint, look))
        request.generation = found.generation
        if dry_run or not found.changes:
            _show(found, output)
            return
        _show(found, Format.TABLE)
        confirm("Apply that to all processes?", yes)
    answer = run_command(_apply(endpoint, request))
    _show(answer, output)
    if wait:
        run_command(_wait(endpoint, answer.generation, timeout))


def live(
    every: Annotated[bool, typer.Option("--all", help="Also keys that nobody has applied.")] = False,
    cluster: ClusterOption = "local",
    control: ControlOption = "",
    output: FormatOption = Format.TABLE,
) -> None:
    """Print what is in force of the configuration: what was applied, and which processes run it."""
    endpoint = control_endpoint(cluster, control)
    answer = run_command(_get(endpoint))
    keys = [
        {
            "key": each.key,
            "value": json.loads(each.value),
            "source": each.source,
            "reloadable": each.reloadable,
        }
        for each in answer.keys
        if every or each.source == "applied"
    ]
    processes = [_row(process) for process in answer.processes]
    if output is Format.NAME:
        emit_rows([{"name": each["key"]} for each in keys], ["name"], output)
    elif output is not Format.TABLE:
        at = answer.applied.at.ToJsonString() if answer.HasField("applied") else None
        generation = answer.applied.generation
        emit_data({"generation": generation, "at": at, "keys": keys, "processes": processes}, output)
    else:
        if keys:
            emit_rows([each | {"value": json.dumps(each["value"])} for each in keys], KEYS, output)
        emit_rows(processes, PROCESSES, output)
        err.print(f"generation {answer.applied.generation}")


def _asked(file: Path | None, settings: list[str]) -> dict[str, object]:
    """SECTION.KEY to value, of the file and over it of --set."""
    asked: dict[str, object] = {}
    if file is not None:
        try:
            text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
            content: Any = yaml.safe_load(text)
        except (OSError, UnicodeDecodeError) as error:
            raise fail(f"cannot read {file}: {error}", EXIT_USAGE) from None
        except yaml.YAMLError as error:
            raise fail(f"{file} is not valid YAML: {error}", EXIT_USAGE) from None
        for section, values in _sections(file, content):
            asked |= {f"{section}.{name}": value for name, value in values.items()}
    try:
        return asked | {key: yaml.safe_load(str(value)) for key, value in parse_settings(settings).items()}
    except yaml.YAMLError as error:
        raise fail(f"--set: {error}", EXIT_USAGE) from None


def _sections(file: Path, content: Any) -> Iterable[tuple[str, Mapping[Any, object]]]:
    if content is None:
        return
    if not isinstance(content, Mapping):
        raise fail(f"{file} must hold sections with keys", EXIT_USAGE)
    for section, values in content.items():
        if not isinstance(values, Mapping):
            raise fail(f"{section}: must hold keys ({file})", EXIT_USAGE)
        yield str(section), values


def _json(key: str, value: object) -> str:
    try:
        return json.dumps(value)
    except TypeError:
        raise fail(f"{key}: {value!r} is no value of a configuration", EXIT_USAGE) from None


async def _apply(endpoint: str, request: pb.ApplyConfigRequest) -> pb.ApplyConfigResponse:
    return await ask(endpoint, lambda stub: stub.ApplyConfig(request, timeout=CALL_SECONDS))


async def _get(endpoint: str) -> pb.GetConfigResponse:
    return await ask(endpoint, lambda stub: stub.GetConfig(pb.GetConfigRequest(), timeout=CALL_SECONDS))


async def _wait(endpoint: str, generation: int, seconds: float) -> None:
    """Ends the command if a process refuses the generation, or has not said in time that it runs it."""
    deadline = time.monotonic() + seconds
    while True:
        processes = (await _get(endpoint)).processes
        refusing = [each for each in processes if each.state.refused >= generation]
        if refusing:
            raise fail(
                "; ".join(f"{each.kind} {each.name} refuses it: {each.state.refusal}" for each in refusing),
                EXIT_FAILED,
            )
        behind = [each for each in processes if each.state.generation < generation]
        if not behind:
            err.print(f"{len(processes)} processes run generation {generation}")
            return
        if time.monotonic() > deadline:
            names = ", ".join(f"{each.kind} {each.name}" for each in behind)
            raise fail(f"after {seconds:g} s these do not run generation {generation}: {names}", EXIT_FAILED)
        await asyncio.sleep(POLL_SECONDS)


def _row(process: pb.ConfigProcess) -> dict[str, object]:
    state = process.state
    return {
        "kind": process.kind,
        "name": process.name,
        "generation": state.generation,
        "refused": state.refused or None,
        "refusal": state.refusal or None,
    }


def _show(answer: pb.ApplyConfigResponse, output: Format) -> None:
    rows = [{"key": each.key, "before": each.before, "after": each.after} for each in answer.changes]
    if output is Format.TABLE:
        if rows:
            emit_rows(rows, CHANGES, output)
        err.print(f"generation {answer.generation}" + ("" if rows else ": nothing changes"))
    elif output is Format.NAME:
        emit_rows([{"name": row["key"]} for row in rows], ["name"], output)
    else:
        data = [
            {"key": each.key, "before": json.loads(each.before), "after": json.loads(each.after)}
            for each in answer.changes
        ]
        emit_data({"generation": answer.generation, "changes": data}, output)
