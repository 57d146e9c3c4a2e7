# SPDX-License-Identifier: Apache-2.0
"""Claim: the router core admits and places a request in microseconds, whatever the prompt's length, the queue's length and
the size of the cluster; its prefix index answers for 64 workers at once and takes some 35 bytes a block.

All figures are through the Python binding. Times are CPU microseconds of the calling thread, medians over batches: a
neighbour's load moves them little. The targets are those of the core's design.
"""

import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bench._common import arguments, report
from twinpool._core import AdmissionConfig, RouterCore

BLOCK_TOKENS = 64
CHAIN_BLOCKS = 2048
TARGETS = {
    "longest_prefix_us": 10.0,
    "place_8x64_us": 25.0,
    "admit_2k_us": 2.0,
    "index_bytes_a_block": 48.0,
}
"""At most."""

Chain = NDArray[np.uint8]


def cpu_us(call: Callable[[], object], calls: int, batches: int = 15) -> float:
    """Median over batches of the CPU time of a call."""
    times = []
    for _ in range(batches):
        start = time.thread_time_ns()
        for _ in range(calls):
            call()
        times.append((time.thread_time_ns() - start) / calls / 1e3)
    return statistics.median(times)


def cluster(prefill: int, decode: int, **limits: float) -> RouterCore:
    """A core that knows so many workers, all with a load report."""
    core = RouterCore(AdmissionConfig(max_queue_requests=0, index_max_bytes=0, **limits))
    for role, count in (("prefill", prefill), ("decode", decode)):
        for i in range(count):
            name = f"{role[0]}{i}"
            core.upsert_worker(0.0, name, 1, "m", role, "ready", "fp", 100_000, BLOCK_TOKENS, 1000)
            core.report_load(0.0, name, 1, i, 0, 1000 * i if role == "prefill" else 0, 90_000, 0.01)
    return core


def fill(core: RouterCore, chains: list[Chain]) -> float:
    """Stores chains on the decode workers in turn; million blocks a CPU second."""
    start = time.thread_time()
    for i, chain in enumerate(chains):
        core.index_stored(f"d{i % 64}", 1, chain)
    return len(chains) * CHAIN_BLOCKS / (time.thread_time() - start) / 1e6


def empty(core: RouterCore, chains: list[Chain]) -> float:
    """Removes them again; million blocks a CPU second."""
    start = time.thread_time()
    for i, chain in enumerate(chains):
        core.index_removed(f"d{i % 64}", 1, chain)
    return len(chains) * CHAIN_BLOCKS / (time.thread_time() - start) / 1e6


def index_figures(core: RouterCore, chains: list[Chain], quick: bool) -> dict[str, float]:
    """Rates, memory and searches with a million blocks indexed."""
    figures = {"insert_m_s": fill(core, chains)}
    stats = core.stats()
    figures["index_bytes_a_block"] = stats["index_bytes"] / stats["index_blocks"]
    shared = chains[0]
    for worker in range(64):  # 64 different depths of one prompt
        core.index_stored(f"d{worker}", 1, shared[: 31 * (worker + 1)])
    calls = 200 if quick else 1000
    figures["longest_prefix_us"] = cpu_us(lambda: core.longest_prefix(shared), calls)
    turn = itertools.cycle(chains[1:])
    figures["longest_prefix_one_holder_us"] = cpu_us(lambda: core.longest_prefix(next(turn)), calls)
    return figures


def admission_figures(core: RouterCore, chains: list[Chain], quick: bool) -> dict[str, float]:
    """submit, plan and the end of a request; short and very long prompts."""
    numbers = itertools.count()
    figures = {}
    calls = 100 if quick else 400

    def run(tokens: int, hashes: Chain) -> tuple[float, float]:
        submits, plans = [], []
        for _ in range(calls):
            name = f"r{next(numbers)}"
            start = time.thread_time_ns()
            request = core.submit(0.0, name, "m", tokens, 100, hashes).request
            middle = time.thread_time_ns()
            core.plan(0.0)
            end = time.thread_time_ns()
            submits.append(middle - start)
            plans.append(end - middle)
            core.advance(0.0, request, 1, "cancel")
            core.forget(request)
        return statistics.median(submits) / 1e3, statistics.median(plans) / 1e3

    figures["admit_2k_us"], figures["place_8x64_us"] = run(2048, chains[1][:32])
    figures["admit_128k_us"], figures["place_8x64_128k_us"] = run(CHAIN_BLOCKS * BLOCK_TOKENS, chains[0])
    return figures


def queue_figures(chains: list[Chain], quick: bool) -> dict[str, float]:
    """plan with ten thousand waiting and no room."""
    core = cluster(8, 64, transfer_window_requests=1, queue_ttl_seconds=3600)
    waiting = 1000 if quick else 10_000
    for i in range(waiting):
        core.submit(0.0, f"r{i}", "m", 2048, 100, chains[i % len(chains)][:32], tenant=f"t{i % 7}")
    core.plan(0.0)
    running = itertools.cycle((1, 2))

    def changed() -> None:
        core.report_load(0.0, "d0", 1, next(running), 0, 0, 90_000, 0.01)
        core.plan(0.0)

    return {
        "plan_idle_10k_waiting_us": cpu_us(lambda: core.plan(0.0), 500),
        "plan_blocked_10k_waiting_us": cpu_us(changed, 100),
    }


def churn_growth(chains: list[Chain], rounds: int) -> float:
    """Index memory after ``rounds`` of storing and removing all, over what it was after the second."""
    core = cluster(1, 64)
    sizes = []
    for _ in range(rounds):
        fill(core, chains)
        sizes.append(core.stats()["index_bytes"])
        empty(core, chains)
    return sizes[-1] / sizes[1]


def main() -> None:
    """Measures and prints."""
    options = arguments(__doc__ or "")
    quick = bool(options.quick)
    random = np.random.default_rng(0)
    chains = [
        random.integers(0, 256, (CHAIN_BLOCKS, 16), dtype=np.uint8) for _ in range(64 if quick else 512)
    ]
    core = cluster(8, 64, prefill_window_tokens=0, transfer_window_requests=0)
    figures = index_figures(core, chains, quick)
    figures |= admission_figures(core, chains, quick)
    figures["remove_m_s"] = empty(core, chains[1:])
    figures |= queue_figures(chains, quick)
    figures["churn_growth"] = churn_growth(chains, 3 if quick else 10)
    ratios = {f"{name} of target": figures[name] / target for name, target in TARGETS.items()}
    report("The router core costs microseconds a request", figures, ratios, as_json=bool(options.json))


if __name__ == "__main__":
    main()
