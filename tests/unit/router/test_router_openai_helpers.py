# SPDX-License-Identifier: Apache-2.0
"""The helpers of OpenAI's own client: forms and tools given as Python types, events of a stream, parsed results."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.support.chat_world import prompt_text, write_chat_model
from tests.unit.router.test_router_http import ASK, CALL, served


class Report(BaseModel):
    """What the client wants to get."""

    town: str
    days: int


class weather(BaseModel):
    """What the weather is."""

    town: str


REPORT = '{"town": "Bern", "days": 3}'
TOOLS: Any = [openai.pydantic_function_tool(weather)]
FLAT: Any = [openai.pydantic_function_tool(weather)["function"] | {"type": "function"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat-model"))


async def test_a_chat_is_parsed_into_a_type(model: Path) -> None:
    async with served(model, REPORT) as (cluster, client):
        found = await client.chat.completions.parse(
            model="fake", messages=ASK, response_format=Report, max_tokens=99
        )
        assert found.choices[0].message.parsed == Report(town="Bern", days=3)
        grammar = cluster.workers["d0"].decodes[-1].draw.grammar
        assert all(f'"{name}"' in grammar for name in ("town", "days"))
        with pytest.raises(openai.LengthFinishReasonError):
            await client.chat.completions.parse(
                model="fake", messages=ASK, response_format=Report, max_tokens=5
            )


async def test_a_call_is_parsed_into_a_type(model: Path) -> None:
    async with served(model, CALL) as (cluster, client):
        found = await client.chat.completions.parse(model="fake", messages=ASK, tools=TOOLS, max_tokens=200)
        calls = found.choices[0].message.tool_calls
        assert calls is not None
        assert calls[0].function.parsed_arguments == weather(town="Bern")
        assert "What the weather is." in prompt_text(cluster)


async def test_events_of_a_streamed_form(model: Path) -> None:
    async with (
        served(model, REPORT) as (_, client),
        client.chat.completions.stream(
            model="fake",
            messages=ASK,
            response_format=Report,
            max_tokens=99,
            logprobs=True,
            stream_options={"include_usage": True},
        ) as stream,
    ):
        events = [event async for event in stream]
        final = await stream.get_final_completion()
        deltas = [event.delta for event in events if event.type == "content.delta"]
        assert "".join(deltas) == REPORT
        (done,) = [event for event in events if event.type == "content.done"]
        assert (done.content, done.parsed) == (REPORT, Report(town="Bern", days=3))
        (logprobs,) = [event for event in events if event.type == "logprobs.content.done"]
        assert [token.logprob for token in logprobs.content] == [-0.5] * (len(REPORT) + 1)
        assert final.choices[0].message.parsed == Report(town="Bern", days=3)
        assert final.usage is not None
        assert final.usage.completion_tokens == len(REPORT) + 1


async def test_events_of_a_streamed_call(model: Path) -> None:
    async with (
        served(model, CALL) as (_, client),
        client.chat.completions.stream(model="fake", messages=ASK, tools=TOOLS, max_tokens=200) as stream,
    ):
        events = [event async for event in stream]
        final = await stream.get_final_completion()
        pieces = [
            event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"
        ]
        (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        assert (done.name, done.arguments) == ("weather", "".join(pieces))
        assert done.parsed_arguments == weather(town="Bern")
        calls = final.choices[0].message.tool_calls
        assert calls is not None
        assert calls[0].function.parsed_arguments == weather(town="Bern")
        assert final.choices[0].message.content == "I look."


async def test_choices_of_a_stream_are_kept_apart(model: Path) -> None:
    async with (
        served(model, REPORT) as (_, client),
        client.chat.completions.stream(
            model="fake", messages=ASK, response_format=Report, n=2, max_tokens=99
        ) as stream,
    ):
        final = await stream.get_final_completion()
        assert [choice.message.parsed for choice in final.choices] == [Report(town="Bern", days=3)] * 2


async def test_a_response_is_parsed_into_a_type(model: Path) -> None:
    async with served(model, REPORT) as (cluster, client):
        found = await client.responses.parse(
            model="fake", input="Rain?", text_format=Report, max_output_tokens=99
        )
        assert found.output_parsed == Report(town="Bern", days=3)
        assert '"days"' in cluster.workers["d0"].decodes[-1].draw.grammar
        async with client.responses.stream(
            model="fake", input="Rain?", text_format=Report, max_output_tokens=99
        ) as stream:
            pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert "".join(pieces) == REPORT
        assert final.output_parsed == Report(town="Bern", days=3)


async def test_a_call_of_a_response_is_parsed_into_a_type(model: Path) -> None:
    async with served(model, CALL) as (_, client):
        async with client.responses.stream(
            model="fake", input="Rain?", tools=FLAT, max_output_tokens=200
        ) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
        pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert done.arguments == "".join(pieces) == '{"town": "Bern"}'
        assert [item.type for item in final.output] == ["message", "function_call"]


async def test_a_program_without_a_loop_and_raw_answers(model: Path) -> None:
    async with served(model, REPORT) as (_, client):
        base = str(client.base_url)

        def ask() -> None:
            with OpenAI(base_url=base, api_key="none", max_retries=0) as sync:
                with sync.chat.completions.stream(
                    model="fake", messages=ASK, response_format=Report, max_tokens=99
                ) as stream:
                    stream.until_done()
                    assert stream.get_final_completion().choices[0].message.parsed is not None
                raw = sync.chat.completions.with_raw_response.create(
                    model="fake", messages=ASK, max_tokens=99
                )
                assert raw.headers["content-type"] == "application/json"
                assert raw.parse().choices[0].message.content == REPORT
                with sync.chat.completions.with_streaming_response.create(
                    model="fake", messages=ASK, max_tokens=99, stream=True
                ) as response:
                    lines = [line for line in response.iter_lines() if line]
                assert lines[-1] == "data: [DONE]"

        await asyncio.to_thread(ask)
