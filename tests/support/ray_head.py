# SPDX-License-Identifier: Apache-2.0
"""A Ray of its own for a test, as an operator starts it: a head that is no child of who uses it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from twinpool.control.ray_join import HEAD_AWAY_SECONDS

START_SECONDS = 180.0
STOP_SECONDS = 20.0


class RayHead:
    """``address`` for ``pools.ray_address``. ``directory`` must be short: Ray makes sockets below it."""

    def __init__(self, directory: Path, cpus: int) -> None:
        self._directory = directory
        with socket.socket() as free:
            free.bind(("", 0))
            self._client_port = int(free.getsockname()[1])
        root = str(Path(__file__).parents[2])
        environment = os.environ | {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(HEAD_AWAY_SECONDS),
            "PYTHONPATH": os.pathsep.join((root, os.environ.get("PYTHONPATH", ""))),
        }
        command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--port=0"]
        command += [f"--num-cpus={cpus}", "--include-dashboard=false", "--object-store-memory=80000000"]
        # It cannot be left out, and takes a fixed port otherwise.
        command += [f"--ray-client-server-port={self._client_port}"]
        command += [f"--temp-dir={directory}"]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=START_SECONDS, check=False
            )
            found = re.search(r"--address='([^']+)'", done.stdout)
            assert found, done.stdout + done.stderr
        except BaseException:
            # What it has started is no child of anyone.
            self.end()
            raise
        self.address = found[1]

    def processes(self) -> list[psutil.Process]:
        """All of it, workers included."""
        own = []
        # The server for Ray's clients is not told the directory.
        marks = (str(self._directory), f"--port={self._client_port}")
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(mark in part for part in process.cmdline() for mark in marks):
                    own += [process, *process.children(recursive=True)]
        return list(dict.fromkeys(own))

    def kill_head(self) -> None:
        """Kills the head's own process (its control store), and nothing else."""
        (head,) = (each for each in self.processes() if each.name() == "gcs_server")
        head.kill()

    def end(self) -> None:
        """Kills what is left."""
        left = self.processes()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=STOP_SECONDS)
