# SPDX-License-Identifier: Apache-2.0
"""``echo`` of the OpenAI-compatible API, with and without log-probabilities, asked by OpenAI's own client."""

from itertools import chain
from pathlib import Path
from typing import Any

import openai
import pytest
from test_router_http import served

from tests.support.chat_world import write_chat_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat-model"))


async def test_echo_with_log_probabilities(model: Path) -> None:
    prompt, text = "né \N{PILE OF POO}!", "ö."
    async with served(model, text) as (cluster, client):
        answer = await client.completions.create(
            model="fake", prompt=prompt, max_tokens=9, n=2, echo=True, logprobs=2
        )
        cluster.workers["p0"].script.scored_a_message = 3
        ids = await client.completions.create(
            model="fake", prompt=list(prompt.encode()), max_tokens=9, echo=True, logprobs=2
        )
        size = len(prompt.encode())
        for choice in (*answer.choices, *ids.choices):
            assert choice.text == prompt + text
            found = choice.logprobs
            assert found is not None
            assert found.tokens is not None
            assert found.token_logprobs is not None
            assert found.top_logprobs is not None
            assert found.text_offset is not None
            assert len(found.tokens) == size + len(text.encode()) + 1
            assert found.token_logprobs[0] is None
            assert found.token_logprobs[1:size] == [-float(at) for at in range(1, size)]
            assert found.token_logprobs[size:] == [-0.5] * (len(text.encode()) + 1)
            assert found.top_logprobs[0] is None
            assert found.top_logprobs[size - 1] == {"!": -1.0, '"': -2.0}
            assert found.tokens[:1] == ["n"]
            # A character of several tokens is where the first of them is.
            whole = [*prompt, *text, ""]
            starts = [at for at, character in enumerate(whole) for _ in character.encode() or [0]]
            assert found.text_offset == starts
        assert {one.draw.prompt_logprobs for one in cluster.workers["p0"].prefills} == {2}


@pytest.mark.parametrize("max_tokens", [0, 4])
async def test_echo_with_log_probabilities_in_chunks(model: Path, max_tokens: int) -> None:
    async with served(model, "xyz") as (cluster, client):
        cluster.workers["p0"].script.scored_a_message = 2
        fields: dict[str, Any] = {
            "model": "fake", "prompt": ["abcdef", "g"], "max_tokens": max_tokens, "echo": True, "logprobs": 1, "n": 2,
        }  # fmt: skip
        whole = await client.completions.create(**fields)
        stream = await client.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage == whole.usage
        for choice in whole.choices:
            own = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
            assert "".join(one.text for one in own) == choice.text
            assert [one.finish_reason for one in own if one.finish_reason] == [choice.finish_reason]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                parts = [getattr(one.logprobs, name) for one in own if one.logprobs is not None]
                assert [*chain(*parts)] == getattr(choice.logprobs, name)
        assert [choice.text for choice in whole.choices[::2]] == (
            ["abcdefxyz", "gxyz"] if max_tokens else ["abcdef", "g"]
        )


async def test_a_prompt_that_is_only_scored(model: Path) -> None:
    async with served(model, "xyz") as (cluster, client):
        answer = await client.completions.create(
            model="fake", prompt="abc", max_tokens=0, echo=True, logprobs=0
        )
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason) == ("abc", "length")
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == ["a", "b", "c"]
        assert choice.logprobs.token_logprobs == [None, -1.0, -2.0]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)
        assert cluster.workers["p0"].prefills[0].draw.stop.max_tokens == 1
        plain = await client.completions.create(model="fake", prompt=[97, 98], max_tokens=0, echo=True)
        assert (plain.choices[0].text, plain.choices[0].logprobs) == ("ab", None)


async def test_how_much_of_prompts_is_scored_in_one_answer(model: Path) -> None:
    """What is streamed is not gathered, and so has the limit of each prompt alone."""
    async with served(model, "x", max_scored_prompt_tokens=10) as (_, client):
        fields: dict[str, Any] = {"model": "fake", "max_tokens": 1, "echo": True, "logprobs": 1}
        await client.completions.create(prompt=["a" * 5, "b" * 5], **fields)
        with pytest.raises(openai.APIStatusError) as together:
            await client.completions.create(prompt=["a" * 5, "b" * 6], **fields)
        assert (together.value.code, together.value.param) == ("PROMPT_TOO_LONG", "prompt")
        with pytest.raises(openai.APIStatusError) as choices:
            await client.completions.create(prompt="a" * 6, n=2, **fields)
        assert choices.value.code == "PROMPT_TOO_LONG"
        stream = await client.completions.create(prompt=["a" * 5, "b" * 6], stream=True, **fields)
        assert [chunk async for chunk in stream]
        with pytest.raises(openai.APIStatusError) as alone:
            await client.completions.create(prompt="a" * 11, **fields)
        assert (alone.value.code, alone.value.param) == ("PROMPT_TOO_LONG", "prompt_logprobs")
        await client.completions.create(prompt="a" * 11, model="fake", max_tokens=1, echo=True)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"echo": True, "logprobs": 21}, "logprobs", "INVALID_LOGPROBS"),
        ({"echo": False, "max_tokens": 0}, "stop.max_tokens", "INVALID_STOP"),
        ({"echo": True, "logprobs": -1}, "logprobs", "INVALID_ARGUMENT"),
        ({"echo": True, "max_tokens": 0, "min_tokens": 2}, "stop.min_tokens", "INVALID_STOP"),
    ],
)
async def test_refusals_of_echo(model: Path, fields: dict[str, Any], param: str, code: str) -> None:
    async with served(model, "x") as (cluster, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.post("/completions", body={"model": "fake", "prompt": "a"} | fields, cast_to=object)
        assert (caught.value.param, caught.value.code) == (param, code)
        assert not cluster.workers["p0"].prefills
