# SPDX-License-Identifier: Apache-2.0
"""The client of several routers sees one stream, whatever happens to them."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tests.support.fake_cluster import generate, prompt
from tests.support.fake_pair import FakePair, fake_pair
from tests.support.fake_worker import FIRST_TOKEN, Script
from tests.support.waiting import until
from twinpool.client import Completion
from twinpool.cluster_client import ClusterClient
from twinpool.errors import TwinpoolError
from twinpool.retry import RetryPolicy
from twinpool.sync_client import SyncClusterClient
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import inference_pb2_grpc

BRISK = RetryPolicy(first_pause_seconds=0.001, longest_pause_seconds=0.01)


def expected(tokens: int, choice: int = 0) -> list[int]:
    return [FIRST_TOKEN + (at + choice) % 26 for at in range(tokens)]


def client_of(*endpoints: str, policy: RetryPolicy = BRISK) -> ClusterClient:
    client = ClusterClient(endpoints, policy=policy)
    client._breakers._next = 0
    return client


async def collect(
    client: ClusterClient,
    request: pb.GenerateRequest,
    at: int = -1,
    act: "Callable[[], object] | None" = None,
) -> Completion:
    """The whole answer. Once ``at`` tokens have come, ``act`` is awaited."""
    whole = Completion()
    done = False
    async with contextlib.aclosing(client.stream(request, timeout=120)) as events:
        async for event in events:
            assert not (event.HasField("started") and whole.started.request_id), "started came twice"
            whole.take(event)
            if act is not None and not done and sum(map(len, whole.token_ids)) >= at >= 0:
                done = True
                await act()  # type: ignore[misc]
    return whole


@pytest.mark.parametrize("n", [1, 2])
async def test_the_router_is_lost_under_a_stream(model_path: Path, n: int) -> None:
    async with (
        fake_pair(model_path, script=Script(step_seconds=0.01)) as pair,
        client_of(pair.other.router.endpoint, pair.one.router.endpoint) as client,
    ):
        request = generate(prompt(40), max_tokens=50, n=n, logprobs=1)
        whole = await collect(client, request, 7, pair.lose)
        assert whole.token_ids == [expected(50, choice) for choice in range(n)]
        assert whole.texts == ["".join(map(chr, row)) for row in whole.token_ids]
        assert [[one.chosen.token_id for one in row] for row in whole.logprobs] == whole.token_ids
        assert whole.finished.usage.completion_tokens == 50 * n
        assert (client.resumes, client.retries) == (1, 0), "going on costs no retry"
        await pair.assert_quiescent()


async def test_nobody_has_the_answer_any_more(model_path: Path) -> None:
    """It is drawn again from its first token, and the caller sees none of it twice."""
    async with (
        fake_pair(model_path, script=Script(step_seconds=0.01)) as pair,
        client_of(pair.other.router.endpoint, pair.one.router.endpoint) as client,
    ):

        async def lose_all() -> None:
            await pair.lose()
            for made in pair.one.workers.values():
                made.kept.states.clear()

        request = generate(prompt(40), max_tokens=50, logprobs=0)
        request.stop.stop_strings.append("no such text")
        whole = await collect(client, request, 7, lose_all)
        assert whole.token_ids == [expected(50)]
        assert whole.texts == ["".join(map(chr, expected(50)))]
        assert [one.chosen.token_id for one in whole.logprobs[0]] == expected(50)
        await pair.assert_quiescent()


async def test_an_answer_that_parts_when_it_is_drawn_again_is_no_answer(model_path: Path) -> None:
    async with (
        fake_pair(model_path, script=Script(step_seconds=0.01)) as pair,
        client_of(pair.other.router.endpoint, pair.one.router.endpoint) as client,
    ):

        async def lose_all() -> None:
            await pair.lose()
            for made in pair.one.workers.values():
                made.kept.states.clear()
                made.script = Script(token=lambda job, choice, offset: FIRST_TOKEN + 7)

        with pytest.raises(TwinpoolError, match="parted"):
            await collect(client, generate(prompt(40), max_tokens=50), 7, lose_all)
        await pair.assert_quiescent()


async def test_before_the_first_event_it_is_sent_elsewhere(model_path: Path) -> None:
    async with fake_pair(model_path) as pair, client_of("127.0.0.1:1", pair.one.router.endpoint) as client:
        whole = await collect(client, generate(max_tokens=5))
        assert (whole.token_ids, client.retries) == ([expected(5)], 1)


async def test_a_client_that_leaves_ends_its_answer(model_path: Path) -> None:
    async with (
        fake_pair(model_path, script=Script(step_seconds=0.01)) as pair,
        client_of(pair.one.router.endpoint) as client,
    ):
        events = client.stream(generate(max_tokens=3000))
        async for event in events:
            if event.HasField("tokens"):
                break
        await events.aclose()
        await pair.assert_quiescent()
        assert not any(made.kept.states for made in pair.one.workers.values())


async def test_an_error_of_the_request_is_not_tried_again(model_path: Path) -> None:
    async with fake_pair(model_path) as pair, client_of(pair.one.router.endpoint) as client:
        with pytest.raises(TwinpoolError, match="EMPTY_PROMPT"):
            await client.complete(generate([]))
        assert client.retries == 0


async def test_tries_and_budget_are_bounded(model_path: Path) -> None:
    policy = RetryPolicy(tries=3, first_pause_seconds=0.001, longest_pause_seconds=0.002)
    async with client_of("127.0.0.1:1", "127.0.0.1:2", policy=policy) as client:
        with pytest.raises(TwinpoolError, match="SERVER_UNREACHABLE"):
            await client.complete(generate(max_tokens=5))
        assert client.retries == 3
    policy = RetryPolicy(tries=100, ratio=0.0, min_per_second=0.2, first_pause_seconds=0.001)
    async with client_of("127.0.0.1:1", policy=policy) as client:
        with pytest.raises(TwinpoolError, match="SERVER_UNREACHABLE"):
            await client.complete(generate(max_tokens=5))
        assert client.retries == 2


async def test_a_deadline_bounds_all_tries(model_path: Path) -> None:
    policy = RetryPolicy(tries=10_000, first_pause_seconds=0.05, min_per_second=1e6)
    async with client_of("127.0.0.1:1", policy=policy) as client:
        with pytest.raises(TwinpoolError):
            await client.complete(generate(max_tokens=5), timeout=0.3)


class Scripted(inference_pb2_grpc.InferenceServiceServicer):
    """A server that says what a test wants: an iterator of events, or an exception, for each call."""

    def __init__(self) -> None:
        self.said: list[list[pb.GenerateResponse | grpc.StatusCode | None]] = []
        self.resumed: list[list[int]] = []
        self.keys: list[str] = []
        self.repeated: list[bool] = []
        self.seeds: list[int] = []

    async def _say(self, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.GenerateResponse]:
        for event in self.said.pop(0):
            if event is None:
                await asyncio.Event().wait()
            elif isinstance(event, pb.GenerateResponse):
                yield event
            else:
                await context.abort(event, "scripted")

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.keys.append(request.idempotency_key)
        self.repeated.append(request.repeated)
        self.seeds.append(request.sampling.seed)
        async for event in self._say(context):
            yield event

    async def Resume(
        self, request: pb.ResumeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ResumeResponse]:
        self.resumed.append(list(request.next_index))
        async for event in self._say(context):
            yield pb.ResumeResponse(response=event)


@asynccontextmanager
async def scripted() -> AsyncIterator[tuple[Scripted, str]]:
    server, service = grpc.aio.server(), Scripted()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield service, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def started(token: bytes = b"t") -> pb.GenerateResponse:
    return pb.GenerateResponse(started=pb.GenerateStarted(request_id="r", resume_token=token))


def tokens(offset: int, text: str) -> pb.GenerateResponse:
    return pb.GenerateResponse(tokens=pb.GenerateTokens(offset=offset, token_ids=[*text.encode()], text=text))


FINISHED = pb.GenerateResponse(finished=pb.GenerateFinished())


@pytest.mark.parametrize(
    "broken",
    [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
        "early",
    ],
)
async def test_a_stream_that_breaks_is_resumed_at_the_next_token(broken: grpc.StatusCode | str) -> None:
    async with scripted() as (service, endpoint), client_of(endpoint) as client:
        tail = [broken] if isinstance(broken, grpc.StatusCode) else []
        service.said = [
            [started(), tokens(0, "ab"), *tail],
            [started(b"u"), *tail],
            [started(b"v"), tokens(2, "c"), *tail],
            [started(), tokens(3, "d"), FINISHED],
        ]
        whole = await collect(client, generate())
        assert whole.texts == ["abcd"]
        assert service.resumed == [[2], [2], [3]]


async def test_a_repeated_request_is_the_same_request() -> None:
    async with scripted() as (service, endpoint), client_of(endpoint) as client:
        service.said = [[grpc.StatusCode.UNAVAILABLE], [started(), FINISHED]]
        await client.complete(generate())
        assert len(set(service.keys)) == 1
        assert service.keys[0]
        assert len(set(service.seeds)) == 1
        assert service.repeated == [False, True], "workers are asked only for what may have run"


async def test_a_server_that_is_silent_is_left() -> None:
    async with scripted() as (service, endpoint):
        client = ClusterClient([endpoint], policy=BRISK, hang_seconds=0.1)
        async with client:
            service.said = [[started(), tokens(0, "ab"), None], [started(), tokens(2, "c"), FINISHED]]
            assert (await client.complete(generate())).texts == ["abc"]


async def test_a_stream_that_skips_a_token_is_refused() -> None:
    async with scripted() as (service, endpoint), client_of(endpoint) as client:
        service.said = [[started(), tokens(1, "ab")]]
        with pytest.raises(TwinpoolError, match="where 0 was due"):
            await client.complete(generate())


async def test_all_streams_of_a_lost_router_go_on(model_path: Path) -> None:
    """However many they are: to go on is no retry."""
    policy = RetryPolicy(ratio=0.0, min_per_second=0.1, first_pause_seconds=0.001)
    async with (
        fake_pair(model_path, script=Script(step_seconds=0.02)) as pair,
        client_of(pair.other.router.endpoint, policy=policy) as client,
    ):
        asking = [
            asyncio.create_task(client.complete(generate(prompt(20, seed), max_tokens=60)))
            for seed in range(12)
        ]
        await until(lambda: drawing(pair) == 12, 60.0)
        client._breakers._endpoints.append(pair.one.router.endpoint)
        await pair.lose()
        for whole in await asyncio.gather(*asking):
            assert whole.token_ids == [expected(60)]
        await pair.assert_quiescent()


def drawing(pair: FakePair) -> int:
    return sum(len(session.running) for made in pair.one.workers.values() for session in made.sessions)


async def test_a_program_without_a_loop_gets_the_same(model_path: Path) -> None:
    async with fake_pair(model_path, script=Script(step_seconds=0.005)) as pair:
        endpoints = [pair.other.router.endpoint, pair.one.router.endpoint]

        def ask() -> tuple[Completion, list[str]]:
            with SyncClusterClient(endpoints, policy=BRISK) as client:
                whole = client.complete(generate(max_tokens=20), timeout=60)
                stream = client.stream(generate(prompt(30, 2), max_tokens=3000))
                kinds = [str(next(stream).WhichOneof("event")) for _ in range(3)]
                stream.close()
                with pytest.raises(TwinpoolError, match="EMPTY_PROMPT"):
                    client.complete(generate([]))
                client.close()
                return whole, kinds

        whole, kinds = await asyncio.to_thread(ask)
        assert whole.token_ids == [expected(20)]
        assert kinds == ["started", "tokens", "tokens"]
        await pair.assert_quiescent()
        assert not any(thread.name == "twinpool-client" for thread in threading.enumerate())
