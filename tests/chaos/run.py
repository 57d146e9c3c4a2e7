# SPDX-License-Identifier: Apache-2.0
"""One run: start, load and faults by the plan, heal, rest, stop; and what came of it as one JSON object."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import torch
from prometheus_client.parser import text_string_to_metric_families

from bench._common import machine, percentile
from tests.chaos.load import ANSWER_SECONDS, Clients, Questions, Tally
from tests.chaos.network import Network, usable
from tests.chaos.schedule import NETWORK, ROUTERS, WEIGHTS, WORKERS, Fault, plan
from tests.chaos.world import LEASE_SECONDS, READY_SECONDS, World
from tests.support.fleet import available_port
from tests.support.oracle import oracle
from tests.support.quiescence import inspect, unrest
from twinpool.cluster_client import ClusterClient
from twinpool.engine.tiny import write_tiny
from twinpool.errors import TwinpoolError

REST_SECONDS = 20 * LEASE_SECONDS
CHILDREN_SECONDS = 20.0
ROUTER_GAUGES = ("inflight_requests", "num_requests_running", "num_requests_waiting", "queue_tokens")

Tell = Callable[[str, "State"], None]


@dataclass
class Options:
    """``clients`` streams at a time over ``questions`` prompts, answers of up to ``longest`` tokens. ``links``: "namespaces",
    "none", or "auto" for the first where the machine has it."""

    seed: int
    seconds: float
    clients: int = 6
    questions: int = 48
    longest: int = 400
    links: str = "auto"


@dataclass
class State:
    """What a progress display shows."""

    seconds: float = 0.0
    of: float = 0.0
    running: int = 0
    tally: Tally | None = None
    applied: dict[str, int] | None = None
    restarts: int = 0


def run(options: Options, directory: Path, tell: Tell) -> dict[str, object]:
    """Runs it. The result's ``failures`` is empty if nothing was lost, wrong, held at the end or left behind."""
    signal.signal(signal.SIGTERM, _terminated)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    why_not = usable() if options.links != "none" else "not wanted"
    if options.links == "namespaces" and why_not:
        raise RuntimeError(f"no namespaces here: {why_not}")
    kinds = frozenset(WEIGHTS) - (NETWORK if why_not else frozenset())
    faults = plan(options.seed, options.seconds, kinds=kinds)
    state = State(of=options.seconds)
    tell("writing the model and asking the oracle", state)
    model = write_tiny(directory / "model", "deepseek_v3", seed=7)
    questions = Questions(options.seed, options.questions, options.longest)
    known = oracle(model)
    # Two threads that spin for one another are slow where many processes share two cores.
    torch.set_num_threads(1)
    questions.solve(
        known, lambda count: tell(f"the oracle has answered {count} of {options.questions}", state)
    )
    network = None if why_not else Network(list(WORKERS))
    world = World(directory, model, network)
    try:
        tell("starting etcd, Ray and the workers", state)
        world.start_store()
        world.start_ray()
        # Ray has set its own, which would end this process without the end below.
        signal.signal(signal.SIGTERM, _terminated)
        result = asyncio.run(_under_load(world, options, questions, faults, state, tell))
    finally:
        tell("stopping", state)
        world.stop()
        if network is not None:
            network.close()
    if left := _left_behind(before):
        result["failures"] = [*result["failures"], f"processes left behind: {left}"]  # type: ignore[misc]
    result["links"] = "none: " + why_not if why_not else "namespaces"
    return result


