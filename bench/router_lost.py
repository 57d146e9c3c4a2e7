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
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bench._common import Figures, arguments, report
from bench.recovery import AFTER, BEFORE, LENGTHS, MODEL, OUTPUT_TOKENS, QUICK_LENGTHS, configuration
from twinpool import logs
from twinpool.client import request
from twinpool.cluster_client import ClusterClient
from twinpool.config import load_config, to_env
from twinpool.control.local import LocalCluster
from twinpool.engine.tiny import write_tiny
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
        gaps = [after - before for before, after in itertools.pairwise(times[seen - 1 :])]
        pace = [after - before for before, after in itertools.pairwise(times[1:seen])]
        return {"ms": max(gaps) * 1e3, "pace_ms": statistics.median(pace) * 1e3}

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
        model = write_tiny(
            Path(directory) / "model",
            "deepseek_v3",
            seed=1,
            layers=4,
            hidden=512,
            max_context=16384,
            overrides=MODEL,
        )
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


async def measure(lengths: tuple[int, ...], rounds: int) -> tuple[dict[str, object], Figures]:
    """Medians, and the pause over the re-prefill."""
    samples: dict[str, list[float]] = {}
    async with running(rounds * len(lengths)) as bench:
        for _ in range(rounds):
            for length in lengths:
                for name, side in (("resume", bench.resume), ("re-prefill", bench.again)):
                    for figure, value in (await side(length)).items():
                        samples.setdefault(f"{length} tokens {name} {figure}", []).append(value)
    figures: dict[str, object] = {name: statistics.median(values) for name, values in samples.items()}
    for length in lengths:
        values = samples[f"{length} tokens resume ms"]
        figures[f"{length} tokens resume ms, least and most"] = [min(values), max(values)]
    ratios = {
        f"{length} tokens resume/re-prefill": statistics.median(samples[f"{length} tokens resume ms"])
        / statistics.median(samples[f"{length} tokens re-prefill ms"])
        for length in lengths
    }
    return figures | {"rounds": rounds}, ratios


def main() -> None:
    """Entry point."""
    options = arguments(__doc__ or "", ("--rounds", {"type": int, "default": 4}))
    logs.setup("error", False)
    lengths, rounds = (QUICK_LENGTHS, 2) if options.quick else (LENGTHS, options.rounds)
    load = os.getloadavg()[0]
    # Ray and gRPC say on stdout that something was killed.
    with contextlib.redirect_stdout(sys.stderr):
        figures, ratios = asyncio.run(measure(lengths, rounds))
    figures["load average before"] = load
    report("a dead router costs a pause, not a re-prefill", figures, ratios, as_json=options.json)


if __name__ == "__main__":
    main()
