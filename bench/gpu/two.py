# SPDX-License-Identifier: Apache-2.0
"""Claim: with prefill on one GPU and decode on another, running answers do not feel long prompts, and no token changes.

Through the product: routers, gRPC, NIXL, workers as processes, a random model of DeepSeek-V2-Lite's shape. *split* prefills on
the first device and decodes on the second; *whole* does both on the second; *replicas* does both on each, in chunks.

- ``ttft``: time to first token, split against whole.
- ``beside``: time between tokens of running answers while long prompts arrive, split against replicas.
- ``goodput``: requests a second within 1 s to the first token and 20 ms between tokens, split against replicas, over rates.
- ``tokens``: equal prompts both ways, token by token.
- ``read``: block-major reads between the devices through the product against raw NIXL (``bench.gpu.handoff_vram``).
- ``fetch``: a cached prefix pulled from the other device against computing it: break-even, measured and as placement predicts.

``python -m bench.gpu.two --devices cuda:0,cuda:1 --json``. ``--devices cuda:0,cuda:0`` shares one GPU; ``--device cpu --layers 2 --quick``
checks the script itself. ``--quick`` is a short run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench._common import Figures, arguments, report
from bench._split import Processes, Prompts, compare
from bench.gpu import _two_fetch as fetch
from bench.gpu._devices import devices_of
from bench.gpu._two_cluster import REPLICAS, Plan, Running, start
from bench.gpu._two_load import Beside, Rate, goodput, interference
from bench.gpu.split import equal_tokens, write_model

PARTS = ("read", "ttft", "tokens", "beside", "goodput", "fetch")
BLOCK_TOKENS = 64
READ_SECONDS = 240


def numbers(text: str) -> list[int]:
    """Numbers by comma."""
    return [int(part) for part in text.split(",")]


def verdicts(figures: dict[str, object], lengths: list[int]) -> dict[str, list[str]]:
    """Where splitting wins and where it loses, one sentence each, by the figures that are there."""
    found: dict[str, list[str]] = {"wins": [], "losses": []}

    def weigh(what: str, split: str, other: str, *, more: bool = False) -> None:
        ours, theirs = figures.get(split), figures.get(other)
        if isinstance(ours, float) and isinstance(theirs, float):
            won = ours > theirs if more else ours < theirs
            found["wins" if won else "losses"].append(f"{what}: {ours:.4g} against {theirs:.4g}")

    for length in lengths:
        label = f"{length} tokens ttft"
        weigh(
            f"time to first token of {length} tokens, ms, against one device",
            f"{label} split ms",
            f"{label} whole ms",
        )
    for name in [
        name for name in figures if "answers beside" in name and ", split: " in name and "alone" not in name
    ]:
        weigh(
            name.replace(", split:", ", against replicas:"), name, name.replace(", split:", f", {REPLICAS}:")
        )
    weigh(
        "goodput, requests a second, against replicas",
        "goodput of split per s",
        f"goodput of {REPLICAS} per s",
        more=True,
    )
    return found


def reads(options: argparse.Namespace, devices: tuple[str, str]) -> tuple[dict[str, object], Figures]:
    """The reads, in processes of their own, so that their pools are gone before the workers start."""
    command = [sys.executable, "-m", "bench.gpu.handoff_vram", "--devices", ",".join(devices), "--json"]
    command += ["--blocks", options.blocks, "--rounds", str(options.rounds)]
    if devices[0] == "cpu":
        command += ["--layers", str(options.layers)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=READ_SECONDS, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {f"read: {name}": value for name, value in found["figures"].items()}, {
        f"read: {name}": value for name, value in found["ratios"].items()
    }


async def fetches(
    running: Running, prompts: Prompts, lengths: list[int], rounds: int
) -> tuple[dict[str, object], Figures]:
    """From a worker of the first device to one of the second."""
    owner, reader = (fetch.Computer(running.records[name]) for name in ("replica-0", "decode"))
    await owner.open()
    await reader.open()
    try:
        times, pulls, figures = await fetch.compare(owner, reader, prompts, lengths, rounds)
    finally:
        await owner.close()
        await reader.close()
    measured, inside = fetch.break_even(times)
    figures["break-even measured tokens"] = measured if measured != float("inf") else "never"
    figures["break-even lies among the lengths"] = inside
    ratios: Figures = {}
    said = {
        "at the start": [],
        "after the pulls": [(blocks, read) for blocks, read, _ in pulls.all],
        "after the pulls, with their waits": [(blocks, waited) for blocks, _, waited in pulls.all],
    }
    for name, observed in said.items():
        tokens = fetch.predicted(owner.record, reader.record, observed, max(lengths))
        figures[f"break-even predicted {name} tokens"] = tokens if tokens != float("inf") else "never"
        if inside and tokens != float("inf"):
            ratios[f"break-even predicted {name}/measured"] = tokens / measured
    cost = reader.record.prefill_cost
    figures["calibration of prefill"] = [cost.base_seconds, cost.unit_seconds, cost.context_seconds]
    return figures, ratios


async def parts_of(
    options: argparse.Namespace, running: Running, prompts: Prompts
) -> tuple[dict[str, object], Figures]:
    """The parts that need the cluster, in the order of ``PARTS``."""
    lengths, rounds = numbers(options.lengths), options.rounds
    alone = {name: running.clients[name] for name in ("split", "whole")}
    loaded = {name: running.clients[name] for name in ("split", REPLICAS)}
    figures: dict[str, object] = {}
    ratios: Figures = {}

    def tell() -> None:
        print(json.dumps(figures), file=sys.stderr, flush=True)

    if "ttft" in options.parts:
        for length in lengths:
            figures |= await compare(alone, prompts, length, rounds)
            ratios[f"{length} tokens ttft split/whole"] = float(
                str(figures[f"{length} tokens ttft split ms"])
            ) / float(str(figures[f"{length} tokens ttft whole ms"]))
        tell()
    if "tokens" in options.parts:
        figures |= await equal_tokens(alone, prompts, lengths[0])
    if "fetch" in options.parts:
        found, more = await fetches(running, prompts, numbers(options.prefixes), rounds)
        figures |= found
        ratios |= more
        tell()
    if "beside" in options.parts:
        load = Beside(options.beside, options.running)
        figures |= await interference(loaded, prompts, load, max(1, rounds // 2))
        tell()
    if "goodput" in options.parts:
        pair = max(BLOCK_TOKENS, options.beside // 8), options.beside
        rates = [Rate(float(rate), options.seconds, pair) for rate in options.rates.split(",")]
        figures |= await goodput(loaded, prompts, rates)
    return figures, ratios


async def measure(
    options: argparse.Namespace, plan: Plan, directory: Path
) -> tuple[dict[str, object], Figures]:
    """Starts everything, measures, stops everything."""
    model = directory / "model"
    processes = Processes(directory, plan.shared(model))
    try:
        began = time.perf_counter()
        running = await start(processes, plan)
        ready = time.perf_counter() - began
        print(f"ready after {ready:.1f} s", file=sys.stderr, flush=True)
        prompts = Prompts(int(json.loads((model / "config.json").read_text())["vocab_size"]))
        figures, ratios = await parts_of(options, running, prompts)
        for client in running.clients.values():
            await client.close()
        return {"ready s": ready, **figures}, ratios
    except BaseException:
        processes.tell()
        raise
    finally:
        processes.stop()


def parse() -> argparse.Namespace:
    """The arguments; what cannot be run ends the program with a sentence."""
    options = arguments(
        __doc__ or "",
        ("--devices", {"default": "", "help": "where prompts are computed and where answers are, by comma"}),
        ("--device", {"default": "", "help": "one device for both"}),
        ("--layers", {"type": int, "default": 27, "help": "of the model; 27 are DeepSeek-V2-Lite's"}),
        ("--parts", {"default": ",".join(PARTS), "help": "which, by comma"}),
        ("--lengths", {"default": "1024,8192,32768", "help": "tokens of a prompt, several by comma"}),
        ("--beside", {"type": int, "default": 8192, "help": "tokens of a prompt that arrives beside running answers"}),
        ("--running", {"type": int, "default": 16, "help": "running answers"}),
        ("--prefixes", {"default": "64,128,256,512,1024,2048,8192", "help": "tokens of a cached prefix, by comma"}),
        ("--blocks", {"default": "1,16,256,2048", "help": "blocks of one read, several by comma"}),
        ("--rates", {"default": "1,2,4,8,16,32", "help": "requests a second, growing, by comma"}),
        ("--seconds", {"type": float, "default": 10.0, "help": "of each rate"}),
        ("--chunk", {"type": int, "default": 2048, "help": "tokens of a prefill step where prefill is split off"}),
        ("--replica-chunk", {"type": int, "default": 512, "help": "the same where one worker does both"}),
        ("--rounds", {"type": int, "default": 7}),
        ("--memory", {"default": "/dev/shm", "help": "where the checkpoint is written, and removed"}),
    )  # fmt: skip
    options.parts = options.parts.split(",")
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        raise SystemExit(f"--parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if options.devices and options.device:
        raise SystemExit("--devices and --device: give one of them")
    options.pair = devices_of(options.devices or options.device or "cuda:0,cuda:1")
    if options.pair[0] == "cpu" and options.layers > 8:
        raise SystemExit(f"--layers {options.layers} on a CPU takes hours; at most 8, such as 2")
    if options.quick:
        small = {"lengths": "64,256", "beside": 512, "running": 2, "prefixes": "64,256", "blocks": "1,16"}
        short = {"rounds": 2, "seconds": 4.0, "rates": "1,2"} | (small if options.pair[0] == "cpu" else {})
        for name, value in short.items():
            setattr(options, name, value)
    return options


def main() -> None:
    options = parse()
    longest = max([*numbers(options.lengths), *numbers(options.prefixes), options.beside])
    context = longest + 4096
    plan = Plan(
        devices=options.pair,
        max_context_tokens=context,
        # Room for several of the longest, and for as many of the arriving ones as may run.
        num_blocks=max(4 * context, 48 * (options.beside + 256)) // BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        split_chunk=options.chunk,
        replica_chunk=options.replica_chunk,
    )
    figures: dict[str, object] = {
        "devices": ",".join(plan.devices),
        "one device": plan.one_device,
        "layers": options.layers,
        "chunk tokens": options.chunk,
        "replica chunk tokens": options.replica_chunk,
    }
    ratios: Figures = {}
    began = time.perf_counter()
    if "read" in options.parts:
        found, more = reads(options, plan.devices)
        figures |= found
        ratios |= more
    if set(options.parts) - {"read"}:
        directory = Path(tempfile.mkdtemp(prefix="twinpool-two-", dir=options.memory))
        try:
            figures["model GB"] = write_model(directory / "model", options.layers, plan.devices[0]) / 1e9
            found, more = asyncio.run(measure(options, plan, directory))
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        figures |= found
        ratios |= more
    figures |= verdicts(figures, numbers(options.lengths))
    figures["run_seconds"] = time.perf_counter() - began
    report(
        "prefill and decode on a device each: running answers do not feel long prompts", figures, ratios,
        as_json=options.json,
    )  # fmt: skip


if __name__ == "__main__":
    main()
