# SPDX-License-Identifier: Apache-2.0
"""Two loads, each on both ways in turn: long prompts that arrive beside running answers, and rates of requests."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from bench._common import percentile
from bench._split import Answer, Prompts, all_run, ask
from twinpool.client import Client
from twinpool.control.replay.figures import Objectives, Timing, latency_figures
from twinpool.errors import TwinpoolError

OBJECTIVES = Objectives(ttft=1.0, itl=0.020)
RUNNING_PROMPT = 512
RUNNING_TOKENS = 2048
"""Of a running answer: more than it will get, since it is cancelled."""
ARRIVALS = 6


@dataclass(frozen=True)
class Beside:
    """``length``: tokens of an arriving prompt; one comes every ``every`` seconds beside ``running`` answers."""

    length: int
    running: int = 16
    every: float = 0.25


async def _window(
    client: Client, prompts: Prompts, load: Beside
) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds: gaps between tokens of the running answers before and while prompts arrive; time to first token of these."""
    # No longer than the prompts that arrive, for a small model's sake.
    answers = [Answer() for _ in range(load.running)]
    tasks = [
        asyncio.ensure_future(
            ask(client, prompts(min(RUNNING_PROMPT, load.length)), RUNNING_TOKENS, into=answer)
        )
        for answer in answers
    ]
    try:
        await all_run(answers, tasks)
        quiet = time.perf_counter()
        await asyncio.sleep(2 * load.every)
        began = time.perf_counter()
        arrivals = []
        for number in range(ARRIVALS):
            await asyncio.sleep(max(0.0, began + number * load.every - time.perf_counter()))
            arrivals.append(asyncio.ensure_future(ask(client, prompts(load.length), 2)))
        firsts = [answer.ttft_ms for answer in await asyncio.gather(*arrivals)]
        ended = time.perf_counter()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return _gaps(answers, quiet, began), _gaps(answers, began, ended), firsts


def _gaps(answers: Sequence[Answer], low: float, high: float) -> list[float]:
    return [
        (after - before) * 1e3
        for answer in answers
        for before, after in zip(answer.times, answer.times[1:], strict=False)
        if low <= before and after <= high
    ]


async def interference(
    clients: Mapping[str, Client], prompts: Prompts, load: Beside, rounds: int
) -> dict[str, object]:
    """Medians and 99th percentiles between tokens of running answers, over all rounds; the ways in turn, the first round dropped."""
    found: dict[str, tuple[list[float], list[float], list[float]]] = {name: ([], [], []) for name in clients}
    for turn in range(rounds + 1):
        for name, client in clients.items():
            for kept, new in zip(found[name], await _window(client, prompts, load), strict=True):
                if turn:
                    kept.extend(new)
    figures: dict[str, object] = {}
    for name, (alone, beside, firsts) in found.items():
        label = f"{load.running} answers beside {load.length} tokens, {name}"
        for share in (0.5, 0.99):
            figures[f"{label}: itl alone p{share * 100:.0f} ms"] = percentile(alone, share)
            figures[f"{label}: itl p{share * 100:.0f} ms"] = percentile(beside, share)
        figures[f"{label}: ttft of the arriving p50 ms"] = percentile(firsts, 0.5)
    return figures


@dataclass(frozen=True)
class Rate:
    """Requests a second for so many seconds: half of the prompts have ``lengths[0]`` tokens, half ``lengths[1]``."""

    rate: float
    seconds: float
    lengths: tuple[int, int]
    answer: int = 64


async def _timed(client: Client, tokens: list[int], count: int, at: float) -> Timing:
    await asyncio.sleep(max(0.0, at - time.perf_counter()))
    timing, answer = Timing(time.perf_counter()), Answer()
    with suppress(TwinpoolError):  # One that is refused was not served, and counts as missed.
        await ask(client, tokens, count, into=answer)
    if len(answer.tokens) == count:
        timing.first, timing.end, timing.output_tokens = answer.times[0], answer.times[-1], count
    return timing


async def at_rate(client: Client, prompts: Prompts, load: Rate) -> dict[str, object]:
    """One rate; arrivals are exponential and the same for every way."""
    draw = random.Random(f"{load.rate}")
    due: list[tuple[float, int]] = []
    at = 0.0
    while (at := at + draw.expovariate(load.rate)) < load.seconds or not due:
        due.append((at, load.lengths[draw.random() < 0.5]))
    planned = [(at, prompts(length)) for at, length in due]
    began = time.perf_counter() + 0.05
    timings = await asyncio.gather(
        *(_timed(client, tokens, load.answer, began + at) for at, tokens in planned)
    )
    return latency_figures(timings, OBJECTIVES)


async def goodput(
    clients: Mapping[str, Client], prompts: Prompts, loads: Sequence[Rate]
) -> dict[str, object]:
    """Each way at growing rates until less than half of its requests meet the objectives. ``best``: most in time a second."""
    figures: dict[str, object] = {}
    best = dict.fromkeys(clients, 0.0)
    alive = set(clients)
    for load in loads:
        for name, client in clients.items():
            if name not in alive:
                continue
            found = await at_rate(client, prompts, load)
            figures[f"{load.rate:g}/s, {name}"] = found
            if float(str(found["attainment"])) < 0.5:
                alive.discard(name)
            best[name] = max(best[name], float(str(found["goodput_per_second"])))
    figures |= {f"goodput of {name} per s": value for name, value in best.items()}
    return figures
