# SPDX-License-Identifier: Apache-2.0
"""Decode steps of a model shaped like DeepSeek-V2-Lite (15.7 B, bfloat16, random weights) on one GPU.

``python -m bench.gpu.v2_lite_step --out DIR``. First a model of three layers gives its logits through the torch
kernels and through the device's own, to be compared. Then steps of the whole model are timed, from plan to token ids
on the host, with 4,096 tokens of random KV a sequence: median over steps, and the device's share of it by events. The
floor is what has to be read: (2.204 GB of fixed weights + 26 x experts that are hit x 17.30 MB + KV) at 4,597 GB/s.
"""

import argparse
import json
import os
import statistics
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import torch

from bench.gpu import transformers_baseline
from bench.gpu.mla_cases import READ_BYTES_PER_SECOND
from bench.gpu.v2_lite_shape import CONFIG
from twinpool.engine.batch import AttentionBatch
from twinpool.engine.config import ModelConfig
from twinpool.engine.graphs import DecodeGraphs
from twinpool.engine.kernels import REGISTRY, Capability, Kernels
from twinpool.engine.kv.pool import KVPool
from twinpool.engine.models.decoder import PagedDecoder
from twinpool.engine.runner import ModelRunner
from twinpool.engine.sampling import DrawParams, SequenceDraw
from twinpool.engine.step import PlanArrays

VLLM_MS = {1: 3.521, 16: 9.034, 64: 12.301, 256: 20.463}
"""vLLM 0.22.1 on the same kind of card (FLASH_ATTN_MLA, Triton MoE, CUDA graphs)."""
BLOCK = 64


