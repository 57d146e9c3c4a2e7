# SPDX-License-Identifier: Apache-2.0
"""An HTTP request that is sent again under its ``Idempotency-Key`` gets the answer of the first one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.support.chat_world import WEATHER, chat_pair, write_chat_model
from tests.support.fake_pair import FakePair
from tests.support.waiting import until

CALL = 'I look.\n<tool_call>{"name": "weather", "arguments": {"town": "Zürich"}}</tool_call>'
KEYED = {"Idempotency-Key": "k"}
CHAT: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": "Rain?"}],
    "tools": [WEATHER],
    "max_tokens": 200,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat-key-model"))


@asynccontextmanager
async def served(model: Path, step_seconds: float = 0.0) -> AsyncIterator[tuple[FakePair, AsyncOpenAI]]:
    """The client asks the one router."""
    async with chat_pair(model, CALL, step_seconds=step_seconds, settings={"http_port": 0}) as pair:
        async with client_of(pair.one.router.apis.http_endpoint) as client:
            yield pair, client
        await pair.assert_quiescent()


def client_of(endpoint: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://{endpoint}/v1", api_key="none", max_retries=0)


def ran(pair: FakePair) -> int:
    return len({command.portable.stream_id for made in pair.one.workers.values() for command in made.decodes})


async def test_a_chat_that_is_sent_again(model: Path) -> None:
    async with served(model) as (pair, client):
        first = await client.chat.completions.create(**CHAT, extra_headers=KEYED)
        again = await client.chat.completions.create(**CHAT, extra_headers=KEYED)
        assert (again.id, again.choices, again.usage) == (first.id, first.choices, first.usage)
        assert again.choices[0].message.tool_calls, "ids of calls and all"
        assert ran(pair) == 1
        async with client_of(pair.other.router.apis.http_endpoint) as another:
            elsewhere = await another.chat.completions.create(**CHAT, extra_headers=KEYED)
        assert (elsewhere.id, elsewhere.choices) == (first.id, first.choices)
        assert ran(pair) == 1


async def test_a_stream_that_broke_is_told_again(model: Path) -> None:
    async with served(model, step_seconds=0.01) as (pair, client):
        stream = await client.chat.completions.create(**CHAT, stream=True, extra_headers=KEYED)
        had = 0
        async for _ in stream:
            had += 1
            if had == 4:
                break
        await stream.close()
        again = await client.chat.completions.create(**CHAT, stream=True, extra_headers=KEYED)
        chunks = [chunk async for chunk in again]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "I look."
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        arguments = "".join(call.function.arguments or "" for call in calls if call.function is not None)
        assert arguments == '{"town": "Zürich"}'
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        assert ran(pair) == 1


async def test_its_router_is_lost(model: Path) -> None:
    """The workers have it. A client that says that this is its first try is not looked for there."""
    async with served(model, step_seconds=0.01) as (pair, client):
        other = pair.other.router.apis.http_endpoint
        async with client_of(other) as lost:
            asking = asyncio.create_task(lost.chat.completions.create(**CHAT, extra_headers=KEYED))
            await until(lambda: ran(pair) == 1)
            await until(lambda: any(made.held for made in pair.one.workers.values()))
            await pair.lose()
            with pytest.raises(
                (openai.APIConnectionError, openai.InternalServerError, asyncio.CancelledError)
            ):
                await asking
        retry = KEYED | {"x-stainless-retry-count": "1"}
        answer = await client.chat.completions.create(**CHAT, extra_headers=retry)
        assert answer.choices[0].finish_reason == "tool_calls"
        assert ran(pair) == 1
        asked = sum(len(made.kept.asked) for made in pair.one.workers.values())
        assert asked
        first = {"Idempotency-Key": "another", "x-stainless-retry-count": "0"}
        await client.chat.completions.create(**CHAT, extra_headers=first)
        assert sum(len(made.kept.asked) for made in pair.one.workers.values()) == asked


async def test_another_request_under_the_key(model: Path) -> None:
    async with served(model) as (pair, client):
        await client.chat.completions.create(**CHAT, extra_headers=KEYED)
        with pytest.raises(openai.ConflictError) as caught:
            await client.chat.completions.create(**CHAT | {"max_tokens": 199}, extra_headers=KEYED)
        assert caught.value.code == "IDEMPOTENCY_MISMATCH"
        await client.chat.completions.create(**CHAT)
        assert ran(pair) == 2


async def test_several_prompts_have_a_key_each(model: Path) -> None:
    async with served(model) as (pair, client):
        options: dict[str, Any] = {"model": "fake", "prompt": ["One.", "Two."], "max_tokens": 20}
        first = await client.completions.create(**options, extra_headers=KEYED)
        again = await client.completions.create(**options, extra_headers=KEYED)
        assert [choice.text for choice in again.choices] == [choice.text for choice in first.choices]
        assert ran(pair) == 2


async def test_a_response_that_is_asked_for_again(model: Path) -> None:
    async with served(model) as (pair, client):
        options: dict[str, Any] = {"model": "fake", "input": "Rain?", "max_output_tokens": 200}
        first = await client.responses.create(**options, extra_headers=KEYED)
        again = await client.responses.create(**options, extra_headers=KEYED)
        assert (again.id, again.output_text) == (first.id, first.output_text)
        assert ran(pair) == 1


@pytest.mark.parametrize("key", [b"k" * 129, b"\xff\xfe"])
async def test_what_is_no_key(model: Path, key: bytes) -> None:
    async with served(model) as (pair, _):
        host, port = pair.one.router.apis.http_endpoint.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"model": "fake", "messages": [{"role": "user", "content": "Rain?"}]}'
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nIdempotency-Key: " + key + b"\r\n"
            b"Content-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body)
        )
        said = await reader.read()
        writer.close()
        assert said.startswith(b"HTTP/1.1 400 ")
        assert b"INVALID_RESUME" in said
