# SPDX-License-Identifier: Apache-2.0
"""Workers that change their role: the router follows their records, and what was meant for the former role is placed anew."""

import asyncio
from pathlib import Path

import numpy as np

from tests.support.fake_cluster import FakeCluster, fake_cluster, generate, prompt
from tests.support.fake_worker import FakeWorker, Script
from tests.support.waiting import until
from twinpool.v1 import control_pb2
from twinpool.v1 import worker_pb2 as pb

STEP = control_pb2.CostModel(base_seconds=0.04, unit_seconds=0.005)
FLIPPING = control_pb2.WORKER_STATE_FLIPPING


def row(cluster: FakeCluster, name: str) -> dict[str, object]:
    """A worker as the core has it."""
    (found,) = (row for row in cluster.router.core.workers() if row["name"] == name)
    return found


def change(made: FakeWorker) -> None:
    """It has the other role from now on, and refuses commands of the former epoch."""
    made.role = pb.ROLE_DECODE if made.role == pb.ROLE_PREFILL else pb.ROLE_PREFILL
    made.epoch += 1


def flip(cluster: FakeCluster, made: FakeWorker) -> None:
    """It flips, and the router hears of each step."""
    cluster.router.fleet.upsert(made.record(FLIPPING))
    change(made)
    cluster.router.fleet.upsert(made.record())


async def test_it_leaves_one_fleet_and_joins_the_other(model_path: Path) -> None:
    async with fake_cluster(model_path, prefill=1, decode=2) as cluster:
        made = cluster.workers["d1"]
        session = cluster.router.fleet.session(made.key)
        flip(cluster, made)
        assert row(cluster, "d1")["role"] == "prefill"
        answers = await asyncio.gather(*(cluster.ask(generate(prompt(40, seed))) for seed in range(8)))
        assert all(answer.finished.decode_worker == "d0" for answer in answers)
        assert {answer.finished.prefill_worker for answer in answers} == {"p0", "d1"}
        assert all(command.epoch == 2 for command in made.prefills)
        assert all(command.epoch == 1 for command in cluster.workers["d0"].decodes)
        flip(cluster, made)
        answers = await asyncio.gather(*(cluster.ask(generate(prompt(40, seed))) for seed in range(8, 16)))
        assert {answer.finished.decode_worker for answer in answers} == {"d0", "d1"}
        assert {answer.finished.prefill_worker for answer in answers} == {"p0"}
        # By one stream all along.
        assert cluster.router.fleet.session(made.key) is session
        assert made.calls == 1
        await cluster.assert_quiescent()


async def test_what_is_cached_there_is_known_as_before(model_path: Path) -> None:
    async with fake_cluster(model_path, prefill=2, decode=2) as cluster:
        made = cluster.workers["d1"]
        core = cluster.router.core
        asked = generate(prompt(64))
        await cluster.ask(asked)
        hashes = next(command for worker in ("p0", "p1") for command in cluster.workers[worker].prefills)
        held = bytes(hashes.prompt.block_hashes)[: 3 * 16]
        blocks = np.frombuffer(held, np.uint8).reshape(-1, 16)
        core.index_stored(made.key.name, made.key.incarnation, blocks)
        flip(cluster, made)
        assert (made.key.name, 3) in [(name, blocks) for name, blocks in core.longest_prefix(blocks)]
        assert (await cluster.ask(asked)).finished.prefill_worker == "d1"


async def test_a_command_that_was_meant_for_the_former_role_is_placed_anew(model_path: Path) -> None:
    """The router has not heard of the change: nothing fails, and no breaker learns from it."""
    async with fake_cluster(model_path, prefill=1, decode=2, settings={"breaker_failures": 1}) as cluster:
        change(cluster.workers["d1"])
        answers = await asyncio.gather(*(cluster.ask(generate(prompt(40, seed))) for seed in range(8)))
        assert all(answer.finished.decode_worker == "d0" for answer in answers)
        assert max(answer.finished.attempts for answer in answers) == 2, "it was never tried"
        assert cluster.router.fleet.breakers.closed(cluster.workers["d1"].key)
        await cluster.assert_quiescent()


