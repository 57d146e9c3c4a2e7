# SPDX-License-Identifier: Apache-2.0
"""``twinpool up`` and ``twinpool down``: a local cluster that stays."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import psutil
import typer

from twinpool.config import TwinpoolConfig, to_env
from twinpool.control import state
from twinpool.control.cli.config import parse_settings, read_config
from twinpool.control.cli.model import resolve_model
from twinpool.control.cli.output import EXIT_UNAVAILABLE, err, fail
from twinpool.control.cli.progress import Stages, stages
from twinpool.control.cli.target import ClusterOption

POLL_SECONDS = 0.1
DOWN_SECONDS = 90.0


def up(
    model: Annotated[
        str, typer.Option(help="A checkpoint directory or the name of a known model.")
    ] = "smollm2-135m-instruct",
    prefill: Annotated[int, typer.Option(help="Prefill workers.", min=1)] = 1,
    decode: Annotated[int, typer.Option(help="Decode workers.", min=1)] = 1,
    cluster: ClusterOption = "local",
    embedded_store: Annotated[
        bool, typer.Option(help="Use the embedded store even if etcd is installed.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML file.", envvar="TWINPOOL_CONFIG")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Any option, as section.key=value.")
    ] = None,
) -> None:
    """Start a local cluster in the background; `twinpool down` stops it."""
    settings = parse_settings(setting or [])
    # The name may come either way; the state of a running cluster is kept under it.
    cluster = str(settings.get("cluster.name", cluster))
    running = state.read(cluster)
    if running is not None and running.alive():
        raise fail(
            f"cluster {cluster!r} is already up (pid {running.pid}); routers: {', '.join(running.router_endpoints)}"
        )
    path = resolve_model(model)
    overrides: dict[str, object] = {
        "cluster.name": cluster,
        "model.path": str(path),
        "model.name": path.name,
        "pools.prefill_workers": prefill,
        "pools.decode_workers": decode,
    }
    loaded = read_config(config, overrides | settings)
    if "http_port" not in loaded.control.model_fields_set:
        # Nobody but this machine's own users reaches it, unless control.host says otherwise.
        loaded = loaded.model_copy(update={"control": loaded.control.model_copy(update={"http_port": 0})})
    process = _spawn(loaded, embedded_store)
    try:
        with stages(True) as progress:
            found = _wait_up(cluster, process, progress)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise fail("interrupted; the cluster was stopped") from None
    http = f", http {', '.join(found.http_endpoints)}" if found.http_endpoints else ""
    err.print(
        f"[green]up[/]: routers {', '.join(found.router_endpoints)}{http}, control {found.control_endpoint}"
    )
    if found.console_url:
        err.print(f"console: {found.console_url}")
    err.print(f'try: twinpool generate --cluster {cluster} --chat "What is the capital of France?"')


def down(cluster: ClusterOption = "local") -> None:
    """Stop a local cluster and wait until nothing of it is left."""
    found = state.read(cluster)
    if found is None:
        raise fail(f"no local cluster {cluster!r}", EXIT_UNAVAILABLE)
    if not found.alive():
        state.remove(cluster)
        raise fail(f"cluster {cluster!r} was not running any more; its state was removed", EXIT_UNAVAILABLE)
    process = psutil.Process(found.pid)
    process.terminate()
    with err.status(f"Stopping {cluster}"):
        try:
            process.wait(DOWN_SECONDS)
        except psutil.TimeoutExpired:
            _kill_tree(process)
            state.remove(cluster)
            raise fail(f"the cluster did not stop within {DOWN_SECONDS:g} s and was killed") from None
    err.print(f"{cluster} is down")


def _spawn(config: TwinpoolConfig, embedded_store: bool) -> subprocess.Popen[bytes]:
    directory = state.directory(config.cluster.name)
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    (directory / "progress.json").unlink(missing_ok=True)
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("TWINPOOL_") or key == "TWINPOOL_HOME"
    }
    command = [sys.executable, "-m", "twinpool.control.supervisor"]
    if embedded_store:
        command.append("--embedded-store")
    with (directory / "logs" / "supervisor.log").open("ab") as log_file:
        return subprocess.Popen(
            command,
            env=inherited | to_env(config),
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait_up(cluster: str, process: subprocess.Popen[bytes], progress: Stages) -> state.LocalState:
    directory = state.directory(cluster)
    while True:
        found = state.read(cluster)
        if found is not None and found.pid == process.pid:
            return found
        note: dict[str, str] = {}
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            note = json.loads((directory / "progress.json").read_text())
        if process.poll() is not None:
            message = note.get("error", f"the supervisor ended with {process.returncode}")
            raise fail(f"{message} (logs: {directory / 'logs'})")
        if "stage" in note:
            progress.stage(note["stage"], note.get("detail", ""))
        time.sleep(POLL_SECONDS)


def _kill_tree(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
