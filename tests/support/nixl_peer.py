# SPDX-License-Identifier: Apache-2.0
"""A worker's transfer half in a process of its own: a pool, a generation table and a transfer thread.

Always spawned: a process forked after an agent existed hangs.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.transfer_shim import ReadFaults, ShimAgent
from twinpool.ids import WorkerKey, new_incarnation
from twinpool.transfer.base import PeerDescriptor, PoolMemory
from twinpool.transfer.nixl import NixlAgent
from twinpool.transfer.thread import TransferThread

FINGERPRINT = "test-model"
_ANSWER_SECONDS = 60.0


def pattern(block: int, salt: int, block_bytes: int) -> NDArray[np.uint8]:
    """Bytes that only block ``block`` with ``salt`` has."""
    return np.random.default_rng([salt, block]).integers(0, 256, block_bytes, dtype=np.uint8)


class Worker:
    """A pool and a transfer thread in this process. ``faults`` apply to its data reads, by their number."""

    def __init__(
        self,
        key: WorkerKey,
        num_blocks: int,
        block_bytes: int,
        ucx_tls: str,
        poll_seconds: float = 150e-6,
        *,
        pull_here: bool = False,
    ) -> None:
        self.key = key
        self.ucx_tls = ucx_tls
        self.pool = np.zeros((num_blocks, block_bytes), dtype=np.uint8)
        self.generations = np.ones(num_blocks, dtype=np.uint64)
        memory = PoolMemory.of_array(self.pool)
        self.faults = ReadFaults()
        self._shims: list[ShimAgent] = []

        def make() -> ShimAgent:
            agent = NixlAgent(key, FINGERPRINT, memory, self.generations, ucx_tls=ucx_tls)
            shim = ShimAgent(agent, time.monotonic)
            shim.data = self.faults
            self._shims.append(shim)
            return shim

        self.thread = TransferThread(make, poll_seconds=poll_seconds, pull_here=pull_here)
        self.descriptor = self.thread.start()

    @property
    def data_reads(self) -> int:
        """Data reads posted so far."""
        return self._shims[0].data_reads

    def fill(self, blocks: list[int], salt: int) -> list[int]:
        """New content: generations first, as the block manager does. Returns all generations."""
        for block in blocks:
            self.generations[block] += 1
            self.pool[block] = pattern(block, salt, self.pool.shape[1])
        return [int(generation) for generation in self.generations]


def _serve(connection: Connection, name: str, sizes: tuple[int, int], ucx_tls: str) -> None:
    worker = Worker(WorkerKey(name, new_incarnation()), *sizes, ucx_tls)
    worker.thread.set_offers(1)
    connection.send(worker.descriptor)
    while True:
        try:
            call, arguments = connection.recv()
        except EOFError:
            break
        if call == "stop":
            break
        connection.send(getattr(worker, call)(*arguments))
    worker.thread.stop()


class PeerProcess:
    """An owner in another process. A context manager: it is gone at the end, whatever state it was put in."""

    def __init__(self, name: str, num_blocks: int, block_bytes: int, ucx_tls: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, name, (num_blocks, block_bytes), ucx_tls), daemon=True
        )
        self._process.start()
        theirs.close()
        self.descriptor: PeerDescriptor = self._receive()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def fill(self, blocks: list[int], salt: int) -> list[int]:
        """See :meth:`Worker.fill`."""
        self._connection.send(("fill", (blocks, salt)))
        generations: list[int] = self._receive()
        return generations

    def pause(self) -> None:
        """Returns when every thread of the process has really stopped."""
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while not self._stopped():
            assert time.monotonic() < deadline, "the peer does not stop"
            time.sleep(0.001)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """A clean end."""
        self._connection.send(("stop", ()))
        self._process.join(_ANSWER_SECONDS)
        assert self._process.exitcode == 0

    def kill(self) -> None:
        self._process.kill()  # also ends a stopped process
        self._process.join(_ANSWER_SECONDS)
        self._connection.close()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def _stopped(self) -> bool:
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        # The state follows the command's name, which is in parentheses and may hold anything.
        return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

    def _signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def _receive(self) -> Any:
        assert self._connection.poll(_ANSWER_SECONDS), "the peer does not answer"
        return self._connection.recv()


class Called:
    """A callback that can be waited for."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._got: Any = None

    def __call__(self, *arguments: Any) -> None:
        self._got = arguments[0] if arguments else None
        self._event.set()

    @property
    def came(self) -> bool:
        return self._event.is_set()

    def wait(self) -> Any:
        """What it was called with, once it was called."""
        assert self._event.wait(_ANSWER_SECONDS), f"no answer within {_ANSWER_SECONDS:g} s"
        return self._got
