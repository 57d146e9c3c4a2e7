# SPDX-License-Identifier: Apache-2.0
"""The parts of ``bench/handoff.py`` that need a whole cluster: what splitting adds, and what a cancel leaves behind."""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bench._common import Figures
from twinpool import logs
from twinpool.client import Client, request
from twinpool.config import TwinpoolConfig, load_config
from twinpool.control.local import LocalCluster
from twinpool.engine.local import LocalEngine
from twinpool.engine.sampling import DrawParams
from twinpool.engine.tiny import write_tiny
from twinpool.v1.control_pb2 import WorkerRecord
from twinpool.v1.worker_pb2 import ROLE_PREFILL

LENGTHS = (64, 512, 2048)
LONG = 32 * 1024
CHUNK = 512
OUTPUT_TOKENS = 4


def configuration(model: Path) -> TwinpoolConfig:
    """Both sides run with these settings."""
    return load_config(
        None,
        {
            "cluster.name": "bench",
            "model.path": str(model),
            "kv.num_blocks": LONG // 64 + 128,
            "kv.block_tokens": 64,
            "scheduler.max_chunk_tokens": CHUNK,
            "router.local_prefill": False,
            "log.level": "warning",
        },
        env={},
    )


class Prompts:
    """Prompts that were not seen before."""

    def __init__(self) -> None:
        self._draw = random.Random(1)

    def __call__(self, length: int) -> list[int]:
        return [self._draw.randrange(8, 500) for _ in range(length)]


async def ask(client: Client, tokens: list[int]) -> Figures:
    """Times of one request as its client sees them."""
    start, times, read = time.perf_counter(), [], 0.0
    message = request(tokens, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    async for event in client.stream(message):
        if event.HasField("tokens"):
            times.append(time.perf_counter())
        elif event.HasField("finished"):
            read = event.finished.handoff.read_time.ToTimedelta().total_seconds()
    return {"ttft_ms": (times[0] - start) * 1e3, "read_ms": read * 1e3}


def generate(engine: LocalEngine, tokens: list[int]) -> float:
    """Milliseconds to the first token in one process."""
    began = time.monotonic()
    params = DrawParams(temperature=0.0, max_tokens=OUTPUT_TOKENS)
    return (engine.generate([tokens], params)[0][0].times[0] - began) * 1e3


async def split(client: Client, engine: LocalEngine, rounds: int) -> dict[str, object]:
    """Time to first token of the cluster and of one engine, in turn."""
    prompts, figures = Prompts(), dict[str, object]()
    await ask(client, prompts(64))
    generate(engine, prompts(64))
    for length in LENGTHS:
        added, reads, sides = [], [], ([], [])  # type: ignore[var-annotated]
        for _ in range(rounds):
            found = await ask(client, prompts(length))
            alone = await asyncio.to_thread(generate, engine, prompts(length))
            added.append(found["ttft_ms"] - alone)
            reads.append(found["read_ms"])
            sides[0].append(found["ttft_ms"])
            sides[1].append(alone)
        for name, values in (("cluster", sides[0]), ("engine", sides[1]), ("added", added)):
            figures[f"{length} tokens ttft {name} ms"] = statistics.median(values)
        figures[f"{length} tokens reads ms"] = statistics.median(reads)
    return figures


async def cancelled(client: Client, prefill: WorkerRecord, rounds: int) -> dict[str, object]:
    """What a short prompt waits for that is sent right after the cancel of a long one."""
    prompts = Prompts()
    alone, behind, steps = [], [], []
    for _ in range(rounds):
        alone.append((await ask(client, prompts(64)))["ttft_ms"])
        before = steps_of(prefill)
        stream = client.stream(request(prompts(LONG), max_tokens=4, temperature=0.0))
        # Until some of its chunks are computed.
        reading = asyncio.ensure_future(anext(aiter(stream)))
        await until(lambda start=before[1]: steps_of(prefill)[1] >= start + 8)  # type: ignore[misc]
        seconds, count = (now - then for now, then in zip(steps_of(prefill), before, strict=True))
        steps.append(seconds / count * 1e3)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await stream.aclose()  # type: ignore[attr-defined]
        behind.append((await ask(client, prompts(64)))["ttft_ms"])
    found = {"alone": alone, "after cancel": behind}
    figures: dict[str, object] = {
        f"64 tokens ttft {name} ms": statistics.median(values) for name, values in found.items()
    }
    figures["32k prompt chunk ms"] = statistics.median(steps)
    figures["head of line in chunks"] = (statistics.median(behind) - statistics.median(alone)) / (
        statistics.median(steps)
    )
    return figures


def steps_of(worker: WorkerRecord) -> tuple[float, float]:
    """Seconds in steps, and steps, since the worker's start."""
    with urllib.request.urlopen(f"http://{worker.metrics_endpoint}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels
    }
    name = "twinpool_worker_step_time_seconds"
    return samples[f"{name}_sum"], samples[f"{name}_count"]


async def until(done: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits until ``done``; raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not await asyncio.to_thread(done):  # noqa: ASYNC110 - it is another process's figure
            await asyncio.sleep(0.005)


async def cluster(rounds: int, parts: list[str]) -> tuple[dict[str, object], Figures]:
    """Starts a cluster over a tiny MLA model and measures the parts that were asked for."""
    logs.setup("error", False)
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="twinpool-bench-") as directory:
        model = write_tiny(Path(directory) / "model", "deepseek_v3", seed=1, max_context=2 * LONG)
        config = configuration(model)
        engine = LocalEngine.from_config(config)
        made = LocalCluster(config, Path(directory))
        try:
            await made.start(lambda *_: None, asyncio.Event())
            prefill = next(worker for worker in made.view.workers() if worker.role == ROLE_PREFILL)
            async with Client(made.router_endpoints[0]) as client:
                if "cluster" in parts:
                    figures |= await split(client, engine, rounds)
                if "cancel" in parts:
                    figures |= await cancelled(client, prefill, max(3, rounds // 2))
        finally:
            await made.stop()
    return figures, {}
