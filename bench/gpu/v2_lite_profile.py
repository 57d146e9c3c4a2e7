# SPDX-License-Identifier: Apache-2.0
"""Where a decode step's time goes, launch by launch, in the model of ``v2_lite_step``.

``python -m bench.gpu.v2_lite_profile --out DIR``. A layer runs from the end of one mixture of experts to the end of the
next. For each launch of a layer, medians over the layers: when it starts and ends after the layer began, in microseconds.
A launch that overlaps the one before it waits inside, so what it costs is the time from that one's end to its own.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu.v2_lite_step import BLOCK, build, make_plan, make_pool
from twinpool.engine.graphs import DecodeGraphs
from twinpool.engine.kv.pool import KVPool
from twinpool.engine.models.decoder import PagedDecoder
from twinpool.engine.step import PlanArrays

Span = tuple[str, float, float]


def spans_of(graphs: DecodeGraphs, plan: PlanArrays, replays: int) -> list[Span]:
    """Name, start and end (microseconds) of everything on the device, in order of their ends."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as taken:
        for _ in range(replays):
            graphs.run(plan)
        torch.cuda.synchronize()
    found = [
        (event.name, float(event.time_range.start), float(event.time_range.end))
        for event in taken.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return sorted(found, key=lambda span: span[2])


def layers_of(spans: list[Span]) -> list[list[Span]]:
    """The launches from one mixture's end to the next one's, times counted from there; the first of a step is left out."""
    layers: list[list[Span]] = []
    layer: list[Span] | None = None
    zero = 0.0
    for name, start, end in spans:
        if name.startswith("Memcpy"):
            layer = None
            continue
        if layer is not None:
            layer.append((name, start - zero, end - zero))
        if name.startswith(("experts_kernel", "down_large")):
            if layer:
                layers.append(layer)
            layer, zero = [], end
    usual = statistics.mode(len(layer) for layer in layers)
    return [layer for layer in layers if len(layer) == usual]


def table_of(layers: list[list[Span]]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    before = 0.0
    for launches in zip(*layers, strict=True):
        start, end = (statistics.median(launch[place] for launch in launches) for place in (1, 2))
        rows.append({
            "kernel": launches[0][0][:56], "start": round(start, 1), "end": round(end, 1), "cost": round(end - before, 1)
        })  # fmt: skip
        before = end
    return rows


def measure(model: PagedDecoder, pool: KVPool, batch: int, prompt: int) -> dict[str, object]:
    random = np.random.default_rng(batch)
    width = -(-(prompt + 8) // BLOCK)
    tables = random.permutation(pool.num_blocks)[: batch * width].reshape(batch, width)
    graphs = DecodeGraphs(model, pool, max_context=width * BLOCK, buckets=[batch])
    tokens = random.integers(0, 102400, batch)
    plan = make_plan(tokens, np.full(batch, prompt + 1), tables)
    for _ in range(3):
        graphs.run(plan)
    torch.cuda.synchronize()
    spans = spans_of(graphs, plan, 3)
    layers = layers_of(spans)
    return {"batch": batch, "layers": len(layers), "launches": table_of(layers)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--out", default=os.environ.get("OUT", ""))
    arguments = parser.parse_args()
    batches = [int(batch) for batch in arguments.batches.split(",")]
    model = build(27, None)
    pool = make_pool(model, max(batches) * -(-(arguments.prompt + 8) // BLOCK))
    report = {
        "card": torch.cuda.get_device_name(), "torch": torch.__version__,
        "command": " ".join(["python -m bench.gpu.v2_lite_profile", *sys.argv[1:]]),
        "steps": [measure(model, pool, batch, arguments.prompt) for batch in batches],
    }  # fmt: skip
    for step in report["steps"]:
        assert isinstance(step, dict)
        print("batch", step["batch"], "layers", step["layers"])
        for row in step["launches"]:
            print("   ", row)
    if arguments.out:
        Path(arguments.out, "v2_lite_profile.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
