# SPDX-License-Identifier: Apache-2.0
"""Who may serve a request together: never a worker in its old role, never a pair that nobody asked for, and each router counts
its own."""

import asyncio
from pathlib import Path

import grpc
import pytest

from tests.support.fake_cluster import fake_cluster, generate, prompt
from tests.support.fake_pair import fake_pair
from tests.support.fake_worker import Script
from tests.support.waiting import until
from twinpool import metrics
from twinpool.v1 import worker_pb2 as worker

QUEUE: dict[str, object] = {"queue_ttl_seconds": 0.3}


@pytest.mark.parametrize("local", [False, True])
async def test_without_a_prefill_worker_nothing_is_computed_elsewhere_unseen(
    model_path: Path, local: bool
) -> None:
    """A decode worker computes prompts where the policy says so, and then it is counted; else the client hears that there is
    nobody."""
    settings = QUEUE | {"local_prefill": local}
    async with fake_cluster(model_path, settings=settings) as cluster:
        cluster.router.fleet.remove(cluster.workers["p0"].record())
        before = metrics.ROUTER_LOCAL_PREFILLS._value.get()
        answer = await cluster.ask(generate(prompt(40)))
        counted = metrics.ROUTER_LOCAL_PREFILLS._value.get() - before
        if local:
            assert (answer.error, answer.finished.prefill_worker) == (None, "d0")
            assert counted == 1
        else:
            assert (answer.code, answer.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKERS")
            assert counted == 0
            assert cluster.workers["d0"].decodes == []
        await cluster.assert_quiescent()


async def test_a_worker_that_comes_back_in_the_other_role_is_used_in_that_alone(model_path: Path) -> None:
    async with fake_cluster(model_path, prefill=2, decode=1) as cluster:
        changed = cluster.workers["p1"]
        await cluster.ask(generate(prompt(40)))
        changed.role = worker.ROLE_DECODE
        await changed.restart()
        cluster.router.fleet.upsert(changed.record())
        await cluster.ready()
        prefilled = len(changed.prefills)
        answers = await asyncio.gather(*(cluster.ask(generate(prompt(40, seed))) for seed in range(1, 13)))
        assert {answer.finished.prefill_worker for answer in answers} == {"p0"}
        assert {answer.finished.decode_worker for answer in answers} == {"d0", "p1"}
        assert len(changed.prefills) == prefilled
        roles = {row["name"]: row["role"] for row in cluster.router.core.workers()}
        assert roles == {"p0": "prefill", "p1": "decode", "d0": "decode"}
        await cluster.assert_quiescent()


async def test_a_worker_that_says_another_role_than_its_record_gets_nothing(model_path: Path) -> None:
    async with fake_cluster(model_path, prefill=1, decode=2) as cluster:
        liar = cluster.workers["d1"]
        await liar.kill()
        liar.role = worker.ROLE_PREFILL
        await liar.start()
        await until(lambda: liar.sessions)
        answers = await asyncio.gather(*(cluster.ask(generate(prompt(40, seed))) for seed in range(8)))
        assert {answer.finished.decode_worker for answer in answers} == {"d0"}
        assert liar.prefills == liar.decodes == []


async def test_two_routers_count_what_each_has_placed_and_one_that_is_lost_counts_no_more(
    model_path: Path,
) -> None:
    gate = asyncio.Event()
    async with fake_pair(
        model_path, script=Script(handoff_gate=gate), settings={"transfer_window_requests": 64}
    ) as pair:
        clusters = (pair.one, pair.other)
        asked = [
            asyncio.create_task(cluster.ask(generate(prompt(40, seed))))
            for seed in range(6)
            for cluster in clusters
        ]
        workers = pair.one.workers

        def held() -> int:
            return sum(len(made.held) for made in workers.values())

        def reserved() -> list[int]:
            return [cluster.router.core.stats()["reservations"] for cluster in clusters]

        # Two a request: one on each of its workers.
        await until(lambda: reserved() == [12, 12] and held() == 24)
        await pair.lose()
        # The workers take its end for the end of all that it had placed.
        await until(lambda: held() == 12)
        assert pair.one.router.core.stats()["reservations"] == 12
        gate.set()
        answers = await asyncio.gather(*asked)
        assert [answer.error is None for answer in answers].count(True) == 6
        await pair.one.assert_quiescent()
