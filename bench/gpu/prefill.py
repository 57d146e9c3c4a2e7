# SPDX-License-Identifier: Apache-2.0
"""Prefill of latent attention on one GPU: checks every variant against float64, then times it.

``python -m bench.gpu.prefill --out DIR``. Every variant has processes of its own, so that one that fails or hangs takes
nothing with it. Fresh prompts and chunks over a cached prefix; keys and values are expanded beforehand (column ``us``)
or inside (column ``whole``, the operation as the model calls it). A time is the median over replays of one CUDA graph.
TFLOP/s count the pairs of query and key that causality lets through, 2 x (192 + 128) operations each.
"""

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.mla_cases import (
    LATENT,
    MATRIX_FLOP_PER_SECOND,
    PAGE,
    SCALE,
    WIDTH,
    Problem,
    error_of,
    make_poisoned,
    make_problem,
)
from twinpool.engine.kernels import triton_prefill
from twinpool.engine.kernels.triton_prefill import Attend

NOPE, ROPE, DIM = 128, 64, 128
TOLERANCE = 6e-3
"""bfloat16 weights of the softmax, and bfloat16 results."""
ROWS = [
    (heads, count, context)
    for heads in (16, 128)
    for count, context in (
        (1024, 1024),
        (4096, 4096),
        (8192, 8192),
        (16384, 16384),
        (2048, 16384),
        (512, 8192),
    )
]
"""(heads, new tokens, context)"""
CHUNKS = [(1, 1), (63, 63), (64, 64), (65, 65), (127, 127), (128, 128), (129, 129), (257, 257), (1000, 1000), (1, 700),
          (5, 300), (128, 129), (64, 190), (300, 301), (130, 1500), (700, 1500)]  # fmt: skip
BATCHES = [[(700, 700), (65, 1000), (300, 301)], [(5, 3), (4, 0), (200, 190), (1, 1)]]
VARIANTS = "hopper:128:2:t,hopper:128:2:n,hopper:64:4:t,hopper:64:4:n,portable,portable:128:128:8:2,portable:64:64:4:2,cudnn"


def launcher(name: str) -> Attend:
    """``hopper:TOKENS:STAGES:t|n`` (turns or none), ``portable[:QUERIES:TOKENS:WARPS:STAGES]``, ``cudnn`` (fresh prompts)."""
    kind, *numbers = name.split(":")
    if kind == "cudnn":
        return cudnn
    if kind == "portable":
        tile = triton_prefill.Tile(*map(int, numbers)) if numbers else None
        return partial(triton_prefill.attend, tile=tile)
    from twinpool.engine.kernels import gluon_prefill

    variant = gluon_prefill.Variant()
    if numbers:
        variant = gluon_prefill.Variant(int(numbers[0]), int(numbers[1]), numbers[2] == "t")
    return partial(gluon_prefill.attend, variant=variant)


