# SPDX-License-Identifier: Apache-2.0
"""A control process beside a fleet of real workers, and the command line that operators use."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.fleet import Fleet, available_port
from twinpool.config import load_config, to_env
from twinpool.errors import TwinpoolError
from twinpool.store import Keys
from twinpool.v1 import control_pb2 as pb

WAIT_SECONDS = 120.0
KEYS = Keys("test")


class Control:
    """A control process that runs no workers of its own, and the command line that talks to it."""

    def __init__(self, fleet: Fleet, directory: Path) -> None:
        self._fleet = fleet
        self._log = directory / "control.log"
        self.endpoint = f"127.0.0.1:{available_port()}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        port = int(self.endpoint.rpartition(":")[2])
        overrides: dict[str, object] = {
            "cluster.name": "test",
            "cluster.etcd_endpoints": self._fleet.endpoint,
            "control.port": port,
            "pools.prefill_workers": 0,
            "pools.decode_workers": 0,
            "log.format": "json",
        }
        env = {key: value for key, value in os.environ.items() if not key.startswith("TWINPOOL_")}
        env |= to_env(load_config(None, overrides, env={}))
        command = [sys.executable, "-m", "twinpool.control.cli.main", "serve", "control"]
        with self._log.open("ab") as out:
            self.process = subprocess.Popen(
                command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    async def serving(self) -> None:
        """Waits until it answers."""
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                code, _, error = await self.run("get", "operations")
                if code == 0:
                    return
                assert self.process is not None
                assert self.process.poll() is None, self._log.read_text()[-4000:] + error

    async def back(self) -> None:
        """Starts it, and again if it ends (Ray may not start in its time on a busy machine), as its supervisor does; waits until
        it answers."""
        async with asyncio.timeout(WAIT_SECONDS):
            while (await self.run("get", "operations"))[0] != 0:
                if self.process is None or self.process.poll() is not None:
                    self.start()

    def kill(self) -> None:
        """SIGKILL to it and to all that it has started."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    async def run(self, *arguments: str) -> tuple[int, Any, str]:
        """The command line: exit status, what it printed as JSON, and stderr."""
        command = [sys.executable, "-m", "twinpool.control.cli.main", *arguments]
        process = await asyncio.create_subprocess_exec(
            *command,
            "--control",
            self.endpoint,
            "-o",
            "json",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, error = await process.communicate()
        return process.returncode or 0, json.loads(out) if out.strip() else None, error.decode()


def recorded(fleet: Fleet, name: str) -> pb.Operation:
    """The operation in etcd."""
    try:
        item = fleet.store.get(KEYS.operation(name))
    except TwinpoolError:
        return pb.Operation()
    return pb.Operation() if item is None else pb.Operation.FromString(item.value)
