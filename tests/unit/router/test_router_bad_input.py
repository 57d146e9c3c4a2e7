# SPDX-License-Identifier: Apache-2.0
"""Bad input over the wire: the exact status, and no worker hears of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest

from tests.support.fake_cluster import FakeCluster, collect, fake_cluster, generate, prompt
from tests.support.fake_worker import Script
from tests.support.waiting import until
from twinpool.router.service import SERVICE
from twinpool.v1 import inference_pb2 as pb

INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


@pytest.fixture
async def cluster(model_path: Path) -> AsyncIterator[FakeCluster]:
    async with fake_cluster(model_path, decode_script=Script(step_seconds=0.01)) as made:
        yield made


def chat(role: str, content: str) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role=role, content=content)])


def with_stop(
    change: Callable[[pb.StopConditions], object], max_tokens: int | None = 4
) -> pb.GenerateRequest:
    request = generate(max_tokens=max_tokens)
    change(request.stop)
    return request


def with_sampling(**values: float) -> pb.GenerateRequest:
    return generate(sampling=pb.SamplingParams(**values))  # type: ignore[arg-type]


CASES: dict[str, tuple[pb.GenerateRequest, grpc.StatusCode, str, str]] = {
    "no prompt": (pb.GenerateRequest(), INVALID, "EMPTY_PROMPT", "prompt is not set"),
    "no ids": (pb.GenerateRequest(token_ids=pb.TokenIds()), INVALID, "EMPTY_PROMPT", "0 tokens"),
    "empty text": (generate(text=""), INVALID, "EMPTY_PROMPT", "text is empty"),
    "empty chat": (generate(chat=pb.ChatMessages()), INVALID, "EMPTY_PROMPT", "chat.messages is empty"),
    "role": (generate(chat=chat("robot", "x")), INVALID, "INVALID_CHAT", "chat.messages[0].role is 'robot'"),
    "long prompt": (generate(prompt(4096)), INVALID, "PROMPT_TOO_LONG", "4096 tokens; the limit is 4095"),
    "context": (
        generate(prompt(100), max_tokens=3997),
        INVALID,
        "CONTEXT_LIMIT_EXCEEDED",
        "make 4097; the limit is 4096",
    ),
    "vocabulary": (
        generate([1, 258]),
        INVALID,
        "TOKEN_OUT_OF_VOCABULARY",
        "token_ids.ids[1] is 258; the limit is 257",
    ),
    "largest id": (generate([2**32 - 1]), INVALID, "TOKEN_OUT_OF_VOCABULARY", "is 4294967295"),
    "temperature": (with_sampling(temperature=-1), INVALID, "INVALID_SAMPLING", "sampling.temperature is -1"),
    "nan": (with_sampling(top_p=float("nan")), INVALID, "INVALID_SAMPLING", "sampling.top_p is nan"),
    "infinite": (
        with_sampling(temperature=float("inf")),
        INVALID,
        "INVALID_SAMPLING",
        "is inf; the limit is 0 to 100",
    ),
    "top_k": (with_sampling(top_k=10**9), INVALID, "INVALID_SAMPLING", "sampling.top_k is 1000000000"),
    "max_tokens": (generate(max_tokens=0), INVALID, "INVALID_STOP", "stop.max_tokens is 0"),
    "min_tokens": (
        with_stop(lambda stop: setattr(stop, "min_tokens", 5)),
        INVALID,
        "INVALID_STOP",
        "stop.min_tokens is 5",
    ),
    "stop string": (
        with_stop(lambda stop: stop.stop_strings.append("")),
        INVALID,
        "INVALID_STOP",
        "stop_strings[0]",
    ),
    "n": (generate(n=17), INVALID, "INVALID_N", "n is 17; the limit is 1 to 16"),
    "logprobs": (generate(logprobs=21), INVALID, "INVALID_LOGPROBS", "logprobs is 21; the limit is 0 to 20"),
    "prompt_logprobs": (
        generate(prompt_logprobs=21),
        INVALID,
        "INVALID_LOGPROBS",
        "prompt_logprobs is 21; the limit is 0 to 20",
    ),
    "priority": (generate(priority=-101), INVALID, "INVALID_PRIORITY", "priority is -101"),
    "request id": (
        generate(request_id="no spaces"),
        INVALID,
        "INVALID_REQUEST_ID",
        "request_id is 'no spaces'",
    ),
    "tenant": (generate(tenant="t" * 65), INVALID, "INVALID_TENANT", "64 printable"),
    "model": (
        generate(model="other"),
        NOT_FOUND,
        "MODEL_NOT_FOUND",
        "model is 'other'; the limit is one of fake",
    ),
    "adapter": (generate(adapter="lora"), NOT_FOUND, "ADAPTER_NOT_FOUND", "adapter is 'lora'"),
}


@pytest.mark.parametrize("case", CASES)
async def test_the_status_names_field_value_and_limit(cluster: FakeCluster, case: str) -> None:
    request, code, reason, words = CASES[case]
    seen = {name: len(made.prefills) + len(made.decodes) for name, made in cluster.workers.items()}
    answer = await cluster.ask(request)
    assert (answer.code, answer.reason) == (code, reason)
    assert answer.error is not None
    assert words in answer.error.message
    assert not answer.events
    assert seen == {name: len(made.prefills) + len(made.decodes) for name, made in cluster.workers.items()}
    await cluster.assert_quiescent()


def raw_call(cluster: FakeCluster, method: str) -> "grpc.aio.UnaryStreamMultiCallable[bytes, bytes]":
    return cluster.channel.unary_stream(
        f"/{SERVICE}/{method}", request_serializer=None, response_deserializer=None
    )


@pytest.mark.parametrize(
    ("raw", "reason", "words"),
    [
        (
            pb.GenerateRequest(text="QQQ").SerializeToString().replace(b"QQQ", b"\xff\xfea"),
            "INVALID_TEXT",
            "text is not valid UTF-8",
        ),
        (b"\x0a\xff", "INVALID_ARGUMENT", "2 bytes is not a valid GenerateRequest"),
        (generate().SerializeToString() + b"\x9a\x06\x01A", "INVALID_ARGUMENT", "field number 99"),
    ],
    ids=["utf-8", "garbage", "unknown field"],
)
async def test_bytes_that_are_no_request(cluster: FakeCluster, raw: bytes, reason: str, words: str) -> None:
    answer = await collect(raw_call(cluster, "Generate")(raw))  # type: ignore[arg-type]
    assert (answer.code, answer.reason) == (INVALID, reason)
    assert answer.error is not None
    assert words in answer.error.message


async def test_a_model_must_be_named_if_there_are_two(model_path: Path) -> None:
    async with fake_cluster(model_path) as cluster:
        await cluster.add("p9", cluster.workers["p0"].role, model_path=str(model_path), model="second")
        await cluster.add("d9", cluster.workers["d0"].role, model_path=str(model_path), model="second")
        await cluster.ready()
        answer = await cluster.ask(generate())
        assert answer.reason == "INVALID_ARGUMENT"
        assert answer.error is not None
        assert "fake, second" in answer.error.message
        for model, worker in (("fake", "d0"), ("second", "d9")):
            for _ in range(4):
                assert (await cluster.ask(generate(model=model))).finished.decode_worker == worker


async def test_workers_of_two_kv_formats_are_never_paired(model_path: Path) -> None:
    async with fake_cluster(model_path) as cluster:
        await cluster.add("d9", cluster.workers["d0"].role, model_path=str(model_path), fingerprint="other")
        await until(
            lambda: (session := cluster.router.fleet.session(cluster.workers["d9"].key)) and session.up
        )
        for seed in range(8):
            assert (await cluster.ask(generate(prompt(40, seed)))).finished.decode_worker == "d0"


async def test_no_worker_at_all(model_path: Path) -> None:
    async with fake_cluster(model_path, prefill=0, decode=0) as cluster:
        answer = await cluster.ask(generate())
        assert (answer.code, answer.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKERS")
        assert answer.error is not None
        assert answer.error.retry_after is not None


async def test_an_id_in_flight_is_refused_and_may_be_used_again(cluster: FakeCluster) -> None:
    call = cluster.stub.Generate(generate(max_tokens=500, request_id="same"))
    await call.read()
    answer = await cluster.ask(generate(request_id="same"))
    assert (answer.code, answer.reason) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST")
    assert (await cluster.ask(generate(request_id="same", tenant="other"))).error is None, (
        "ids are a tenant's own"
    )
    call.cancel()
    await cluster.assert_quiescent()
    assert (await cluster.ask(generate(request_id="same"))).started.request_id == "same"


@pytest.mark.parametrize("size", [(1 << 20), (4 << 20) - 200, (4 << 20) + 200, 16 << 20])
async def test_message_sizes(model_path: Path, size: int) -> None:
    """The limit is ours, not gRPC's default of 4 MiB; beyond it the answer names value and limit."""
    limit = 6 << 20
    settings: dict[str, object] = {"max_message_bytes": limit, "max_prompt_tokens": 1 << 20}
    record: dict[str, object] = {"max_context_tokens": 1 << 25, "num_blocks": 1 << 21}
    async with fake_cluster(model_path, settings=settings, **record) as cluster:
        answer = await cluster.ask(generate([1] * size, max_tokens=1))  # a byte each on the wire
        if size > limit:
            assert (answer.code, answer.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
            assert answer.error is not None
            assert str(limit) in answer.error.message
        elif size > 1 << 20:
            assert answer.reason == "PROMPT_TOO_LONG", "more tokens than a message to a worker may hold"
        else:
            assert answer.finished.usage.prompt_tokens == size
        await cluster.assert_quiescent()


async def test_health_says_whether_a_model_can_be_asked(model_path: Path) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with fake_cluster(model_path, prefill=1, decode=0) as cluster:
        stub = health_pb2_grpc.HealthStub(cluster.channel)

        async def status(service: str) -> int:
            response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            return int(response.status)

        serving = health_pb2.HealthCheckResponse.SERVING
        assert await status("") == serving
        assert await status(SERVICE) != serving
        await cluster.add("d0", 2, model_path=str(model_path))  # type: ignore[arg-type]
        await cluster.ready()
        async with asyncio.timeout(60):
            while await status(SERVICE) != serving:  # noqa: ASYNC110 - the condition is an answer over the wire
                await asyncio.sleep(0.05)