def cudnn(
    query: Tensor,
    keys: Tensor,
    rows: Tensor,
    values: Tensor,
    output: Tensor,
    lse: Tensor | None,
    *,
    scale: float,
) -> None:
    """The library's kernel, for comparison: keys with their rotary columns in one tensor."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    turned = rows[:, None, -ROPE:].expand(-1, keys.shape[1], -1)
    whole = torch.cat((keys, turned), -1)
    q, k, v = (part.transpose(0, 1)[None] for part in (query, whole, values))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    output.copy_(found[0].transpose(0, 1))


def draw(heads: int, count: int, context: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, keys, rows and values as ``Attend`` takes them."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    return (
        normal(count, heads, NOPE + ROPE),
        normal(context, heads, NOPE),
        normal(context, WIDTH),
        normal(context, heads, DIM),
    )


def reference(
    query: Tensor, keys: Tensor, rows: Tensor, values: Tensor, tokens: Tensor, heads: list[int]
) -> tuple[Tensor, Tensor]:
    """Output ``[n, heads, v]`` and LSE of some query tokens and heads, in float64."""
    count, context = len(query), len(keys)
    outputs, sums = [], []
    for head in heads:
        q = query[tokens, head].double()
        scores = q[:, :NOPE] @ keys[:, head].double().T + q[:, NOPE:] @ rows[:, LATENT:].double().T
        seen = tokens[:, None] + context - count >= torch.arange(context, device=query.device)[None, :]
        scores = (scores * SCALE).masked_fill(~seen, float("-inf"))
        sums.append(torch.logsumexp(scores, -1))
        outputs.append(torch.softmax(scores, -1) @ values[:, head].double())
    return torch.stack(outputs, 1), torch.stack(sums, 1)


def check_chunks(name: str) -> list[dict[str, object]]:
    """Every edge of lengths, by expanded operands, poisoned outputs."""
    found = []
    for count, context in CHUNKS:
        operands = draw(3, count, context, count)
        output = torch.full((count, 3, DIM), float("nan"), device="cuda", dtype=torch.bfloat16)
        lse = torch.full((count, 3), float("nan"), device="cuda")
        launcher(name)(*operands, output, lse, scale=SCALE)
        plain = torch.full_like(output, float("nan"))
        launcher(name)(*operands, plain, None, scale=SCALE)
        expected, sums = reference(*operands, torch.arange(count, device="cuda"), [0, 1, 2])
        error = max(error_of(output, expected), error_of(plain, expected))
        lse_error = float((lse.double() - sums).abs().max())
        ok = error <= TOLERANCE and lse_error <= 1e-2
        found.append({"check": f"{count} of {context}", "error": error, "lse_error": lse_error, "ok": ok})
    return found


def operation(name: str, problem: Problem, weights: tuple[Tensor, Tensor], query: Tensor) -> Tensor:
    """The whole operation."""
    return triton_prefill.expand(
        query, problem.pages, problem.batch, launcher(name),
        expand_keys=weights[0], expand_values=weights[1], scale=SCALE, with_lse=False,
    ).output  # fmt: skip


def weights_of(heads: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(11)
    both = torch.randn(heads, NOPE + DIM, LATENT, generator=generator, device="cuda") * LATENT**-0.5
    both = both.to(torch.bfloat16)
    return both[:, :NOPE], both[:, NOPE:]


def check_batches(name: str) -> list[dict[str, object]]:
    """The operation over a pool of NaN, against its torch twin."""
    from twinpool.engine.kernels import torch_backend

    found = []
    for shapes in BATCHES:
        problem = make_poisoned(shapes, 16, torch.bfloat16, decodes=0, seed=3)
        weights = weights_of(16)
        query = torch.randn(len(problem.query), 16, NOPE + ROPE, device="cuda").to(torch.bfloat16)
        result = operation(name, problem, weights, query)
        expected = torch_backend.mla_expanded_attention(
            query.float(), problem.pages.float(), problem.batch,
            expand_keys=weights[0].float(), expand_values=weights[1].float(), scale=SCALE,
        ).output  # fmt: skip
        error = error_of(result, expected)
        found.append({"check": str(shapes), "error": error, "ok": error <= 2 * TOLERANCE})
    return found


def median_us(call: Callable[[], object], replays: int) -> float:
    """Of a CUDA graph of three calls, divided by them."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(3):
                call()
    graph.replay()
    spans = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        spans.append(begin.elapsed_time(end) * 1e3 / 3)
    return statistics.median(spans)


