# SPDX-License-Identifier: Apache-2.0
"""Claim: through the product, the time between tokens is that of a step on the device.

One decode worker that computes prompts itself, a router and clients as processes; a model of DeepSeek-V2-Lite's shape
with random weights; with steps that are begun ahead (``scheduler.ahead``) and without, one after the other, the same
prompts each way. So many answers run at once, over prompts of ``--prompt`` tokens; what counts is the time in which all
of them run. *step* is the worker's own count of its steps in that time (plan, model, sampling), *beside* what is left of
the time between tokens: telling tokens, taking commands, metrics.

``python -m bench.gpu.serve --json`` takes some 90 s. ``--device cpu --layers 3 --prompt 64 --batches 1,4`` checks the script itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from bench._common import Figures, arguments, percentile, report
from bench._split import ROUTERS, Answer, Processes, Prompts, all_run, ask, served
from bench.gpu.split import write_model
from twinpool.client import Client

SERVED_SECONDS = 60.0
"""How long the router may take to answer once the worker is ready."""

STEP_TIME = re.compile(r"^twinpool_worker_step_time_seconds_(sum|count)(?:\{[^}]*\})? (\S+)", re.MULTILINE)


def steps_of(endpoint: str) -> tuple[float, float]:
    """Seconds of the worker's steps, and how many there were."""
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as answer:
        found = dict(STEP_TIME.findall(answer.read().decode()))
    return float(found["sum"]), float(found["count"])


async def running(
    client: Client, asked: list[list[int]], tokens: int, metrics: str
) -> tuple[dict[str, float], list[Answer]]:
    """Milliseconds a token while the answers to all prompts run, and the answers."""
    answers = [Answer() for _ in asked]
    tasks = [
        asyncio.ensure_future(ask(client, prompt, tokens, into=answer))
        for prompt, answer in zip(asked, answers, strict=True)
    ]
    try:
        await all_run(answers, tasks)
        began = max(answer.times[0] for answer in answers)
        before = await asyncio.to_thread(steps_of, metrics)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        after = await asyncio.to_thread(steps_of, metrics)
        ended = min(answer.times[-1] for answer in answers)
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    gaps = [
        (later - earlier) * 1e3
        for answer in answers
        for earlier, later in zip(answer.times, answer.times[1:], strict=False)
        if began <= earlier and later <= ended
    ]
    step = (after[0] - before[0]) / (after[1] - before[1]) * 1e3
    between = statistics.fmean(gaps)
    found = {
        "itl mean ms": between,
        "itl p50 ms": statistics.median(gaps),
        "itl p99 ms": percentile(gaps, 0.99),
        "step mean ms": step,
        "beside ms": between - step,
        "tokens per s": len(asked) / between * 1e3,
    }
    return found, answers


def settings_of(options: argparse.Namespace, model: Path) -> dict[str, object]:
    """Of every process."""
    gpu, most = options.device.startswith("cuda"), max(options.counts)
    context = options.prompt + options.tokens + 64
    return {
        "model.path": str(model),
        "model.dtype": "bfloat16" if gpu else "float32",
        "model.max_context_tokens": context,
        "kv.block_tokens": 64,
        "kv.num_blocks": (most + 2) * (context // 64 + 2),
        "scheduler.max_chunk_tokens": 2048,
        "scheduler.max_batched_tokens": 2048 + most,
        "scheduler.max_num_seqs": most,
        "worker.device": options.device,
        "worker.calibration_seconds": 10.0 if gpu else 1.0,
        "transfer.ucx_tls": "tcp,sm,self,cuda_copy" if gpu else "tcp,sm,self",
    }


async def serve(
    options: argparse.Namespace, processes: Processes, ahead: str, figures: dict[str, object]
) -> list[list[list[int]]]:
    """One worker and its router: fills ``figures``. Returns the tokens of all answers, for each of ``counts``."""
    processes.start("decode", ahead, {"worker.name": ahead, "worker.pool": ahead, "scheduler.ahead": ahead})
    record = await processes.record(ahead, ahead)
    name = f"router-{ahead}"
    processes.start("router", name, {"router.name": name, "router.pool": ahead, **ROUTERS["whole"]})
    client = Client((await processes.router(name)).endpoint)
    await asyncio.wait_for(served(client, 1), SERVED_SECONDS)
    vocabulary = int(json.loads((processes.directory / "model" / "config.json").read_text())["vocab_size"])
    # The same prompts each way.
    prompts, told = Prompts(vocabulary), list[list[list[int]]]()
    for count in options.counts:
        # The first time builds graphs and kernels.
        await asyncio.gather(*(ask(client, prompts(options.prompt), 8) for _ in range(count)))
        rounds = []
        told.append([])
        for _ in range(options.rounds):
            asked = [prompts(options.prompt) for _ in range(count)]
            found, answers = await running(client, asked, options.tokens, record.metrics_endpoint)
            rounds.append(found)
            told[-1] += [answer.tokens for answer in answers]
        for figure in rounds[0]:
            figures[f"{count} answers, ahead {ahead}: {figure}"] = statistics.median(
                found[figure] for found in rounds
            )
        print(json.dumps(figures), file=sys.stderr, flush=True)
    await client.close()
    return told


async def measure(options: argparse.Namespace, model: Path, directory: Path) -> dict[str, object]:
    """Starts everything, measures, stops everything: a worker after the other, with the device to itself."""
    figures: dict[str, object] = {}
    told = []
    for ahead in options.ahead.split(","):
        processes = Processes(directory, settings_of(options, model))
        try:
            told.append(await serve(options, processes, ahead, figures))
        except BaseException:
            processes.tell()
            raise
        finally:
            processes.stop()
            shutil.rmtree(directory / "store", ignore_errors=True)
    for ahead, other in zip(options.ahead.split(",")[1:], told[1:], strict=True):
        for count, first, second in zip(options.counts, told[0], other, strict=True):
            same = [
                one == two
                for one_answer, two_answer in zip(first, second, strict=True)
                for one, two in zip(one_answer, two_answer, strict=True)
            ]
            figures[f"{count} answers, ahead {ahead}: tokens equal, of {len(same)}"] = sum(same)
    return figures


def main() -> None:
    options = arguments(
        __doc__ or "",
        ("--layers", {"type": int, "default": 27}),
        ("--device", {"default": "cuda:0"}),
        ("--ahead", {"default": "off,on", "help": "scheduler.ahead, several by comma"}),
        ("--batches", {"default": "1,16,64", "help": "answers at once, several by comma"}),
        ("--prompt", {"type": int, "default": 4096, "help": "tokens of a prompt"}),
        ("--tokens", {"type": int, "default": 256, "help": "of an answer"}),
        ("--rounds", {"type": int, "default": 3}),
        ("--memory", {"default": "/dev/shm", "help": "where the checkpoint is written, and removed"}),
    )
    if options.quick:
        options.rounds = 1
    options.counts = [int(count) for count in options.batches.split(",")]
    directory = Path(tempfile.mkdtemp(prefix="twinpool-serve-", dir=options.memory))
    try:
        began = time.perf_counter()
        write_model(directory / "model", options.layers, options.device)
        figures = asyncio.run(measure(options, directory / "model", directory))
        figures["run_seconds"] = time.perf_counter() - began
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    ratios: Figures = {
        name.removesuffix("beside ms") + "beside/itl": float(str(value))
        / float(str(figures[name.replace("beside ms", "itl mean ms")]))
        for name, value in figures.items()
        if name.endswith("beside ms")
    }
    report(
        "through the product, the time between tokens is that of a step",
        figures,
        ratios,
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
