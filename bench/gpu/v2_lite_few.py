# SPDX-License-Identifier: Apache-2.0
"""Decode steps of few sequences of the model of ``v2_lite_step``: limits and tiles of its kernels compared in one process.

``python -m bench.gpu.v2_lite_few --out DIR``. Cards and minutes differ by more than variants do, so every batch runs all
variants in turn, ``--rounds`` times. Steps as in ``v2_lite_step``: 4,096 tokens of context, plan to token ids.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from bench.gpu.v2_lite_step import BLOCK, build, make_pool, time_batch
from twinpool.engine.kernels import triton_experts, triton_few_launch
from twinpool.engine.kernels.triton_experts import Tile
from twinpool.engine.models import decoder

CONTEXT, STEPS = 4096, 25
DEFAULTS = {
    (decoder, "FEW"): decoder.FEW,
    (triton_few_launch, "LIBRARY"): triton_few_launch.LIBRARY,
    (triton_experts, "FEW_TILES"): triton_experts.FEW_TILES,
    (triton_experts, "SINGLE_TILES"): triton_experts.SINGLE_TILES,
    (triton_experts, "TILES"): triton_experts.TILES,
}


def _set(module: object, name: str, value: object) -> Callable[[], None]:
    return lambda: setattr(module, name, value)


def _single(first: Tile, second: Tile) -> Callable[[], None]:
    return _set(triton_experts, "SINGLE_TILES", (first, second))


def _rows(rows: int, first: Tile, second: Tile) -> Callable[[], None]:
    return _set(triton_experts, "TILES", triton_experts.TILES | {rows: (first, second)})


VARIANTS: dict[str, tuple[tuple[int, ...], Callable[[], None]]] = {
    "now": ((1, 16, 64, 256), lambda: None),
    "products of the library": ((16, 64), _set(decoder, "FEW", 1)),
    "no product of the library": ((64,), _set(triton_few_launch, "LIBRARY", 64)),
    "deeper columns": (
        (16,),
        _set(triton_experts, "FEW_TILES", (Tile(32, 256, 3, 4), Tile(64, 256, 3, 4))),
    ),
    "wider columns": ((16,), _set(triton_experts, "FEW_TILES", triton_experts.TILES[16])),
    "narrow down, 1": ((1,), _single(Tile(32, 256, 3, 4), Tile(32, 256, 3, 4))),
    "narrow down, two stages, 1": ((1,), _single(Tile(32, 256, 2, 4), Tile(32, 256, 2, 4))),
    "narrow both, 1": ((1,), _single(Tile(16, 256, 4, 4), Tile(32, 256, 3, 4))),
    "narrow deep, 1": ((1,), _single(Tile(16, 512, 3, 4), Tile(16, 512, 3, 4))),
    "three blocks, 1": ((1,), _single(Tile(32, 128, 4, 4), Tile(32, 128, 4, 4))),
    "narrow down, 64": ((64,), _rows(16, Tile(64, 128, 3, 4), Tile(64, 128, 3, 4))),
    "narrow deep down, 64": ((64,), _rows(16, Tile(64, 128, 3, 4), Tile(64, 256, 2, 4))),
    "wide steps, 64": ((64,), _rows(16, Tile(64, 256, 2, 4), Tile(64, 256, 2, 4))),
    "narrow down, 256": ((256,), _rows(64, Tile(64, 64, 3, 4), Tile(64, 64, 3, 4))),
    "narrow deep down, 256": ((256,), _rows(64, Tile(64, 64, 3, 4), Tile(64, 128, 2, 4))),
    "four stages, 256": ((256,), _rows(64, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4))),
    "wide steps, 256": ((256,), _rows(64, Tile(64, 128, 2, 4), Tile(128, 128, 2, 4))),
    "narrow, 256": ((256,), _rows(64, Tile(32, 128, 3, 4), Tile(64, 128, 3, 4))),
}
"""By name: for which batches, and what is set."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--variants", default="", help="names by ;, else all")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", default=os.environ.get("OUT", ""))
    arguments = parser.parse_args()
    batches = [int(batch) for batch in arguments.batches.split(",")]
    wanted = set(filter(None, arguments.variants.split(";")))
    model = build(27, None)
    pool = make_pool(model, max(batches) * (-(-(CONTEXT + STEPS + 8) // BLOCK)))
    rows: list[dict[str, object]] = []
    report = {
        "card": torch.cuda.get_device_name(), "torch": torch.__version__,
        "command": " ".join(["python -m bench.gpu.v2_lite_few", *sys.argv[1:]]), "steps": rows,
    }  # fmt: skip
    for batch in batches:
        for turn in range(arguments.rounds):
            for name, (sizes, change) in VARIANTS.items():
                if batch not in sizes or (wanted and name not in wanted):
                    continue
                for (module, attribute), value in DEFAULTS.items():
                    setattr(module, attribute, value)
                change()
                try:
                    row, graphs, _ = time_batch(model, pool, batch, CONTEXT, STEPS)
                except (RuntimeError, triton.errors.TritonError) as fault:
                    print(batch, name, "not run:", str(fault)[:120], flush=True)
                    continue
                del graphs
                rows.append(
                    {
                        "batch": batch,
                        "variant": name,
                        "round": turn,
                        "ms": row["ms"],
                        "device_ms": row["device_ms"],
                    }
                )
                print(rows[-1], flush=True)
                if arguments.out:
                    Path(arguments.out, "v2_lite_few.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
