# SPDX-License-Identifier: Apache-2.0
"""Routers that are killed under their streams: each answer goes on through the other one, and is the one that nobody interrupted.

Two real routers over real workers. Clients know both, and begin with the one that is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import ROUTER
from tests.support.chat_world import TEMPLATE, weather_chat
from tests.support.fake_pair import Stream
from tests.support.fleet import BLOCK, Fleet, running_fleet
from tests.support.quiescence import inspect
from tests.support.routers import Routers
from tests.support.steps import prompt
from tests.support.turns import whole_turn
from tests.support.waiting import until, until_told
from twinpool.client import Completion, request
from twinpool.cluster_client import ClusterClient
from twinpool.config import RpcConfig
from twinpool.retry import RetryPolicy
from twinpool.rpc import channel
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import inference_pb2_grpc

pytestmark = [pytest.mark.integration, pytest.mark.faults]

DECODERS = ("decode-0", "decode-1")
# Long for a stream that is resumed, short for a test that waits for its end.
GRACE_SECONDS = 20.0
KILLED, OTHER = "router-a", "router-b"
# One hand-off at a time towards a worker: what comes after it waits in the router's queue.
SETTINGS = ROUTER | {"router.transfer_window_requests": 1, "router.drain_timeout_seconds": 1.0}


@pytest.fixture(scope="module")
def shared_workers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    workers = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
    with running_fleet(tmp_path_factory.mktemp("two-routers"), checkpoint, workers) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def shared_routers(shared_workers: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routers]:
    template = tmp_path_factory.mktemp("template") / "chat_template.jinja"
    template.write_text(TEMPLATE)
    routers = Routers(shared_workers, SETTINGS | {"router.chat_template": str(template)})
    try:
        for name in (KILLED, OTHER):
            asyncio.run(routers.start(name))
        yield routers
    finally:
        routers.end()


@pytest.fixture
async def routers(shared_routers: Routers) -> AsyncIterator[Routers]:
    """Both are there at the beginning; at the end nothing is left anywhere."""
    for name in (KILLED, OTHER):
        if not shared_routers.alive(name):
            await shared_routers.start(name)
    yield shared_routers
    shared_routers.fleet.clear_faults()
    await shared_routers.fleet.assert_quiet(within=60.0)
    await shared_routers.assert_quiet()


@contextlib.asynccontextmanager
async def client_of(routers: Routers) -> AsyncIterator[ClusterClient]:
    """It begins with the router that will be killed."""
    endpoints = [routers.endpoint(KILLED), routers.endpoint(OTHER)]
    async with ClusterClient(endpoints, policy=RetryPolicy(grace_seconds=GRACE_SECONDS)) as client:
        client._breakers._next = 0
        yield client


async def collect(
    client: ClusterClient,
    message: pb.GenerateRequest,
    due: Callable[[Completion], bool] = lambda _: False,
    act: Callable[[], object] = lambda: None,
) -> Completion:
    """A whole answer; ``act`` is called once, after the first event at which ``due`` is true."""
    whole, done = Completion(), False
    async with contextlib.aclosing(client.stream(message, timeout=240.0)) as events:
        async for event in events:
            whole.take(event)
            if not done and due(whole):
                done = True
                act()
    assert done or act() is None
    return whole


def tokens(whole: Completion) -> int:
    return sum(map(len, whole.token_ids))


def greedy(tokens: list[int], max_tokens: int, **fields: object) -> pb.GenerateRequest:
    return request(tokens, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **fields)  # type: ignore[arg-type]


def hold(routers: Routers, reads: int = 24) -> None:
    for name in DECODERS:
        for skip in range(reads):
            routers.fleet.faults(name).read("hold", skip=skip)


def free(routers: Routers) -> None:
    for name in DECODERS:
        routers.fleet.faults(name).clear()


async def chunks_offered(routers: Routers, before: int) -> None:
    await until(lambda: routers.fleet.faults("prefill-0").count("to_reader:chunk_ready") > before, 60.0)


# --- each phase ---------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 5, 40, 79, 80])
async def test_while_it_decodes(routers: Routers, at: int) -> None:
    """With the first token, in the middle, before the last token, and after it but before the end is told."""
    ids = prompt(3 * BLOCK, 100 + at)
    async with client_of(routers) as client:
        whole = await collect(
            client, greedy(ids, 80), lambda have: tokens(have) >= at, lambda: routers.kill(KILLED)
        )
    assert whole.token_ids == [routers.fleet.oracle.greedy(ids, 80, ignore_eos=True)]
    assert whole.finished.usage.completion_tokens == 80
    assert whole.finished.usage.prompt_tokens == len(ids)
    assert not routers.alive(KILLED)


async def test_while_the_prompt_is_computed(routers: Routers) -> None:
    """The client has the first event and no token: the decode worker has the prompt. The prefill worker stands still, so that it
    has not ended by then."""
    ids = prompt(18 * BLOCK, 121)
    prefill = routers.fleet.workers["prefill-0"].process
    started: list[Completion] = []

    def note(have: Completion) -> bool:
        started.append(have)
        return False

    async def reserved() -> bool:
        counts = [await inspect(routers.fleet.workers[name].endpoint) for name in DECODERS]
        return any(each.requests for each in counts)

    prefill.send_signal(signal.SIGSTOP)
    try:
        async with client_of(routers) as client:
            asking = asyncio.create_task(collect(client, greedy(ids, 20), note))
            await until(lambda: started)
            await until_told(reserved)
            routers.kill(KILLED)
            assert tokens(started[0]) == 0
            prefill.send_signal(signal.SIGCONT)
            whole = await asking
            assert client.resumes >= 1
    finally:
        prefill.send_signal(signal.SIGCONT)
    assert whole.token_ids == [routers.fleet.oracle.greedy(ids, 20, ignore_eos=True)]


async def test_in_the_hand_off(routers: Routers) -> None:
    """The first token is out, and the KV is not on the decode worker yet."""
    ids = prompt(6 * BLOCK, 122)
    hold(routers)
    async with client_of(routers) as client:
        whole = await collect(
            client,
            greedy(ids, 20),
            lambda have: tokens(have) >= 1,
            lambda: (routers.kill(KILLED), free(routers)),
        )
        assert client.resumes >= 1
    assert whole.token_ids == [routers.fleet.oracle.greedy(ids, 20, ignore_eos=True)]


async def test_in_the_queue(routers: Routers) -> None:
    """Nothing was placed and the client has no event: the request is sent to the other router under its key."""
    hold(routers)
    offered = routers.fleet.faults("prefill-0").count("to_reader:chunk_ready")
    async with contextlib.AsyncExitStack() as stack:

        async def ask(seed: int) -> asyncio.Task[Completion]:
            clients.append(await stack.enter_async_context(client_of(routers)))
            return asyncio.create_task(collect(clients[-1], greedy(prompt(8 * BLOCK, seed), 10)))

        clients: list[ClusterClient] = []
        first = [await ask(seed) for seed in (123, 124)]
        await chunks_offered(routers, offered + 1)
        waiting = await ask(125)
        await until(lambda: routers.metric(KILLED, "twinpool_router_num_requests_waiting") >= 1, 60.0)
        routers.kill(KILLED)
        free(routers)
        for seed, answer in zip((123, 124, 125), [*first, waiting], strict=True):
            expected = routers.fleet.oracle.greedy(prompt(8 * BLOCK, seed), 10, ignore_eos=True)
            assert (await answer).token_ids == [expected]
        assert clients[-1].retries >= 1


# --- what an answer may be made of --------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
async def test_drawn_by_a_seed_with_log_probabilities(routers: Routers, n: int) -> None:
    message = request(
        prompt(2 * BLOCK + 3, 131), max_tokens=150, temperature=1.0, seed=77, n=n, logprobs=2, ignore_eos=True
    )
    message.sampling.repetition_penalty = 1.3
    async with client_of(routers) as client:
        undisturbed = await client.complete(message, timeout=240.0)
        client._breakers._next = 0
        whole = await collect(
            client, message, lambda have: tokens(have) >= 12 * n, lambda: routers.kill(KILLED)
        )
        assert client.resumes >= 1
    assert whole.token_ids == undisturbed.token_ids
    assert whole.texts == undisturbed.texts
    for row, other in zip(whole.logprobs, undisturbed.logprobs, strict=True):
        assert [one.chosen.token_id for one in row] == [one.chosen.token_id for one in other]
        assert [one.chosen.logprob for one in row] == pytest.approx(
            [one.chosen.logprob for one in other], abs=1e-3
        )


async def test_a_stop_string_across_the_break(routers: Routers) -> None:
    ids = prompt(2 * BLOCK, 132)
    async with client_of(routers) as client:
        text = (await client.complete(greedy(ids, 60), timeout=240.0)).texts[0]
        # It begins before the break and ends behind it.
        pieces: list[str] = []
        client._breakers._next = 0
        stop = text[len(text) // 2 : len(text) // 2 + 24]
        expected = text[: text.index(stop)]

        def due(have: Completion) -> bool:
            pieces[:] = have.texts
            return bool(have.texts) and len(have.texts[0]) >= len(expected) - 8

        whole = await collect(client, greedy(ids, 60, stop=[stop]), due, lambda: routers.kill(KILLED))
    assert whole.texts == [expected]
    assert whole.finished.choices[0].stop_string == stop


@pytest.mark.parametrize(("kind", "at"), [("call", 5), ("call", 30), ("reasoning", 30)])
async def test_a_chat(routers: Routers, kind: str, at: int) -> None:
    """In the arguments of a call that is held to a schema, and in reasoning: a turn is told as if nobody had interrupted it."""
    message = weather_chat(max_tokens=120)
    message.request.sampling.seed = 5
    if kind == "call":
        message.tool_name = "weather"
        town = {"type": "string", "minLength": 40, "maxLength": 60}
        schema = {"type": "object", "properties": {"town": town}, "required": ["town"]}
        message.request.chat.tools[0].parameters_json = json.dumps(schema)
    else:
        message.request.stop.ignore_eos = True
        message.request.chat.variables_json = '{"think": true}'
    async with client_of(routers) as client:
        undisturbed, ended = await whole_turn(client, message)
        client._breakers._next = 0
        choice, finished = await whole_turn(client, message, at, lambda: routers.kill(KILLED))
        assert client.resumes >= 1
    assert choice == undisturbed
    assert finished.choices == ended.choices
    assert finished.usage.completion_tokens == ended.usage.completion_tokens
    if kind == "call":
        assert len(json.loads(choice.calls[0].arguments)["town"]) >= 40
    else:
        assert choice.text[0][0] == "reasoning"


# --- many, and none -----------------------------------------------------------------------


async def test_all_streams_of_a_router_go_on(routers: Routers) -> None:
    """In whatever phase each of them is."""
    wanted = [(prompt(5 + 13 * number, 140), 30 + number) for number in range(8)]
    for ids, count in wanted:
        routers.fleet.oracle.greedy(ids, count, ignore_eos=True)
    async with client_of(routers) as client:
        have = [0]

        def due(whole: Completion) -> bool:
            have[0] = max(have[0], tokens(whole))
            return False

        # The other one is not there for them yet.
        routers_of = client._breakers._endpoints
        later = routers_of.pop()
        asking = [asyncio.create_task(collect(client, greedy(ids, count), due)) for ids, count in wanted]
        await until(lambda: have[0] >= 3, 60.0)
        routers_of.append(later)
        routers.kill(KILLED)
        for (ids, count), answer in zip(wanted, asking, strict=True):
            expected = routers.fleet.oracle.greedy(ids, count, ignore_eos=True)
            assert (await answer).token_ids == [expected]


@contextlib.asynccontextmanager
async def stub_of(routers: Routers, name: str) -> AsyncIterator[inference_pb2_grpc.InferenceServiceAsyncStub]:
    async with channel(routers.endpoint(name), RpcConfig()) as connection:
        yield inference_pb2_grpc.InferenceServiceStub(connection)


def resumable(ids: list[int], max_tokens: int, grace: float) -> pb.GenerateRequest:
    message = greedy(ids, max_tokens)
    message.resume_grace.FromNanoseconds(int(grace * 1e9))
    return message


async def test_the_other_router_takes_over_from_one_that_lives(routers: Routers) -> None:
    ids = prompt(2 * BLOCK, 151)
    async with stub_of(routers, KILLED) as one, stub_of(routers, OTHER) as other:
        stream = Stream(one.Generate(resumable(ids, 250, GRACE_SECONDS)))
        await stream.has(3)
        again = Stream(other.Resume(pb.ResumeRequest(token=stream.token)))
        assert (await stream.ended()).reason == "STREAM_SUPERSEDED"
        answer = await again.ended()
        assert (answer.error, answer.tokens()) == (
            None,
            routers.fleet.oracle.greedy(ids, 250, ignore_eos=True),
        )
    assert routers.metric(OTHER, "twinpool_router_reattached_total", source="router") >= 1


async def test_a_key_finds_the_answer_of_a_router_that_is_lost(routers: Routers) -> None:
    """Its client is another process now, and has nothing but the key."""
    ids = prompt(2 * BLOCK, 152)
    message = resumable(ids, 100, GRACE_SECONDS)
    message.idempotency_key = "of-a-router-that-is-lost"
    before = routers.metric(OTHER, "twinpool_router_reattached_total", source="worker")
    async with stub_of(routers, KILLED) as one, stub_of(routers, OTHER) as other:
        stream = Stream(one.Generate(message))
        await stream.has(20)
        routers.kill(KILLED)
        await stream.ended()
        message.repeated = True
        answer = await Stream(other.Generate(message)).ended()
        assert (answer.error, answer.tokens()) == (
            None,
            routers.fleet.oracle.greedy(ids, 100, ignore_eos=True),
        )
    assert routers.metric(OTHER, "twinpool_router_reattached_total", source="worker") == before + 1


async def test_what_nobody_asks_for_is_forgotten(routers: Routers) -> None:
    """The workers hold no block for it at once, and no token of it after its grace."""
    ids = prompt(2 * BLOCK, 153)
    async with stub_of(routers, KILLED) as one, stub_of(routers, OTHER) as other:
        stream = Stream(one.Generate(resumable(ids, 250, 2.0)))
        await stream.has(3)
        routers.kill(KILLED)
        await stream.ended()
        await routers.fleet.assert_quiet(within=30.0)
        kept = [await inspect(worker.endpoint) for worker in routers.fleet.live]
        assert sum(counts.kept_answers for counts in kept) >= 1

        async def forgotten() -> bool:
            left = [await inspect(worker.endpoint) for worker in routers.fleet.live]
            return not any(counts.kept_answers for counts in left)

        await until_told(forgotten, 120.0)
        lost = await Stream(other.Resume(pb.ResumeRequest(token=stream.token))).ended()
        assert lost.reason == "RESUME_LOST"


async def test_a_client_that_cancels_through_the_other_router(routers: Routers) -> None:
    async with stub_of(routers, KILLED) as one, stub_of(routers, OTHER) as other:
        stream = Stream(one.Generate(resumable(prompt(2 * BLOCK, 154), 250, GRACE_SECONDS)))
        await stream.has(3)
        routers.kill(KILLED)
        await stream.ended()
        assert (await other.Cancel(pb.CancelRequest(token=stream.token))).found
        gone = await Stream(other.Resume(pb.ResumeRequest(token=stream.token))).ended()
        assert gone.reason == "RESUME_LOST"
        await routers.fleet.assert_quiet(within=30.0)
