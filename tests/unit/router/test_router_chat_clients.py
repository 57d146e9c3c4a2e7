# SPDX-License-Identifier: Apache-2.0
"""The client of several routers sees one turn, whatever happens to them."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.chat_world import chat_pair, weather_chat, write_chat_model, writes
from tests.support.fake_pair import FakePair
from tests.support.fake_worker import Script
from tests.support.turns import told
from twinpool.cluster_client import ClusterClient
from twinpool.errors import TwinpoolError
from twinpool.retry import RetryPolicy
from twinpool.sync_client import SyncClusterClient
from twinpool.v1 import chat_pb2 as chat

BRISK = RetryPolicy(first_pause_seconds=0.001, longest_pause_seconds=0.01)
ARGUMENTS = f'{{"town": "{"Zürich 😀 " * 10}"}}'
CALL = f'<tool_call>{{"name": "weather", "arguments": {ARGUMENTS}}}</tool_call>'
TEXT = f"Hm, so ü.\n</think>\n\nI look.\n{CALL}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat-client-model"))


def thoughtful(n: int = 1, key: str = "") -> chat.ChatRequest:
    request = weather_chat()
    request.request.chat.variables_json = '{"think": true}'
    request.request.n = n
    request.request.idempotency_key = key
    return request


def client_of(*endpoints: str) -> ClusterClient:
    client = ClusterClient(endpoints, policy=BRISK)
    client._breakers._next = 0
    return client


def lost_first(pair: FakePair) -> ClusterClient:
    return client_of(pair.other.router.endpoint, pair.one.router.endpoint)


async def collect(
    client: ClusterClient,
    request: chat.ChatRequest,
    at: int = -1,
    act: Callable[[], Awaitable[object]] | None = None,
) -> list[chat.ChatResponse]:
    """All events. Once ``at`` tokens were told, ``act`` is awaited."""
    out: list[chat.ChatResponse] = []
    async with contextlib.aclosing(client.chat(request, timeout=120)) as events:
        async for event in events:
            out.append(event)
            if act is not None and event.delta.position.next_index >= at:
                act, doing = None, act
                await doing()
    assert act is None, "nothing was done"
    assert [event.WhichOneof("event") for event in out].count("started") == 1
    assert out[-1].HasField("finished")
    return out


@pytest.mark.parametrize(("at", "n"), [(4, 1), (40, 1), (90, 1), (40, 2)])
async def test_the_router_is_lost_under_a_turn(model: Path, at: int, n: int) -> None:
    """In reasoning, in content, and in the arguments of a call."""
    async with chat_pair(model, TEXT, step_seconds=0.01) as pair, lost_first(pair) as client:
        request = thoughtful(n, "the same key, and so the same ids of calls")
        events = await collect(client, request, at, pair.lose)
        assert (client.resumes, client.retries) == (1, 0), "going on costs no retry"
        async with client_of(pair.one.router.endpoint) as another:
            assert told(events, n) == told(await collect(another, request), n)
        assert told(events, n)[0].calls[0].arguments == ARGUMENTS
        await pair.assert_quiescent()


async def test_nobody_has_the_turn_any_more(model: Path) -> None:
    """It is drawn again from its first token, and the caller sees none of it twice."""
    async with chat_pair(model, TEXT, step_seconds=0.01) as pair, lost_first(pair) as client:

        async def lose_all() -> None:
            await pair.lose()
            for made in pair.one.workers.values():
                made.kept.states.clear()

        request = thoughtful(key="k")
        events = await collect(client, request, 60, lose_all)
        async with client_of(pair.one.router.endpoint) as another:
            assert told(events) == told(await collect(another, request))
        await pair.assert_quiescent()


async def test_a_turn_that_parts_when_it_is_drawn_again_is_no_turn(model: Path) -> None:
    async with chat_pair(model, TEXT, step_seconds=0.01) as pair, lost_first(pair) as client:

        async def lose_all() -> None:
            await pair.lose()
            for made in pair.one.workers.values():
                made.kept.states.clear()
                made.script = Script(token=writes(TEXT.replace("so", "no")))

        with pytest.raises(TwinpoolError, match="parted"):
            await collect(client, thoughtful(), 60, lose_all)
        await pair.assert_quiescent()


async def test_before_the_first_event_it_is_sent_elsewhere(model: Path) -> None:
    async with chat_pair(model, TEXT) as pair, client_of("127.0.0.1:1", pair.one.router.endpoint) as client:
        assert told(await collect(client, thoughtful()))[0].calls[0].name == "weather"
        assert client.retries == 1


async def test_a_client_that_leaves_ends_its_turn(model: Path) -> None:
    async with (
        chat_pair(model, "on and on " * 300, step_seconds=0.01) as pair,
        client_of(pair.one.router.endpoint) as client,
    ):
        events = client.chat(thoughtful())
        async for event in events:
            if event.HasField("delta"):
                break
        await events.aclose()
        await pair.assert_quiescent()
        assert not any(made.kept.states for made in pair.one.workers.values())


async def test_chats_go_to_all_routers(model: Path) -> None:
    async with chat_pair(model, TEXT) as pair, lost_first(pair) as client:
        for _ in range(4):
            await collect(client, thoughtful())
        for cluster in (pair.one, pair.other):
            assert cluster.router.usage.totals("").requests == 2


async def test_a_program_without_a_loop_gets_the_same(model: Path) -> None:
    async with chat_pair(model, TEXT) as pair:

        def ask() -> list[chat.ChatResponse]:
            with SyncClusterClient([pair.one.router.endpoint], policy=BRISK) as client:
                return list(client.chat(thoughtful(), timeout=60))

        events = await asyncio.to_thread(ask)
        assert told(events)[0].text == [("reasoning", "Hm, so ü."), ("content", "I look.")]
        await pair.assert_quiescent()
