# SPDX-License-Identifier: Apache-2.0
"""The plan of a chaos run: the same for a seed, with every kind of fault, and never without a worker to go on with."""

import itertools

import pytest

from tests.chaos.schedule import NETWORK, QUIET_SECONDS, WEIGHTS, WORKERS, WORKERS_A_ROLE, plan

SECONDS = 600


@pytest.mark.parametrize("seed", range(20))
def test_a_seed_gives_one_plan(seed: int) -> None:
    faults = plan(seed, SECONDS)
    assert faults == plan(seed, SECONDS)
    assert faults != plan(seed + 1, SECONDS)
    assert {fault.kind for fault in faults} == {kind for kind, weight in WEIGHTS.items() if weight}
    gaps = [after.at - before.at for before, after in itertools.pairwise(faults)]
    assert sum(gaps) / len(gaps) < 8, "a fault every few seconds"
    assert all(fault.at + fault.seconds <= SECONDS - QUIET_SECONDS for fault in faults)


@pytest.mark.parametrize("seed", range(20))
def test_a_worker_of_each_role_and_a_router_are_left_alone(seed: int) -> None:
    faults = plan(seed, SECONDS)
    for fault in faults:
        busy = [other for other in faults if other.at <= fault.at < other.recovered]
        assert sum(other.kind.startswith("etcd") for other in busy) <= 1
        assert sum(other.kind == "router_kill" for other in busy) <= 1
        for role in ("prefill", "decode"):
            hit = {
                other.targets[0]
                for other in busy
                if other.kind in ("kill", "stop", "isolate") and WORKERS[other.targets[0]] == role
            }
            assert len(hit) < WORKERS_A_ROLE


def test_a_machine_without_namespaces_has_a_plan_without_links() -> None:
    assert not {fault.kind for fault in plan(1, SECONDS, kinds=frozenset(WEIGHTS) - NETWORK)} & NETWORK
