# SPDX-License-Identifier: Apache-2.0
"""The parts of ``bench/handoff.py`` that need a whole cluster: what splitting adds, and what a cancel leaves behind."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bench._common import Figures
from bench._split import Processes, Prompts, ask, compare, start_clients
from twinpool import logs
from twinpool.client import Client, request
from twinpool.engine.tiny import write_tiny
from twinpool.v1.control_pb2 import WorkerRecord

LENGTHS = (64, 512, 2048)
LONG = 32 * 1024
CHUNK = 512
VOCABULARY = 500
OUTPUT_TOKENS = 4


def settings_of(model: Path) -> dict[str, object]:
    """Of both workers and both routers."""
    return {
        "model.path": str(model),
        "kv.num_blocks": LONG // 64 + 128,
        "kv.block_tokens": 64,
        "scheduler.max_chunk_tokens": CHUNK,
        "log.level": "warning",
    }


async def cancelled(
    client: Client, prefill: WorkerRecord, prompts: Prompts, rounds: int
) -> dict[str, object]:
    """What a short prompt waits for that is sent right after the cancel of a long one."""
    alone, behind, steps = [], [], []
    for _ in range(rounds):
        alone.append((await ask(client, prompts(64), OUTPUT_TOKENS)).ttft_ms)
        before = steps_of(prefill)
        stream = client.stream(request(prompts(LONG), max_tokens=OUTPUT_TOKENS, temperature=0.0))
        # Until some of its chunks are computed.
        reading = asyncio.ensure_future(anext(aiter(stream)))
        await until(lambda start=before[1]: steps_of(prefill)[1] >= start + 8)  # type: ignore[misc]
        seconds, count = (now - then for now, then in zip(steps_of(prefill), before, strict=True))
        steps.append(seconds / count * 1e3)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await stream.aclose()  # type: ignore[attr-defined]
        behind.append((await ask(client, prompts(64), OUTPUT_TOKENS)).ttft_ms)
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
        processes = Processes(Path(directory), settings_of(model))
        try:
            clients, prompts = await start_clients(processes), Prompts(VOCABULARY)
            if "cluster" in parts:
                for length in LENGTHS:
                    figures |= await compare(clients, prompts, length, rounds)
            if "cancel" in parts:
                prefill = await processes.record("prefill")
                figures |= await cancelled(clients["split"], prefill, prompts, max(3, rounds // 2))
            for client in clients.values():
                await client.close()
        finally:
            processes.stop()
    return figures, {}
