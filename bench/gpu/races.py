# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Races that compute-sanitizer's racecheck reports in decode steps of two layers of the model of ``v2_lite_step``.

``python -m bench.gpu.races --out DIR`` runs the steps (one token, a few, more than a tile of an expert's; without graphs)
under racecheck, after a minimal kernel that hands values from one warpgroup to another, through the compiler's captures
and through an mbarrier. Where the minimal one, which cannot race, is reported too, racecheck does not see that order.
"""

import argparse
import collections
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from bench.gpu.v2_lite_step import build, eager, make_plan, make_pool

RACE = re.compile(
    r"(?:Error|Warning): Race reported between (?P<one>[^\n]+)\n(?P<others>(?:=+ +and [^\n]+\n)+)"
)
"""Of racecheck's analysis, which joins all hazards of an instruction."""


@gluon.jit
def _giver(OUT, value, held, full, MBARRIER: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.arange(0, 128, layout=layout)
    if MBARRIER:
        held.store(lane + value)
        mbarrier.arrive(full, count=1)
    gl.store(OUT + lane, lane + value)


@gluon.jit
def _taker(OUT, value, held, full, MBARRIER: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.arange(0, 128, layout=layout)
    found = lane + value
    if MBARRIER:
        mbarrier.wait(full, 0)
        found = held.load(layout)
    gl.store(OUT + 128 + lane, found)


@gluon.jit
def handed_over(SOURCE, OUT, MBARRIER: gl.constexpr):
    """A value that is loaded here is captured by two warpgroups; with ``MBARRIER`` one gets the other's sums by shared memory."""
    value = gl.load(SOURCE)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    held = gl.allocate_shared_memory(gl.int32, [128], flat)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    gl.warp_specialize(
        [
            (_giver, (OUT, value, held, full, MBARRIER)),
            (_taker, (OUT, value, held, full, MBARRIER)),
        ],
        [4],
        [32],
    )


def minimal() -> None:
    """Both forms, and whether what came out is right."""
    source = torch.full((1,), 7, dtype=torch.int32, device="cuda")
    for by_barrier in (False, True):
        out = torch.zeros(256, dtype=torch.int32, device="cuda")
        handed_over[(64,)](source, out, MBARRIER=by_barrier, num_warps=4)
        torch.cuda.synchronize()
        right = torch.arange(128, device="cuda", dtype=torch.int32).repeat(2) + 7
        print("by mbarrier" if by_barrier else "captured", bool((out == right).all()), flush=True)


def steps() -> None:
    """A step each of 1, 5 and 40 tokens."""
    model = build(2, None)
    for count in (1, 5, 40):
        context = np.random.default_rng(count).integers(1, 400, count)
        tables = np.random.default_rng(2).permutation(count * 8).reshape(count, 8)
        pool = make_pool(model, tables.size)
        plan = make_plan(np.arange(count) + 7, context, tables)
        logits = eager(model, pool, plan)
        best = model.best(model.scores(torch.randn(count, 2048, device="cuda", dtype=torch.bfloat16)))
        torch.cuda.synchronize()
        print(count, bool(logits.isfinite().all()), bool(best[1].all()), flush=True)


def races_of(text: str) -> list[str]:
    """What racecheck's analysis says, a line for each instruction."""
    tidy = (re.sub(r"\s*=+\s*", " ", f"{hit['one']} {hit['others']}").strip() for hit in RACE.finditer(text))
    return [f"{count} x {race}" for race, count in collections.Counter(tidy).most_common()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", choices=["steps", "minimal"], help="what runs under the sanitizer")
    parser.add_argument("--out", default=os.environ.get("OUT", ""))
    arguments = parser.parse_args()
    if arguments.run:
        (steps if arguments.run == "steps" else minimal)()
        return 0
    report: dict[str, object] = {"card": torch.cuda.get_device_name()}
    for name in ("minimal", "steps"):
        # All kernels: with a filter by kernel the sanitizer itself failed on the steps.
        command = ["compute-sanitizer", "--tool", "racecheck", "--racecheck-report", "analysis"]
        command += ["--print-limit", "20000", "--show-backtrace", "no"]
        command += [sys.executable, "-m", "bench.gpu.races", "--run", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        lines = done.stdout.splitlines()
        kept = {"summary": lines[-1:], "printed": [x for x in lines if not x.startswith("=")][-4:]}
        report[name] = kept | {
            "races": races_of(done.stdout),
            "rc": done.returncode,
            "err": done.stderr[-400:],
        }
        print(name, json.dumps(report[name], indent=1)[:6000], flush=True)
        if arguments.out:
            Path(arguments.out, f"races_{name}.log").write_text(done.stdout + done.stderr)
            Path(arguments.out, "races.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
