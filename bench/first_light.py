# SPDX-License-Identifier: Apache-2.0
"""Claim: splitting prefill and decode into two processes costs little latency.

Time to first token and inter-token latency of a whole cluster (router, prefill worker, NIXL, decode worker; four processes)
against the same engine in one process, same prompts, alternating in one run. Prompts are new in every round, so no cache helps
either side.
"""

import asyncio
import itertools
import random
import statistics
import tempfile
import time
from pathlib import Path

from bench._common import Figures, arguments, report
from twinpool.client import Client, request
from twinpool.config import TwinpoolConfig, load_config
from twinpool.control.local import LocalCluster
from twinpool.engine.fetch import fetch_model
from twinpool.engine.local import LocalEngine
from twinpool.engine.sampling import DrawParams

LENGTHS = (64, 256, 1024)
OUTPUT_TOKENS = 24


def configuration(path: Path) -> TwinpoolConfig:
    """Both sides run with these settings."""
    return load_config(
        None,
        {
            "cluster.name": "bench",
            "model.path": str(path),
            "kv.num_blocks": 256,
            "scheduler.max_chunk_tokens": 256,
            "log.level": "warning",
        },
        env={},
    )


def prompt(draw: random.Random, length: int, vocab: int) -> list[int]:
    """A prompt that was not seen before."""
    return [draw.randrange(100, vocab) for _ in range(length)]


def _figures(times: list[float], start: float, label: str) -> Figures:
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return {f"{label}_ttft_ms": (times[0] - start) * 1e3, f"{label}_itl_ms": statistics.median(gaps) * 1e3}


async def ask_cluster(client: Client, tokens: list[int], label: str) -> Figures:
    """One request through the router; times are taken at the client."""
    start, times = time.perf_counter(), []
    message = request(tokens, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    read_ms = 0.0
    async for event in client.stream(message):
        if event.HasField("tokens"):
            times.extend([time.perf_counter()] * len(event.tokens.token_ids))
        elif event.HasField("finished"):
            read_ms = event.finished.handoff.read_time.ToTimedelta().total_seconds() * 1e3
    # The first gap holds the hand-off; the median gap is a decode step.
    return _figures(times, start, label) | {
        f"{label}_first_gap_ms": (times[1] - times[0]) * 1e3,
        f"{label}_read_ms": read_ms,
    }


def ask_engine(engine: LocalEngine, tokens: list[int], label: str) -> Figures:
    """The same request to the engine in this process."""
    params = DrawParams(temperature=0.0, max_tokens=OUTPUT_TOKENS)
    start = time.perf_counter()
    shift = start - time.monotonic()
    generation = engine.generate([tokens], params)[0][0]
    times = [moment + shift for moment in generation.times]
    return _figures(times, start, label) | {f"{label}_first_gap_ms": (times[1] - times[0]) * 1e3}


async def measure(rounds: int, path: Path) -> tuple[dict[str, object], dict[str, float]]:
    """Runs both sides in turn; returns medians and the cluster's figures over the engine's."""
    config = configuration(path)
    engine = LocalEngine.from_config(config)
    vocab = engine.model.config.vocab_size
    draw = random.Random(1)
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="twinpool-bench-") as directory:
        cluster = LocalCluster(config, Path(directory))
        try:
            await cluster.start(lambda *_: None, asyncio.Event())
            async with Client(cluster.router_endpoints[0]) as client:
                await ask_cluster(client, prompt(draw, 64, vocab), "warm")
                ask_engine(engine, prompt(draw, 64, vocab), "warm")
                for _ in range(rounds):
                    for length in LENGTHS:
                        for side in ("cluster", "engine"):
                            label = f"{side}_{length}"
                            tokens = prompt(draw, length, vocab)
                            found = (
                                await ask_cluster(client, tokens, label)
                                if side == "cluster"
                                else await asyncio.to_thread(ask_engine, engine, tokens, label)
                            )
                            for name, value in found.items():
                                samples.setdefault(name, []).append(value)
        finally:
            await cluster.stop()
    figures = {name: statistics.median(values) for name, values in samples.items()}
    ratios = {
        f"{name.removeprefix('cluster_')}": value / figures[name.replace("cluster", "engine")]
        for name, value in figures.items()
        if name.startswith("cluster") and name.replace("cluster", "engine") in figures
    }
    return dict(figures), ratios


def main() -> None:
    """Entry point."""
    args = arguments(__doc__ or "")
    rounds = 3 if args.quick else 9
    figures, ratios = asyncio.run(measure(rounds, fetch_model("smollm2-135m-instruct")))
    report(
        "first light: a cluster against one process", figures | {"rounds": rounds}, ratios, as_json=args.json
    )


if __name__ == "__main__":
    main()
