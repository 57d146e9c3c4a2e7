# SPDX-License-Identifier: Apache-2.0
"""What a router tells the control process: load, the last minute, requests and their way, prefixes and who holds them."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from tests.support.chat_world import chat_cluster, write_chat_model
from tests.support.fake_cluster import FakeCluster, fake_cluster, generate, prompt
from tests.support.fake_worker import Script
from tests.support.waiting import until, until_told
from tests.unit.router.test_router_locality import cached_cluster
from tests.unit.router.test_router_tenants import BLUE, RED, bearer, red
from twinpool import metrics
from twinpool.config import MetricsConfig
from twinpool.errors import from_rpc_error
from twinpool.router.recent import Recent
from twinpool.rpc import digest_of
from twinpool.v1 import router_pb2 as pb
from twinpool.v1 import router_pb2_grpc, telemetry_pb2
from twinpool.v1 import worker_pb2 as worker

HOPS = ["tokenize", "queue", "reserve", "prefill", "handoff", "decode"]


@pytest.fixture
async def cluster(model_path: Path) -> AsyncIterator[FakeCluster]:
    """Two prefill workers with caches, one decode worker."""
    async with cached_cluster(model_path) as made:
        yield made


def stub(cluster: FakeCluster) -> Any:
    return router_pb2_grpc.RouterServiceStub(cluster.channel)


async def telemetry(cluster: FakeCluster) -> telemetry_pb2.RouterTelemetry:
    answer = await stub(cluster).GetTelemetry(pb.GetTelemetryRequest(), timeout=60)
    assert answer.router == "router-test"
    found: telemetry_pb2.RouterTelemetry = answer.telemetry
    return found


async def requests(cluster: FakeCluster, **asked: Any) -> pb.ListRouterRequestsResponse:
    answer: pb.ListRouterRequestsResponse = await stub(cluster).ListRouterRequests(
        pb.ListRouterRequestsRequest(**asked), timeout=60
    )
    return answer


async def hops(cluster: FakeCluster, count: int) -> bool:
    return any(len(one.hops) == count for one in (await requests(cluster)).requests)


async def placed_twice(cluster: FakeCluster) -> bool:
    return any(one.attempts >= 2 for one in (await requests(cluster)).requests)


async def test_the_last_minute_is_told(cluster: FakeCluster) -> None:
    before = await telemetry(cluster)
    for seed in range(3):
        await cluster.ask(generate(prompt(40, seed), max_tokens=4))
    refused = await cluster.ask(generate(prompt(40), max_tokens=100_000))
    assert refused.error is not None
    now = await telemetry(cluster)
    assert now.time_to_first_token_summary.count - before.time_to_first_token_summary.count == 3
    assert now.inter_token_latency_summary.count > before.inter_token_latency_summary.count
    assert now.prompt_tokens - before.prompt_tokens == 120
    assert now.generation_tokens - before.generation_tokens == 12
    ended = {one.reason: one.count for one in now.ended}
    earlier = {one.reason: one.count for one in before.ended}
    assert ended[""] - earlier.get("", 0) == 3
    assert ended[refused.reason] - earlier.get(refused.reason, 0) == 1
    assert now.time_to_first_token_summary.p50.ToNanoseconds() > 0
    assert (now.queued_requests, now.running_requests) == (0, 0)


async def test_running_requests_are_counted(cluster: FakeCluster) -> None:
    gate = asyncio.Event()
    for name in ("p0", "p1"):
        cluster.workers[name].script.prefill_gate = gate
    asked = asyncio.ensure_future(cluster.ask(generate(prompt(64))))
    await until(cluster.held)
    assert (await telemetry(cluster)).running_requests == 1
    gate.set()
    await asked
    assert (await telemetry(cluster)).running_requests == 0


def test_short_prompts_are_counted_apart() -> None:
    recent = Recent(MetricsConfig(short_prompt_tokens=100))
    recent.first_token(0.5, 100)
    recent.first_token(2.0, 101)
    message = telemetry_pb2.RouterTelemetry()
    recent.tell(message)
    assert message.time_to_first_token_summary.count == 2
    assert message.short_time_to_first_token_summary.count == 1
    assert message.short_time_to_first_token_summary.p99.ToNanoseconds() / 1e9 == pytest.approx(0.5, rel=0.05)


def test_counts_are_those_of_a_minute() -> None:
    now = 0.0
    recent = Recent(MetricsConfig(short_prompt_tokens=1), clock=lambda: now)

    def told() -> tuple[int, float]:
        message = telemetry_pb2.RouterTelemetry()
        recent.tell(message)
        return message.prompt_tokens, message.window.ToNanoseconds() / 1e9

    metrics.ROUTER_PROMPT_TOKENS.inc(7)
    assert told() == (7, 0.0)
    for _ in range(12):
        now += 5.0
        recent.watch()
    assert told() == (7, 60.0), "the minute that began when they were counted"
    now += 5.0
    recent.watch()
    assert told() == (0, 60.0)


async def test_a_running_request_is_listed_with_where_it_is(cluster: FakeCluster) -> None:
    gate = asyncio.Event()
    for name in ("p0", "p1"):
        cluster.workers[name].script.prefill_gate = gate
    asked = asyncio.ensure_future(cluster.ask(generate(prompt(64), request_id="mine")))
    await until(cluster.held)
    await until_told(lambda: hops(cluster, 4))
    (one,) = (await requests(cluster, state="live")).requests
    assert (one.client_id, one.live, one.state, one.pool, one.model) == (
        "mine",
        True,
        "Prefilling",
        "default",
        "fake",
    )
    assert one.prompt_tokens == 64
    assert not one.HasField("cached_tokens")
    assert one.decode.name == "d0"
    assert one.prefill.name in ("p0", "p1")
    assert [hop.name for hop in one.hops] == HOPS[:4]
    assert [hop.HasField("ended") for hop in one.hops] == [True, True, True, False]
    assert not (await requests(cluster, state="ended")).requests
    gate.set()
    answer = await asked
    await until(lambda: cluster.router.admission.active == 0)
    (one,) = (await requests(cluster)).requests
    assert (one.live, one.state, one.output_tokens) == (False, "Finished", len(answer.tokens()))
    assert one.HasField("cached_tokens")
    assert [hop.name for hop in one.hops] == HOPS
    for before, after in zip(one.hops, one.hops[1:], strict=False):
        assert before.ended == after.began
    assert one.hops[-1].ended.ToNanoseconds() <= one.age.ToNanoseconds()


async def test_a_request_that_was_placed_anew_shows_both_ways(cluster: FakeCluster) -> None:
    failing = Script(fail_prefill=worker.FAILURE_REASON_FENCED)
    cluster.workers["p0"].script = cluster.workers["p1"].script = failing
    asked = asyncio.ensure_future(cluster.ask(generate(prompt(64), request_id="again")))
    await until_told(lambda: placed_twice(cluster))
    cluster.workers["p0"].script = cluster.workers["p1"].script = Script()
    await asked
    (one,) = (await requests(cluster)).requests
    assert one.attempts >= 2
    names = [hop.name for hop in one.hops]
    assert names[:5] == ["tokenize", "queue", "reserve", "prefill", "queue"], (
        "the hop that failed has its own time"
    )
    assert max(hop.attempt for hop in one.hops) >= 2


async def test_lists_are_filtered_and_cut(cluster: FakeCluster) -> None:
    for number in range(5):
        await cluster.ask(generate(prompt(20, number), request_id=f"r{number}"))
    found = await requests(cluster, limit=2)
    assert ([one.client_id for one in found.requests], found.found) == (["r4", "r3"], 5)
    assert len((await requests(cluster, state="Finished")).requests) == 5
    assert not (await requests(cluster, state="Failed")).requests
    assert not (await requests(cluster, pool="other")).requests
    assert len((await requests(cluster, pool="default")).requests) == 5


async def test_running_requests_are_known_however_few_are_remembered(model_path: Path) -> None:
    gate = asyncio.Event()
    script, settings = Script(prefill_gate=gate), {"trace_requests": 1}
    async with fake_cluster(model_path, prefill_script=script, settings=settings) as cluster:
        asked = [asyncio.ensure_future(cluster.ask(generate(prompt(20, seed)))) for seed in range(3)]
        await until(lambda: cluster.router.admission.active == 3)
        assert len((await requests(cluster, state="live")).requests) == 3
        gate.set()
        await asyncio.gather(*asked)
        await until(lambda: cluster.router.admission.active == 0)
        assert len((await requests(cluster)).requests) == 1


async def test_a_tenant_that_a_client_made_up_is_a_digest(cluster: FakeCluster) -> None:
    await cluster.ask(generate(prompt(20), tenant="secret-project"))
    (one,) = (await requests(cluster)).requests
    assert one.tenant == f"sha256:{hashlib.sha256(b'secret-project').hexdigest()[:12]}"


async def test_shared_beginnings_are_found_with_their_holders(cluster: FakeCluster) -> None:
    shared = prompt(64, 1)
    for seed in range(2, 6):
        await cluster.ask(generate(shared + prompt(32, seed)))
    await cluster.ask(generate(prompt(48, 9)))
    answer = await stub(cluster).ListHotPrefixes(pb.ListHotPrefixesRequest(limit=3), timeout=60)
    first = answer.prefixes[0]
    assert (first.blocks, first.tokens, first.uses, first.model) == (4, 64, 4, "fake")
    assert len(first.block_hash) == 16
    held = cluster.router.core.longest_prefix(cluster.router.beginnings._heat.newest()[-1].hashes[:4])
    assert {(one.worker.name, one.blocks) for one in first.holders} == set(held)
    assert len(answer.prefixes) == 3
    assert [one.uses for one in answer.prefixes[1:]] == [1, 1]


async def test_where_there_are_tenants_operators_alone_are_told(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(yaml.safe_dump({"tenants": [red()], "operators": {"keys": [digest_of(BLUE)]}}))
    model = write_chat_model(tmp_path / "model")
    async with chat_cluster(model, "abc", tenants_file=str(tenants)) as cluster:
        service = router_pb2_grpc.RouterServiceStub(cluster.channel)
        calls: list[tuple[Any, Any]] = [
            (service.GetTelemetry, pb.GetTelemetryRequest()),
            (service.ListRouterRequests, pb.ListRouterRequestsRequest()),
            (service.ListHotPrefixes, pb.ListHotPrefixesRequest()),
        ]
        for method, request in calls:
            await method(request, timeout=60, metadata=bearer(BLUE))
            for shown in (None, bearer(RED)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await method(request, timeout=60, metadata=shown)
                assert from_rpc_error(caught.value).reason == "UNAUTHENTICATED"
