# SPDX-License-Identifier: Apache-2.0
"""Claim: offered three times what it can do, a cluster still does nearly as much as at its best, and says no early.

A whole cluster (router, one prefill and one decode worker, etcd, Ray) over a tiny MLA model. Its capacity is what clients get
that ask without a pause. Then requests come at random moments (Poisson) at 1 to 3 times that rate, each new to the cluster and
with a deadline for its whole answer. *goodput*: answers complete in time, a second, once the load has lasted for a deadline and
while it lasts. *refused*: with which reason,
and how long after it was sent the client heard of it; *late*: accepted, but ended by their deadline. Resident memory of router
and workers is that after each load; the loads alternate over the rounds, so growth would show.

``python -m bench.overload [--seconds N] [--rounds N]``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench._common import arguments, percentile, report
from bench._router_load import rss_bytes
from twinpool import logs
from twinpool.client import Client, request
from twinpool.config import TwinpoolConfig, load_config
from twinpool.control.local import LocalCluster
from twinpool.engine.tiny import write_tiny
from twinpool.errors import TwinpoolError

LOADS = (1.0, 1.5, 2.0, 3.0)
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 48
DEADLINE_SECONDS = 4.0
CAPACITY_CLIENTS = 16
CAPACITY_SECONDS = 10.0
MiB = 1 << 20


def configuration(model: Path) -> TwinpoolConfig:
    """Everything as it is by default, but for pools that fit the machine."""
    return load_config(
        None,
        {
            "cluster.name": "bench",
            "model.path": str(model),
            "kv.num_blocks": 1024,
            "kv.block_tokens": 16,
            "log.level": "warning",
        },
        env={},
    )


@dataclass
class Offered:
    """What became of the requests of one load."""

    since: float
    until: float
    good: int = 0
    late: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    heard: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Answers in time, a second."""
        return self.good / (self.until - self.since)


class Bench:
    """A running cluster and one client of it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._draw = random.Random(1)

    async def ask(self, into: Offered, deadline: float | None) -> None:
        """One request; counts what becomes of it."""
        tokens = [self._draw.randrange(8, 500) for _ in range(PROMPT_TOKENS)]
        message = request(tokens, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
        began, first, placed, reason = time.perf_counter(), 0.0, False, ""
        try:
            async for event in self._client.stream(message, timeout=deadline):
                placed = True
                if event.HasField("tokens") and not first:
                    first = time.perf_counter() - began
        except TwinpoolError as error:
            reason = error.reason
        if not reason:
            into.good += into.since <= time.perf_counter() < into.until
            into.firsts.append(first)
        elif placed or reason == "DEADLINE_EXCEEDED":
            into.late += 1
        else:
            into.refused[reason] += 1
            into.heard.append(time.perf_counter() - began)

    async def capacity(self, seconds: float) -> float:
        """Answers a second to clients that ask without a pause, without a deadline."""
        began = time.perf_counter()
        end = began + seconds
        found = Offered(began, end)

        async def client() -> None:
            while time.perf_counter() < end:
                await self.ask(found, None)

        await asyncio.gather(*(client() for _ in range(CAPACITY_CLIENTS)))
        return found.goodput

    async def offer(self, rate: float, seconds: float) -> Offered:
        """Requests at random moments, ``rate`` a second on average; returns when the last has ended."""
        began = at = time.perf_counter()
        found = Offered(began + DEADLINE_SECONDS, began + seconds)
        async with asyncio.TaskGroup() as group:
            while (at := at + self._draw.expovariate(rate)) < began + seconds:
                await asyncio.sleep(max(0.0, at - time.perf_counter()))
                group.create_task(self.ask(found, DEADLINE_SECONDS))
        return found


def resident(cluster: LocalCluster) -> dict[str, float]:
    """MiB of the router and of each worker."""
    pids = {record.worker.name: record.pid for record in cluster.view.workers()}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.cmdline()[-2:] == ["serve", "router"]:
                pids["router"] = child.pid
    return {name: rss_bytes(pid) / MiB for name, pid in pids.items()}


async def measure(rounds: int, seconds: float) -> tuple[dict[str, object], dict[str, float]]:
    """Runs every load ``rounds`` times, in turn."""
    runs: dict[float, list[Offered]] = {load: [] for load in LOADS}
    memory: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="twinpool-bench-") as directory:
        model = write_tiny(Path(directory) / "model", "deepseek_v3", seed=1, layers=4, hidden=512)
        cluster = LocalCluster(configuration(model), Path(directory))
        try:
            await cluster.start(lambda *_: None, asyncio.Event())
            async with Client(cluster.router_endpoints[0]) as client:
                bench = Bench(client)
                await bench.capacity(CAPACITY_SECONDS / 2)
                capacity = await bench.capacity(CAPACITY_SECONDS)
                for _ in range(rounds):
                    for load in LOADS:
                        runs[load].append(await bench.offer(load * capacity, seconds))
                        memory.append(resident(cluster))
        finally:
            await cluster.stop()
    return _figures(capacity, runs, memory)


def _figures(
    capacity: float, runs: dict[float, list[Offered]], memory: list[dict[str, float]]
) -> tuple[dict[str, object], dict[str, float]]:
    figures: dict[str, object] = {"capacity requests/s": capacity}
    goodput: dict[float, float] = {}
    for load, found in runs.items():
        goodput[load] = statistics.median(each.goodput for each in found)
        refused: Counter[str] = sum((each.refused for each in found), Counter())
        figures |= {
            f"{load:g}x goodput requests/s": goodput[load],
            f"{load:g}x refused": dict(refused),
            f"{load:g}x late": sum(each.late for each in found),
        }
        for name, values in (("refusal heard", "heard"), ("first token", "firsts")):
            all_of = [value for each in found for value in getattr(each, values)]
            if all_of:
                figures[f"{load:g}x {name} ms, p50 and p99"] = [
                    percentile(all_of, 0.5) * 1e3,
                    percentile(all_of, 0.99) * 1e3,
                ]
    ratios = {"goodput at 3x over its peak": goodput[3.0] / max(goodput.values())}
    for name in memory[0]:
        first, last = memory[0][name], memory[-1][name]
        figures[f"{name} MiB, after the first and the last load"] = [first, last]
        ratios[f"{name} memory, last over first"] = last / first
    return figures, ratios


def main() -> None:
    """Entry point."""
    options = arguments(
        __doc__ or "",
        ("--rounds", {"type": int, "default": 3}),
        ("--seconds", {"type": float, "default": 20.0, "help": "of each load"}),
    )
    logs.setup("error", False)
    rounds, seconds = (1, 10.0) if options.quick else (options.rounds, options.seconds)
    load = os.getloadavg()[0]
    with contextlib.redirect_stdout(sys.stderr):
        figures, ratios = asyncio.run(measure(rounds, seconds))
    figures |= {"rounds": rounds, "seconds a load": seconds, "load average before": load}
    report("goodput holds at three times the capacity", figures, ratios, as_json=options.json)


if __name__ == "__main__":
    main()