def time_row(name: str, row: tuple[int, int, int], replays: int) -> dict[str, object]:
    """Median microseconds of the kernel and of the whole operation; the error of some tokens of some heads."""
    heads, count, context = row
    operands = draw(heads, count, context, 1)
    output = torch.full((count, heads, DIM), float("nan"), device="cuda", dtype=torch.bfloat16)
    launch = launcher(name)
    spent = median_us(lambda: launch(*operands, output, None, scale=SCALE), replays)
    some = torch.tensor(sorted({0, 1, 63, 64, 127, 128, count // 2, count - 65, count - 1}), device="cuda")
    which = sorted({0, heads // 2, heads - 1})
    error = error_of(output[some][:, which], reference(*operands, some, which)[0])
    finite = bool(torch.isfinite(output).all())
    work = 2 * heads * (NOPE + ROPE + DIM) * count * (context - (count - 1) / 2)
    shape: dict[str, object] = {"variant": name, "heads": heads, "tokens": count, "context": context}
    rate = work / spent / 1e6
    shape |= {
        "us": round(spent, 1),
        "tflop_s": round(rate, 1),
        "of_peak": round(rate * 1e12 / MATRIX_FLOP_PER_SECOND, 3),
    }
    shape |= {"error": error, "ok": error <= TOLERANCE and finite}
    if name != "cudnn":
        pages = torch.randn(context // PAGE + 8, PAGE, WIDTH, device="cuda").to(torch.bfloat16)
        order = np.random.default_rng(1).permutation(len(pages))
        problem = make_problem([(count, context)], heads, pages, order, decodes=0, seed=2)
        problem.query = problem.query[:0]
        query = torch.randn(count, heads, NOPE + ROPE, device="cuda", dtype=torch.bfloat16)
        weights = weights_of(heads)
        shape["whole_us"] = round(median_us(lambda: operation(name, problem, weights, query), replays), 1)
    return shape


def worker(arguments: argparse.Namespace) -> None:
    """One variant; prints a JSON object a line."""
    name = arguments.variant
    if arguments.check:
        for found in check_chunks(name) + check_batches(name):
            print(json.dumps({"variant": name, **found}), flush=True)
        return
    for row in ROWS:
        if arguments.rows and f"{row[0]}:{row[1]}:{row[2]}" not in arguments.rows.split(","):
            continue
        if name == "cudnn" and row[1] != row[2]:
            continue
        print(json.dumps(time_row(name, row, arguments.replays)), flush=True)
        torch.cuda.empty_cache()
    print(json.dumps({"variant": name, "built": built()}), flush=True)


def built() -> list[dict[str, object]]:
    """What the compiler says of the kernels of this process."""
    from twinpool.engine.kernels import gluon_mla_prefill

    found = []
    for function in (gluon_mla_prefill.mla_prefill, triton_prefill.prefill_kernel):
        for kernel in function.device_caches[0][0].values() if function.device_caches else ():
            found.append({
                "kernel": kernel.metadata.name, "registers": kernel.n_regs, "spills": kernel.n_spills,
                "shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps,
            })  # fmt: skip
    return found


def start(*options: str, seconds: float) -> tuple[list[dict[str, object]], str]:
    """Runs a worker; what it printed, and why it failed."""
    command = [sys.executable, "-m", "bench.gpu.prefill", *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds, 1), check=False)
        text, fault = (
            done.stdout,
            "" if done.returncode == 0 else (done.stderr[-1500:] or str(done.returncode)),
        )
    except subprocess.TimeoutExpired as expired:
        raw = expired.stdout or b""
        text, fault = raw.decode() if isinstance(raw, bytes) else raw, f"no end after {seconds:.0f} s"
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")], fault


def everything(arguments: argparse.Namespace) -> int:
    """Checks in parallel, then times one after the other while there is time."""
    deadline = time.monotonic() + arguments.seconds
    variants = arguments.variants.split(",")
    report: dict[str, object] = {
        "card": torch.cuda.get_device_name(), "torch": torch.__version__,
        "command": " ".join(["python -m bench.gpu.prefill", *sys.argv[1:]]),
    }  # fmt: skip
    checks: list[dict[str, object]] = []
    times: list[dict[str, object]] = []
    broken: dict[str, str] = {}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        named = [name for name in variants if name != "cudnn"]
        jobs = [(name, pool.submit(start, "--check", "--variant", name, seconds=80)) for name in named]
        for name, job in jobs:
            found, fault = job.result()
            checks += found
            for wrong in [one for one in found if not one["ok"]]:
                print("WRONG", wrong, flush=True)
                fault = fault or "wrong results"
            if fault:
                print("FAILED", name, fault, flush=True)
                broken[name] = fault
    print("checked", len(checks), "cases; broken:", sorted(broken) or "none", flush=True)
    for name in variants:
        left = deadline - time.monotonic()
        if name in broken or left < 12:
            print("not timed:", name, flush=True)
            continue
        options = ["--variant", name, "--replays", str(arguments.replays), "--rows", arguments.rows]
        found, fault = start(*options, seconds=min(left, 60))
        for one in found:
            print(one, flush=True)
        times += found
        if fault:
            print("FAILED", name, fault, flush=True)
            broken[name] = fault
        report |= {"checks": checks, "times": times, "broken": broken}
        if arguments.out:
            Path(arguments.out, "prefill.json").write_text(json.dumps(report, indent=1) + "\n")
    show(times, variants)
    return 1 if broken or any(not one.get("ok", True) for one in times) else 0


def show(times: list[dict[str, object]], variants: list[str]) -> None:
    """TFLOP/s of each variant, a row a line."""
    print("heads tokens context", *(f"{name:>20}" for name in variants))
    for row in ROWS:
        here = {
            one["variant"]: one
            for one in times
            if (one.get("heads"), one.get("tokens"), one.get("context")) == row
        }
        if here:
            cells = [f"{here[name]['tflop_s'] if name in here else '-':>20}" for name in variants]
            print(f"{row[0]:>5} {row[1]:>6} {row[2]:>7}", *cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", default=VARIANTS)
    parser.add_argument("--variant", default="")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--rows", default="", help="heads:tokens:context,...; all if empty")
    parser.add_argument("--replays", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=225, help="after which no variant is begun")
    parser.add_argument("--out", default=os.environ.get("OUT", ""))
    arguments = parser.parse_args()
    if arguments.variant:
        worker(arguments)
        return 0
    return everything(arguments)


if __name__ == "__main__":
    sys.exit(main())