def build(layers: int, backend: str | None) -> PagedDecoder:
    """Norms 1, the rest N(0, 0.02), a seed for each parameter."""
    config = ModelConfig.from_dict(CONFIG | {"num_hidden_layers": layers})
    kernels = Kernels.select(REGISTRY, Capability.of("cuda"), torch.bfloat16, backend=backend)
    model = PagedDecoder(config, kernels, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                generator = torch.Generator("cuda").manual_seed(zlib.crc32(name.encode()))
                parameter.normal_(std=0.02, generator=generator)
    return model.eval()


def make_pool(model: PagedDecoder, blocks: int) -> KVPool:
    """Random KV, as a norm leaves it."""
    rows = model.kv_rows
    pool = KVPool(blocks, model.kv_layout.layers, BLOCK, rows.columns, rows.dtype, "cuda")
    for part in pool.tensor.split(256):
        part.normal_()
    return pool


def make_plan(tokens: np.ndarray, context: np.ndarray, tables: np.ndarray) -> PlanArrays:
    """The decode step that makes each sequence ``context`` tokens long."""
    count = len(tokens)
    last = context - 1
    blocks = tables[np.arange(count), last // BLOCK].astype(np.int64)
    return PlanArrays(
        seq=np.arange(count, dtype=np.int64),
        token_ids=tokens.astype(np.int32),
        positions=last.astype(np.int32),
        q_start=np.arange(count + 1, dtype=np.int32),
        context=context.astype(np.int32),
        block_table=tables.astype(np.int32),
        slots=blocks * BLOCK + last % BLOCK,
        sample=np.ones(count, np.uint8),
        num_decodes=count,
        copies=np.zeros((0, 2), np.int32),
    )


def compare() -> dict[str, float]:
    """Logits of a small batch by the device's kernels in a graph against the torch kernels: relative errors."""
    random = np.random.default_rng(0)
    context = np.array([1, 63, 64, 65, 700, 1500, 3], np.int32)
    width = 24
    tables = random.permutation(len(context) * width).reshape(len(context), width)
    plan = make_plan(random.integers(0, 102400, len(context)), context, tables)
    found = []
    for backend in ("torch", None):
        model = build(3, backend)
        torch.manual_seed(1)
        pool = make_pool(model, tables.size)
        # A batch that is not a bucket: the graph has sequences to fill it up.
        buckets = [8] if backend is None else [len(context)]
        runs = DecodeGraphs(model, pool, max_context=width * BLOCK, buckets=buckets)
        if backend is None:
            runs.run(plan)
            logits = runs.run(plan).logits
        else:
            logits = eager(model, pool, plan)
        written = pool.tensor[
            torch.from_numpy(plan.slots // BLOCK).cuda(), :, torch.from_numpy(plan.slots % BLOCK).cuda()
        ]
        found.append((logits.double(), written.double()))
    return {
        name: float((one - other).norm() / other.norm())
        for name, one, other in zip(("logits", "kv"), found[1], found[0], strict=True)
    }


@torch.inference_mode()
def eager(model: PagedDecoder, pool: KVPool, plan: PlanArrays) -> torch.Tensor:
    """The same step without a graph."""
    batch = AttentionBatch.build(
        q_start=plan.q_start, context=plan.context, block_table=plan.block_table, slots=plan.slots,
        block_tokens=BLOCK, num_decodes=plan.num_decodes, device="cuda",
    )  # fmt: skip
    ids, positions = (torch.from_numpy(a.astype(np.int64)).cuda() for a in (plan.token_ids, plan.positions))
    return model.logits(model(ids, positions, pool.tensor, batch))


def make_prefill(shapes: list[tuple[int, int]], tables: np.ndarray) -> PlanArrays:
    """A step of chunks, ``(new tokens, context)``."""
    random = np.random.default_rng(5)
    counts = np.array([count for count, _ in shapes])
    context = np.array([length for _, length in shapes])
    positions = np.concatenate([np.arange(length - count, length) for count, length in shapes])
    rows = np.repeat(np.arange(len(shapes)), counts)
    return PlanArrays(
        seq=np.arange(len(shapes), dtype=np.int64),
        token_ids=random.integers(0, 102400, len(positions)).astype(np.int32),
        positions=positions.astype(np.int32),
        q_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        context=context.astype(np.int32),
        block_table=tables.astype(np.int32),
        slots=tables[rows, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK,
        sample=np.ones(len(shapes), np.uint8),
        num_decodes=0,
        copies=np.zeros((0, 2), np.int32),
    )


def compare_prefill() -> float:
    """Relative error of the logits of all tokens of three chunks, against the torch kernels."""
    shapes = [(700, 700), (65, 1000), (300, 301)]
    tables = np.random.default_rng(2).permutation(3 * 16).reshape(3, 16)
    found = []
    for backend in ("torch", None):
        model = build(3, backend)
        torch.manual_seed(1)
        found.append(eager(model, make_pool(model, tables.size), make_prefill(shapes, tables)).double())
    return float((found[1] - found[0]).norm() / found[0].norm())


def floor_ms(batch: int, context: int) -> float:
    experts = 64 * (1 - (58 / 64) ** batch)
    return (2.204e9 + 26 * experts * 17.30e6 + context * batch * 31104) / READ_BYTES_PER_SECOND * 1e3


@torch.inference_mode()
def time_batch(
    model: PagedDecoder, pool: KVPool, batch: int, prompt: int, steps: int
) -> tuple[dict[str, object], DecodeGraphs, PlanArrays]:
    """Steps one after the other, each with the token ids that the last one gave."""
    random = np.random.default_rng(batch)
    width = -(-(prompt + steps + 8) // BLOCK)
    tables = random.permutation(pool.num_blocks)[: batch * width].reshape(batch, width)
    graphs = DecodeGraphs(model, pool, max_context=width * BLOCK, buckets=[batch])
    tokens = random.integers(0, 102400, batch)
    whole, device = [], []
    for step in range(steps):
        plan = make_plan(tokens, np.full(batch, prompt + step + 1), tables)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        started = time.perf_counter()
        begin.record()
        best = graphs.run(plan).best
        end.record()
        tokens, finite = best.cpu().numpy()
        assert finite.all()
        whole.append((time.perf_counter() - started) * 1e3)
        device.append(begin.elapsed_time(end))
    spent, floor = statistics.median(whole[3:]), floor_ms(batch, prompt)
    row = {
        "batch": batch, "context": prompt, "ms": round(spent, 3), "device_ms": round(statistics.median(device[3:]), 3),
        "tokens_per_second": round(batch / spent * 1e3), "floor_ms": round(floor, 3),
        "over_floor": round(spent / floor, 3), "vllm_ms": VLLM_MS.get(batch), "distinct_tokens": len(set(tokens.tolist())),
    }  # fmt: skip
    return row, graphs, plan


def time_runner(model: PagedDecoder, pool: KVPool, batch: int, prompt: int, steps: int) -> float:
    """Median milliseconds of ``ModelRunner.step`` on the same kind of plans, greedy draws included."""
    random = np.random.default_rng(batch)
    width = -(-(prompt + steps + 8) // BLOCK)
    tables = random.permutation(pool.num_blocks)[: batch * width].reshape(batch, width)
    runner = ModelRunner(model, pool)
    draws = [SequenceDraw(DrawParams(temperature=0.0, max_tokens=4096)) for _ in range(batch)]
    tokens, spans = random.integers(0, 102400, batch), []
    for step in range(steps):
        plan = make_plan(tokens, np.full(batch, prompt + step + 1), tables)
        started = time.perf_counter()
        tokens = runner.step(plan, draws).tokens
        spans.append((time.perf_counter() - started) * 1e3)
    return statistics.median(spans[3:])


def kernels_of(graphs: DecodeGraphs, plan: PlanArrays, replays: int = 3) -> list[dict[str, object]]:
    """What a step's device time goes to."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as taken:
        for _ in range(replays):
            graphs.run(plan)
        torch.cuda.synchronize()
    rows = [
        {
            "kernel": event.key[:90],
            "us": round(event.self_device_time_total / replays, 1),
            "calls": event.count // replays,
        }
        for event in taken.key_averages()
    ]
    return sorted(rows, key=lambda row: -float(str(row["us"])))[:24]


@torch.inference_mode()
def baseline(model: PagedDecoder, batches: str, prompt: int) -> dict[str, object]:
    """The same weights in ``transformers``: how far the logits of a prompt differ, and steps."""
    import transformers

    theirs = transformers_baseline.copy_model(model, CONFIG, "cuda")
    plan = make_prefill([(100, 100)], np.arange(2)[None])
    ours = eager(model, make_pool(model, 2), plan).double()
    other = (
        theirs(input_ids=torch.from_numpy(plan.token_ids.astype(np.int64))[None].cuda()).logits[0].double()
    )
    steps = []
    for batch in map(int, batches.split(",")):
        steps.append(transformers_baseline.time_steps(theirs, batch, prompt, 12))
        print("transformers", transformers.__version__, steps[-1], flush=True)
    error = float((ours - other).norm() / other.norm())
    return {"version": transformers.__version__, "logits": error, "steps": steps}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--transformers", default="", help="batches of the baseline")
    parser.add_argument("--out", default=os.environ.get("OUT", ""))
    arguments = parser.parse_args()
    batches = [int(batch) for batch in arguments.batches.split(",")]
    report: dict[str, object] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": " ".join(["python -m bench.gpu.v2_lite_step", *sys.argv[1:]]),
    }
    errors = compare() | {"prefill": compare_prefill()}
    print("relative errors against the torch kernels:", errors, flush=True)
    model = build(27, None)
    width = -(-(arguments.prompt + arguments.steps + 8) // BLOCK)
    pool = make_pool(model, max(batches) * width)
    rows = []
    for batch in batches:
        row, graphs, plan = time_batch(model, pool, batch, arguments.prompt, arguments.steps)
        row["runner_ms"] = round(time_runner(model, pool, batch, arguments.prompt, arguments.steps), 3)
        rows.append(row)
        print(row, flush=True)
        row["kernels"] = kernels_of(graphs, plan)
        for kernel in row["kernels"][:14]:  # type: ignore[index]
            print("   ", kernel, flush=True)
        del graphs
    report |= {"errors": errors, "steps": rows}
    if arguments.transformers:
        del pool
        torch.cuda.empty_cache()
        report["transformers"] = baseline(model, arguments.transformers, arguments.prompt)
    if arguments.out:
        Path(arguments.out, "v2_lite_step.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0 if max(errors.values()) <= 3e-2 else 1


if __name__ == "__main__":
    sys.exit(main())
