# SPDX-License-Identifier: Apache-2.0
"""Fleets of real workers that the tests of this folder share; each test leaves its fleet without faults and at rest."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.fleet import Fleet, running_fleet
from tests.support.oracle import oracle
from twinpool.engine.tiny import write_tiny

BRIEF_LEASE_SECONDS = 2.0
BRIEF_DEADLINE_SECONDS = 1.0
# A tiny model ends most answers before they can be moved, unless they are moved at once.
ROUTER = {"router.quarantine_seconds": 0.5, "router.queue_ttl_seconds": 600, "router.finish_seconds": 0.0}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny MLA model."""
    path = tmp_path_factory.mktemp("model") / "deepseek_v3"
    write_tiny(path, "deepseek_v3", seed=7)
    # Loaded here, so that no test stands still for it while something is held.
    oracle(path).greedy([8, 9], 2)
    # Two threads that spin for one another are slow where many processes share two cores.
    torch.set_num_threads(1)
    return path


@pytest.fixture(scope="session")
def shared_fleet(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One prefill and two decode workers. No test may end one of them."""
    workers = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
    with running_fleet(tmp_path_factory.mktemp("fleet"), checkpoint, workers) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def shared_brief_fleet(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A pair whose leases and read deadlines are short enough to wait for."""
    workers = {"prefill-0": "prefill", "decode-0": "decode"}
    settings = {
        "transfer.lease_seconds": BRIEF_LEASE_SECONDS,
        "transfer.read_deadline_seconds": BRIEF_DEADLINE_SECONDS,
    }
    with running_fleet(tmp_path_factory.mktemp("brief"), checkpoint, workers, settings) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def shared_routed_fleet(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two workers of each role behind a router."""
    workers = {f"{role}-{number}": role for role in ("prefill", "decode") for number in range(2)}
    with running_fleet(tmp_path_factory.mktemp("routed"), checkpoint, workers) as fleet:
        asyncio.run(fleet.start_router(ROUTER))
        yield fleet


@pytest.fixture
async def fleet(shared_fleet: Fleet) -> AsyncIterator[Fleet]:
    yield shared_fleet
    await _left_at_rest(shared_fleet)


@pytest.fixture
async def brief_fleet(shared_brief_fleet: Fleet) -> AsyncIterator[Fleet]:
    yield shared_brief_fleet
    await _left_at_rest(shared_brief_fleet)


@pytest.fixture
async def routed(shared_routed_fleet: Fleet) -> AsyncIterator[Fleet]:
    """Tests may kill workers, if they start them again."""
    yield shared_routed_fleet
    await _left_at_rest(shared_routed_fleet)
    await shared_routed_fleet.assert_router_quiet(within=30.0)
    shared_routed_fleet.assert_registered()


async def _left_at_rest(fleet: Fleet) -> None:
    fleet.clear_faults()
    await fleet.assert_quiet(within=30.0)
