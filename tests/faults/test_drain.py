# SPDX-License-Identifier: Apache-2.0
"""Workers that end in good order under load: no request fails, and every answer is the one that nobody interrupted."""

import asyncio

import pytest

from tests.faults.test_restarts import DECODERS, restart
from tests.support.asking import Outcome, ask
from tests.support.fleet import BLOCK, Fleet
from tests.support.load import under_load
from tests.support.steps import prompt

pytestmark = [pytest.mark.integration, pytest.mark.faults]

ANSWER_TOKENS = 120


async def ended(fleet: Fleet, name: str) -> int:
    """Ends a worker as a supervisor does, and waits until its process is gone; its exit code."""
    process = fleet.workers[name].process
    process.terminate()
    return await asyncio.to_thread(process.wait, 60)


async def test_a_decode_worker_that_drains_hands_its_answers_over(routed: Fleet) -> None:
    released = {name: routed.faults(name).count("to_owner:release") for name in DECODERS}
    moved = routed.router_metric("twinpool_router_migrations_total")
    drained: list[str] = []
    ending: list[asyncio.Task[int]] = []

    def drain_after_five(outcome: Outcome) -> bool:
        if len(outcome.tokens) >= 5 and not drained:
            # The one that has taken a prompt over.
            (name,) = (n for n in DECODERS if routed.faults(n).count("to_owner:release") > released[n])
            drained.append(name)
            ending.append(asyncio.create_task(ended(routed, name)))
        return False

    async with routed.client() as client:
        outcome = await ask(client, routed.oracle, prompt(3 * BLOCK, 91), 290, leave=drain_after_five)
    assert len(outcome.tokens) == 290
    assert outcome.done.decode_worker not in drained
    assert routed.router_metric("twinpool_router_migrations_total") > moved
    assert await ending[0] == 0
    await restart(routed, drained[0])


async def test_a_rolling_restart_under_load_fails_nothing(routed: Fleet) -> None:
    async with under_load(routed, seed=92, longest=100, max_tokens=ANSWER_TOKENS) as load:
        for name in list(routed.workers):
            await load.more(3)
            assert await ended(routed, name) == 0
            await restart(routed, name)
    outcomes = load.outcomes
    assert [outcome.reason for outcome in outcomes if outcome.error is not None] == []
    assert all(len(outcome.tokens) == ANSWER_TOKENS for outcome in outcomes)
