# SPDX-License-Identifier: Apache-2.0
"""What workers measured at their start is what placement predicts with, until it has learned more."""

from pathlib import Path

import pytest

from tests.support.fake_cluster import FakeCluster, fake_cluster, generate, prompt
from tests.support.waiting import until
from twinpool.v1 import control_pb2
from twinpool.v1 import worker_pb2 as pb

GUESS = {"prior_prefill_seconds": 0.002, "prior_prefill_token_seconds": 1e-4}
PREFILL = control_pb2.CostModel(base_seconds=0.5, unit_seconds=0.03, context_seconds=1e-7)
STEP = control_pb2.CostModel(base_seconds=0.04, unit_seconds=0.005)


def model(cluster: FakeCluster, name: str, kind: str) -> dict[str, float]:
    """A cost model of a worker, as the core has it."""
    (row,) = (row for row in cluster.router.core.workers() if row["name"] == name)
    found = row[f"{kind}_model"]
    assert isinstance(found, dict)
    return found


def coefficients(cluster: FakeCluster, name: str, kind: str) -> tuple[float, ...]:
    fit = model(cluster, name, kind)
    return (fit["base_seconds"], fit["per_unit_seconds"], fit["per_context_seconds"])


async def test_placement_predicts_with_the_measured_costs(model_path: Path) -> None:
    async with fake_cluster(model_path, prefill=0, decode=0, settings=GUESS) as cluster:
        shared = {"model_path": str(model_path)}
        slow = control_pb2.CostModel(base_seconds=5.0, unit_seconds=0.3)
        await cluster.add("slow", pb.ROLE_PREFILL, prefill_cost=slow, **shared)
        await cluster.add("fast", pb.ROLE_PREFILL, prefill_cost=PREFILL, step_cost=STEP, **shared)
        await cluster.add("d0", pb.ROLE_DECODE, step_cost=STEP, **shared)
        await cluster.add("d1", pb.ROLE_DECODE, **shared)
        await cluster.ready()
        assert coefficients(cluster, "fast", "prefill") == (0.5, 0.03, 1e-7)
        assert coefficients(cluster, "slow", "prefill") == (5.0, 0.3, 0)
        assert coefficients(cluster, "d0", "step") == (0.04, 0.005, 0)
        # Whoever measured nothing is guessed.
        assert coefficients(cluster, "d0", "prefill")[:2] == (0.002, 1e-4)
        assert coefficients(cluster, "d1", "step") == coefficients(cluster, "slow", "step")
        for seed in range(4):
            assert (await cluster.ask(generate(prompt(40, seed)))).finished
        assert len(cluster.workers["fast"].prefills) == 4
        assert not cluster.workers["slow"].prefills


async def test_what_was_learned_outlives_changes_of_the_record(model_path: Path) -> None:
    async with fake_cluster(model_path, prefill=0, decode=1) as cluster:
        made = await cluster.add("p0", pb.ROLE_PREFILL, prefill_cost=PREFILL, model_path=str(model_path))
        await cluster.ready()
        core, fleet = cluster.router.core, cluster.router.fleet
        for tokens in range(100, 2000, 100):
            core.observe_prefill(made.key.name, made.key.incarnation, tokens, 0, tokens * 4e-3)
        learned = model(cluster, "p0", "prefill")
        assert learned["per_unit_seconds"] == pytest.approx(4e-3, rel=0.1)
        fleet.upsert(made.record(control_pb2.WORKER_STATE_DRAINING))
        fleet.upsert(made.record())
        assert model(cluster, "p0", "prefill") == learned
        # Nor does a stream that broke: it is the same incarnation.
        session = fleet.session(made.key)
        assert session is not None
        fleet.session_up(session, pb.ROLE_PREFILL)
        assert model(cluster, "p0", "prefill") == learned
        # Another one is measured anew.
        await made.restart()
        fleet.upsert(made.record())
        await cluster.ready()
        assert coefficients(cluster, "p0", "prefill") == (0.5, 0.03, 1e-7)


async def test_a_record_that_is_completed_late_or_comes_back_counts(model_path: Path) -> None:
    async with fake_cluster(model_path, prefill=0, decode=1, settings=GUESS) as cluster:
        made = await cluster.add("p0", pb.ROLE_PREFILL, model_path=str(model_path))
        fleet = cluster.router.fleet
        await cluster.ready()
        assert coefficients(cluster, "p0", "prefill")[:2] == (0.002, 1e-4)
        record = made.record()
        record.prefill_cost.CopyFrom(PREFILL)
        fleet.upsert(record)
        assert coefficients(cluster, "p0", "prefill") == (0.5, 0.03, 1e-7)
        # To the core a worker whose registration lapsed is a new one.
        fleet.remove(record)
        fleet.upsert(record)
        await until(lambda: (session := fleet.session(made.key)) is not None and session.up)
        assert coefficients(cluster, "p0", "prefill") == (0.5, 0.03, 1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
async def test_nonsense_is_ignored(model_path: Path, bad: float) -> None:
    async with fake_cluster(model_path, prefill=0, decode=1, settings=GUESS) as cluster:
        broken = control_pb2.CostModel(base_seconds=0.1, unit_seconds=bad)
        await cluster.add(
            "p0", pb.ROLE_PREFILL, prefill_cost=broken, step_cost=STEP, model_path=str(model_path)
        )
        await cluster.ready()
        assert coefficients(cluster, "p0", "prefill")[:2] == (0.002, 1e-4)
        assert coefficients(cluster, "p0", "step") == (0.04, 0.005, 0)
        assert (await cluster.ask(generate())).finished
