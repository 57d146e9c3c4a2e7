# SPDX-License-Identifier: Apache-2.0
"""`twinpool drain` and `twinpool restart` against real workers and a real control process: nothing fails, nothing is forgotten."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import ROUTER
from tests.support.asking import Outcome, ask
from tests.support.control import Control, recorded
from tests.support.fleet import BLOCK, Fleet, running_fleet
from tests.support.load import under_load
from tests.support.steps import prompt
from tests.support.waiting import until
from twinpool.v1 import control_pb2 as pb

pytestmark = [pytest.mark.integration, pytest.mark.faults]

WAIT_SECONDS = 120.0
WORKERS = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"}


@pytest.fixture(scope="module")
def shared(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Control]]:
    directory = tmp_path_factory.mktemp("operated")
    with running_fleet(directory, checkpoint, WORKERS) as fleet:
        asyncio.run(fleet.start_router(ROUTER))
        control = Control(fleet, directory)
        control.start()
        try:
            asyncio.run(control.serving())
            yield fleet, control
        finally:
            control.kill()


@pytest.fixture
async def operated(shared: tuple[Fleet, Control]) -> AsyncIterator[tuple[Fleet, Control]]:
    """Left whole and at rest."""
    yield shared
    fleet, _ = shared
    await fleet.router_sees()
    await fleet.assert_quiet()
    await fleet.assert_router_quiet()


async def gone(fleet: Fleet, name: str) -> int:
    """Waits until a worker's process has ended; its exit status."""
    return await asyncio.to_thread(fleet.workers[name].process.wait, WAIT_SECONDS)


async def back(fleet: Fleet, name: str) -> None:
    """The next incarnation of a worker that has ended, as its supervisor starts it."""
    fleet.start(fleet.workers[name].role, name)
    await fleet.ready(name)


async def test_restart_of_each_worker_under_load_fails_nothing(operated: tuple[Fleet, Control]) -> None:
    fleet, control = operated
    async with under_load(fleet, seed=601, longest=100, max_tokens=60) as load:
        for name in WORKERS:
            await load.more(3)
            before = fleet.workers[name].record.worker.incarnation
            asked = asyncio.create_task(control.run("restart", name, "--yes", "--wait"))
            assert await gone(fleet, name) == 0
            await back(fleet, name)
            code, operation, error = await asked
            assert code == 0, error
            assert (operation["state"], operation["kind"]) == ("succeeded", "restart")
            assert operation["incarnation"] == f"{before:016x}"
            assert operation["successor"] == f"{fleet.workers[name].record.worker.incarnation:016x}"
            await fleet.router_sees()
    assert [outcome.reason for outcome in load.outcomes if outcome.error is not None] == []
    assert all(len(outcome.tokens) == 60 for outcome in load.outcomes)


async def test_a_drained_worker_leaves_its_prefixes_to_the_other(operated: tuple[Fleet, Control]) -> None:
    """What the prompts of late had in common is in the other one's cache when it is gone."""
    fleet, control = operated
    shared_prompt = prompt(6 * BLOCK, 511)
    async with fleet.client() as client:
        first = await ask(client, fleet.oracle, [*shared_prompt, 7], 2)
        holder = first.done.prefill_worker
        (other,) = {"prefill-0", "prefill-1"} - {holder}
        taken = fleet.metric(other, "twinpool_worker_prefix_fetched_tokens_total")
        code, operation, error = await control.run("drain", holder, "--yes", "--wait")
        assert code == 0, error
        assert operation["state"] == "succeeded"
        assert await gone(fleet, holder) == 0
        assert fleet.metric(other, "twinpool_worker_prefix_fetched_tokens_total") >= taken + 6 * BLOCK
        again = await ask(client, fleet.oracle, [*shared_prompt, 8], 2)
        assert again.done.prefill_worker == other
        assert again.done.usage.cached_tokens >= 6 * BLOCK
    # It is out for good: a list says so, and a second drain has nothing to drain.
    code, operations, _ = await control.run("get", "operations")
    assert code == 0
    assert {"worker": holder, "kind": "drain", "state": "succeeded"}.items() <= operations[0].items()
    code, _, error = await control.run("drain", holder, "--yes")
    assert code == 2
    assert "WORKER_NOT_FOUND" in error
    # A restart brings it back.
    asked = asyncio.create_task(control.run("restart", holder, "--yes", "--wait"))
    await back(fleet, holder)
    code, _, error = await asked
    assert code == 0, error


async def test_an_operation_goes_on_after_the_control_process_was_killed(
    operated: tuple[Fleet, Control],
) -> None:
    fleet, control = operated
    name = "decode-1"
    async with fleet.client() as client:
        order = fleet.faults(name)
        order._ask(do="steps", run=False)
        running: list[asyncio.Task[Outcome]] = []
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                # Until one of them has been placed there.
                while not order._ask(do="standing"):
                    tokens = prompt(BLOCK + len(running), 520 + len(running))
                    running.append(asyncio.create_task(ask(client, fleet.oracle, tokens, 8)))
                    await asyncio.wait(running[-1:], timeout=0.2)
            code, operation, error = await control.run("restart", name, "--yes")
            assert code == 0, error
            assert operation["state"] == "running"
            # It has been asked, and cannot leave.
            await until(lambda: recorded(fleet, operation["id"]).steps[-1].name == "leave", WAIT_SECONDS)
            control.kill()
        finally:
            order._ask(do="steps", run=True)
        assert await gone(fleet, name) == 0
        assert recorded(fleet, operation["id"]).state == pb.OPERATION_STATE_RUNNING
        control.start()
        await back(fleet, name)
        await until(
            lambda: recorded(fleet, operation["id"]).state == pb.OPERATION_STATE_SUCCEEDED, WAIT_SECONDS
        )
        outcomes = await asyncio.gather(*running)
        assert [outcome.reason for outcome in outcomes if outcome.error is not None] == []
    await control.serving()
    steps = [step.name for step in recorded(fleet, operation["id"]).steps]
    assert steps == ["ask", "leave", "end", "start", "ready"]


async def test_what_cannot_be_operated_on_is_refused(operated: tuple[Fleet, Control]) -> None:
    _, control = operated
    code, _, error = await control.run("restart", "nobody", "--yes")
    assert (code, "WORKER_NOT_FOUND" in error) == (2, True)
    code, _, error = await control.run("drain", "decode-0")
    assert (code, "--yes" in error) == (2, True)
