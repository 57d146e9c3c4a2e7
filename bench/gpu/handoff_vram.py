# SPDX-License-Identifier: Apache-2.0
"""Claim: a validated pull from VRAM to VRAM keeps up with raw NIXL on the same blocks.

Two processes on one GPU or on two, each with a block-major pool of DeepSeek-V3's shape (4.3 MiB a block). *product*: ticket,
pull over the transfer thread, generations, comparison. *raw*: NIXL with prepared lists, polled without a pause. *copy*:
gather and scatter inside one process. Alternating in one run. Before that every size is read once with digests on
both sides, and all bytes are compared.

``python -m bench.gpu.handoff_vram --json`` takes under 90 s; ``--devices cuda:0,cuda:1``: the owner's and the reader's.
``--device cpu --layers 2`` checks the script itself.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial

from bench._common import Figures, arguments, interleave, report
from bench._handoff import (
    Copy,
    Product,
    Raw,
    Setting,
    measure,
    measure_many,
    scattered,
    wrong_blocks,
)
from bench.gpu._devices import devices_of

IN_FLIGHT = 8
"""Reads at once, where a rate is that of several prompts."""

COPIES_MAX = 512
"""Blocks up to which the copy is measured: it needs two pools of its own."""


def together(
    product: Product, raw: Raw, setting: Setting, count: int, rounds: int
) -> tuple[Figures, Figures]:
    """Product and raw with several reads at once."""
    found = interleave(
        rounds,
        {
            "raw": partial(measure_many, raw, setting, count, IN_FLIGHT, 5),
            "product": partial(measure_many, product, setting, count, IN_FLIGHT, 5),
        },
    )
    label = f"{IN_FLIGHT} x {count} blocks"
    figures = {
        f"{label} {side} {name}": value for side, values in found.items() for name, value in values.items()
    }
    return figures, {f"{label} product/raw": found["product"]["GB_per_s"] / found["raw"]["GB_per_s"]}


def check(setting: Setting, counts: list[int]) -> dict[str, object]:
    """Reads each count once with digests; an owner whose bytes differ from its digests would fail the pull."""
    product = Product(replace(setting, digest="always"))
    found: dict[str, object] = {}
    try:
        for count in counts:
            remote, local = scattered(count, setting.num_blocks, 100)
            found[f"{count} blocks with digests us"] = product.read(remote, local) * 1e6
            found[f"{count} blocks wrong"] = wrong_blocks(setting, product.half.pool, remote, local)
    finally:
        product.close()
    return found


def parse() -> argparse.Namespace:
    """The arguments."""
    return arguments(
        __doc__ or "",
        ("--blocks", {"default": "1,16,256,2048", "help": "blocks of one read, several by comma"}),
        ("--layers", {"type": int, "default": 61}),
        ("--device", {"default": "cuda:0"}),
        (
            "--devices",
            {"default": "", "help": "the owner's and the reader's, by comma; empty: --device for both"},
        ),
        ("--tls", {"default": "", "help": "UCX transports; by default all for a GPU, tcp,sm,self else"}),
        ("--rounds", {"type": int, "default": 5}),
    )


def main() -> None:
    options = parse()
    began = time.perf_counter()
    counts = [int(count) for count in options.blocks.split(",")]
    if options.quick:
        counts, options.rounds = counts[:2], 2
    owner, reader = devices_of(options.devices or options.device)
    on_gpu = reader.startswith("cuda")
    setting = Setting(
        num_blocks=2 * max(counts),
        layers=options.layers,
        device=reader,
        owner_device=owner,
        ucx_tls=options.tls or ("tcp,sm,self,cuda_copy,cuda_ipc" if on_gpu else "tcp,sm,self"),
    )
    figures: dict[str, object] = {
        "block_bytes": setting.block_bytes,
        "ucx_tls": setting.ucx_tls,
        "devices": f"{owner},{reader}",
    }
    figures.update(check(setting, counts))
    product = Product(setting)
    raw = Raw(product.owner, setting)
    copy = Copy(replace(setting, num_blocks=min(setting.num_blocks, 2 * COPIES_MAX)))
    ratios: Figures = {}
    try:
        for count in counts:
            repeats = 5 if count <= 256 else 3
            sides = {
                "raw": partial(measure, raw, setting, count, repeats),
                "product": partial(measure, product, setting, count, repeats),
            }
            if count <= COPIES_MAX:
                small = replace(setting, num_blocks=min(setting.num_blocks, 2 * COPIES_MAX))
                sides["copy"] = partial(measure, copy, small, count, repeats)
            found = interleave(options.rounds, sides)
            for side, values in found.items():
                figures.update({f"{count} blocks {side} {name}": value for name, value in values.items()})
            rate = {side: values["GB_per_s"] for side, values in found.items()}
            ratios[f"{count} blocks product/raw"] = rate["product"] / rate["raw"]
            if "copy" in rate:
                ratios[f"{count} blocks product/copy"] = rate["product"] / rate["copy"]
            if count * IN_FLIGHT <= setting.num_blocks:
                figures_, ratios_ = together(product, raw, setting, count, options.rounds)
                figures |= figures_
                ratios |= ratios_
            remote, local = scattered(count, setting.num_blocks, 0)
            raw.read(remote, local)
            figures[f"{count} blocks raw wrong"] = wrong_blocks(setting, raw.pool, remote, local)
    finally:
        product.close()
    figures["run_seconds"] = time.perf_counter() - began
    report("a validated pull from VRAM to VRAM keeps up with raw NIXL", figures, ratios, as_json=options.json)


if __name__ == "__main__":
    main()
