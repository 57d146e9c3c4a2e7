# SPDX-License-Identifier: Apache-2.0
"""Two workers in one process, over real gRPC streams and threads; blocks move by loopback."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc.aio
import pytest
from worker_pair import random_prompt, reference, stack

from tests.support.quiescence import assert_quiescent, inspect
from tests.support.waiting import until
from tests.support.worker_client import (
    AttemptFailedError,
    Request,
    RouterSession,
    generate,
    next_message,
)
from twinpool import rpc
from twinpool.config import TwinpoolConfig
from twinpool.errors import from_rpc_error
from twinpool.ids import WorkerKey, new_incarnation
from twinpool.v1 import handoff_pb2, handoff_pb2_grpc, worker_pb2_grpc
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.control_pb2 import WorkerRecord
from twinpool.worker.commands import worker_id
from twinpool.worker.serving import Serving

CONFIG = TwinpoolConfig.model_validate(
    {
        "kv": {"num_blocks": 24, "block_tokens": 16, "poison_freed": True},
        "transfer": {"backend": "loopback", "digest": "always", "read_deadline_seconds": 20},
        "rpc": {"connect_timeout_seconds": 60},
        "worker": {"report_interval_seconds": 0.05},
    }
)


@dataclass
class Running:
    serving: Serving
    server: rpc.Server
    record: WorkerRecord
    stopped: bool = False

    async def stop(self) -> None:
        if not self.stopped:
            self.stopped = True
            await self.serving.close_streams()
            await self.server.stop(0.5)
            await self.serving.stop()


async def _start(role: str, fingerprint: str = "unit") -> Running:
    key = WorkerKey(f"{role}-0", new_incarnation())
    engine = replace(stack(24), fingerprint=fingerprint)
    serving, server = Serving(CONFIG, role, key, engine), rpc.Server(CONFIG.rpc)
    port = server.bind("127.0.0.1")
    await serving.start(server)
    await server.start()
    return Running(serving, server, WorkerRecord(worker=worker_id(key), endpoint=f"127.0.0.1:{port}"))


@asynccontextmanager
async def _pair(decode_fingerprint: str = "unit") -> AsyncIterator[tuple[Running, Running]]:
    prefill, decode = await _start("prefill"), await _start("decode", decode_fingerprint)
    try:
        yield prefill, decode
    finally:
        await prefill.stop()
        await decode.stop()


@asynccontextmanager
async def _sessions(*workers: Running) -> AsyncIterator[list[RouterSession]]:
    sessions = [RouterSession(worker.record) for worker in workers]
    try:
        for session in sessions:
            await session.open()
        yield sessions
    finally:
        for session in sessions:
            await session.close()


async def test_a_request_over_real_streams() -> None:
    prompt = random_prompt(37)
    async with _pair() as (p, d), _sessions(p, d) as (to_p, to_d):
        assert to_p.welcome is not None
        assert to_p.welcome.role == pb.ROLE_PREFILL
        answer = await generate(to_p, to_d, Request(prompt, "r", "unit", max_tokens=9))
        assert answer.tokens == [reference(prompt, 9)]
        await assert_quiescent([p.record.endpoint, d.record.endpoint])
        counts = await inspect(d.record.endpoint)
        assert (counts.sessions, counts.total_blocks, counts.fence_failures) == (1, 24, 0)
        assert counts.bytes_read == answer.bytes == 3 * 16 * counts.kv_bytes_per_token


async def test_many_at_once_share_step_messages() -> None:
    prompts = [random_prompt(5 + 3 * number, number) for number in range(6)]
    async with _pair() as (p, d), _sessions(p, d) as (to_p, to_d):
        requests = [Request(prompt, f"r{i}", "unit", max_tokens=28) for i, prompt in enumerate(prompts)]
        answers = await asyncio.gather(*(generate(to_p, to_d, request) for request in requests))
        assert [answer.tokens for answer in answers] == [[reference(prompt, 28)] for prompt in prompts]
        assert to_d.step_messages < 6 * 27
        await assert_quiescent([p.record.endpoint, d.record.endpoint])


async def test_another_incarnation_is_refused() -> None:
    async with _pair() as (p, _):
        session = RouterSession(p.record)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await session.open(incarnation=12345)
        assert from_rpc_error(caught.value).reason == "INCARNATION_MISMATCH"
        await session.close()


@pytest.mark.parametrize(
    "first",
    [pb.SessionRequest(), pb.SessionRequest(cancel=pb.CancelCommand(id=pb.AttemptId(request_id="r")))],
)
async def test_the_first_message_must_be_hello(first: pb.SessionRequest) -> None:
    async with _pair() as (p, _), rpc.channel(p.record.endpoint, CONFIG.rpc) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Session(iter([first]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_wrong_command_is_refused_and_the_session_goes_on() -> None:
    prompt = random_prompt(20)
    async with _pair() as (p, d), _sessions(p, d) as (to_p, to_d):
        wrong = Request(prompt, "wrong", "unit", max_tokens=10_000).decode(p.record)
        queue = to_d.attempt("wrong")
        to_d.send(wrong)
        with pytest.raises(AttemptFailedError) as caught:
            await next_message(queue, "decode")
        assert caught.value.reason == pb.FAILURE_REASON_INVALID
        assert (await generate(to_p, to_d, Request(prompt, "r", "unit", max_tokens=2))).tokens == [
            reference(prompt, 2)
        ]


async def test_a_message_that_is_no_command_ends_the_session() -> None:
    async with _pair() as (p, _), _sessions(p) as (to_p,):
        to_p.send(pb.SessionRequest())
        error = await asyncio.wait_for(asyncio.shield(to_p.ended), 60)
        assert isinstance(error, grpc.aio.AioRpcError)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_router_that_dials_anew_ends_its_old_session() -> None:
    async with _pair() as (p, _), _sessions(p) as (first,):
        second = RouterSession(p.record)
        second.incarnation = first.incarnation
        await second.open()
        assert isinstance(await asyncio.wait_for(asyncio.shield(first.ended), 60), grpc.aio.AioRpcError)
        assert (await inspect(p.record.endpoint)).sessions == 1
        await second.close()


async def test_a_router_that_dies_frees_all_it_started() -> None:
    async with _pair() as (p, d), _sessions(p) as (to_p,):
        to_d = RouterSession(d.record)
        await to_d.open()
        request = Request(random_prompt(50), "r", "unit", max_tokens=300)
        running = asyncio.create_task(generate(to_p, to_d, request))
        await until(lambda: to_d.step_messages or running.done())
        await to_d.drop()
        await assert_quiescent([d.record.endpoint])
        running.cancel()
        to_p.send(request.cancel())
        await assert_quiescent([p.record.endpoint])


async def test_draining_refuses_the_new_and_finishes_the_old() -> None:
    prompt = random_prompt(20)
    async with _pair() as (p, d), _sessions(p, d) as (to_p, to_d):
        running = asyncio.create_task(generate(to_p, to_d, Request(prompt, "old", "unit", max_tokens=200)))
        await until(lambda: to_d.step_messages or running.done())
        draining = asyncio.create_task(d.serving.drain(60, 0.0))
        await asyncio.sleep(0)
        with pytest.raises(AttemptFailedError) as caught:
            await generate(to_p, to_d, Request(prompt, "new", "unit"))
        assert caught.value.reason == pb.FAILURE_REASON_NOT_SERVING
        assert (await running).tokens == [reference(prompt, 200)]
        assert await asyncio.wait_for(draining, 60) is True


async def test_what_outlives_the_drain_is_told_before_the_stream_ends() -> None:
    async with _pair() as (p, d), _sessions(p, d) as (to_p, to_d):
        request = Request(random_prompt(20), "r", "unit", max_tokens=300)
        running = asyncio.create_task(generate(to_p, to_d, request))
        await until(lambda: to_d.step_messages or running.done())
        assert await d.serving.drain(0.001, 0.0) is False
        await d.stop()
        with pytest.raises(AttemptFailedError) as caught:
            await running
        assert caught.value.reason == pb.FAILURE_REASON_NOT_SERVING
        error = await asyncio.wait_for(asyncio.shield(to_d.ended), 60)
        assert isinstance(error, grpc.aio.AioRpcError)
        assert from_rpc_error(error).reason == "DRAINING"


async def test_workers_of_unequal_fingerprints_never_pair() -> None:
    async with _pair(decode_fingerprint="other") as (p, d), _sessions(p, d) as (to_p, to_d):
        with pytest.raises(AttemptFailedError) as caught:
            await generate(to_p, to_d, Request(random_prompt(20), "r", "unit"))
        assert caught.value.reason == pb.FAILURE_REASON_FENCED
        assert "'other'" in str(caught.value)
        await assert_quiescent([p.record.endpoint, d.record.endpoint])


async def test_an_owner_of_another_incarnation_is_fenced() -> None:
    async with _pair() as (p, d), _sessions(p, d) as (to_p, to_d):
        stale = WorkerRecord()
        stale.CopyFrom(p.record)
        stale.worker.incarnation = 4242
        queue = to_d.attempt("r")
        to_d.send(Request(random_prompt(20), "r", "unit").decode(stale))
        with pytest.raises(AttemptFailedError) as caught:
            await next_message(queue, "decode")
        assert caught.value.reason == pb.FAILURE_REASON_FENCED
        await assert_quiescent([d.record.endpoint])
        assert not to_p.attempt("r").qsize()


async def test_an_owner_that_is_not_there_fails_at_once() -> None:
    async with _pair() as (p, d), _sessions(d) as (to_d,):
        await p.stop()
        queue = to_d.attempt("r")
        to_d.send(Request(random_prompt(20), "r", "unit").decode(p.record))
        with pytest.raises(AttemptFailedError) as caught:
            await next_message(queue, "decode")
        assert caught.value.reason == pb.FAILURE_REASON_PEER_LOST
        await assert_quiescent([d.record.endpoint])


async def test_an_owner_that_stops_fails_what_is_expected_of_it() -> None:
    async with _pair() as (p, d), _sessions(d) as (to_d,):
        queue = to_d.attempt("r")
        to_d.send(Request(random_prompt(20), "r", "unit").decode(p.record))
        assert (await next_message(queue, "decode")).WhichOneof("message") == "reserved"
        await p.stop()
        with pytest.raises(AttemptFailedError) as caught:
            await next_message(queue, "decode")
        assert caught.value.reason == pb.FAILURE_REASON_PEER_LOST
        await assert_quiescent([d.record.endpoint])


async def test_a_reader_that_has_not_connected_gets_no_stream() -> None:
    async with _pair() as (p, _), rpc.channel(p.record.endpoint, CONFIG.rpc) as channel:
        hello = handoff_pb2.ExchangeRequest(reader=pb.WorkerId(name="stranger", incarnation=1))
        call = handoff_pb2_grpc.HandoffServiceStub(channel).Exchange(iter([hello]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call))
        assert from_rpc_error(caught.value).reason == "INCARNATION_MISMATCH"


async def test_load_is_reported_at_once_then_when_it_changes_and_not_too_often() -> None:
    async with _pair() as (p, d), _sessions(p, d) as (to_p, to_d):
        await until(lambda: to_d.loads)
        assert to_d.loads[0].available_blocks == to_d.loads[0].total_blocks == 24
        started = asyncio.get_running_loop().time()
        await generate(to_p, to_d, Request(random_prompt(20), "r", "unit", max_tokens=300))
        seconds = asyncio.get_running_loop().time() - started
        assert any(load.running_requests == 1 and load.step_time.nanos for load in to_d.loads)
        assert len(to_d.loads) <= 3 + seconds / 0.05
        await assert_quiescent([d.record.endpoint])
        await until(lambda: not to_d.loads[-1].running_requests)
        seen = len(to_d.loads)
        await asyncio.sleep(0.3)
        assert len(to_d.loads) <= seen + 1, "nothing changes, so there is nothing to report"
