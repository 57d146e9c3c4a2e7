# SPDX-License-Identifier: Apache-2.0
"""``/v1/responses``, asked by OpenAI's own client, with workers that only pretend."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.chat_world import WEATHER, prompt_text, write_chat_model
from tests.unit.router.test_router_http import CALL, served

TOOL: Any = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat-model"))


async def test_a_response(model: Path) -> None:
    async with served(model, "It is dry.") as (cluster, client):
        found = await client.responses.create(
            model="fake", input="Rain?", instructions="Be brief.", max_output_tokens=50, temperature=0
        )
        assert found.output_text == "It is dry."
        assert found.status == "completed"
        assert found.usage is not None
        assert found.usage.output_tokens == len("It is dry.") + 1
        assert found.usage.input_tokens_details.cached_tokens == 0
        assert prompt_text(cluster) == "[system]Be brief.[user]Rain?[assistant]"
        cut = await client.responses.create(model="fake", input="Rain?", max_output_tokens=5)
        assert (cut.status, cut.output_text) == ("incomplete", "It is")
        assert cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens"


async def test_the_loop_of_an_agent(model: Path) -> None:
    async with served(model, CALL) as (cluster, client):
        found = await client.responses.create(
            model="fake", input="Rain?", tools=[TOOL], max_output_tokens=200
        )
        assert [item.type for item in found.output] == ["message", "function_call"]
        call = found.output[1]
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("weather", {"town": "Bern"})
        back: Any = [
            {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
            *found.output,
            {"type": "function_call_output", "call_id": call.call_id, "output": "Dry."},
        ]
        await client.responses.create(model="fake", input=back, tools=[TOOL], max_output_tokens=9)
        assert 'I look.<tool_call>{"name": "weather"' in prompt_text(cluster)
        assert prompt_text(cluster).endswith("[tool]Dry.[assistant]")


async def test_a_streamed_response(model: Path) -> None:
    async with served(model, "<think>Hm.</think>" + CALL + CALL) as (_, client):
        async with client.responses.stream(
            model="fake", input="Rain?", tools=[TOOL], max_output_tokens=300
        ) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 5
        assert "response.function_call_arguments.delta" in kinds
        said = ["message", "function_call"]
        assert [item.type for item in final.output] == ["reasoning", *said, *said]
        assert final.output_text == "I look." * 2
        raw = await client.responses.create(model="fake", input="x", stream=True, max_output_tokens=300)
        numbers = [event.sequence_number async for event in raw]
        assert numbers == list(range(len(numbers)))


async def test_a_form(model: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    async with served(model, '{"a": 1}') as (cluster, client):
        found = await client.responses.create(
            model="fake",
            input="x",
            max_output_tokens=50,
            text={"format": {"type": "json_schema", "name": "x", "schema": schema}},
        )
        assert found.output_text == '{"a": 1}'
        assert '"integer"' in cluster.workers["d0"].decodes[-1].draw.grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, None),
        ({"surprise": 1}, "surprise"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    model: Path, fields: dict[str, Any], param: str | None
) -> None:
    async with served(model, "x") as (cluster, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.post("/responses", body={"model": "fake", "input": "x"} | fields, cast_to=object)
        assert isinstance(caught.value.body, dict)
        assert param is None or caught.value.body["param"] == param
        assert not cluster.workers["p0"].prefills


async def test_an_answer_that_fails_later_says_so_in_the_stream(model: Path) -> None:
    async with served(model, "x" * 400, max_resumes=0) as (cluster, client):
        cluster.workers["d0"].script.fail_after_tokens = 20
        stream = await client.responses.create(model="fake", input="x", max_output_tokens=300, stream=True)
        last = [event async for event in stream][-1]
        assert last.type == "error"
        assert "scripted" in last.message
