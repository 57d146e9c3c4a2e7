# SPDX-License-Identifier: Apache-2.0
"""The overview: everybody is asked at once, nobody keeps the others waiting, and totals become rates."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.telling import Cluster, seconds, telling_cluster
from tests.support.waiting import until
from twinpool import rpc
from twinpool.config import RpcConfig
from twinpool.control.overview.collect import FRESH_SECONDS
from twinpool.control.overview.plain import plain
from twinpool.control.overview.rates import RoleHistory, WorkerHistory
from twinpool.control.service import ControlServer
from twinpool.errors import TwinpoolError, from_rpc_error
from twinpool.sketch import Sketch
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import control_pb2_grpc, telemetry_pb2, worker_pb2

PREFILL, DECODE = worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE


async def fresh(cluster: Cluster) -> pb.Overview:
    """One that is asked for now."""
    cluster.collector._last = None
    return await cluster.collector.overview()


async def test_pools_workers_routers_and_operations_are_shown() -> None:
    async with telling_cluster() as cluster:
        p0 = await cluster.worker("p0", PREFILL)
        await cluster.worker("p1", PREFILL, state=pb.WORKER_STATE_DRAINING)
        d0 = await cluster.worker("d0", DECODE)
        p0.did(10, 5, prompt=1000, queried=400, hit=100)
        d0.did(20, 2, drawn=600)
        d0.says.running, d0.says.waiting = 3, 2
        router = await cluster.router("r0")
        router.telemetry.queued_requests = 4
        running, ended = pb.OPERATION_STATE_RUNNING, pb.OPERATION_STATE_SUCCEEDED
        states = [ended] * 4 + [running] + [ended] * 4
        cluster.operations = [pb.Operation(id=f"o{at}", state=state) for at, state in enumerate(states)]
        found = await cluster.collector.overview()
    (pool,) = found.pools
    prefill, decode = pool.roles
    assert (prefill.role, prefill.desired, prefill.registered, prefill.ready, prefill.draining) == (
        PREFILL,
        2,
        2,
        1,
        1,
    )
    assert (decode.desired, decode.registered, decode.ready, decode.running, decode.waiting) == (
        1,
        1,
        1,
        3,
        2,
    )
    assert prefill.utilization == pytest.approx(0.5), "p1 has told no time yet"
    assert prefill.prompt_tokens_per_second == pytest.approx(100)
    assert prefill.hit_rate == pytest.approx(0.25)
    assert not decode.HasField("hit_rate")
    assert decode.kv_usage == pytest.approx(0.1)
    assert decode.generation_tokens_per_second == pytest.approx(30)
    assert [worker.record.worker.name for worker in found.workers] == ["d0", "p0", "p1"]
    assert all(worker.reachable for worker in found.workers)
    assert found.routers[0].telemetry.queued_requests == 4
    assert [one.id for one in found.operations] == ["o4", "o0", "o1", "o2", "o3", "o5"]


async def test_who_does_not_answer_is_shown_so_and_keeps_nobody_waiting() -> None:
    async with telling_cluster(answer_seconds=0.3) as cluster:
        hung = await cluster.worker("hung", DECODE)
        await cluster.worker("dead", DECODE)
        await cluster.worker("well", DECODE)
        router = await cluster.router("r0")
        first = await cluster.collector.overview()
        assert all(worker.reachable for worker in first.workers)
        hung.gate.clear()
        await cluster.servers["dead"].stop(0)
        router.error = TwinpoolError("UNAUTHENTICATED")
        second = await fresh(cluster)
        hung.gate.set()
    by_name = {worker.record.worker.name: worker for worker in second.workers}
    assert [by_name[name].reachable for name in ("dead", "hung", "well")] == [False, False, True]
    assert by_name["hung"].error.startswith("DEADLINE_EXCEEDED")
    assert by_name["dead"].error.startswith("SERVER_UNREACHABLE") or "UNAVAILABLE" in by_name["dead"].error
    for name in ("hung", "dead"):
        assert by_name[name].counts.total_blocks == 100, "what it said last"
        assert by_name[name].age.ToNanoseconds() >= by_name["well"].age.ToNanoseconds()
    assert second.pools[0].roles[1].unreachable == 2
    assert not second.routers[0].reachable
    assert second.routers[0].error.startswith("UNAUTHENTICATED")


async def test_another_incarnation_at_the_address_is_not_taken_for_the_worker() -> None:
    async with telling_cluster() as cluster:
        worker = await cluster.worker("w", DECODE)
        worker.says.worker.incarnation = 8
        (found,) = (await cluster.collector.overview()).workers
        assert not found.reachable
        assert not found.HasField("counts")


async def test_several_who_ask_at_once_ask_the_workers_once() -> None:
    async with telling_cluster() as cluster:
        worker = await cluster.worker("w", DECODE)
        worker.gate.clear()
        asked = [asyncio.ensure_future(cluster.collector.overview()) for _ in range(5)]
        await until(lambda: worker.asked)
        asked[0].cancel()
        worker.gate.set()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert all(isinstance(one, pb.Overview) for one in found[1:])
        assert worker.asked == 1
        await cluster.collector.overview()
        assert worker.asked == 1, f"younger than {FRESH_SECONDS} s"
        await fresh(cluster)
        assert worker.asked == 2


async def test_routers_latencies_are_put_together() -> None:
    async with telling_cluster() as cluster:
        for name, times in (("r0", [0.1] * 98), ("r1", [5.0] * 2)):
            sketch = Sketch()
            for one in times:
                sketch.add(one)
            (await cluster.router(name)).telemetry.time_to_first_token.CopyFrom(sketch.message())
        found = (await cluster.collector.overview()).time_to_first_token
    assert found.count == 100
    assert found.p90.ToNanoseconds() / 1e9 == pytest.approx(0.1, rel=0.05)
    assert found.p99.ToNanoseconds() / 1e9 == pytest.approx(5.0, rel=0.05)


def answer(uptime: float, busy: float, drawn: int) -> worker_pb2.InspectResponse:
    return worker_pb2.InspectResponse(uptime=seconds(uptime), busy=seconds(busy), generation_tokens=drawn)


def test_rates_are_those_of_the_last_seconds() -> None:
    history, status = WorkerHistory(), pb.WorkerStatus()
    history.tell(status)
    assert not status.HasField("window")
    history.hear(answer(100, 0, 0), 0.0)
    history.tell(status)
    assert (status.window.ToNanoseconds() / 1e9, status.utilization) == (100, 0), "since the start"
    for at in range(1, 31):
        history.hear(answer(100 + at, 0.5 * at, 20 * at), float(at))
    history.tell(status)
    assert status.window.ToNanoseconds() / 1e9 == pytest.approx(10, abs=1)
    assert status.utilization == pytest.approx(0.5)
    assert status.generation_tokens_per_second == pytest.approx(20)
    history.hear(answer(90, 50, 9999), 31.0)
    history.tell(status)
    assert status.utilization == pytest.approx(0.5), "an answer that was overtaken changes nothing"


def test_the_swing_is_that_of_five_minutes() -> None:
    history = RoleHistory()
    assert history.swing(0.0, 0.9) == 0
    assert history.swing(100.0, 0.2) == pytest.approx(0.7)
    assert history.swing(299.0, 0.5) == pytest.approx(0.7)
    assert history.swing(301.0, 0.5) == pytest.approx(0.3)


async def test_requests_of_all_routers_are_one_list() -> None:
    async with telling_cluster() as cluster:
        for name, ids in (("r0", (1, 4)), ("r1", (2, 3))):
            router = await cluster.router(name)
            for at in ids:
                one = telemetry_pb2.RequestSummary(client_id=f"q{at}", router=name)
                one.arrived.FromSeconds(at)
                router.requests.append(one)
        asked = pb.ListRequestsRequest(state="live", pool="p", limit=3)
        found = await cluster.collector.requests(asked)
        assert [one.client_id for one in found.requests] == ["q4", "q3", "q2"]
        assert found.found == 4
        told = cluster.routes["r0"].asked[0]
        assert (told.state, told.pool, told.limit) == ("live", "p", 3)
        only = await cluster.collector.requests(pb.ListRequestsRequest(router="r1"))
        assert [one.client_id for one in only.requests] == ["q3", "q2"]
        cluster.routes["r1"].error = TwinpoolError("UNAUTHENTICATED")
        assert (await cluster.collector.requests(asked)).unreachable == ["r1"]
        with pytest.raises(TwinpoolError, match="no router 'r9'"):
            await cluster.collector.requests(pb.ListRequestsRequest(router="r9"))


async def test_prefixes_of_all_routers_are_put_together() -> None:
    def prefix(name: bytes, blocks: int, uses: int, *holders: str) -> telemetry_pb2.HotPrefix:
        made = telemetry_pb2.HotPrefix(block_hash=name * 16, blocks=blocks, uses=uses)
        for holder in holders:
            made.holders.add(worker=worker_pb2.WorkerId(name=holder), blocks=blocks)
        return made

    async with telling_cluster() as cluster:
        (await cluster.router("r0")).prefixes = [prefix(b"a", 4, 2, "p0"), prefix(b"b", 9, 1, "p1")]
        (await cluster.router("r1")).prefixes = [prefix(b"a", 4, 3, "p0", "d0")]
        first, second = await cluster.collector.prefixes(10)
    assert (first.uses, [one.worker.name for one in first.holders]) == (5, ["p0", "d0"])
    assert second.block_hash == b"b" * 16


async def test_routers_with_tenants_are_shown_the_operators_key(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("tp-secret\n")
    async with telling_cluster(operator_key_file=str(path)) as cluster:
        router = await cluster.router("r0")
        assert (await cluster.collector.overview()).routers[0].reachable
        assert router.keys == ["Bearer tp-secret"]
    async with telling_cluster(operator_key_file=str(tmp_path / "none")) as cluster:
        await cluster.router("r0")
        assert "operator_key_file" in (await cluster.collector.overview()).routers[0].error


@asynccontextmanager
async def served(cluster: Cluster) -> AsyncIterator[Any]:
    """A stub to the control process of a cluster."""
    view: Any = cluster
    server = ControlServer(cluster.config, view, view, collector=cluster.collector)
    await server.start()
    async with rpc.channel(server.endpoint, RpcConfig()) as channel:
        yield control_pb2_grpc.ControlServiceStub(channel)
    await server.stop()


async def test_operators_get_it_once_or_again_and_again() -> None:
    async with telling_cluster() as cluster, served(cluster) as stub:
        await cluster.worker("p0", PREFILL)
        await cluster.worker("d0", DECODE, pool="other")
        whole = (await stub.GetOverview(pb.GetOverviewRequest(), timeout=60)).overview
        assert [pool.pool for pool in whole.pools] == ["default", "other"]
        part = (await stub.GetOverview(pb.GetOverviewRequest(pool="other"), timeout=60)).overview
        assert [pool.pool for pool in part.pools] == ["other"]
        assert [worker.record.worker.name for worker in part.workers] == ["d0"]
        request = pb.WatchOverviewRequest()
        request.interval.FromMilliseconds(200)
        call = stub.WatchOverview(request)
        moments = [(await call.read()).overview.at.ToNanoseconds() for _ in range(3)]
        assert moments == sorted(set(moments))
        call.cancel()
        for milliseconds in (199, 60_001):
            request.interval.FromMilliseconds(milliseconds)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.WatchOverview(request).read()
            assert from_rpc_error(caught.value).reason == "INVALID_ARGUMENT"


async def test_a_stop_ends_the_streams() -> None:
    async with telling_cluster() as cluster:
        async with served(cluster) as stub:
            request = pb.WatchOverviewRequest()
            request.interval.FromSeconds(60)
            call = stub.WatchOverview(request)
            await call.read()
        assert call.done() or await call.code() is not None


def test_messages_become_plain_data() -> None:
    status = pb.WorkerStatus(
        record=pb.WorkerRecord(worker=worker_pb2.WorkerId(name="w", incarnation=255), role=PREFILL),
        reachable=True,
        age=seconds(1.5),
    )
    status.record.started_at.FromSeconds(100)
    found = plain(status)
    assert found["record"]["worker"] == {"name": "w", "incarnation": "00000000000000ff"}
    assert (found["record"]["role"], found["record"]["state"]) == ("prefill", "unspecified")
    assert (found["age"], found["record"]["started_at"], found["counts"], found["hit_rate"]) == (
        1.5,
        100.0,
        None,
        None,
    )
    prefix = telemetry_pb2.HotPrefix(block_hash=b"\x01\xff")
    assert plain(prefix)["block_hash"] == "01ff"
    assert "time_to_first_token" not in plain(telemetry_pb2.RouterTelemetry()), "sketches are for programs"
    assert "time_to_first_token_summary" in plain(telemetry_pb2.RouterTelemetry())
