# SPDX-License-Identifier: Apache-2.0
"""Samples from an overview of the cluster."""

from types import SimpleNamespace
from typing import cast

from google.protobuf.duration_pb2 import Duration

from twinpool.control.rebalance.capacity import Cost
from twinpool.control.rebalance.plan import ROLE_NUMBERS
from twinpool.control.rebalance.source import Overview, OverviewSource
from twinpool.control.rebalance.telemetry import Role
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2


def seconds(value: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(int(value * 1e9))
    return message


def seen(
    name: str, role: Role, pool: str = "default", reachable: bool = True, **counts: object
) -> SimpleNamespace:
    record = SimpleNamespace(
        worker=worker_pb2.WorkerId(name=name, incarnation=1),
        pool=pool,
        role=ROLE_NUMBERS[role],
        state=pb.WORKER_STATE_READY,
        epoch=2,
        cordoned=False,
        block_tokens=16,
        max_num_seqs=8,
        prefill_cost=pb.CostModel(base_seconds=0.01),
        step_cost=pb.CostModel(),
    )
    said: dict[str, object] = {
        "busy": seconds(3.0),
        "step_time": seconds(0.02),
        "total_blocks": 100,
        "free_blocks": 40,
        "cached_blocks": 30,
        "running": 2,
        "waiting": 1,
        "waiting_prefill_tokens": 0,
        "generation_tokens": 0,
        "query_tokens": 0,
        "hit_tokens": 0,
    }
    return SimpleNamespace(record=record, counts=SimpleNamespace(**(said | counts)), reachable=reachable)


def overview(workers: list[SimpleNamespace], **router: object) -> Overview:
    said: dict[str, object] = {
        "window": seconds(60.0),
        "ended": [SimpleNamespace(reason="", count=30), SimpleNamespace(reason="CANCELLED", count=6)],
        "queued_requests": 4,
        "queued_tokens": 400,
        "running_requests": 5,
        "generation_tokens": 3000,
        "pools": [],
    }
    telemetry = SimpleNamespace(**(said | router))
    return cast(
        Overview,
        SimpleNamespace(workers=workers, routers=[SimpleNamespace(telemetry=telemetry, reachable=True)]),
    )


async def test_a_sample_is_what_workers_and_routers_count() -> None:
    now = [overview([seen("p", "prefill", query_tokens=9000), seen("d", "decode")])]

    async def ask() -> Overview:
        return now[0]

    source = OverviewSource(ask)
    first = await source.sample("default", 100.0)
    assert first is not None
    now[0] = overview(
        [
            seen("p", "prefill", query_tokens=10_000, hit_tokens=200, waiting_prefill_tokens=50),
            seen("d", "decode", generation_tokens=700),
        ],
        queued_tokens=900,
    )
    second = await source.sample("default", 110.0)
    assert second is not None
    # What was looked up, and by how much what waits has grown.
    assert second.prompt_tokens - first.prompt_tokens == 1000 + 500 + 50
    assert (second.prefilled_tokens, second.cached_tokens, second.generated_tokens) == (1000, 200, 700)
    assert (second.finished, second.output_tokens) == (5, 500)
    assert second.requests - first.requests == 6
    worker = second.workers[0]
    assert (worker.epoch, worker.available_blocks, worker.busy_seconds) == (2, 70, 3.0)
    assert worker.prefill_cost == Cost(0.01, 0.0)
    assert worker.step_cost is None


async def test_a_worker_that_starts_anew_takes_nothing_back() -> None:
    workers = [seen("p", "prefill", query_tokens=9000)]

    async def ask() -> Overview:
        return overview(workers)

    source = OverviewSource(ask)
    await source.sample("default", 100.0)
    workers[0] = seen("p", "prefill", query_tokens=50)
    workers[0].record.worker.incarnation = 2
    sample = await source.sample("default", 110.0)
    assert sample is not None
    assert sample.prefilled_tokens == 50


async def test_what_has_come_stays_when_it_ends_or_is_out_of_reach() -> None:
    """Of what ends, routers say the last minute: right after a burst less has ended than runs no more."""
    workers = [seen("p", "prefill", waiting_prefill_tokens=700), seen("d", "decode")]
    now = [overview(workers, ended=[], running_requests=90)]

    async def ask() -> Overview:
        return now[0]

    source = OverviewSource(ask)
    first = await source.sample("default", 100.0)
    workers[0].reachable = False
    now[0] = overview(workers, running_requests=0, queued_requests=0, queued_tokens=0)
    second = await source.sample("default", 101.0)
    assert first is not None
    assert second is not None
    assert (second.requests, second.prompt_tokens) == (first.requests, first.prompt_tokens) == (94, 1100)


async def test_whoever_does_not_answer_is_not_fit_and_nobody_is_nothing() -> None:
    workers = [seen("p", "prefill"), seen("q", "prefill", reachable=False), seen("x", "decode", "other")]

    async def ask() -> Overview:
        return overview(workers)

    source = OverviewSource(ask)
    sample = await source.sample("default", 100.0)
    assert sample is not None
    assert [(worker.name, worker.state) for worker in sample.workers] == [("p", "ready"), ("q", "unready")]
    # The other pool holds as many sequences, so half of the queue is taken to be its own.
    assert sample.queued == 2
    workers[0].reachable = False
    assert await source.sample("default", 105.0) is None


async def test_what_waits_for_another_pool_is_not_counted() -> None:
    workers = [seen("p", "prefill"), seen("x", "prefill", "other")]
    pools = [
        SimpleNamespace(pool="default", queued_requests=1, queued_tokens=10, running_requests=2),
        SimpleNamespace(pool="other", queued_requests=40, queued_tokens=4000, running_requests=9),
    ]

    async def ask() -> Overview:
        return overview(workers, pools=pools, queued_requests=41, queued_tokens=4010)

    source = OverviewSource(ask)
    own, other = await source.sample("default", 100.0), await source.sample("other", 100.0)
    assert own is not None
    assert other is not None
    assert (own.queued, own.queued_tokens, other.queued, other.queued_tokens) == (1, 10, 40, 4000)
