# SPDX-License-Identifier: Apache-2.0
"""Workers whose loops stand still or whose transport breaks, while gRPC answers on: the router must lose them, and nobody an answer."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.faults.conftest import ROUTER
from tests.faults.test_restarts import DECODERS, restart
from tests.support.asking import Outcome, ask
from tests.support.fleet import BLOCK, Fleet, running_fleet
from tests.support.load import under_load
from tests.support.steps import prompt
from tests.support.waiting import until_told
from twinpool import rpc
from twinpool.config import RpcConfig
from twinpool.store import Keys
from twinpool.v1.control_pb2 import WORKER_STATE_READY, WORKER_STATE_UNREADY, WorkerRecord

pytestmark = [pytest.mark.integration, pytest.mark.faults]

WATCHED = {"worker.hang_seconds": 2.0, "worker.give_up_seconds": 0.0}
GIVING_UP = {"worker.hang_seconds": 2.0, "worker.give_up_seconds": 4.0}
WAIT_SECONDS = 120.0


def order(fleet: Fleet, name: str, **command: object) -> Any:
    """A command to the seam of a worker: see ``fault_seam``."""
    return fleet.faults(name)._ask(**command)


async def until_health(fleet: Fleet, name: str, *, live: bool, ready: bool) -> None:
    """Waits until the worker's own answers say so."""
    async with rpc.channel(fleet.workers[name].endpoint, RpcConfig()) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def says(service: str) -> bool:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        async def as_wanted() -> bool:
            return (await says("live"), await says("")) == (live, ready)

        await until_told(as_wanted, WAIT_SECONDS)


async def until_state(fleet: Fleet, name: str, state: int) -> None:
    """Waits until the worker's record says so."""
    key = Keys("test").worker("default", name)

    async def as_wanted() -> bool:
        item = await asyncio.to_thread(fleet.store.get, key)
        return item is not None and WorkerRecord.FromString(item.value).state == state

    await until_told(as_wanted, WAIT_SECONDS)


@pytest.fixture(scope="module")
def watched_fleet(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A prefill and two decode workers whose watchdogs are quick, behind a router."""
    workers = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
    with running_fleet(tmp_path_factory.mktemp("watched"), checkpoint, workers, WATCHED) as fleet:
        asyncio.run(fleet.start_router(ROUTER))
        yield fleet


@pytest.fixture
async def watched(watched_fleet: Fleet) -> AsyncIterator[Fleet]:
    """Left whole and at rest."""
    yield watched_fleet
    watched_fleet.clear_faults()
    await watched_fleet.router_sees()
    await watched_fleet.assert_quiet()


def serving_one(fleet: Fleet, before: dict[str, int]) -> str:
    """The decode worker that has taken a prompt over since."""
    (name,) = (n for n in DECODERS if fleet.faults(n).count("to_owner:release") > before[n])
    return name


async def answered(fleet: Fleet, seed: int, **breaks: object) -> tuple[str, Outcome]:
    """Breaks the decode worker of a long answer after its fifth token; who it was, and what the client got: all of it."""
    before = {name: fleet.faults(name).count("to_owner:release") for name in DECODERS}
    broken: list[str] = []

    def break_after_five(outcome: Outcome) -> bool:
        if len(outcome.tokens) >= 5 and not broken:
            broken.append(serving_one(fleet, before))
            order(fleet, broken[0], **breaks)
        return False

    async with fleet.client() as client:
        outcome = await ask(client, fleet.oracle, prompt(3 * BLOCK, seed), 290, leave=break_after_five)
    assert len(outcome.tokens) == 290
    return broken[0], outcome


async def test_a_step_loop_that_stands_still_costs_no_answer(watched: Fleet) -> None:
    quarantines = watched.router_metric("twinpool_router_quarantines_total", role="decode")
    name, outcome = await answered(watched, 301, do="steps", run=False)
    assert outcome.done.attempts > 1
    assert outcome.done.decode_worker != name
    assert order(watched, name, do="standing")
    assert watched.router_metric("twinpool_router_quarantines_total", role="decode") > quarantines
    # It answers all the same.
    await until_health(watched, name, live=False, ready=False)
    await until_state(watched, name, WORKER_STATE_UNREADY)
    async with watched.client() as client:
        for number in range(4):
            other = await ask(client, watched.oracle, prompt(2 * BLOCK, 302 + number), 5)
            assert other.done.decode_worker != name
    order(watched, name, do="steps", run=True)
    await until_health(watched, name, live=True, ready=True)
    await until_state(watched, name, WORKER_STATE_READY)
    await watched.assert_quiet(name)


@pytest.mark.parametrize("mode", ["refuse", "hang"])
async def test_a_worker_whose_transfer_agent_is_broken_gets_no_work(watched: Fleet, mode: str) -> None:
    name = DECODERS[0]
    async with under_load(watched, seed=601, longest=100, max_tokens=40) as load:
        await load.more(3)
        order(watched, name, do="agent", mode=mode)
        await until_health(watched, name, live=mode == "refuse", ready=False)
        await until_state(watched, name, WORKER_STATE_UNREADY)
        # Whoever was placed before the router heard of it has been placed anew.
        await load.more(6)
        after = len(load.outcomes)
        await load.more(6)
        assert {outcome.done.decode_worker for outcome in load.outcomes[after:]} == {DECODERS[1]}
        order(watched, name, do="agent", mode="")
        await until_health(watched, name, live=True, ready=True)
        await until_state(watched, name, WORKER_STATE_READY)
    assert [outcome.reason for outcome in load.outcomes if outcome.error is not None] == []


async def test_a_worker_whose_transfer_thread_dies_ends_itself(watched: Fleet) -> None:
    """For whoever supervises it to start another one."""
    name, _ = await answered(watched, 331, do="agent", mode="raise")
    assert await asyncio.to_thread(watched.workers[name].process.wait, WAIT_SECONDS) == 1
    await restart(watched, name)


async def test_a_worker_that_stands_still_for_too_long_ends_itself(watched: Fleet) -> None:
    for decoder in DECODERS:
        watched.workers[decoder].kill()
        await restart(watched, decoder, GIVING_UP)
    name, _ = await answered(watched, 332, do="steps", run=False)
    assert await asyncio.to_thread(watched.workers[name].process.wait, WAIT_SECONDS) == 1
    await restart(watched, name)
