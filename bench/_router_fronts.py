# SPDX-License-Identifier: Apache-2.0
"""The routers that a router benchmark compares: their processes, workers and clients."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from bench._router_load import GrpcClient, HttpClient

_HERE = Path(__file__).parent
_ROUTER_CORE = 0
"""Routers have this core to themselves, as far as the machine allows; clients and workers take the last one."""


class Front(Protocol):
    """A router with its workers."""

    name: str
    pid: int

    async def __aenter__(self) -> "Front": ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    async def send(self, body: bytes) -> float:
        """See ``_router_load.Send``."""

    def body(self, prompt: str | Sequence[int], stream: bool) -> bytes:
        """An encoded request."""


class _Processes:
    """Children that end with their standard input, or by a signal."""

    def __init__(self) -> None:
        self._all: list[subprocess.Popen[str]] = []

    def start(self, command: list[str], core: int) -> subprocess.Popen[str]:
        """Starts a process on a core."""
        cores = os.sched_getaffinity(0)
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if os.environ.get("TWINPOOL_BENCH_STDERR") is None else None,
            text=True,
            cwd=_HERE.parent,
            preexec_fn=lambda: os.sched_setaffinity(0, {core} & cores or cores),
        )
        self._all.append(child)
        return child

    def stop(self) -> None:
        """Ends all."""
        for child in reversed(self._all):
            if child.stdin is not None:
                child.stdin.close()
            child.terminate()
        for child in self._all:
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


async def _line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    line = await asyncio.get_running_loop().run_in_executor(None, child.stdout.readline)
    if not line:
        raise RuntimeError(f"{child.args!r} ended without an answer")
    return line.strip()


def _last_core() -> int:
    return max(os.sched_getaffinity(0))


class Ours:
    """Twinpool's router. ``processes`` routers on one port."""

    name = "ours"
    transport = "native"

    def __init__(
        self, peers: str, tokenizer: str, step_seconds: float, processes: int = 1, workers: int = 4
    ) -> None:
        self._tokenizer, self._step_seconds = tokenizer, step_seconds
        self._processes, self._workers = processes, workers
        self._children = _Processes()
        self.pids: list[int] = []

    async def __aenter__(self) -> Self:
        half = str(self._workers // 2)
        mocks = self._children.start(
            [
                *(sys.executable, "-m", "bench._router_mocks", "--model", self._tokenizer),
                *("--prefill", half, "--decode", half, "--step-seconds", str(self._step_seconds)),
            ],
            _last_core(),
        )
        records = await _line(mocks)
        port = str(_free_port()) if self._processes > 1 else "0"
        for number in range(self._processes):
            command = [sys.executable, "-m", "bench._router_ours", "--port", port]
            command += ["--transport", self.transport]
            router = self._children.start(command, _ROUTER_CORE + number)
            assert router.stdin is not None
            router.stdin.write(records + "\n")
            router.stdin.flush()
            endpoint = await _line(router)
            self.pids.append(router.pid)
        self._client = GrpcClient(endpoint, channels=8 * self._processes if self._processes > 1 else 1)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()
        self._children.stop()

    @property
    def pid(self) -> int:
        """Of the first router."""
        return self.pids[0]

    async def send(self, body: bytes) -> float:
        """See Front."""
        return await self._client.send(body)

    @staticmethod
    def encode(prompt: str | Sequence[int], stream: bool) -> bytes:
        """An encoded request."""
        return GrpcClient.body(prompt, stream)

    def body(self, prompt: str | Sequence[int], stream: bool) -> bytes:
        """See Front."""
        return self.encode(prompt, stream)


class OursPython(Ours):
    """The same over gRPC for Python."""

    name = "ours-python"
    transport = "python"


class Peer(ABC):
    """A router that speaks HTTP to clients."""

    name = ""
    workers = "grpc"

    def __init__(self, peers: str, tokenizer: str, step_seconds: float) -> None:
        self.peers, self.tokenizer, self._step_seconds = peers, tokenizer, step_seconds
        self._children = _Processes()
        self.pid = 0

    @abstractmethod
    def command(self, port: int, urls: list[str]) -> list[str]:
        """How it is started."""

    async def __aenter__(self) -> Self:
        mocks = self._children.start(
            [
                *(self.peers, str(_HERE / "_router_peer_mocks.py"), self.workers),
                *("--model", self.tokenizer, "--step-seconds", str(self._step_seconds)),
            ],
            _last_core(),
        )
        urls = json.loads(await _line(mocks))
        port = _free_port()
        router = self._children.start(self.command(port, urls), _ROUTER_CORE)
        self.pid = router.pid
        self._client = HttpClient(f"127.0.0.1:{port}")
        async with asyncio.timeout(60):
            while not await self._answers():  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        return self

    async def _answers(self) -> bool:
        try:
            await self._client.send(self.body("hello", False))
        except (OSError, RuntimeError, asyncio.IncompleteReadError):
            return False
        return True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()
        self._children.stop()

    async def send(self, body: bytes) -> float:
        """See Front."""
        return await self._client.send(body)

    def body(self, prompt: str | Sequence[int], stream: bool) -> bytes:
        """See Front."""
        return HttpClient.body(prompt, stream)


class Smg(Peer):
    """tokenspeed-smg over gRPC workers; it tokenises."""

    name = "smg"
    options: tuple[str, ...] = ()

    def command(self, port: int, urls: list[str]) -> list[str]:
        """See Peer."""
        return [
            *(self.peers, "-m", "smg.launch_router", "--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-port", str(_free_port()), "--worker-urls", *urls, "--backend", "tokenspeed"),
            *("--policy", "cache_aware", "--model-path", self.tokenizer, "--log-level", "error"),
            *("--tokenizer-path", str(Path(self.tokenizer) / "tokenizer.json"), *self.options),
        ]


class SmgCached(Smg):
    """The same with its tokenizer's cache of prefixes."""

    name = "smg-cached"
    options = ("--tokenizer-cache-enable-l1",)


class Sglang(Peer):
    """sglang-router over HTTP workers; it forwards the text."""

    name = "sglang"
    workers = "http"

    def command(self, port: int, urls: list[str]) -> list[str]:
        """See Peer."""
        return [
            *(self.peers, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-port", str(_free_port()), "--worker-urls", *urls),
            *("--policy", "cache_aware", "--log-level", "error"),
        ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


FRONTS: Mapping[str, Callable[[str, str, float], Any]] = {
    "ours": Ours,
    "ours-python": OursPython,
    "smg": Smg,
    "smg-cached": SmgCached,
    "sglang": Sglang,
}
