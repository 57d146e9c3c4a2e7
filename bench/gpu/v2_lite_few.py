# SPDX-License-Identifier: Apache-2.0
"""Decode steps of one to four sequences of the model of ``v2_lite_step``: the kernels for very few tokens, and their tiles.

``python -m bench.gpu.v2_lite_few --out DIR``. First the layers' kernels for very few tokens on and off, by logits and by
time; then tiles of the experts of one token. Steps as in ``v2_lite_step``: 4,096 tokens of context, plan to token ids.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

from bench.gpu.v2_lite_step import BLOCK, build, make_plan, make_pool, time_batch
from twinpool.engine.graphs import DecodeGraphs
from twinpool.engine.kernels import triton_moe
from twinpool.engine.kernels.triton_moe import Tile
from twinpool.engine.models import decoder

CONTEXT, STEPS = 4096, 24
TILES = [
    (Tile(32, 128, 4, 4), Tile(64, 128, 4, 4)),
    (Tile(64, 128, 3, 4), Tile(128, 128, 3, 4)),
    (Tile(32, 256, 3, 4), Tile(64, 256, 3, 4)),
    (Tile(16, 256, 4, 4), Tile(32, 128, 5, 4)),
    (Tile(32, 128, 5, 4), Tile(32, 256, 4, 4)),
    (Tile(16, 512, 3, 4), Tile(16, 512, 3, 4)),
]


def compare(count: int) -> float:
    """Relative difference of the logits of three layers with the kernels for few tokens and without, in graphs."""
    context = np.array([700, 65, 1, 1500][:count], np.int32)
    tables = np.random.default_rng(0).permutation(count * 24).reshape(count, 24)
    plan = make_plan(np.arange(5, 5 + count), context, tables)
    found = []
    for small in (0, count):
        decoder.SMALL = small
        model = build(3, None)
        torch.manual_seed(1)
        graphs = DecodeGraphs(model, make_pool(model, tables.size), max_context=24 * BLOCK, buckets=[count])
        graphs.run(plan)
        found.append(graphs.run(plan).logits.double())
    return float((found[1] - found[0]).norm() / found[0].norm())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90, help="after which nothing is begun")
    parser.add_argument("--out", default=os.environ.get("OUT", ""))
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    rows: list[dict[str, object]] = []
    errors = {count: compare(count) for count in (1, 2)}
    print("relative differences of logits:", errors, flush=True)
    model = build(27, None)
    pool = make_pool(model, 4 * (-(-(CONTEXT + STEPS + 8) // BLOCK)))

    def run(batch: int, small: int) -> None:
        if time.monotonic() > deadline:
            print("not run:", batch, small, triton_moe.SINGLE_TILES, flush=True)
            return
        decoder.SMALL = small
        row, graphs, _ = time_batch(model, pool, batch, CONTEXT, STEPS)
        del graphs
        rows.append({
            "batch": batch, "small": small, "tiles": triton_moe.SINGLE_TILES, "ms": row["ms"], "device_ms": row["device_ms"]
        })  # fmt: skip
        print(rows[-1], flush=True)
        report = {
            "card": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "errors": errors,
            "steps": rows,
        }
        if arguments.out:
            Path(arguments.out, "v2_lite_few.json").write_text(json.dumps(report, indent=1) + "\n")

    for small in (0, 1):
        run(1, small)
    for tiles in TILES[1:]:
        triton_moe.SINGLE_TILES = tiles
        run(1, 1)
    triton_moe.SINGLE_TILES = TILES[0]
    for batch in (2, 4):
        for small in (0, batch):
            run(batch, small)
    return 0 if max(errors.values()) <= 3e-2 else 1


if __name__ == "__main__":
    sys.exit(main())
