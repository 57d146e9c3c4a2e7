# SPDX-License-Identifier: Apache-2.0
"""One prefill and one decode worker behind two routers: one hands every prompt off, one lets the decode worker compute it.

Both ways go through the same router code, so what splitting adds is what is between them.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from twinpool.client import Client, request
from twinpool.config import load_config, to_env
from twinpool.errors import TwinpoolError
from twinpool.store import Keys, Store, connect_store, start_store
from twinpool.v1.control_pb2 import WORKER_STATE_READY, RouterRecord, WorkerRecord

Record = TypeVar("Record", WorkerRecord, RouterRecord)

OUTPUT_TOKENS = 32
START_SECONDS = 150.0
CLUSTER = "bench"
ENTRY = """
import sys
from twinpool.config import load_config
from twinpool.launch import run_process
sys.exit(run_process(sys.argv[1], load_config()))
"""
ROUTERS: dict[str, dict[str, object]] = {
    "split": {"router.local_prefill": False},
    "whole": {"router.local_prefill": True, "router.prior_transfer_seconds": 60.0, "router.harm_weight": 0.0},
}


class Processes:
    """The store's clients and the processes of a cluster; ``stop`` ends them all."""

    def __init__(self, directory: Path, settings: Mapping[str, object]) -> None:
        self.directory = directory
        self.server = start_store(directory / "store")
        self.settings = {
            "cluster.name": CLUSTER,
            "cluster.etcd_endpoints": self.server.endpoint,
            "log.level": "info",
            **settings,
        }
        config = load_config(None, self.settings, env={})
        self.store: Store = connect_store(config.cluster)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, kind: str, name: str, settings: Mapping[str, object]) -> None:
        """One process; it logs to ``<name>.log``."""
        config = load_config(None, self.settings | dict(settings), env={})
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TWINPOOL_")}
        with (self.directory / f"{name}.log").open("ab") as out:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-c", ENTRY, kind],
                env=environment | to_env(config),
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    async def record(self, name: str, pool: str = "default") -> WorkerRecord:
        """Waits for a ready worker."""
        return await self._wait(name, Keys(CLUSTER).worker(pool, name), WorkerRecord)

    async def router(self, name: str) -> RouterRecord:
        """Waits for a router."""
        return await self._wait(name, Keys(CLUSTER).router(name), RouterRecord)

    async def _wait(self, name: str, key: str, kind: type[Record]) -> Record:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._processes[name].poll() is not None:
                break
            item = await asyncio.to_thread(self.store.get, key)
            if item is not None:
                record = kind.FromString(item.value)
                if not isinstance(record, WorkerRecord) or record.state == WORKER_STATE_READY:
                    return record
            await asyncio.sleep(0.1)
        raise RuntimeError(f"{name} is not ready: {self.log(name)}")

    def log(self, name: str) -> str:
        """The end of a process's log."""
        return (self.directory / f"{name}.log").read_text(errors="replace")[-3000:]

    def tell(self) -> None:
        """Prints the ends of all logs."""
        for name in self._processes:
            print(name, self.log(name), file=sys.stderr)

    def stop(self) -> None:
        """Ends all of it."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        self.store.close()
        self.server.stop()


async def start_clients(processes: Processes) -> dict[str, Client]:
    """Starts the workers and both routers; returns a client for each way once requests can be served."""
    for role in ("prefill", "decode"):
        processes.start(role, role, {"worker.name": role})
    for role in ("prefill", "decode"):
        await processes.record(role)
    clients: dict[str, Client] = {}
    for name, own in ROUTERS.items():
        processes.start("router", name, {"router.name": name, **own})
        clients[name] = Client((await processes.router(name)).endpoint)
    for client in clients.values():
        while not any(found.ready for found in await client.models()):  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.1)
    return clients


class Answer:
    """One request as its client sees it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.began = time.perf_counter()
        self.bytes = 0
        self.read_seconds = 0.0

    @property
    def ttft_ms(self) -> float:
        return (self.times[0] - self.began) * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        return [(after - before) * 1e3 for before, after in zip(self.times, self.times[1:], strict=False)]


async def ask(
    client: Client,
    tokens: list[int],
    count: int = OUTPUT_TOKENS,
    *,
    scored: bool = False,
    into: Answer | None = None,
) -> Answer:
    """Greedy tokens; ``scored``: with the log-probabilities of the prompt; ``into``: filled as they come."""
    answer = into or Answer()
    message = request(
        tokens, max_tokens=count, temperature=0.0, ignore_eos=True, prompt_logprobs=0 if scored else None
    )
    async for event in client.stream(message):
        if event.HasField("tokens"):
            answer.tokens.extend(event.tokens.token_ids)
            answer.times.append(time.perf_counter())
        elif event.HasField("finished"):
            answer.bytes = event.finished.handoff.bytes
            answer.read_seconds = event.finished.handoff.read_time.ToTimedelta().total_seconds()
    return answer


async def served(client: Client, decode_workers: int) -> None:
    """Returns once a router has answered: to be asked it needs the tokenizer, and streams to so many decode workers. It calls itself
    ready only with prefill workers, too, which the pool of the replicas has none of."""
    while True:
        try:
            if any(found.decode_workers == decode_workers for found in await client.models()):
                await ask(client, [9, 10, 11], 2)
                return
        except TwinpoolError as error:
            if error.reason != "NO_WORKERS":
                raise
        await asyncio.sleep(0.1)


async def all_run(answers: Sequence[Answer], tasks: Sequence[asyncio.Future[Answer]]) -> None:
    """Returns once each of the answers has a token. Raises what ended one of the tasks that ask for them."""
    while not all(answer.times for answer in answers):
        await asyncio.sleep(0.002)
        for task in tasks:
            if task.done():
                task.result()


class Prompts:
    """Prompts that were not seen before."""

    def __init__(self, vocabulary: int) -> None:
        self._draw, self._vocabulary = random.Random(1), vocabulary

    def __call__(self, length: int) -> list[int]:
        return [self._draw.randrange(8, self._vocabulary) for _ in range(length)]


async def compare(
    clients: dict[str, Client], prompts: Prompts, length: int, rounds: int
) -> dict[str, object]:
    """Both ways in turn, each with prompts of its own; the first round is not counted."""
    found: dict[str, list[Answer]] = {name: [] for name in clients}
    for turn in range(rounds + 1):
        for name, client in clients.items():
            answer = await ask(client, prompts(length))
            if turn:
                found[name].append(answer)
    figures: dict[str, object] = {}
    for name, answers in found.items():
        figures[f"{length} tokens ttft {name} ms"] = statistics.median(answer.ttft_ms for answer in answers)
        figures[f"{length} tokens between tokens {name} ms"] = statistics.median(
            gap for answer in answers for gap in answer.gaps_ms
        )
    added = [one.ttft_ms - other.ttft_ms for one, other in zip(*found.values(), strict=True)]
    figures[f"{length} tokens ttft added ms"] = statistics.median(added)
    pulls = found["split"]
    assert all(answer.bytes for answer in pulls), "a prompt was not handed off"
    assert not any(answer.bytes for answer in found["whole"]), "a prompt was handed off"
    seconds = statistics.median(answer.read_seconds for answer in pulls)
    figures[f"{length} tokens reads ms"] = seconds * 1e3
    figures[f"{length} tokens GB_per_s"] = pulls[0].bytes / seconds / 1e9
    return figures
