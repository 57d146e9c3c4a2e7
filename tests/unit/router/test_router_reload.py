# SPDX-License-Identifier: Apache-2.0
"""Each key of a router's that is marked reloadable is taken up by a router that runs. Those of the core: test_router_core_configure."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from tests.support.fake_cluster import DRAINING, FakeCluster, fake_cluster, generate, prompt
from tests.support.fake_worker import Script
from tests.support.waiting import until
from twinpool._core import AdmissionConfig
from twinpool.config import reloadable
from twinpool.ids import WorkerKey
from twinpool.router.breaker import Breakers, BreakerState
from twinpool.router.prefix import Source
from twinpool.router.retry import Retries
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import worker_pb2 as worker

A, B = WorkerKey("a", 1), WorkerKey("b", 1)


@pytest.fixture
async def cluster(model_path: Path) -> AsyncIterator[FakeCluster]:
    async with fake_cluster(model_path) as made:
        yield made


def chat(count: int = 1, tools: int = 0) -> pb.GenerateRequest:
    messages = [pb.ChatMessage(role="user", content="hi") for _ in range(count)]
    made = [pb.Tool(name=f"tool{at}") for at in range(tools)]
    return generate(chat=pb.ChatMessages(messages=messages, tools=made))


def stop(**fields: Any) -> pb.GenerateRequest:
    request = generate()
    request.stop.MergeFrom(pb.StopConditions(**fields))
    return request


def biased() -> pb.GenerateRequest:
    bias = pb.LogitBias(token_id=65, bias=1.0)
    return generate(sampling=pb.SamplingParams(logit_bias=[bias]))


REQUESTS: dict[str, tuple[object, pb.GenerateRequest, str]] = {
    "max_prompt_tokens": (19, generate(prompt(20)), "PROMPT_TOO_LONG"),
    "max_prompt_chars": (5, generate(text="abcdef"), "PROMPT_TOO_LONG"),
    "max_output_tokens": (3, generate(max_tokens=4), "INVALID_STOP"),
    "max_choices": (1, generate(n=2), "INVALID_N"),
    "max_logprobs": (0, generate(logprobs=1), "INVALID_LOGPROBS"),
    "max_scored_prompt_tokens": (19, generate(prompt(20), prompt_logprobs=0), "PROMPT_TOO_LONG"),
    "max_stop_strings": (0, stop(stop_strings=["ab"]), "INVALID_STOP"),
    "max_stop_string_chars": (1, stop(stop_strings=["ab"]), "INVALID_STOP"),
    "max_stop_token_ids": (0, stop(stop_token_ids=[7]), "INVALID_STOP"),
    "max_logit_biases": (0, biased(), "INVALID_SAMPLING"),
    "max_chat_messages": (1, chat(2), "INVALID_CHAT"),
    "max_tools": (0, chat(tools=1), "INVALID_TOOLS"),
    "max_grammar_bytes": (
        1,
        generate(structured=pb.StructuredOutput(regex="[ab]+")),
        "INVALID_GRAMMAR",
    ),
    "max_tenant_chars": (1, generate(tenant="ab"), "INVALID_TENANT"),
    "max_resume_grace_seconds": (1, generate(resume_grace=Duration(seconds=9)), "INVALID_RESUME"),
}
"""Key to a limit, a request that it refuses, and the reason."""


@pytest.mark.parametrize("key", REQUESTS)
async def test_a_lower_limit_refuses_the_next_request(cluster: FakeCluster, key: str) -> None:
    limit, request, reason = REQUESTS[key]
    before = await cluster.ask(request)
    if key == "max_tools":
        # This model's template shows no tools, which is found after their number.
        assert "template" in str(before.error)
    else:
        assert before.error is None
    cluster.apply(**{key: limit})
    answer = await cluster.ask(request)
    assert answer.reason == reason
    assert answer.error is not None
    assert (
        f"more than {limit} tools" in answer.error.message
        if key == "max_tools"
        else "limit" in answer.error.message
    )


async def test_the_limit_of_a_prompt_holds_for_detokenize_too(cluster: FakeCluster) -> None:
    wanted = pb.DetokenizeRequest(token_ids=pb.TokenIds(ids=prompt(20)))
    await cluster.stub.Detokenize(wanted)
    cluster.apply(max_prompt_tokens=19)
    with pytest.raises(grpc.RpcError, match="the limit is 19"):
        await cluster.stub.Detokenize(wanted)


# --- what is not about one request's form -----------------------------------------------------


async def retry_burst(cluster: FakeCluster) -> None:
    retries = Retries(cluster.live.following.router, cluster.router.fleet.breakers)
    assert retries.budget.left == 100
    cluster.apply(retry_burst=3, retry_ratio=0)
    retries.requested()
    assert retries.budget.left == 3


async def retry_ratio(cluster: FakeCluster) -> None:
    cluster.apply(retry_burst=2, retry_ratio=0)
    retries = Retries(cluster.live.following.router, cluster.router.fleet.breakers)
    assert retries.budget.take(forced=False)
    retries.requested()
    assert retries.budget.left == 1
    cluster.apply(retry_burst=2, retry_ratio=0.5)
    retries.requested()
    assert retries.budget.left == 1.5


def breakers_of(cluster: FakeCluster, now: list[float]) -> Breakers:
    return Breakers(cluster.live.following.router, lambda *_asked: None, lambda _key: True, lambda: now[0])


async def breaker_failures(cluster: FakeCluster) -> None:
    breakers = breakers_of(cluster, [0.0])
    breakers.failed(A)
    assert breakers.closed(A)
    cluster.apply(breaker_failures=2)
    breakers.failed(A)
    assert breakers.state(A) is BreakerState.OPEN
    cluster.apply(breaker_failures=0)
    for _ in range(9):
        breakers.failed(B)
    assert breakers.closed(B)


async def breaker_open_seconds(cluster: FakeCluster) -> None:
    now = [0.0]
    breakers = breakers_of(cluster, now)
    cluster.apply(breaker_failures=1, breaker_open_seconds=50)
    breakers.failed(A)
    now[0] = 49.0
    assert breakers.state(A) is BreakerState.OPEN
    now[0] = 50.0
    assert breakers.state(A) is BreakerState.HALF_OPEN


async def fetch_backoff_seconds(cluster: FakeCluster) -> None:
    def failed_and_named() -> bool:
        key = cluster.workers["p0"].key
        sources = cluster.router.prefixes
        named = worker.PrefixSource(blocks=2)
        failed = worker.PrefillDone(fetched=worker.PrefixFetched(failure=worker.FAILURE_REASON_TRANSFER))
        sources.fetched(Source(key, named), A, failed)
        action: Any = SimpleNamespace(local=False, fetch_from=(key.name, key.incarnation), fetch_blocks=2)
        return sources.placed(action) is not None

    cluster.apply(fetch_backoff_seconds=0)
    assert failed_and_named()
    cluster.apply(fetch_backoff_seconds=3600)
    assert not failed_and_named()


async def resume_grace_seconds(cluster: FakeCluster) -> None:
    await cluster.ask(generate(idempotency_key="first"))
    assert len(cluster.router.kept) == 1
    cluster.apply(resume_grace_seconds=0.01)
    await cluster.ask(generate(idempotency_key="second"))
    await until(lambda: len(cluster.router.kept) == 1)


async def reserve_timeout_seconds(cluster: FakeCluster) -> None:
    cluster.workers["d0"].script.silent = {"reserved"}
    cluster.apply(reserve_timeout_seconds=0.05, max_attempts=1)
    answer = await cluster.ask(generate())
    assert answer.error is not None
    assert "did not answer the reservation in time" in answer.error.message


async def stream_interval_seconds(cluster: FakeCluster) -> None:
    async def messages() -> int:
        gate = cluster.workers["d0"].script.handoff_gate = asyncio.Event()
        call = cluster.stub.Generate(generate(max_tokens=30))
        assert (await call.read()).WhichOneof("event") == "started"
        assert len((await call.read()).tokens.token_ids) == 1
        gate.set()
        count = 0
        while (event := await call.read()) is not grpc.aio.EOF:
            count += event.WhichOneof("event") == "tokens"
        return count

    cluster.workers["d0"].script.step_seconds = 0.01
    assert await messages() > 5
    cluster.apply(stream_interval_seconds=10)
    # The second message waits for the interval, or for the end.
    assert await messages() == 1


async def finish_seconds(cluster: FakeCluster) -> None:
    await cluster.add("d1", worker.ROLE_DECODE, model_path=cluster.workers["d0"].record().model_path)
    await cluster.ready()
    for name in ("d0", "d1"):
        cluster.workers[name].script.hold_after_tokens = 4
    asking = asyncio.create_task(cluster.ask(generate(max_tokens=8)))
    await until(lambda: any(cluster.workers[name].held for name in ("d0", "d1")))
    name = "d0" if cluster.workers["d0"].held else "d1"
    cluster.router.fleet.upsert(cluster.workers[name].record(DRAINING))
    await until(lambda: bool(list(cluster.router.fleet.leaving())))
    cluster.router.migration.watch()
    assert cluster.workers[name].held
    cluster.apply(finish_seconds=0)
    await until(lambda: not cluster.workers[name].held)
    for other in ("d0", "d1"):
        cluster.workers[other].script.hold_after_tokens = None
    answer = await asking
    assert answer.error is None
    assert answer.finished.decode_worker != name


OTHERS: dict[str, Callable[[FakeCluster], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        retry_burst,
        retry_ratio,
        breaker_failures,
        breaker_open_seconds,
        fetch_backoff_seconds,
        resume_grace_seconds,
        reserve_timeout_seconds,
        stream_interval_seconds,
        finish_seconds,
    )
}


@pytest.mark.parametrize("key", OTHERS)
async def test_it_is_taken_up_by_what_runs(model_path: Path, key: str) -> None:
    # Too long to wait for, should a change not count.
    settings: dict[str, object] = {
        "reserve_timeout_seconds": 600,
        "resume_grace_seconds": 300,
        "finish_seconds": 3600,
    }
    async with fake_cluster(
        model_path, settings=settings, decode_script=Script(), prefill_script=Script()
    ) as cluster:
        await OTHERS[key](cluster)


async def test_what_is_short_is_taken_up_too(cluster: FakeCluster) -> None:
    recent = cluster.router.recent
    recent.first_token(0.1, 50)
    assert sum(recent.short_ttft.message().counts) == 1
    assert cluster.live.take(1, {"metrics.short_prompt_tokens": 49})
    recent.first_token(0.1, 50)
    recent.first_token(0.1, 49)
    assert sum(recent.short_ttft.message().counts) == 2


def test_every_live_key_of_the_router_is_shown() -> None:
    live = {key.removeprefix("router.") for key in reloadable() if key.startswith("router.")}
    assert live - set(AdmissionConfig.FIELDS) == set(REQUESTS) | set(OTHERS)


# --- the core, inside a router ----------------------------------------------------------------


async def test_a_lower_queue_refuses_and_a_wider_window_places(model_path: Path) -> None:
    settings: dict[str, object] = {"prefill_window_tokens": 30, "max_bypass": 0}
    gate = asyncio.Event()
    async with fake_cluster(
        model_path, prefill_script=Script(prefill_gate=gate), settings=settings
    ) as cluster:
        asking = [asyncio.create_task(cluster.ask(generate(prompt(20, seed)))) for seed in range(3)]
        await until(lambda: cluster.router.core.stats()["queued"] == 2)
        cluster.apply(prefill_window_tokens=30, max_bypass=0, max_queue_requests=2)
        answer = await cluster.ask(generate(prompt(20, 9)))
        assert (answer.code, answer.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert answer.error is not None
        assert "max_queue_requests" in answer.error.message
        cluster.apply(prefill_window_tokens=1000)
        await until(lambda: cluster.router.core.stats()["queued"] == 0)
        gate.set()
        assert [done.error for done in await asyncio.gather(*asking)] == [None] * 3
        await cluster.assert_quiescent()


async def test_what_the_core_refuses_changes_nothing(cluster: FakeCluster) -> None:
    assert not cluster.live.take(1, {"router.max_queue_requests": 1, "router.index_max_bytes": 1 << 20})
    assert not cluster.live.take(2, {"router.max_queue_requests": 0})
    assert cluster.live.refused == 2
    assert "router.max_queue_requests = 0" in cluster.live.refusal
    assert cluster.live.following.router.max_queue_requests == 4096
    assert cluster.live.generation == 0
