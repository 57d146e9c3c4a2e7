# SPDX-License-Identifier: Apache-2.0
"""What ``recovery`` and ``router_lost`` share: a model, a pause and a re-prefill in turn, and the report."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from bench._common import Figures, arguments, report
from twinpool import logs
from twinpool.engine.tiny import write_tiny

LENGTHS = (1024, 8192)
QUICK_LENGTHS = (256, 1024)
BEFORE = 16
"""Tokens that the client has when something dies."""
AFTER = 16
OUTPUT_TOKENS = 512
MODEL: dict[str, object] = {
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 192,
    "moe_intermediate_size": 256,
    "intermediate_size": 2048,
}


class Sides(Protocol):
    """A running cluster and the two things that are compared on it."""

    async def resume(self, length: int) -> Figures:
        """The pause of a stream under which something dies, and its pace before."""
        ...

    async def again(self, length: int) -> Figures:
        """Time to first token of a new prompt, as long as the context was."""
        ...


Running = Callable[[int], AbstractAsyncContextManager[Sides]]
"""The cluster, warmed up, for so many deaths."""


def write_model(directory: Path) -> Path:
    """The largest tiny MLA model whose prefill of 8k tokens takes some seconds on two cores."""
    return write_tiny(
        directory / "model", "deepseek_v3", seed=1, layers=4, hidden=512, max_context=16384, overrides=MODEL
    )


def pause(times: Sequence[float], seen: int) -> Figures:
    """Of the times of tokens, ``seen`` of which came before the death."""
    gaps = [after - before for before, after in itertools.pairwise(times[seen - 1 :])]
    pace = [after - before for before, after in itertools.pairwise(times[1:seen])]
    return {"ms": max(gaps) * 1e3, "pace_ms": statistics.median(pace) * 1e3}


async def measure(
    running: Running, lengths: tuple[int, ...], rounds: int
) -> tuple[dict[str, object], Figures]:
    """Medians, and the pause over the re-prefill."""
    samples: dict[str, list[float]] = {}
    async with running(rounds * len(lengths)) as bench:
        for _ in range(rounds):
            for length in lengths:
                for name, side in (("resume", bench.resume), ("re-prefill", bench.again)):
                    for figure, value in (await side(length)).items():
                        samples.setdefault(f"{length} tokens {name} {figure}", []).append(value)
    figures: dict[str, object] = {name: statistics.median(values) for name, values in samples.items()}
    for length in lengths:
        values = samples[f"{length} tokens resume ms"]
        figures[f"{length} tokens resume ms, least and most"] = [min(values), max(values)]
    ratios = {
        f"{length} tokens resume/re-prefill": statistics.median(samples[f"{length} tokens resume ms"])
        / statistics.median(samples[f"{length} tokens re-prefill ms"])
        for length in lengths
    }
    return figures | {"rounds": rounds}, ratios


def run(claim: str, description: str, running: Running, rounds: int) -> None:
    """The command line of both. ``rounds``: by default."""
    options = arguments(description, ("--rounds", {"type": int, "default": rounds}))
    logs.setup("error", False)
    lengths, wanted = (QUICK_LENGTHS, 2) if options.quick else (LENGTHS, options.rounds)
    load = os.getloadavg()[0]
    # Ray and gRPC say on stdout that something was killed.
    with contextlib.redirect_stdout(sys.stderr):
        figures, ratios = asyncio.run(measure(running, lengths, wanted))
    figures["load average before"] = load
    report(claim, figures, ratios, as_json=options.json)
