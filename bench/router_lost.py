# SPDX-License-Identifier: Apache-2.0
"""Claim: a router that dies under a stream costs a client that resumes a short pause, however long the context is.

A whole cluster (as many routers as will be killed and one more, one prefill and two decode workers, etcd, Ray) over the model
of ``bench.recovery``. *resume*: the router of a running stream is killed (SIGKILL); the pause is the longest time between two
tokens from then on, as the caller of ``twinpool.cluster_client`` sees it. *re-prefill*: the time to first token of a new prompt
as long as the context was, which is the least that a client without resumption would wait for. Both in turn, in one run.

``python -m bench.router_lost [--rounds N]``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bench._common import Figures
from bench._pause import AFTER, BEFORE, OUTPUT_TOKENS, pause, run, write_model
from bench.recovery import configuration
from twinpool.client import request
from twinpool.cluster_client import ClusterClient
from twinpool.config import load_config, to_env
from twinpool.control.local import LocalCluster
from twinpool.errors import TwinpoolError
from twinpool.router_client import RouterClient
from twinpool.v1 import inference_pb2 as pb


class Bench:
    """A running cluster, whose routers are killed one after the other."""

    def __init__(self, endpoints: Sequence[str], pids: Sequence[int]) -> None:
        self._live = dict(zip(endpoints, pids, strict=True))
        self._draw = random.Random(1)

    def message(self, length: int, max_tokens: int) -> pb.GenerateRequest:
        """A request with a new prompt."""
        prompt = [self._draw.randrange(8, 500) for _ in range(length)]
        return request(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)

    async def resume(self, length: int) -> Figures:
        """The pause of a stream whose router is killed, and its pace before."""
        times: list[float] = []
        killed = ""
        seen = 0
        async with ClusterClient(list(self._live)) as client:
            stream = client.stream(self.message(length, OUTPUT_TOKENS))
            async with contextlib.aclosing(stream) as events:
                async for event in events:
                    times += [time.perf_counter()] * len(event.tokens.token_ids)
                    if not killed and len(times) >= BEFORE:
                        killed = await self._serving()
                        os.kill(self._live.pop(killed), signal.SIGKILL)
                        seen = len(times)
                    if killed and len(times) >= seen + AFTER:
                        break
        assert killed, "the answer ended before its router could be killed"
        return pause(times, seen)

    async def again(self, length: int) -> Figures:
        """Time to first token of a new prompt, as long as the context was."""
        start, first = time.perf_counter(), 0.0
        async with ClusterClient(list(self._live)) as client:
            async for event in client.stream(self.message(length + BEFORE, AFTER)):
                if event.HasField("tokens"):
                    first = first or time.perf_counter()
        return {"ms": (first - start) * 1e3}

    async def _serving(self) -> str:
        """The router that has the one stream there is."""
        for endpoint in self._live:
            async with RouterClient(endpoint) as router:
                with contextlib.suppress(TwinpoolError):
                    if any(each.reserved.sequences for each in (await router.inspect()).workers):
                        return endpoint
        raise AssertionError("no router has the stream")


@asynccontextmanager
async def running(kills: int) -> AsyncIterator[Bench]:
    """The cluster, warmed up."""
    with tempfile.TemporaryDirectory(prefix="twinpool-bench-") as directory:
        model = write_model(Path(directory))
        env = to_env(configuration(model)) | {"TWINPOOL_POOLS__ROUTERS": str(kills + 1)}
        cluster = LocalCluster(load_config(None, {}, env=env), Path(directory))
        try:
            await cluster.start(lambda *_: None, asyncio.Event())
            pids = []
            for endpoint in cluster.router_endpoints:
                async with RouterClient(endpoint) as router:
                    name = (await router.inspect()).router
                pids.append(cluster.router_pids[name])
            bench = Bench(cluster.router_endpoints, pids)
            for _ in range(3):
                await bench.again(256)
            yield bench
        finally:
            await cluster.stop()


if __name__ == "__main__":
    run("a dead router costs a pause, not a re-prefill", __doc__ or "", running, 4)
