# SPDX-License-Identifier: Apache-2.0
"""Claim: a router costs nothing while it is idle, stays as large as it is, and several processes share one port.

``idle``: CPU of a router that follows 100 workers (one stream and one subscription of KV events each) with no request.
``memory``: resident memory while new prompts of 8,192 tokens keep coming: it grows until the 64 MiB of tokenised text that
the router may keep are full.
``processes``: requests a second of one router and of two on one port, each pinned to a core that it shares with the clients
where there are only two; the share of the busier one. The tokenizer is given as for ``bench/router.py``.
"""

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

from bench._common import arguments, report
from bench._router_fronts import Ours
from bench._router_load import cpu_seconds, drive, rss_bytes
from bench._router_prompts import Prompts
from twinpool.rpc import run

WORKERS = 100
CONCURRENCY = 32


def main() -> None:
    """Entry point."""
    args = arguments(
        __doc__ or "",
        (
            "--tokenizer",
            {"default": os.environ.get("TWINPOOL_TOKENIZER", ""), "help": "directory of a tokenizer"},
        ),
        ("--seconds", {"type": float, "default": 20.0, "help": "of idleness"}),
        ("--prompts", {"type": int, "default": 1200, "help": "new prompts that the memory is watched over"}),
    )
    if not args.tokenizer:
        print("no tokenizer: give --tokenizer DIRECTORY or set TWINPOOL_TOKENIZER", file=sys.stderr)
        sys.exit(0 if args.quick else 2)
    if args.quick:
        args.seconds, args.prompts = 3.0, 120
    run(_main(args))


async def _main(args: argparse.Namespace) -> int:
    figures: dict[str, object] = {}
    ratios: dict[str, float] = {}
    await _idle(args, figures)
    await _memory(args, figures, ratios)
    await _processes(args, figures, ratios)
    report("router: idle, memory, processes", figures, ratios, as_json=args.json)
    return 0


async def _idle(args: argparse.Namespace, figures: dict[str, object]) -> None:
    async with Ours("", args.tokenizer, 0.0, workers=WORKERS) as front:
        # What follows the start: sessions, snapshots, the tokenizer.
        await asyncio.sleep(args.seconds / 4)
        before, began = cpu_seconds(front.pid), time.monotonic()
        await asyncio.sleep(args.seconds)
        spent, seconds = cpu_seconds(front.pid) - before, time.monotonic() - began
    figures["idle.workers"] = WORKERS
    figures["idle.share_of_a_core"] = spent / seconds


async def _memory(args: argparse.Namespace, figures: dict[str, object], ratios: dict[str, float]) -> None:
    prompts = Prompts(Path(args.tokenizer))
    sizes = []
    async with Ours("", args.tokenizer, 0.0) as front:
        for _ in range(6):
            bodies = [front.body(prompts.first(8192), False) for _ in range(args.prompts // 6)]
            await drive(front.send, bodies, CONCURRENCY, front.pid)
            sizes.append(rss_bytes(front.pid))
    figures["memory.rss_mb"] = [round(size / 1e6, 1) for size in sizes]
    ratios["memory.last_sixth"] = sizes[-1] / sizes[-2]


async def _processes(args: argparse.Namespace, figures: dict[str, object], ratios: dict[str, float]) -> None:
    prompts = Prompts(Path(args.tokenizer))
    bodies = [
        Ours.encode(prompts.ids(prompts.first(1024)), False) for _ in range(200 if args.quick else 2000)
    ]
    rates = {}
    for processes in (1, 2):
        async with Ours("", args.tokenizer, 0.0, processes=processes) as front:
            await drive(front.send, bodies[:100], CONCURRENCY, front.pid)
            before = [cpu_seconds(pid) for pid in front.pids]
            load = await drive(front.send, bodies, CONCURRENCY, front.pid)
            spent = [cpu_seconds(pid) - was for pid, was in zip(front.pids, before, strict=True)]
        rates[processes] = load.requests / load.wall_seconds
        figures[f"processes.{processes}.requests_per_second"] = rates[processes]
        figures[f"processes.{processes}.cpu_us"] = sum(spent) / load.requests * 1e6
        figures[f"processes.{processes}.busiest_share"] = max(spent) / sum(spent)
    ratios["processes.two_over_one"] = rates[2] / rates[1]


if __name__ == "__main__":
    main()
