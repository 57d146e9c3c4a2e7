# SPDX-License-Identifier: Apache-2.0
"""Claim: a hand-off costs what its bytes cost, and no more than its last chunk can be felt.

*rate*: scattered blocks of DeepSeek-V3's shape (61 layers, bfloat16, 4.3 MiB) from another process, through the product
(ticket, transfer thread, generations, comparison), by raw NIXL on the same blocks, and by memcpy inside one process.
*prompt*: 8,192 tokens of that shape in chunks of 512, each announced when a stand-in for the computation is done.
*cluster*: a cluster with a tiny MLA model hands prompts off, or lets the decode worker compute them: what is added to the first token.
*runs*: the same blocks scattered and as one run of neighbours, which NIXL moves as one piece; and how many pieces a prompt's blocks
are in a pool that has been in use for long.
*cancel*: a prompt of 32k tokens is cancelled in the middle; what the next short prompt waits for.

``python -m bench.handoff [--only rate,prompt,runs,cluster,cancel]``. Variants alternate in one run; medians.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from functools import partial

from bench._common import Figures, arguments, interleave, report
from bench._handoff import (
    BLOCK_TOKENS,
    Copy,
    Product,
    Raw,
    Setting,
    measure,
    measure_many,
    scattered,
)
from bench._handoff_pieces import measure_runs, pieces

IN_FLIGHT = 8
"""Reads at once, where a rate is that of several prompts."""

PROMPT_BLOCKS = 8192 // BLOCK_TOKENS
CHUNK_BLOCKS = 512 // BLOCK_TOKENS


def rates(setting: Setting, counts: list[int], rounds: int) -> tuple[dict[str, object], Figures]:
    """Product, raw and copy for each count."""
    figures: dict[str, object] = {}
    ratios: Figures = {}
    product = Product(setting)
    try:
        raw, copy = Raw(product.owner, setting), Copy(setting)
        for count in counts:
            sides: dict[str, Product | Raw | Copy] = {"raw": raw, "product": product, "copy": copy}
            found = interleave(
                rounds,
                {name: partial(measure, side, setting, count, 9) for name, side in sides.items()},
            )
            label = f"{setting.ucx_tls} {count} blocks"
            for name, values in found.items():
                figures |= {f"{label} {name} {figure}": value for figure, value in values.items()}
            rate = {name: values["GB_per_s"] for name, values in found.items()}
            figures[f"{label} product over raw us"] = found["product"]["us"] - found["raw"]["us"]
            ratios[f"{label} product/raw"] = rate["product"] / rate["raw"]
            ratios[f"{label} product/copy"] = rate["product"] / rate["copy"]
            many = interleave(
                rounds,
                {
                    "raw": partial(measure_many, raw, setting, count, IN_FLIGHT, 5),
                    "product": partial(measure_many, product, setting, count, IN_FLIGHT, 5),
                },
            )
            label = f"{setting.ucx_tls} {IN_FLIGHT} x {count} blocks"
            for name, values in many.items():
                figures |= {f"{label} {name} {figure}": value for figure, value in values.items()}
            ratios[f"{label} product/raw"] = many["product"]["GB_per_s"] / many["raw"]["GB_per_s"]
    finally:
        product.close()
    return figures, ratios


def prompt(setting: Setting, rounds: int) -> tuple[dict[str, object], Figures]:
    """The hand-off of one long prompt whose chunks become ready one by one, slower than they can be read."""
    product = Product(setting)
    try:
        raw = Raw(product.owner, setting)
        chunks = [
            scattered(PROMPT_BLOCKS, PROMPT_BLOCKS, seed=3)[0][low : low + CHUNK_BLOCKS]
            for low in range(0, PROMPT_BLOCKS, CHUNK_BLOCKS)
        ]
        local = scattered(PROMPT_BLOCKS, PROMPT_BLOCKS, seed=4)[1]
        last = chunks[-1], local[-CHUNK_BLOCKS:]
        pace = 2 * statistics.median(raw.read(*last) for _ in range(9))

        def overlapped() -> Figures:
            total, tail = product.read_chunks(chunks, local, pace)
            return {"prompt_ms": total * 1e3, "after_last_chunk_ms": tail * 1e3}

        def single() -> Figures:
            return {"last_chunk_raw_ms": raw.read(*last) * 1e3}

        def whole() -> Figures:
            return {"whole_raw_ms": raw.read(scattered(PROMPT_BLOCKS, PROMPT_BLOCKS, 3)[0], local) * 1e3}

        found = interleave(rounds, {"product": overlapped, "last": single, "whole": whole})
    finally:
        product.close()
    figures: dict[str, object] = {"8k prompt compute_ms": pace * len(chunks) * 1e3}
    for values in found.values():
        figures |= {f"8k prompt {name}": value for name, value in values.items()}
    tail = found["product"]["after_last_chunk_ms"]
    figures["8k prompt tail beyond last chunk ms"] = tail - found["last"]["last_chunk_raw_ms"]
    return figures, {"8k prompt tail/whole read": tail / found["whole"]["whole_raw_ms"]}


def runs(setting: Setting, counts: list[int], rounds: int) -> tuple[dict[str, object], Figures]:
    """Scattered blocks against neighbours, raw and through the product, in turn."""
    figures: dict[str, object] = dict(pieces())
    ratios: Figures = {}
    product = Product(setting)
    try:
        raw = Raw(product.owner, setting)
        for count in counts:
            found = interleave(
                rounds,
                {
                    "raw scattered": partial(measure, raw, setting, count, 9),
                    "raw neighbours": partial(measure_runs, raw, setting, count, 9),
                    "product scattered": partial(measure, product, setting, count, 9),
                    "product neighbours": partial(measure_runs, product, setting, count, 9),
                },
            )
            label = f"{setting.device} {count} blocks of {setting.block_bytes >> 10} KiB"
            for name, values in found.items():
                figures |= {f"{label} {name} {figure}": value for figure, value in values.items()}
            for side in ("raw", "product"):
                ratios[f"{label} {side} neighbours/scattered"] = (
                    found[f"{side} neighbours"]["GB_per_s"] / found[f"{side} scattered"]["GB_per_s"]
                )
    finally:
        product.close()
    return figures, ratios


def main() -> None:
    options = arguments(
        __doc__ or "",
        ("--only", {"default": "rate,prompt,runs,cluster,cancel", "help": "parts, several by comma"}),
        ("--layers", {"type": int, "default": 61, "help": "layers of a block; 61 is DeepSeek-V3"}),
        ("--blocks", {"default": "1,16,64", "help": "blocks of one read, several by comma"}),
        ("--tls", {"default": "tcp,sm,self;tcp,self", "help": "UCX transports, several lists by semicolon"}),
        ("--rounds", {"type": int, "default": 9}),
    )
    parts = options.only.split(",")
    if options.quick:
        options.layers, options.blocks, options.rounds = 8, "1,16", 3
    counts = [int(count) for count in options.blocks.split(",")]
    figures: dict[str, object] = {"block_bytes": Setting(1, options.layers).block_bytes}
    ratios: Figures = {}
    began = time.perf_counter()

    def add(found: tuple[dict[str, object], Figures]) -> None:
        figures.update(found[0])
        ratios.update(found[1])

    for ucx_tls in options.tls.split(";") if "rate" in parts else ():
        add(rates(Setting(IN_FLIGHT * max(counts), options.layers, ucx_tls=ucx_tls), counts, options.rounds))
    if "runs" in parts:
        for layers in sorted({4, options.layers}):
            add(runs(Setting(2 * max(counts), layers), counts, options.rounds))
    if "prompt" in parts:
        add(prompt(Setting(PROMPT_BLOCKS, options.layers), options.rounds))
    if "cluster" in parts or "cancel" in parts:
        from bench._handoff_cluster import cluster

        add(asyncio.run(cluster(options.rounds, parts)))
    figures["run_seconds"] = time.perf_counter() - began
    report("a hand-off costs what its bytes cost", figures, ratios, as_json=options.json)


if __name__ == "__main__":
    main()
