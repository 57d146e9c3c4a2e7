# SPDX-License-Identifier: Apache-2.0
"""Prefill of a model shaped like DeepSeek-V2-Lite (15.7 B, bfloat16, random weights) on one GPU, and chunks beside decodes.

``python -m bench.gpu.v2_lite_prefill --out DIR``. First a model of three layers gives the logits of all tokens of three
chunks through the torch kernels and through the device's own, to be compared. Then prompts are computed, whole and in
chunks, each step from plan to a token id on the host. Last, decodes run alone and beside chunks of a prompt: what a
client of a decode sees between two tokens. The floor of a prompt counts its operations at 784 TFLOP/s.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bench.gpu.mla_cases import MATRIX_FLOP_PER_SECOND
from bench.gpu.v2_lite_step import BLOCK, build, eager, make_pool
from twinpool.engine.kv.pool import KVPool
from twinpool.engine.models.decoder import PagedDecoder
from twinpool.engine.runner import ModelRunner
from twinpool.engine.sampling import DrawParams, SequenceDraw
from twinpool.engine.step import PlanArrays

VLLM_MS = {8192: 101.4}
"""vLLM 0.22.1 on the same kind of card."""
LONGEST_CHUNKED = 8192
"""Tokens of the prompt that is computed in chunks beside decodes; then the next one begins."""
HIDDEN, LAYERS, HEADS, LATENT, ROPE, NOPE, VALUE = 2048, 27, 16, 512, 64, 128, 128
EXPERT, SHARED, CHOSEN, DENSE, EXPERTS, VOCABULARY = 1408, 2, 6, 10944, 64, 102400


def floor_ms(count: int, context: int) -> float:
    """Operations of ``count`` tokens that end at ``context``, at the matrix rate."""
    projections = HIDDEN * (HEADS * (NOPE + ROPE) + LATENT + ROPE) + HEADS * VALUE * HIDDEN
    mixture = 3 * HIDDEN * EXPERT * (CHOSEN + SHARED) + HIDDEN * EXPERTS
    per_token = LAYERS * projections + (LAYERS - 1) * mixture + 3 * HIDDEN * DENSE
    expansion = LAYERS * context * LATENT * HEADS * (NOPE + VALUE)
    pairs = LAYERS * HEADS * (NOPE + ROPE + VALUE) * count * (context - (count - 1) / 2)
    total = 2 * (count * per_token + expansion + pairs + HIDDEN * VOCABULARY)
    return total / MATRIX_FLOP_PER_SECOND * 1e3


def make_plan(
    shapes: list[tuple[int, int]], tables: NDArray[np.int64], seed: int, decodes: int
) -> PlanArrays:
    """A step of ``(new tokens, context)``, the first ``decodes`` of which are decodes."""
    counts = np.array([count for count, _ in shapes])
    context = np.array([length for _, length in shapes])
    positions = np.concatenate([np.arange(length - count, length) for count, length in shapes])
    rows = np.repeat(np.arange(len(shapes)), counts)
    return PlanArrays(
        seq=np.arange(len(shapes), dtype=np.int64),
        token_ids=np.random.default_rng(seed).integers(0, VOCABULARY, len(positions)).astype(np.int32),
        positions=positions.astype(np.int32),
        q_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        context=context.astype(np.int32),
        block_table=tables.astype(np.int32),
        slots=tables[rows, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK,
        sample=np.ones(len(shapes), np.uint8),
        num_decodes=decodes,
        copies=np.zeros((0, 2), np.int32),
    )


@torch.inference_mode()
def compare_with_torch() -> dict[str, float]:
    """Relative errors of the logits of three layers: all tokens of three chunks, enough for the products of many tokens, and
    one token alone, which has kernels of its own."""
    shapes = {"chunks": ([(1400, 1400), (65, 1000), (300, 301)], 0), "one token": ([(1, 1500)], 1)}
    tables = np.random.default_rng(2).permutation(3 * 24).reshape(3, 24)
    found: dict[str, list[torch.Tensor]] = {name: [] for name in shapes}
    for backend in ("torch", None):
        model = build(3, backend)
        for name, (chunks, decodes) in shapes.items():
            torch.manual_seed(1)
            plan = make_plan(chunks, tables[: len(chunks)], 5, decodes)
            found[name].append(eager(model, make_pool(model, tables.size), plan).double())
    return {name: float((other - one).norm() / one.norm()) for name, (one, other) in found.items()}


class Bench:
    """One model, one pool, and steps through ``ModelRunner``."""

    def __init__(self, layers: int, blocks: int) -> None:
        self.model: PagedDecoder = build(layers, None)
        self.pool: KVPool = make_pool(self.model, blocks)
        self.runner = ModelRunner(self.model, self.pool)

    def tables(self, sequences: int, tokens: int) -> NDArray[np.int64]:
        width = -(-tokens // BLOCK)
        order = np.random.default_rng(sequences).permutation(self.pool.num_blocks)
        return order[: sequences * width].reshape(sequences, width)

    def step(self, plan: PlanArrays) -> tuple[float, float]:
        """Milliseconds from plan to token ids, and of the device."""
        draws = [SequenceDraw(DrawParams(temperature=0.0, max_tokens=4096)) for _ in plan.seq]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started = time.perf_counter()
        begin.record()
        self.runner.step(plan, draws)
        end.record()
        whole = (time.perf_counter() - started) * 1e3
        end.synchronize()
        return whole, begin.elapsed_time(end)

    def prompt(self, tokens: int, chunk: int, repeats: int) -> dict[str, object]:
        """A prompt of ``tokens`` in chunks: medians over ``repeats`` after two to warm up."""
        tables = self.tables(1, tokens)
        spent, device = [], []
        for repeat in range(repeats + 2):
            whole = inside = 0.0
            for end in range(chunk, tokens + 1, chunk):
                one, other = self.step(make_plan([(chunk, end)], tables, repeat, 0))
                whole, inside = whole + one, inside + other
            spent.append(whole)
            device.append(inside)
        middle = statistics.median(spent[2:])
        floor = sum(floor_ms(chunk, end) for end in range(chunk, tokens + 1, chunk))
        return {
            "tokens": tokens, "chunk": chunk, "ms": round(middle, 2), "device_ms": round(statistics.median(device[2:]), 2),
            "fastest_ms": round(min(spent[2:]), 2), "tokens_per_second": round(tokens / middle * 1e3),
            "floor_ms": round(floor, 2), "vllm_ms": VLLM_MS.get(tokens) if chunk == tokens else None,
        }  # fmt: skip

    def beside(self, decodes: int, context: int, chunk: int, steps: int) -> dict[str, object]:
        """Steps of ``decodes`` sequences, with ``chunk`` tokens of a prompt in each; 0 for none."""
        tables = self.tables(decodes + 1, max(context + steps + 8, LONGEST_CHUNKED))
        spent, device = [], []
        for step in range(steps + 4):
            shapes = [(1, context + step + 1)] * decodes
            if chunk:
                shapes = [*shapes, (chunk, chunk * (step % (LONGEST_CHUNKED // chunk) + 1))]
            one, other = self.step(make_plan(shapes, tables[: len(shapes)], step, decodes))
            spent.append(one)
            device.append(other)
        spans = sorted(spent[4:])
        return {
            "decodes": decodes, "context": context, "chunk": chunk, "p50_ms": round(statistics.median(spans), 3),
            "p99_ms": round(spans[min(int(len(spans) * 0.99), len(spans) - 1)], 3),
            "device_ms": round(statistics.median(device[4:]), 3),
        }  # fmt: skip

    def kernels_of(self, plan: PlanArrays) -> list[dict[str, object]]:
        """What a step's device time goes to."""
        from torch.profiler import ProfilerActivity, profile

        self.step(plan)
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as taken:
            self.step(plan)
            torch.cuda.synchronize()
        rows = [
            {"kernel": event.key[:90], "us": round(event.self_device_time_total, 1), "calls": event.count}
            for event in taken.key_averages()
        ]
        return sorted(rows, key=lambda row: -float(str(row["us"])))[:20]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", default="8192:8192,8192:2048,16384:16384", help="tokens:chunk,...")
    parser.add_argument("--decodes", default="16,64")
    parser.add_argument("--chunks", default="48,112")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--seconds", type=float, default=230, help="after which nothing is begun")
    parser.add_argument("--out", default=os.environ.get("OUT", ""))
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    report: dict[str, object] = {
        "card": torch.cuda.get_device_name(), "torch": torch.__version__,
        "command": " ".join(["python -m bench.gpu.v2_lite_prefill", *sys.argv[1:]]),
    }  # fmt: skip

    def save(**more: object) -> None:
        report.update(more)
        if arguments.out:
            Path(arguments.out, "v2_lite_prefill.json").write_text(json.dumps(report, indent=1) + "\n")

    errors = compare_with_torch()
    print("relative errors against the torch kernels:", errors, flush=True)
    bench = Bench(arguments.layers, 65 * (LONGEST_CHUNKED // BLOCK + 2))
    prompts: list[dict[str, object]] = []
    for tokens, chunk in (map(int, one.split(":")) for one in arguments.prompts.split(",")):
        prompts.append(bench.prompt(tokens, chunk, 5))
        print(prompts[-1], flush=True)
        save(errors=errors, prompts=prompts)
    kernels = bench.kernels_of(make_plan([(8192, 8192)], bench.tables(1, 8192), 0, 0))
    for kernel in kernels[:16]:
        print("   ", kernel, flush=True)
    save(kernels=kernels)
    beside: list[dict[str, object]] = []
    for decodes in map(int, arguments.decodes.split(",")):
        alone = 0.0
        for chunk in [0, *map(int, arguments.chunks.split(","))]:
            if time.monotonic() > deadline:
                print("not run:", decodes, chunk, flush=True)
                continue
            row = bench.beside(decodes, 4096, chunk, arguments.steps)
            alone = alone or float(str(row["p50_ms"]))
            row["p99_of_alone"] = round(float(str(row["p99_ms"])) / alone, 3)
            beside.append(row)
            print(row, flush=True)
            save(beside=beside)
    shapes = [(1, 4097)] * 64 + [(256, 4096)]
    mixed = bench.kernels_of(make_plan(shapes, bench.tables(65, 4200), 0, 64))
    for kernel in mixed[:12]:
        print("   ", kernel, flush=True)
    save(mixed_kernels=mixed)
    return 0 if max(errors.values()) <= 3e-2 else 1


if __name__ == "__main__":
    sys.exit(main())
