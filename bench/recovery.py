# SPDX-License-Identifier: Apache-2.0
"""Claim: a decode worker that dies under a stream costs its client a pause, much shorter than computing the context again.

A whole cluster (router, one prefill and two decode workers, etcd, Ray) over the largest tiny MLA model whose prefill of 8k
tokens takes some seconds on two cores. *resume*: the decode worker of a running stream is killed (SIGKILL); the pause is the
longest time between two tokens from then on. *re-prefill*: what the pause would be at best if nothing of the context were
kept: the time to first token of a new prompt as long as the context was. Both in turn, in one run; Ray brings the killed
worker back before the next measurement.

``python -m bench.recovery [--rounds N]``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from bench._common import Figures
from bench._pause import AFTER, BEFORE, OUTPUT_TOKENS, pause, run, write_model
from twinpool.client import Client, request
from twinpool.config import TwinpoolConfig, load_config
from twinpool.control.local import LocalCluster
from twinpool.router_client import RouterClient
from twinpool.v1.control_pb2 import WORKER_STATE_READY, WorkerRecord
from twinpool.v1.worker_pb2 import ROLE_DECODE

RESTART_SECONDS = 120.0


def configuration(model: Path) -> TwinpoolConfig:
    """Two decode workers, pools that hold every prompt of the run."""
    return load_config(
        None,
        {
            "cluster.name": "bench",
            "model.path": str(model),
            "kv.num_blocks": 1024,
            "kv.block_tokens": 64,
            "pools.decode_workers": 2,
            "router.local_prefill": False,
            "log.level": "warning",
        },
        env={},
    )


class Bench:
    """A running cluster, its client, and prompts that nobody has seen."""

    def __init__(self, cluster: LocalCluster, client: Client, router: RouterClient) -> None:
        self._cluster = cluster
        self._client = client
        self._router = router
        self._draw = random.Random(1)

    def prompt(self, length: int) -> list[int]:
        """A new one."""
        return [self._draw.randrange(8, 500) for _ in range(length)]

    async def resume(self, length: int) -> Figures:
        """The pause of a stream whose decode worker is killed, and its pace before."""
        times: list[float] = []
        killed = 0.0
        message = request(self.prompt(length), max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
        async with contextlib.aclosing(self._client.stream(message)) as events:  # type: ignore[type-var]
            async for event in events:
                times += [time.perf_counter()] * len(event.tokens.token_ids)
                if not killed and len(times) >= BEFORE:
                    worker = await self._serving()
                    os.kill(worker.pid, signal.SIGKILL)
                    killed = time.perf_counter()
                    seen = len(times)
                if killed and len(times) >= seen + AFTER:
                    break
        assert killed, "the answer ended before its worker could be killed"
        await self._restarted(worker)
        return pause(times, seen)

    async def again(self, length: int) -> Figures:
        """Time to first token of a new prompt, as long as the context was."""
        message = request(self.prompt(length + BEFORE), max_tokens=AFTER, temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        first = 0.0
        async for event in self._client.stream(message):
            if event.HasField("tokens"):
                first = first or time.perf_counter()
        return {"ms": (first - start) * 1e3}

    async def _serving(self) -> WorkerRecord:
        """The record of the decode worker that has the one stream there is."""
        view = await self._router.inspect()
        (name,) = [
            each.worker.name for each in view.workers if each.role == ROLE_DECODE and each.reserved.sequences
        ]
        (record,) = [each for each in self._cluster.view.workers() if each.worker.name == name]
        return record

    async def _restarted(self, dead: WorkerRecord) -> None:
        """Waits until Ray has brought the worker back and the router can use it."""

        async def back() -> bool:
            return any(
                each.worker.name == dead.worker.name
                and each.worker.incarnation != dead.worker.incarnation
                and each.state == WORKER_STATE_READY
                for each in self._cluster.view.workers()
            )

        await _until(back)
        await _until(self._router_sees_both)

    async def _router_sees_both(self) -> bool:
        return [(each.ready, each.decode_workers) for each in await self._client.models()] == [(True, 2)]


async def _until(done: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(RESTART_SECONDS):
        while not await done():  # noqa: ASYNC110 - it is another process's state
            await asyncio.sleep(0.02)


@asynccontextmanager
async def running(kills: int) -> AsyncIterator[Bench]:
    """The cluster, warmed up; Ray brings back what is killed."""
    with tempfile.TemporaryDirectory(prefix="twinpool-bench-") as directory:
        model = write_model(Path(directory))
        cluster = LocalCluster(configuration(model), Path(directory))
        try:
            await cluster.start(lambda *_: None, asyncio.Event())
            endpoint = cluster.router_endpoints[0]
            async with Client(endpoint) as client, RouterClient(endpoint) as router:
                bench = Bench(cluster, client, router)
                for _ in range(3):
                    await bench.again(256)
                yield bench
        finally:
            await cluster.stop()


if __name__ == "__main__":
    run("a dead decode worker costs a pause, not a re-prefill", __doc__ or "", running, 7)
