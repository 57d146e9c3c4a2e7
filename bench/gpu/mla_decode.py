# SPDX-License-Identifier: Apache-2.0
"""MLA decode on one GPU: checks every variant against a higher precision, then times it.

``python -m bench.gpu.mla_decode --out DIR`` runs everything: each variant in processes of its own, so that one that
hangs takes nothing with it. A time is the median over replays of one CUDA graph whose calls use different pages,
divided by the calls; outputs are poisoned before the replay that is checked. A call is split and merge; the schedule,
made once a step for all layers, is not in it and timed beside.
"""

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.gpu.mla_cases import PAGE, SCALE, WIDTH, Problem, error_of, make_poisoned, make_problem, solve

TOLERANCE = 3e-3
ROWS = [
    (16, 1, 1024), (16, 1, 8192), (16, 1, 32768), (16, 1, 131072), (16, 16, 1024), (16, 16, 8192), (16, 64, 1024),
    (16, 64, 8192), (16, 64, -8192), (16, 128, 8192), (16, 128, 32768), (64, 1, 32768), (64, 16, 8192), (64, 64, 8192),
    (64, 128, 8192), (128, 1, 8192), (128, 1, 131072), (128, 16, 8192), (128, 64, 1024), (128, 64, 8192),
    (128, 64, -8192), (128, 128, 8192), (128, 128, 32768),
]  # fmt: skip
"""(heads, sequences, context); a negative context is the mean of a ragged batch."""
EDGES = {
    "lengths": ([(1, n) for n in (1, 63, 64, 65, 127, 128, 129, 700)], 8),
    "empty": ([(1, 0), (1, 5), (1, 0)], 3),
    "many": ([(1, 1 + 37 * n % 900) for n in range(70)], 70),
    "long": ([(1, 9000), (1, 1)], 2),
    "one token": ([(1, 1)], 1),
    "one page": ([(1, 64)], 1),
    "one alone": ([(1, 4097)], 1),
    "speculation": ([(1, 200), (4, 300), (2, 65), (3, 64), (4, 2), (4, 1500)], 1),
}


def launcher(name: str) -> Callable[..., None]:
    """``portable``, or ``hopper`` with a variant behind a dash: p(dl), g(entle), an e for each early page, the pieces of ``soon``."""
    from twinpool.engine.kernels import triton_launch

    if name == "portable":
        return triton_launch.attend
    from twinpool.engine.kernels import gluon_launch

    letters = name.partition("-")[2]
    variant = gluon_launch.Variant(
        soon=int(letters.strip("pge") or 0),
        gentle="g" in letters,
        early=letters.count("e"),
        pdl="p" in letters,
    )

    def attend(*operands: object, scale: float) -> None:
        gluon_launch.attend(*operands, scale=scale, variant=variant)  # type: ignore[arg-type]

    return attend


def check_edges(name: str, heads: int, dtype: torch.dtype) -> list[dict[str, object]]:
    """Every edge against float64; the pool is poisoned, the output too."""
    run, found = launcher(name), []
    for edge, (shapes, decodes) in EDGES.items():
        problem = make_poisoned(shapes, heads, dtype, decodes=decodes, seed=len(shapes))
        output = torch.full_like(problem.query[..., :512], float("nan")).contiguous()
        lse = torch.full_like(output[..., 0], float("nan"), dtype=torch.float32)
        run(problem.query, problem.pages, problem.batch, output, lse, scale=SCALE)
        expected, sums = solve(problem, torch.float64)
        blind = sums.isneginf()
        right = bool(torch.equal(lse.isneginf(), blind)) and not bool(output[blind].any())
        far = float((lse[~blind].double() - sums[~blind]).abs().max())
        error = error_of(output, expected)
        limit = TOLERANCE if dtype == torch.bfloat16 else 1e-5
        found.append(
            {
                "edge": edge,
                "heads": heads,
                "error": error,
                "lse": far,
                "ok": right and error <= limit and far <= 1e-2,
            }
        )
    return found


def lengths(sequences: int, context: int) -> list[int]:
    """Equal, or drawn from a wide normal distribution around the mean and scaled to it."""
    if context > 0:
        return [context] * sequences
    drawn = np.random.default_rng(7).normal(-context, -context / 2, sequences).clip(64, None)
    return [max(int(value), 1) for value in drawn * (-context * sequences * 1.0137 / drawn.sum())]


