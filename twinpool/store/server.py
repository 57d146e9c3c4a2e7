# SPDX-License-Identifier: Apache-2.0
"""Starts a store for a local cluster: a real etcd where its binary is installed, else the embedded one."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from twinpool.errors import TwinpoolError
from twinpool.logs import get_logger
from twinpool.store.etcd import EtcdStore

_log = get_logger(__name__)

_START_TRIES: Final = 5
_START_TIMEOUT_SECONDS: Final = 20.0
_STOP_TIMEOUT_SECONDS: Final = 5.0
_LOG_TAIL_BYTES: Final = 2000


@dataclass(slots=True)
class StoreServer:
    """A running store process. ``endpoint`` is host:port."""

    endpoint: str
    kind: Literal["etcd", "embedded"]
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def stop(self) -> None:
        """Ends the process and waits for it. Idempotent."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_STOP_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """Ends the process without giving it a chance, as a crash would."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def find_etcd() -> str | None:
    """Path of the etcd binary, or None."""
    return shutil.which("etcd")


def start_store(
    data_dir: str | os.PathLike[str], *, prefer_embedded: bool = False, host: str = "127.0.0.1", port: int = 0
) -> StoreServer:
    """Starts a store process and returns once it answers.

    ``data_dir``: etcd's data and ``etcd.log``; made if it is missing. ``port`` 0: a free one.
    Raises PORT_UNAVAILABLE if ``port`` is taken, STORE_UNAVAILABLE if the process does not come up.
    """
    directory = Path(data_dir)
    directory.mkdir(parents=True, exist_ok=True)
    binary = None if prefer_embedded else find_etcd()
    for attempt in range(_START_TRIES):
        client, peer = _free_ports(host, port)
        kind: Literal["etcd", "embedded"] = "embedded" if binary is None else "etcd"
        command = (
            [sys.executable, "-m", "twinpool.store.embedded", "--host", host, "--port", str(client)]
            if binary is None
            else _etcd_command(binary, directory, f"{host}:{client}", f"{host}:{peer}")
        )
        server = StoreServer(f"{host}:{client}", kind, _spawn(command, directory / "etcd.log"))
        if _wait_ready(server):
            _log.info("store_started", kind=kind, endpoint=server.endpoint, pid=server.pid)
            return server
        server.kill()
        # Another process may have taken a port between the check and the bind: only then another try helps.
        if port or not _port_clash(directory / "etcd.log"):
            break
        _log.warning("store_port_clash", attempt=attempt + 1)
    raise TwinpoolError(
        "STORE_UNAVAILABLE",
        f"the store did not start; the end of {directory / 'etcd.log'} says:\n{_tail(directory / 'etcd.log')}",
    )


def _etcd_command(binary: str, directory: Path, client: str, peer: str) -> list[str]:
    return [
        binary,
        "--name=twinpool",
        f"--data-dir={directory / 'data'}",
        f"--listen-client-urls=http://{client}",
        f"--advertise-client-urls=http://{client}",
        f"--listen-peer-urls=http://{peer}",
        f"--initial-advertise-peer-urls=http://{peer}",
        f"--initial-cluster=twinpool=http://{peer}",
        "--auto-compaction-mode=periodic",
        "--auto-compaction-retention=10m",
        "--logger=zap",
    ]


def _spawn(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    # A user's ETCD_ variables would override the flags' defaults.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
    if platform.machine() == "aarch64":
        environment["ETCD_UNSUPPORTED_ARCH"] = "arm64"
    if command[0] == sys.executable:
        path = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [path, environment.get("PYTHONPATH", "")]))
    with log.open("ab") as output:
        # A session of its own: Ctrl-C ends the cluster in its order, the store last.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )


def _free_ports(host: str, port: int) -> tuple[int, int]:
    with contextlib.ExitStack() as stack:
        ports = []
        for wanted in (port, 0):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            # As the servers do: a port in TIME_WAIT is free.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((host, wanted))
            except OSError as error:
                raise TwinpoolError(
                    "PORT_UNAVAILABLE", f"the store cannot listen on {host}:{wanted}: {error.strerror}"
                ) from None
            ports.append(int(listener.getsockname()[1]))
        return ports[0], ports[1]


def _wait_ready(server: StoreServer) -> bool:
    """Whether the process answers before its time is over or it ends."""
    deadline = time.monotonic() + _START_TIMEOUT_SECONDS
    store = EtcdStore([server.endpoint], timeout_seconds=1.0)
    try:
        while time.monotonic() < deadline:
            try:
                server.process.wait(0.05)
            except subprocess.TimeoutExpired:
                pass
            else:
                return False
            with contextlib.suppress(TwinpoolError):
                store.get("/")
                # Another process on that port could have answered while ours was failing to bind.
                return server.process.poll() is None
        return False
    finally:
        store.close()


def _tail(log: Path) -> str:
    with log.open("rb") as content:
        content.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
        return content.read().decode("utf-8", "replace")


def _port_clash(log: Path) -> bool:
    text = _tail(log)
    return "address already in use" in text or "PORT_UNAVAILABLE" in text
