# SPDX-License-Identifier: Apache-2.0
"""Conversations with a real cluster: forms that a random model keeps to, calls that it makes, prefixes that hit again.

The model's weights are random, so nothing but the grammar makes its answers valid.
"""

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openai import AsyncOpenAI

from tests.support.chat_world import TEMPLATE, WEATHER
from tests.support.cluster import Cluster, running_cluster
from tests.support.oracle import oracle
from twinpool.client import request
from twinpool.v1.inference_pb2 import TokenizeRequest

pytestmark = pytest.mark.integration

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "town": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["wet", "dry"]}, "maxItems": 2},
    },
    "required": ["town", "days", "tags"],
    "additionalProperties": False,
}
TOWN: dict[str, Any] = {
    "type": "object",
    "properties": {"town": {"type": "string", "maxLength": 8}},
    "required": ["town"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {**WEATHER["function"], "parameters": TOWN}}  # type: ignore[dict-item]
ASK: list[Any] = [{"role": "user", "content": "Does it rain in Bern today?"}]


@pytest.fixture(scope="module")
def chat_cluster(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One worker of each role; the model's template knows tools."""
    model = tmp_path_factory.mktemp("chat") / "llama"
    shutil.copytree(checkpoints["llama"], model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    settings = {"router.http_port": 0, "kv.num_blocks": 256}
    with running_cluster(tmp_path_factory.mktemp("chat-home"), model, settings) as running:
        yield running


async def test_a_text_is_scored(chat_cluster: Cluster) -> None:
    """By HTTP as by gRPC, and as ``transformers`` scores it."""
    text = "Rain in Bern, and more of it. " * 3
    async with chat_cluster.client() as client:
        ids = await client.tokenize(TokenizeRequest(text=text))
        answer = await client.complete(request(text, max_tokens=1, prompt_logprobs=2), timeout=60)
    rows = oracle(chat_cluster.model).logprobs(ids)
    expected = [float(row[token]) for row, token in zip(rows, ids[1:], strict=False)]
    assert [one.chosen.logprob for one in answer.prompt_logprobs] == pytest.approx(expected, abs=1e-3)
    async with openai_client(chat_cluster) as http:
        told = await http.completions.create(model="", prompt=text, max_tokens=0, echo=True, logprobs=2)
    (choice,) = told.choices
    assert choice.text == text
    found = choice.logprobs
    assert found is not None
    assert found.token_logprobs is not None
    assert found.tokens is not None
    assert found.text_offset is not None
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx(expected, abs=1e-3)
    assert "".join(found.tokens) == text
    for token, at in zip(found.tokens, found.text_offset, strict=True):
        assert text[at : at + len(token)] == token
    await chat_cluster.assert_quiescent()


def openai_client(cluster: Cluster) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"http://{cluster.state.http_endpoints[0]}/v1", api_key="none", max_retries=0, timeout=120
    )


async def test_json_under_a_schema_over_the_hand_off(chat_cluster: Cluster) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    found = []
    async with openai_client(chat_cluster) as client:
        for seed in range(4):
            answer = await client.chat.completions.create(
                model="llama",
                messages=ASK,
                n=2,
                seed=seed,
                temperature=1.0,
                max_tokens=300,
                response_format=form,
            )
            assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
            found += [choice.message.content or "" for choice in answer.choices]
    for text in found:
        Draft202012Validator(SCHEMA).validate(json.loads(text))
    assert len(set(found)) == len(found), "each choice and seed draws its own"
    await chat_cluster.assert_quiescent()


async def test_the_same_answer_by_hand_off_and_streamed(chat_cluster: Cluster) -> None:
    async with chat_cluster.client() as client:
        message = request("Say something.", max_tokens=120, seed=5)
        message.structured.regex = "[a-z]{5,20}(, [a-z]{2,9}){1,3}[.]"
        whole = await client.complete(message, timeout=120)
        assert re.fullmatch(message.structured.regex, whole.texts[0])
        again = await client.complete(message, timeout=120)
        assert again.token_ids == whole.token_ids
        assert again.finished.usage.cached_tokens >= 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_call_that_must_be_made_is_valid(chat_cluster: Cluster, choice: Any, stream: bool) -> None:
    options: dict[str, Any] = {
        "model": "llama", "messages": ASK, "tools": [TOOL], "tool_choice": choice, "seed": 3, "max_tokens": 200,
    }  # fmt: skip
    async with openai_client(chat_cluster) as client:
        if stream:
            async with client.chat.completions.stream(**options) as events:
                answer = await events.get_final_completion()
        else:
            answer = await client.chat.completions.create(**options)
    assert answer.choices[0].finish_reason == "tool_calls"
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    (call,) = calls
    assert call.type == "function"
    assert call.function.name == "weather"
    Draft202012Validator(TOWN).validate(json.loads(call.function.arguments))


async def test_a_conversation_that_grows_is_cached(chat_cluster: Cluster) -> None:
    """Each turn sends all turns before it; what was computed for them is found again."""
    messages: list[Any] = [{"role": "system", "content": "You are a weather office. " * 4}, *ASK]
    cached = []
    async with openai_client(chat_cluster) as client:
        for turn in range(4):
            answer = await client.chat.completions.create(
                model="llama",
                messages=messages,
                tools=[TOOL],
                tool_choice="required",
                seed=turn,
                max_tokens=200,
            )
            usage = answer.usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            cached.append((usage.prompt_tokens_details.cached_tokens or 0, usage.prompt_tokens))
            message = answer.choices[0].message
            assert message.tool_calls is not None
            result = {
                "role": "tool",
                "tool_call_id": message.tool_calls[0].id,
                "content": f"Dry on day {turn}.",
            }
            messages += [message, result]
    assert all(earlier < later for earlier, later in itertools.pairwise(cached))
    for (_, before), (found, _) in itertools.pairwise(cached):
        # All whole blocks of the turn before but the generation's opening, which a template ends a prompt with.
        assert found >= before - 4 * 16, cached
    await chat_cluster.assert_quiescent()
