# SPDX-License-Identifier: Apache-2.0
"""The state file of a local cluster: who runs it and where it listens.

One directory a cluster, ``$TWINPOOL_HOME/<cluster>`` (default ``~/.twinpool``), holds ``state.json``, ``logs/`` and the
store's data. The file is written whole and renamed, and removed when the cluster stops.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil


def home() -> Path:
    """Directory of all local clusters."""
    return Path(os.environ.get("TWINPOOL_HOME") or Path.home() / ".twinpool")


@dataclass(frozen=True)
class LocalState:
    """What a command needs to find a local cluster."""

    cluster: str
    pid: int
    started_at: float
    model: str
    store_kind: str
    store_endpoint: str
    control_endpoint: str
    router_endpoints: list[str] = field(default_factory=list)
    http_endpoints: list[str] = field(default_factory=list)
    console_url: str = ""
    metrics_endpoint: str = ""
    tls: dict[str, str] = field(default_factory=dict)
    """Options of section ``tls`` by which its processes know one another: paths and names. Empty: it speaks no TLS."""

    def alive(self) -> bool:
        """Whether the supervising process still runs (a reused pid has another start time)."""
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started_at) < 1.0
        except psutil.NoSuchProcess:
            return False


def directory(cluster: str) -> Path:
    """The cluster's directory."""
    return home() / cluster


def read(cluster: str) -> LocalState | None:
    """The state of a cluster, or None if it has none or the file is damaged."""
    try:
        return LocalState(**json.loads((directory(cluster) / "state.json").read_text()))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return None


def write(state: LocalState) -> None:
    """Publishes the state atomically."""
    path = directory(state.cluster) / "state.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(state), indent=2))
    partial.rename(path)


def remove(cluster: str, *, keep_logs: bool = True) -> None:
    """Forgets a stopped cluster. The logs stay unless told otherwise."""
    path = directory(cluster)
    (path / "state.json").unlink(missing_ok=True)
    shutil.rmtree(path / "store", ignore_errors=True)
    if not keep_logs:
        shutil.rmtree(path, ignore_errors=True)