async def test_one_that_is_welcomed_before_its_record_is_known_serves_once_it_is(model_path: Path) -> None:
    """Its stream breaks and is made anew while the record lies behind."""
    settings: dict[str, object] = {"quarantine_seconds": 0.1}
    async with fake_cluster(model_path, prefill=1, decode=2, settings=settings) as cluster:
        made = cluster.workers["d1"]
        session = cluster.router.fleet.session(made.key)
        assert session is not None
        change(made)
        await made.kill()
        await until(lambda: not session.up)
        await made.start()
        await until(lambda: session.up)
        answers = await asyncio.gather(*(cluster.ask(generate(prompt(40, seed))) for seed in range(8)))
        assert all(answer.finished.decode_worker == "d0" for answer in answers)
        assert not made.decodes, "it is known to be no decode worker"
        cluster.router.fleet.upsert(made.record())
        async with asyncio.timeout(60):
            seed = 10
            while not made.prefills:
                await asyncio.gather(*(cluster.ask(generate(prompt(40, seed + at))) for at in range(4)))
                seed += 4
        await cluster.assert_quiescent()


async def test_what_it_failed_in_the_one_role_is_not_held_against_it_in_the_other(model_path: Path) -> None:
    settings: dict[str, object] = {"breaker_failures": 1, "breaker_open_seconds": 600}
    async with fake_cluster(model_path, prefill=2, decode=2, settings=settings) as cluster:
        made = cluster.workers["d1"]
        cluster.router.fleet.breakers.failed(made.key)
        assert not cluster.router.fleet.breakers.closed(made.key)
        flip(cluster, made)
        assert cluster.router.fleet.breakers.closed(made.key)
        answers = await asyncio.gather(*(cluster.ask(generate(prompt(40, seed))) for seed in range(12)))
        assert "d1" in {answer.finished.prefill_worker for answer in answers}


async def test_its_steps_are_predicted_with_what_it_measured(model_path: Path) -> None:
    async with fake_cluster(model_path, prefill=0, decode=1) as cluster:
        made = await cluster.add("p0", pb.ROLE_PREFILL, step_cost=STEP, model_path=str(model_path))
        await cluster.ready()
        for _ in range(20):
            # Steps of prompts.
            cluster.router.core.report_load(1.0, "p0", made.key.incarnation, 4, 0, 0, 4000, 2.0)
        before = row(cluster, "p0")["step_model"]
        flip(cluster, made)
        after = row(cluster, "p0")["step_model"]
        assert isinstance(after, dict)
        assert after != before
        assert (after["base_seconds"], after["per_unit_seconds"]) == (0.04, 0.005)


async def test_answers_move_off_a_decode_worker_that_flips(model_path: Path) -> None:
    settings: dict[str, object] = {"finish_seconds": 0.0}
    script = Script(step_seconds=0.02)
    async with fake_cluster(model_path, decode=2, decode_script=script, settings=settings) as cluster:
        asked = asyncio.create_task(cluster.ask(generate(prompt(40), max_tokens=60)))
        await until(
            lambda: any(session.running for w in ("d0", "d1") for session in cluster.workers[w].sessions)
        )
        (name,) = (w for w in ("d0", "d1") if cluster.workers[w].held)
        cluster.router.fleet.upsert(cluster.workers[name].record(FLIPPING))
        answer = await asked
        assert answer.finished.decode_worker != name
        assert len(answer.tokens()) == 60
        await cluster.assert_quiescent()


async def test_who_may_know_of_answers_is_asked_for_them(model_path: Path) -> None:
    async with fake_cluster(model_path, prefill=1, decode=2) as cluster:
        fleet = cluster.router.fleet
        made = cluster.workers["d1"]
        assert set(fleet.decode_endpoints()) == {cluster.workers[name].endpoint for name in ("d0", "d1")}
        flip(cluster, made)
        assert made.endpoint in fleet.decode_endpoints()
        assert cluster.workers["p0"].endpoint not in fleet.decode_endpoints()