def _terminated(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


async def _under_load(
    world: World, options: Options, questions: Questions, faults: list[Fault], state: State, tell: Tell
) -> dict[str, object]:
    tell("starting the routers", state)
    await world.start_routers([available_port() for _ in range(ROUTERS)])
    load_before = os.getloadavg()[0]
    async with contextlib.AsyncExitStack() as stack:
        asking_by = [
            await stack.enter_async_context(ClusterClient(world.endpoints)) for _ in range(options.clients)
        ]
        clients = Clients(questions, options.seed, [each.stream for each in asking_by])
        state.tally = clients.tally
        watching = asyncio.create_task(_watch(world, clients, state, tell))
        asking = asyncio.create_task(clients.run())
        started = time.monotonic()
        try:
            async with (
                asyncio.timeout(options.seconds + READY_SECONDS + ANSWER_SECONDS),
                asyncio.TaskGroup() as group,
            ):
                for fault in faults:
                    group.create_task(_at(world, fault, started))
                group.create_task(asyncio.sleep(options.seconds))
        finally:
            clients.stop()
            if world.network is not None:
                world.network.heal()
        tell("healed; the last answers", state)
        await asking
        watching.cancel()
    tell("coming to rest", state)
    failures = await _at_rest(world)
    reattached = sum(each.resumes for each in asking_by)
    return _result(options, clients.tally, world, faults, failures) | {
        "reattached": reattached,
        "load_before": load_before,
    }


async def _at(world: World, fault: Fault, started: float) -> None:
    await asyncio.sleep(max(0.0, started + fault.at - time.monotonic()))
    await world.hit(fault)


async def _watch(world: World, clients: Clients, state: State, tell: Tell) -> None:
    started = time.monotonic()
    while True:
        await asyncio.sleep(1)
        with contextlib.suppress(TwinpoolError):
            await world.records()  # counts restarts
        state.seconds, state.running = time.monotonic() - started, clients.running
        state.applied, state.restarts = dict(world.applied), world.restarts
        tell("chaos", state)


async def _at_rest(world: World) -> list[str]:
    """What is still held, missing or counted when nothing happens any more; empty if all is well."""
    failures: list[str] = []
    for name in WORKERS:
        try:
            await world.ready(name)
        except TimeoutError:
            failures.append(f"{name} has not come back")
    try:
        await world.serving()
    except TimeoutError:
        failures.append("a router does not see every worker")
    deadline = time.monotonic() + REST_SECONDS
    while (found := await _held(world)) and time.monotonic() < deadline:  # noqa: ASYNC110 - of other processes
        await asyncio.sleep(0.5)
    return failures + found


async def _held(world: World) -> list[str]:
    found: list[str] = []
    records = await world.records()
    if sorted(records) != sorted(WORKERS):
        found.append(f"registered are {sorted(records)}")
    for name, record in records.items():
        try:
            found += [f"{name}: {what}" for what in unrest(await inspect(record.endpoint))]
        except grpc.RpcError as error:
            found.append(f"{name}: {error}")
    for router in await world.routers():
        text = await asyncio.to_thread(_metrics, router.metrics_endpoint)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.removeprefix("twinpool_router_") in ROUTER_GAUGES and sample.value:
                    found.append(f"{router.name}: {sample.name} is {sample.value}")
    return found


def _metrics(endpoint: str) -> str:
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as response:
        text: str = response.read().decode()
    return text


def _left_behind(before: set[int]) -> list[str]:
    children = [each for each in psutil.Process().children(recursive=True) if each.pid not in before]
    _, alive = psutil.wait_procs(children, timeout=CHILDREN_SECONDS)
    found = []
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(" ".join(child.cmdline())[:80])
    return found


def _result(
    options: Options, tally: Tally, world: World, faults: list[Fault], failures: list[str]
) -> dict[str, object]:
    if tally.lost:
        failures = [*failures, f"lost streams: {dict(tally.lost)}"]
    if tally.wrong:
        failures = [*failures, *tally.wrong[:20]]
    if world.applied.total() != len(faults):
        failures = [*failures, f"{world.applied.total()} of {len(faults)} faults happened"]
    return {
        "seed": options.seed,
        "seconds": options.seconds,
        "clients": options.clients,
        "faults": dict(sorted(world.applied.items())),
        "restarts": world.restarts,
        "streams": tally.streams,
        "tokens": tally.tokens,
        "finished": tally.finished,
        "resumed": tally.resumed,
        "lost": tally.lost.total(),
        "wrong": len(tally.wrong),
        "placements": {str(count): number for count, number in sorted(tally.placements.items())},
        "first_token_seconds": _percentiles(tally.firsts),
        "longest_gap_seconds": _percentiles(tally.gaps),
        "longest_gap_of_resumed_seconds": _percentiles(tally.resumed_gaps),
        "machine": machine(),
        "failures": failures,
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(percentile(values, share), 3) for name, share in shares.items()}