def problems_of(row: tuple[int, int, int], pages: Tensor) -> list[Problem]:
    """Enough of them that their pages exceed the cache many times, and that the start of a graph is no part of a call."""
    heads, sequences, context = row
    contexts = lengths(sequences, context)
    needed = sum(-(-length // PAGE) for length in contexts)
    calls = max(4, min(40, int(6e9 // (needed * PAGE * WIDTH * 2))))
    generator = np.random.default_rng(abs(context) + sequences)
    found = []
    order = generator.permutation(pages.shape[0])
    for call in range(calls):
        if (call + 1) * needed > len(order):
            order = np.concatenate([order, generator.permutation(pages.shape[0])])
        part = order[call * needed : (call + 1) * needed]
        shapes = [(1, length) for length in contexts]
        found.append(make_problem(shapes, heads, pages, part, decodes=sequences, seed=call))
        shared = {
            key: value for key, value in found[0].batch._derived.items() if key.startswith("triton_parts")
        }
        found[call].batch._derived.update(shared)
    return found


def time_row(name: str, row: tuple[int, int, int], pages: Tensor, replays: int) -> dict[str, object]:
    """Median microseconds of a call, and the error of the first and the last."""
    run, problems = launcher(name), problems_of(row, pages)
    outputs = [torch.empty_like(problem.query[..., :512]).contiguous() for problem in problems]

    def calls() -> None:
        for problem, output in zip(problems, outputs, strict=True):
            problem.batch._derived.update(
                {
                    key: value
                    for key, value in problems[0].batch._derived.items()
                    if key.startswith("triton_parts")
                }
            )
            run(problem.query, problem.pages, problem.batch, output, None, scale=SCALE)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        calls()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            calls()
    for output in outputs:
        output.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    error = 0.0
    for which in (0, -1):
        error = max(error, error_of(outputs[which], solve(problems[which], torch.float32)[0]))
    for _ in range(3):
        graph.replay()
    spans = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        spans.append(begin.elapsed_time(end) * 1e3 / len(problems))
    floor = problems[0].floor_us
    spent = statistics.median(spans)
    return {
        "heads": row[0], "sequences": row[1], "context": row[2], "variant": name, "us": round(spent, 2),
        "fastest_us": round(min(spans), 2), "floor_us": round(floor, 2), "over_floor": round(spent / floor, 3),
        "error": error, "calls": len(problems), "ok": error <= TOLERANCE,
    }  # fmt: skip


def make_pages(count: int) -> Tensor:
    """Random pages, filled piece by piece."""
    pages = torch.empty(count, PAGE, WIDTH, dtype=torch.bfloat16, device="cuda")
    for piece in pages.split(8192):
        piece.normal_()
    return pages


def worker(arguments: argparse.Namespace) -> None:
    """One variant; prints a JSON object a line."""
    torch.manual_seed(0)
    if arguments.check:
        dtype = torch.float32 if arguments.variant == "float32" else torch.bfloat16
        name = "portable" if arguments.variant == "float32" else arguments.variant
        for found in check_edges(name, arguments.heads, dtype):
            print(json.dumps({"variant": arguments.variant, **found}), flush=True)
        # Builds what the timing will use, on pages of a small pool over and over.
        pool = torch.zeros(64, PAGE, WIDTH, dtype=dtype, device="cuda")
        for row in [row for row in ROWS if row[0] == arguments.heads and name == arguments.variant]:
            shapes = [(1, length) for length in lengths(row[1], row[2])]
            order = np.arange(sum(-(-length // PAGE) for _, length in shapes)) % len(pool)
            problem = make_problem(shapes, row[0], pool, order, decodes=row[1], seed=0)
            launcher(name)(
                problem.query, pool, problem.batch, problem.query[..., :512].contiguous(), None, scale=SCALE
            )
        torch.cuda.synchronize()
        return
    pages = make_pages(arguments.pages)
    wanted = [
        row
        for row in ROWS
        if not arguments.rows or f"{row[0]}:{row[1]}:{row[2]}" in arguments.rows.split(",")
    ]
    for row in wanted:
        print(json.dumps(time_row(arguments.variant, row, pages, arguments.replays)), flush=True)
    for resources in built(arguments.variant):
        print(json.dumps({"variant": arguments.variant, "built": resources}), flush=True)


def built(name: str) -> list[dict[str, object]]:
    """What the compiler says of the kernels of this process: registers of a thread, spilled bytes, shared memory."""
    from twinpool.engine.kernels import gluon_mla_decode, triton_merge, triton_mla_decode, triton_small

    main = triton_mla_decode.mla_split if name == "portable" else gluon_mla_decode.mla_decode
    return [
        {
            "kernel": kernel.metadata.name,
            "registers": kernel.n_regs,
            "spills": kernel.n_spills,
            "shared": kernel.metadata.shared,
            "warps": kernel.metadata.num_warps,
        }
        for function in (main, triton_merge.merge_kernel, triton_small.attend_kernel)
        for kernel in (function.device_caches[0][0].values() if function.device_caches else ())
    ]


def start(*options: str, seconds: float) -> tuple[list[dict[str, object]], str]:
    """Runs a worker; what it printed, and why it failed."""
    command = [sys.executable, "-m", "bench.gpu.mla_decode", *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        text, fault = (
            done.stdout,
            "" if done.returncode == 0 else (done.stderr[-1500:] or str(done.returncode)),
        )
    except subprocess.TimeoutExpired as expired:
        raw = expired.stdout or b""
        text, fault = raw.decode() if isinstance(raw, bytes) else raw, f"no end after {seconds} s"
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")], fault


def ceilings() -> dict[str, float]:
    """Copy and matrix rates of this card now."""
    from triton.testing import do_bench

    def copy() -> float:
        source = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
        target = torch.empty_like(source)
        return float(do_bench(lambda: target.copy_(source), warmup=20, rep=100, return_mode="median"))

    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = float(do_bench(lambda: left @ left, warmup=20, rep=100, return_mode="median"))
    return {"copy_gb_s": (1 << 33) / copy() / 1e6, "matrix_tflop_s": 2 * 8192**3 / product / 1e9}


def everything(arguments: argparse.Namespace) -> int:
    """Checks in parallel, then times one after the other."""
    variants = arguments.variants.split(",")
    jobs = [(variant, heads) for variant in variants for heads in map(int, arguments.check_heads.split(","))]
    report: dict[str, object] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ceilings": ceilings(),
        "command": " ".join(["python -m bench.gpu.mla_decode", *sys.argv[1:]]),
    }
    checks: list[dict[str, object]] = []
    broken: set[str] = set()
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        started = [
            (job, pool.submit(start, "--check", "--variant", job[0], "--heads", str(job[1]), seconds=150))
            for job in jobs
        ]
        for (variant, heads), future in started:
            found, fault = future.result()
            checks += found
            for wrong in [one for one in found if not one["ok"]]:
                print("WRONG", wrong)
                broken.add(variant)
            if fault:
                print("FAILED", variant, heads, fault)
                broken.add(variant)
    print("checked", len(checks), "cases; broken:", sorted(broken) or "none", flush=True)
    times: list[dict[str, object]] = []
    resources: list[dict[str, object]] = []
    for variant in variants:
        if variant in broken or variant == "float32":
            continue
        options = ["--variant", variant, "--replays", str(arguments.replays), "--rows", arguments.rows]
        found, fault = start(*options, seconds=100)
        times += [one for one in found if "us" in one]
        resources += [one for one in found if "built" in one]
        if fault:
            print("FAILED", variant, fault)
    report |= {"checks": checks, "times": times, "built": resources}
    if arguments.out:
        Path(arguments.out, "mla_decode.json").write_text(json.dumps(report, indent=1) + "\n")
    show(times, variants)
    for one in resources:
        print(one)
    print(report["ceilings"])
    return 1 if broken or any(not one["ok"] for one in times) else 0


def show(times: list[dict[str, object]], variants: list[str]) -> None:
    """One line a row."""
    print("heads  batch  context   floor", *(f"{variant:>10}" for variant in variants))
    for row in ROWS:
        here = {
            str(one["variant"]): one
            for one in times
            if (one["heads"], one["sequences"], one["context"]) == row
        }
        if not here:
            continue
        floor = next(iter(here.values()))["floor_us"]
        cells = [
            f"{here[name]['us']:>9}{'' if here[name]['ok'] else '!'}" if name in here else f"{'-':>9}"
            for name in variants
        ]
        print(f"{row[0]:>5} {row[1]:>6} {row[2]:>8} {floor:>7}", *cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", default="hopper-p1gee,portable,float32")
    parser.add_argument("--variant", default="")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--check-heads", default="16,128")
    parser.add_argument("--rows", default="", help="heads:batch:context,...; all if empty")
    parser.add_argument("--pages", type=int, default=131072 + 64, help="of the pool that is timed")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--out", default=os.environ.get("OUT", ""))
    arguments = parser.parse_args()
    if arguments.variant:
        worker(arguments)
        return 0
    return everything(arguments)


if __name__ == "__main__":
    sys.exit(main())
