# SPDX-License-Identifier: Apache-2.0
"""Everything at once: delayed, refused and failed reads, lost and repeated messages, clients that leave, workers that die.

Whatever is answered is the oracle's answer, whatever fails says why, and at the end nothing is held anywhere.
``TWINPOOL_SEED=<number>`` repeats a run's schedule.
"""

import asyncio
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, running_fleet
from tests.support.oracle import oracle
from tests.support.soak import (
    CHANCES,
    TRUE_REASONS,
    WORKERS,
    Answers,
    Result,
    Schedule,
    seed_of_run,
    soak,
)

pytestmark = [pytest.mark.integration, pytest.mark.faults]

LEASE_SECONDS = 2.0
SETTINGS = {
    "scheduler.ahead": "on",
    "transfer.lease_seconds": LEASE_SECONDS,
    "transfer.read_deadline_seconds": 1.5,
    "transfer.fetch_deadline_seconds": 1.0,
}
ROUTER = {
    "router.quarantine_seconds": 0.5,
    "router.queue_ttl_seconds": 100,
    "router.local_prefill": True,
}


def run(directory: Path, checkpoint: Path, schedule: Schedule) -> None:
    plan = {"random": CHANCES | {"seed": schedule.seed}}
    answers = Answers(oracle(checkpoint), schedule.prompts)
    # The fence alone has to do in one half of the runs.
    settings = SETTINGS | {"transfer.digest": "always" if schedule.seed % 2 else "off"}
    with running_fleet(directory, checkpoint, WORKERS, settings, plan) as fleet:
        result = asyncio.run(served(fleet, schedule, answers))
    assert len(result.outcomes) == len(schedule.asked)
    assert result.kills == len(schedule.kills)
    assert result.retries > 0, "no fault was met"
    assert set(result.failures) <= TRUE_REASONS, result
    assert result.finished >= 0.7 * len(schedule.asked), result


async def served(fleet: Fleet, schedule: Schedule, answers: Answers) -> Result:
    await fleet.start_router(ROUTER)
    result = await soak(fleet, schedule, answers, clients=16)
    result.retries = round(fleet.router_metric("twinpool_router_retries_total"))
    print(result)
    # Lost releases and dead readers cost a lease, and no more.
    await fleet.assert_quiet(within=10 * LEASE_SECONDS)
    await fleet.assert_router_quiet(within=10.0)
    await fleet.ready()
    fleet.assert_registered()
    return result


def test_soak(tmp_path: Path, checkpoint: Path) -> None:
    run(tmp_path, checkpoint, Schedule.of(seed_of_run(), requests=200, prompts=40, kills=2))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_long_soak(tmp_path: Path, checkpoint: Path) -> None:
    run(tmp_path, checkpoint, Schedule.of(seed_of_run(), requests=2000, prompts=240, kills=24))
