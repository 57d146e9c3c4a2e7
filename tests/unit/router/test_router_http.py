# SPDX-License-Identifier: Apache-2.0
"""The OpenAI-compatible API, asked by OpenAI's own client, with workers that only pretend."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionChunk

from tests.support.addresses import beside_the_loopback
from tests.support.chat_world import WEATHER, chat_cluster, prompt_text, write_chat_model
from tests.support.fake_cluster import FakeCluster
from tests.support.waiting import until
from twinpool.router.openai.shapes import chat_logprobs
from twinpool.text import Tokenizer
from twinpool.v1 import inference_pb2 as pb

CALL = 'I look.\n<tool_call>{"name": "weather", "arguments": {"town": "Bern"}}</tool_call>'
ASK: list[Any] = [{"role": "user", "content": "Rain?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat-model"))


@asynccontextmanager
async def served(
    model: Path, text: str, **settings: object
) -> AsyncIterator[tuple[FakeCluster, AsyncOpenAI]]:
    async with chat_cluster(model, text, **settings) as cluster:
        base = f"http://{cluster.router.apis.http_endpoint}/v1"
        async with AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
            yield cluster, client
            await cluster.assert_quiescent()


async def test_a_router_on_a_pod_s_address_is_reached_by_a_port_forward(model: Path) -> None:
    """kubectl connects to the loopback inside the pod, and gives up all ports it forwards when nobody listens there."""
    own = beside_the_loopback()
    async with served(model, "It is dry.", host=own) as (cluster, _):
        host, _, port = cluster.router.apis.http_endpoint.rpartition(":")
        assert host == own
        async with aiohttp.ClientSession() as session:
            for address in (own, "127.0.0.1"):
                async with session.get(f"http://{address}:{port}/v1/models") as reply:
                    assert reply.status == 200


async def test_a_chat(model: Path) -> None:
    async with served(model, "It is dry.") as (cluster, client):
        answer = await client.chat.completions.create(model="fake", messages=ASK, max_tokens=50)
        (choice,) = answer.choices
        assert choice.message.content == "It is dry."
        assert choice.message.role == "assistant"
        assert choice.finish_reason == "stop"
        assert answer.object == "chat.completion"
        assert answer.model == "fake"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len("It is dry.") + 1
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert prompt_text(cluster) == "[user]Rain?[assistant]"


async def test_a_streamed_chat_of_several_choices(model: Path) -> None:
    async with served(model, "Grün 🙂") as (_, client):
        stream = await client.chat.completions.create(
            model="fake",
            messages=ASK,
            max_tokens=50,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks: list[ChatCompletionChunk] = [chunk async for chunk in stream]
        assert {chunk.id for chunk in chunks} == {chunks[0].id}
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
        for index in (0, 1):
            own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
            assert own[0].delta.role == "assistant"
            assert "".join(choice.delta.content or "" for choice in own) == "Grün 🙂"
            assert [choice.finish_reason for choice in own if choice.finish_reason] == ["stop"]
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 2 * (len("Grün 🙂".encode()) + 1)


async def test_tools(model: Path) -> None:
    async with served(model, CALL) as (cluster, client):
        answer = await client.chat.completions.create(model="", messages=ASK, tools=[WEATHER], max_tokens=200)  # type: ignore[list-item]
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"town": "Bern"})
        # The next turn, as every agent makes it: the message comes back as it was, with the tool's answer.
        back = [*ASK, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "Dry."}]
        await client.chat.completions.create(model="", messages=back, tools=[WEATHER], max_tokens=9)  # type: ignore[list-item]
        assert 'I look.<tool_call>{"name": "weather"' in prompt_text(cluster)
        assert "[tool]Dry." in prompt_text(cluster)


async def test_streamed_tools(model: Path) -> None:
    async with served(model, CALL) as (_, client):
        async with client.chat.completions.stream(
            model="fake",
            messages=ASK,
            tools=[WEATHER],
            max_tokens=200,  # type: ignore[list-item]
        ) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
        assert "tool_calls.function.arguments.delta" in kinds
        assert final.choices[0].finish_reason == "tool_calls"
        assert final.choices[0].message.tool_calls is not None
        assert json.loads(final.choices[0].message.tool_calls[0].function.arguments) == {"town": "Bern"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_call_that_must_be_made(model: Path, choice: Any) -> None:
    rest = ' {"town": "Bern"}}' if isinstance(choice, dict) else 'weather", "arguments": {"town": "Bern"}}'
    async with served(model, rest) as (_, client):
        answer = await client.chat.completions.create(
            model="fake",
            messages=ASK,
            tools=[WEATHER],
            tool_choice=choice,
            max_tokens=200,  # type: ignore[list-item]
        )
        message = answer.choices[0].message
        assert message.content is None
        assert message.tool_calls is not None
        assert message.tool_calls[0].function.arguments == '{"town": "Bern"}'


async def test_reasoning(model: Path) -> None:
    async with served(model, "Hm.\n</think>\n\nYes.") as (_, client):
        answer = await client.chat.completions.create(
            model="fake", messages=ASK, max_tokens=50, extra_body={"chat_template_kwargs": {"think": True}}
        )
        assert answer.choices[0].message.content == "Yes."
        assert answer.choices[0].message.model_extra == {"reasoning_content": "Hm."}


async def test_a_form(model: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    async with served(model, '{"a": 1}') as (cluster, client):
        answer = await client.chat.completions.create(
            model="fake",
            messages=ASK,
            max_tokens=50,
            response_format=wanted,  # type: ignore[arg-type]
        )
        assert answer.choices[0].message.content == '{"a": 1}'
        assert '"integer"' in cluster.workers["d0"].decodes[-1].draw.grammar
        await client.chat.completions.create(
            model="fake", messages=ASK, max_tokens=50, response_format={"type": "json_object"}
        )
        assert "json_schema" in cluster.workers["d0"].decodes[-1].draw.grammar


async def test_log_probabilities(model: Path) -> None:
    async with served(model, "é!") as (_, client):
        chat = await client.chat.completions.create(
            model="fake", messages=ASK, max_tokens=3, logprobs=True, top_logprobs=2
        )
        found = chat.choices[0].logprobs
        assert found is not None
        assert found.content is not None
        assert [token.bytes for token in found.content] == [[0xC3], [0xA9], [33]]
        assert [token.logprob for token in found.content] == [-0.5] * 3
        assert [top.logprob for top in found.content[0].top_logprobs] == [-1.0, -2.0]
        plain = await client.completions.create(model="fake", prompt="a", max_tokens=3, logprobs=1)
        listed = plain.choices[0].logprobs
        assert listed is not None
        assert listed.tokens is not None
        assert listed.tokens[-1] == "!"
        assert listed.token_logprobs == [-0.5] * 3
        assert listed.text_offset == [0, 0, 1], "where the character begins that the token is part of"


async def test_completions_of_several_prompts(model: Path) -> None:
    async with served(model, "xyz") as (_, client):
        answer = await client.completions.create(
            model="fake", prompt=["one", "two!"], n=2, max_tokens=9, echo=True
        )
        assert [choice.text for choice in answer.choices] == ["onexyz", "onexyz", "two!xyz", "two!xyz"]
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len("one") + len("two!")
        stream = await client.completions.create(
            model="fake",
            prompt=[[1, 2], [3]],
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        texts = {index: "" for index in (0, 1)}
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            texts[choice.index] += choice.text
        assert texts == {0: "xyz", 1: "xyz"}
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.prompt_tokens == 3
        ids = await client.completions.create(model="fake", prompt=[65, 66], max_tokens=1)
        assert ids.choices[0].text == "x"
        assert ids.choices[0].finish_reason == "length"


async def test_parameters_reach_the_workers(model: Path) -> None:
    async with served(model, "x") as (cluster, client):
        await client.chat.completions.create(
            model="fake", messages=ASK, max_completion_tokens=7, temperature=0.5, top_p=0.25, seed=-1,
            presence_penalty=1, frequency_penalty=-1.5, stop=["q"], logit_bias={"66": -100, "67": 2},
            extra_body={"top_k": 5, "min_p": 0.125, "repetition_penalty": 1.5, "stop_token_ids": [9], "priority": 3},
        )  # fmt: skip
        draw = cluster.workers["d0"].decodes[0].draw
        sampling = draw.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 5, 0.125)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.5)
        assert (sampling.repetition_penalty, sampling.seed) == (1.5, (1 << 64) - 1)
        assert [(entry.token_id, entry.bias) for entry in sampling.logit_bias] == [(66, -100.0), (67, 2.0)]
        assert draw.stop.max_tokens == 7
        assert 9 in draw.stop_token_ids
        assert cluster.workers["d0"].decodes[0].priority == 3


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"surprise": 1}, "surprise", "UNSUPPORTED_FIELD"),
        ({"temperature": "hot"}, "temperature", "INVALID_ARGUMENT"),
        ({"temperature": 101}, "sampling.temperature", "INVALID_SAMPLING"),
        ({"max_tokens": -1}, "max_tokens", "INVALID_ARGUMENT"),
        ({"max_tokens": 0}, "stop.max_tokens", "INVALID_STOP"),
        ({"n": 0}, "n", "INVALID_ARGUMENT"),
        ({"n": 99}, "n", "INVALID_N"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "INVALID_ARGUMENT"),
        ({"logit_bias": {"5": 101}}, "sampling.logit_bias[0].bias", "INVALID_SAMPLING"),
        ({"logit_bias": {"9999": 1}}, "sampling.logit_bias[0].token_id", "TOKEN_OUT_OF_VOCABULARY"),
        ({"top_logprobs": 3}, "top_logprobs", "INVALID_LOGPROBS"),
        ({"messages": []}, "chat.messages", "EMPTY_PROMPT"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "INVALID_ARGUMENT"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type", "INVALID_ARGUMENT",
        ),
        ({"tools": [WEATHER, WEATHER]}, "chat.tools[1].name", "INVALID_TOOLS"),
        ({"tool_choice": "required"}, "tool_choice", "INVALID_TOOLS"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}},
            "structured", "INVALID_GRAMMAR",
        ),
    ],
)  # fmt: skip
async def test_refusals(model: Path, fields: dict[str, Any], param: str, code: str) -> None:
    async with served(model, "x") as (cluster, client):
        body = {"model": "fake", "messages": ASK} | fields
        with pytest.raises(openai.BadRequestError) as caught:
            await client.post("/chat/completions", body=body, cast_to=object)
        assert isinstance(caught.value.body, dict)
        assert (caught.value.body["param"], caught.value.body["code"]) == (param, code)
        assert caught.value.body["type"] == "invalid_request_error"
        assert "Rain" not in str(caught.value), "a refusal does not quote the prompt"
        assert not cluster.workers["p0"].prefills


async def test_other_statuses(model: Path) -> None:
    async with served(model, "x", max_message_bytes=5000) as (cluster, client):
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="other", messages=ASK)
        assert missing.value.code == "MODEL_NOT_FOUND"
        with pytest.raises(openai.APIStatusError) as large:
            await client.completions.create(model="fake", prompt="x" * 6000)
        assert (large.value.status_code, large.value.code) == (429, "MESSAGE_TOO_LARGE")
        cluster.router.service.drain()
        with pytest.raises(openai.InternalServerError) as draining:
            await client.chat.completions.create(model="fake", messages=ASK)
        assert draining.value.status_code == 503
        assert draining.value.response.headers["x-should-retry"] == "true"
        assert int(draining.value.response.headers["retry-after-ms"]) > 0
        async with aiohttp.ClientSession(f"http://{cluster.router.apis.http_endpoint}") as session:
            async with session.post("/v1/completions", data=b"{") as answer:
                assert answer.status == 400
            async with session.get("/v1/nothing") as answer:
                assert answer.status == 404
                assert (await answer.json())["error"]["type"] == "invalid_request_error"
            async with session.get("/v1/completions") as answer:
                assert answer.status == 405


async def test_a_refusal_repeats_little_of_an_unknown_name(model: Path) -> None:
    async with (
        served(model, "x") as (cluster, _),
        aiohttp.ClientSession(f"http://{cluster.router.apis.http_endpoint}") as session,
    ):
        body = {"model": "fake", "prompt": "x", "y" * 9000: 1}
        async with session.post("/v1/completions", json=body) as answer:
            assert answer.status == 400
            said = await answer.text()
        assert "y" * 64 in said
        assert len(said) < 1000


def test_ids_that_no_token_has_are_rated_as_nothing(model: Path) -> None:
    """A model's head may be padded beyond its tokenizer's vocabulary."""
    tokenizer = Tokenizer.from_pretrained(model)
    rated = pb.PositionLogprobs(
        chosen=pb.TokenLogprob(token_id=ord("a"), logprob=-0.5),
        top=[pb.TokenLogprob(token_id=tokenizer.vocab_size + 5, logprob=-9.0)],
    )
    (found,) = chat_logprobs([rated], tokenizer.token_bytes)
    assert (found["token"], found["top_logprobs"][0]["token"], found["top_logprobs"][0]["bytes"]) == (
        "a",
        "",
        [],
    )


async def test_models_and_health(model: Path) -> None:
    async with served(model, "x") as (cluster, client):
        assert [found.id async for found in client.models.list()] == ["fake"]
        assert (await client.models.retrieve("fake")).owned_by == "twinpool"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        async with aiohttp.ClientSession(f"http://{cluster.router.apis.http_endpoint}") as session:
            for path in ("/health", "/live"):
                async with session.get(path) as answer:
                    assert answer.status == 200
            async with session.get("/metrics") as answer:
                assert "twinpool_router_requests_total" in await answer.text()
            for made in cluster.workers.values():
                cluster.router.fleet.remove(made.record())
            async with session.get("/health") as answer:
                assert answer.status == 503


async def test_a_client_that_leaves_cancels_its_request(model: Path) -> None:
    async with served(model, "x" * 400) as (cluster, client):
        cluster.workers["d0"].script.hold_after_tokens = 20
        stream = await client.chat.completions.create(model="fake", messages=ASK, max_tokens=300, stream=True)
        async for _ in stream:
            break
        await until(lambda: bool(cluster.held()))
        await stream.close()
        await until(lambda: not cluster.held())
        # One that waits for a whole answer leaves as well.
        waiting = asyncio.create_task(
            client.chat.completions.create(model="fake", messages=ASK, max_tokens=300)
        )
        await until(lambda: bool(cluster.held()))
        waiting.cancel()
        await until(lambda: not cluster.held())


async def test_an_answer_that_fails_later_says_so_in_the_stream(model: Path) -> None:
    async with served(model, "x" * 400, max_resumes=0) as (cluster, client):
        cluster.workers["d0"].script.fail_after_tokens = 20
        stream = await client.chat.completions.create(model="fake", messages=ASK, max_tokens=300, stream=True)
        with pytest.raises(openai.APIError, match="scripted") as caught:
            async for _ in stream:
                pass
        assert caught.value.code in ("INTERNAL", "WORKER_LOST", "ATTEMPTS_EXHAUSTED")


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("chat/completions", '{"model": "fake", "messages": [{"role": "user", "content": "a"}], "n": 2000000000}', "INVALID_N"),
        ("completions", '{"model": "fake", "prompt": "a", "n": 2000000000}', "INVALID_N"),
        ("completions", '{"model": "\\ud800", "prompt": "a"}', "INVALID_TEXT"),
        ("responses", '{"model": "fake", "input": "\\udfff"}', "INVALID_TEXT"),
    ],
)  # fmt: skip
async def test_a_body_that_nobody_can_serve_is_refused_at_once(
    model: Path, path: str, body: str, code: str
) -> None:
    async with served(model, "a") as (cluster, _), aiohttp.ClientSession() as session:
        url = f"http://{cluster.router.apis.http_endpoint}/v1/{path}"
        async with session.post(url, data=body) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["code"] == code
