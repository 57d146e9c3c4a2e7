# SPDX-License-Identifier: Apache-2.0
"""What both sides of ``bench/core.py`` share: sizes, timing, memory, and how a side is asked for one workload.

A side is a program that gets a workload's name and prints one JSON object of figures; each call is a process of its own, so
nothing that another workload left behind is measured. Only numpy is needed.
"""

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping

Figures = dict[str, float]

BLOCK_TOKENS = 64
VOCABULARY = 128_000
RUNNING = 64
DECODING = 16
CONTEXTS = (1024, 32_768, 81_920, 131_072)
CACHED = (8192, 32_768, 81_920)
PROMPTS = (256, 2048)
WAITING = (1000, 10_000)
WORKERS = (8, 64)
CHAIN_BLOCKS = 2048
BATCH_BLOCKS = 256
INDEXED_BLOCKS = 1 << 20


def label(tokens: int) -> str:
    """``2048`` as ``2k``."""
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def prompt_ids(count: int, seed: int) -> list[int]:
    """Token ids of a prompt; prompts of different seeds share no block."""
    return [(i * 7919 + seed * 104_729) % VOCABULARY for i in range(count)]


def each_us(calls: int, prepare: Callable[[int], Callable[[], object]]) -> float:
    """Median wall microseconds of ``prepare(i)()``; what ``prepare`` does is not timed."""
    taken = []
    gc.disable()
    for i in range(calls):
        call = prepare(i)
        start = time.perf_counter_ns()
        call()
        taken.append(time.perf_counter_ns() - start)
    gc.enable()
    return statistics.median(taken) / 1e3


def batch_us(calls: int, call: Callable[[], object], batches: int = 15) -> float:
    """Median over batches of the wall microseconds of a call: for calls too short to time one by one."""
    taken = []
    for _ in range(batches):
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        taken.append((time.perf_counter_ns() - start) / calls)
    return statistics.median(taken) / 1e3


def rate(units: int, call: Callable[[], object]) -> float:
    """Million units a wall second of one call."""
    start = time.perf_counter_ns()
    call()
    return units * 1e3 / (time.perf_counter_ns() - start)


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def serve(workloads: Mapping[str, Callable[[bool], Figures]]) -> None:
    """Runs the workload that the command line names."""
    name, quick = sys.argv[1], "--quick" in sys.argv
    print(json.dumps(workloads[name](quick)))
