# SPDX-License-Identifier: Apache-2.0
"""Pods of others in the cluster: clients that ask, and one that tries doors."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from tests.pods.asking import check
from tests.pods.release import Release
from tests.support.chart import ROOT
from tests.support.netns import Host, call
from tests.support.oracle import Oracle
from tests.support.sandbox import Sandbox, image_environment
from tests.support.waiting import until

STOP_SECONDS: Final = 240.0
ROUTERS: Final = "rel-twinpool-router.ns.svc:50051"
_TRY: Final = """
import errno, json, socket, sys
said = {}
for ip, port in json.loads(sys.argv[1]):
    try:
        socket.create_connection((ip, port), 5).close()
        said[f"{ip}:{port}"] = "open"
    except TimeoutError:
        said[f"{ip}:{port}"] = "silence"
    except OSError as error:
        said[f"{ip}:{port}"] = errno.errorcode.get(error.errno or 0, str(error))
print(json.dumps(said))
"""


def sandbox(release: Release, host: Host, name: str, *command: str) -> Sandbox:
    """A process of a client's pod."""
    env = image_environment() | {"PYTHONPATH": str(ROOT)}
    files = {"/etc/resolv.conf": release.resolver, "/etc/hosts": f"127.0.0.1 localhost\n{host.ip} {name}\n"}
    return Sandbox(host, release.directory / f"client-{name}", command, env, files=files)


async def run(release: Release, host: Host, name: str, *command: str) -> str:
    """Runs a command in a client's pod to its end, which has to be a good one; what it wrote."""
    made = sandbox(release, host, name, *command)
    made.start()
    try:
        await until(lambda: not made.running, STOP_SECONDS)
        assert made.code == 0, made.tail()
        return made.log.read_text()
    finally:
        made.kill()


async def doors(host: Host, wanted: Iterable[tuple[str, int]]) -> dict[str, str]:
    """What comes of connecting from a host to (address, port): open, or the name of the error."""
    command = host.holder.inside(sys.executable, "-c", _TRY, json.dumps(list(wanted)))
    found: dict[str, str] = json.loads(await asyncio.to_thread(call, *command))
    return found


@dataclass
class Load:
    """Clients that ask all the time, in one pod. Use as an asynchronous context manager; ``finish`` before its end."""

    release: Release
    host: Host
    streams: int
    max_tokens: int

    async def __aenter__(self) -> Self:
        sizes = (str(self.streams), str(self.max_tokens))
        self._sandbox = sandbox(
            self.release, self.host, self.host.name, "python", "-m", "tests.pods.asking", ROUTERS, *sizes
        )
        self._sandbox.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sandbox.kill()

    @property
    def log(self) -> Path:
        """The answers, a line each."""
        return self._sandbox.log

    def count(self) -> int:
        """How many answers have come."""
        return self.log.read_text().count("\n")

    async def more(self, number: int) -> None:
        """Waits for so many further answers."""
        wanted = self.count() + number
        await until(lambda: self.count() >= wanted or not self._sandbox.running, STOP_SECONDS)
        assert self._sandbox.running, self._sandbox.tail()

    async def finish(self) -> None:
        """Lets each client finish what it has asked."""
        self._sandbox.signal(signal.SIGTERM)
        await until(lambda: not self._sandbox.running, STOP_SECONDS)
        assert self._sandbox.code == 0, self._sandbox.tail()

    def check(self, oracle: Oracle) -> int:
        """Fails unless every stream came to its end with the tokens of the oracle; how often one was resumed."""
        return check(self.log.read_text(), oracle, self.max_tokens)
