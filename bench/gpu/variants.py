# SPDX-License-Identifier: Apache-2.0
"""What the scripts that compare variants of a kernel share: processes of their own, graphs, medians, a report.

Every variant is checked in a process of its own, several at a time, which also builds it; then the variants that are
right are timed one after the other. One that fails or hangs takes nothing with it.
"""

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

Rows = Iterator[dict[str, object]]
PARALLEL = 8


def median_us(call: Callable[[], object], replays: int = 15, calls: int = 3) -> float:
    """Of a CUDA graph of ``calls`` calls, divided by them."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(calls):
                call()
    for _ in range(2):
        graph.replay()
    spans = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        spans.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(spans)


def _start(module: str, *options: str, seconds: float) -> tuple[list[dict[str, object]], str]:
    """Runs a worker; what it printed, and why it failed."""
    command = [sys.executable, "-m", module, *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds, 1), check=False)
        text, fault = (
            done.stdout,
            "" if done.returncode == 0 else (done.stderr[-1200:] or str(done.returncode)),
        )
    except subprocess.TimeoutExpired as expired:
        raw = expired.stdout or b""
        text, fault = raw.decode() if isinstance(raw, bytes) else raw, f"no end after {seconds:.0f} s"
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")], fault


def _everything(module: str, arguments: argparse.Namespace) -> int:
    deadline = time.monotonic() + arguments.seconds
    variants = arguments.variants.split(",")
    report: dict[str, object] = {
        "card": torch.cuda.get_device_name(), "torch": torch.__version__,
        "command": " ".join([f"python -m {module}", *sys.argv[1:]]),
    }  # fmt: skip
    checks: list[dict[str, object]] = []
    times: list[dict[str, object]] = []
    broken: dict[str, str] = {}
    with concurrent.futures.ThreadPoolExecutor(PARALLEL) as pool:
        jobs = [
            (name, pool.submit(_start, module, "--check", "--variant", name, seconds=90)) for name in variants
        ]
        for name, job in jobs:
            found, fault = job.result()
            checks += found
            for wrong in [one for one in found if not one["ok"]]:
                print("WRONG", wrong, flush=True)
                fault = fault or "wrong results"
            if fault:
                print("FAILED", name, fault, flush=True)
                broken[name] = fault
    print("checked", len(checks), "cases; broken:", sorted(broken) or "none", flush=True)
    for name in variants:
        left = deadline - time.monotonic()
        if name in broken or left < 10:
            print("not timed:", name, flush=True)
            continue
        found, fault = _start(module, "--variant", name, seconds=min(left, 60))
        for one in found:
            print(one, flush=True)
        times += found
        if fault:
            print("FAILED", name, fault, flush=True)
            broken[name] = fault
        report |= {"checks": checks, "times": times, "broken": broken}
        if arguments.out:
            target = Path(arguments.out, f"{module.rpartition('.')[2]}.json")
            target.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if broken else 0


def main(module: str, variants: str, check: Callable[[str], Rows], times: Callable[[str], Rows]) -> int:
    """The script of ``module`` (``bench.gpu.…``): ``check`` yields rows with ``ok``, ``times`` rows of figures."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--variants", default=variants)
    parser.add_argument("--variant", default="", help="of a worker")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--seconds", type=float, default=220, help="after which no variant is begun")
    parser.add_argument("--out", default=os.environ.get("OUT", ""))
    arguments = parser.parse_args()
    if not arguments.variant:
        return _everything(module, arguments)
    torch.manual_seed(0)
    for row in (check if arguments.check else times)(arguments.variant):
        print(json.dumps({"variant": arguments.variant, **row}), flush=True)
    return 0
