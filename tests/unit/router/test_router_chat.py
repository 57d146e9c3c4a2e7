# SPDX-License-Identifier: Apache-2.0
"""Chat over gRPC, from the conversation to its next turn, with workers that only pretend."""

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.support.byte_tokenizer import EOS, VOCAB_SIZE
from tests.support.chat_world import chat_cluster, prompt_text, weather_chat, write_chat_model
from tests.support.fake_cluster import FakeCluster
from twinpool.errors import TwinpoolError, from_rpc_error
from twinpool.v1 import chat_pb2 as chat
from twinpool.v1 import chat_pb2_grpc
from twinpool.v1 import inference_pb2 as pb

CALL = 'I look.\n<tool_call>{"name": "weather", "arguments": {"town": "Bern"}}</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat-model"))


def ask(change: Callable[[chat.ChatRequest], object] = lambda request: None) -> chat.ChatRequest:
    request = weather_chat()
    change(request)
    return request


async def turn(cluster: FakeCluster, request: chat.ChatRequest) -> list[chat.ChatResponse]:
    stub = chat_pb2_grpc.ChatServiceStub(cluster.channel)
    try:
        return [response async for response in stub.Chat(request, timeout=60)]
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


def content(responses: list[chat.ChatResponse]) -> str:
    return "".join(response.delta.content for response in responses)


def calls(responses: list[chat.ChatResponse]) -> dict[str, str]:
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for response in responses:
        for call in response.delta.tool_calls:
            names.setdefault(call.index, call.name)
            arguments[call.index] = arguments.get(call.index, "") + call.arguments_json
    return {names[index]: text for index, text in arguments.items()}


async def test_a_turn_that_calls_a_tool(model: Path) -> None:
    async with chat_cluster(model, CALL) as cluster:
        responses = await turn(cluster, ask())
        assert responses[0].HasField("started")
        assert content(responses) == "I look."
        assert calls(responses) == {"weather": '{"town": "Bern"}'}
        assert responses[-1].finished.choices[0].reason == pb.FINISH_REASON_TOOL_CALLS
        assert '"name": "weather"' in prompt_text(cluster)
        assert cluster.workers["d0"].decodes[0].draw.grammar == ""
        await cluster.assert_quiescent()


async def test_without_tools_what_looks_like_a_call_is_text(model: Path) -> None:
    async with chat_cluster(model, CALL) as cluster:
        for change in (
            lambda request: request.request.chat.ClearField("tools"),
            lambda request: setattr(request, "tool_choice", chat.TOOL_CHOICE_MODE_NONE),
        ):
            responses = await turn(cluster, ask(change))
            assert content(responses) == CALL
            assert responses[-1].finished.choices[0].reason == pb.FINISH_REASON_STOP
            assert "weather" not in prompt_text(cluster)


@pytest.mark.parametrize("named", [True, False])
async def test_a_call_that_must_be_made(model: Path, named: bool) -> None:
    rest = ' {"town": "Bern"}}' if named else 'weather", "arguments": {"town": "Bern"}}'

    def must(request: chat.ChatRequest) -> None:
        if named:
            request.tool_name = "weather"
        else:
            request.tool_choice = chat.TOOL_CHOICE_MODE_REQUIRED

    async with chat_cluster(model, rest) as cluster:
        responses = await turn(cluster, ask(must))
        assert calls(responses) == {"weather": '{"town": "Bern"}'}
        assert content(responses) == ""
        assert responses[-1].finished.choices[0].reason == pb.FINISH_REASON_TOOL_CALLS
        opening = '<tool_call>\n{"name": "' + ('weather", "arguments":' if named else "")
        assert prompt_text(cluster).endswith("[assistant]" + opening)
        grammar = cluster.workers["d0"].decodes[0].draw.grammar
        assert grammar == cluster.workers["p0"].prefills[0].draw.grammar
    tokenizer = LLTokenizer((model / "tokenizer.json").read_text(), n_vocab=VOCAB_SIZE, eos_token=EOS)
    for text, good in (
        (rest, True),
        (rest.replace("Bern", "Chur"), True),
        (rest.replace("town", "city"), False),
    ):
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        ids = list(text.encode())
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == good


async def test_reasoning_is_told_apart_unless_it_is_wanted_as_it_is(model: Path) -> None:
    async with chat_cluster(model, "Hm.\n</think>\n\nYes.") as cluster:

        def think(request: chat.ChatRequest) -> None:
            request.request.chat.variables_json = '{"think": true}'

        responses = await turn(cluster, ask(think))
        assert "".join(response.delta.reasoning for response in responses) == "Hm."
        assert content(responses) == "Yes."

        def raw(request: chat.ChatRequest) -> None:
            think(request)
            request.raw_reasoning = True

        assert content(await turn(cluster, ask(raw))) == "Hm.\n</think>\n\nYes."


async def test_what_has_a_form_is_not_reasoned_about(model: Path) -> None:
    async with chat_cluster(model, '{"a": 1}') as cluster:

        def form(request: chat.ChatRequest) -> None:
            request.request.chat.ClearField("tools")
            request.request.chat.variables_json = '{"think": true}'
            request.request.structured.json_schema = '{"type": "object"}'

        responses = await turn(cluster, ask(form))
        assert content(responses) == '{"a": 1}'
        assert prompt_text(cluster).endswith("<think>\n</think>\n\n")
        assert "json_schema" in cluster.workers["d0"].decodes[0].draw.grammar


async def test_a_single_call_ends_the_turn(model: Path) -> None:
    async with chat_cluster(model, CALL + CALL) as cluster:
        responses = await turn(cluster, ask(lambda request: setattr(request, "single_call", True)))
        assert calls(responses) == {"weather": '{"town": "Bern"}'}
        finish = responses[-1].finished
        assert finish.choices[0] == pb.ChoiceFinish(reason=pb.FINISH_REASON_TOOL_CALLS)
        assert finish.usage.completion_tokens == len(CALL), "the second call was not waited for"
        await cluster.assert_quiescent()


async def test_a_chat_is_admitted_once_and_made_in_one_hop_to_a_thread(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noting(name: str, work: Callable[..., object]) -> Callable[..., object]:
        def note(*args: object, **options: object) -> object:
            done.append(name)
            return work(*args, **options)

        return note

    async with chat_cluster(model, CALL) as cluster:
        threads, tenants = cluster.router.tokenize._threads, cluster.router.tenants
        monkeypatch.setattr(threads, "submit", noting("hop", threads.submit))
        monkeypatch.setattr(tenants, "admit", noting("admit", tenants.admit))
        await turn(cluster, ask())
        assert done == ["admit", "hop"]


def both(request: chat.ChatRequest) -> None:
    request.tool_name = "weather"
    request.tool_choice = chat.TOOL_CHOICE_MODE_REQUIRED


def form_and_tools(request: chat.ChatRequest) -> None:
    request.request.structured.regex = "a"


def no_tools(request: chat.ChatRequest) -> None:
    request.request.chat.ClearField("tools")
    request.tool_choice = chat.TOOL_CHOICE_MODE_REQUIRED


def no_schema(request: chat.ChatRequest) -> None:
    request.request.chat.tools[0].parameters_json = "{"
    request.tool_name = "weather"


def bad_schema(request: chat.ChatRequest) -> None:
    request.request.chat.tools[0].parameters_json = '{"type": "object", "properties": 5}'
    request.tool_name = "weather"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda request: request.request.ClearField("chat"), "EMPTY_PROMPT"),
        (lambda request: setattr(request, "tool_name", "missing"), "INVALID_TOOLS"),
        (both, "INVALID_TOOLS"),
        (form_and_tools, "INVALID_TOOLS"),
        (no_tools, "INVALID_TOOLS"),
        (bad_schema, "INVALID_GRAMMAR"),
        (no_schema, "INVALID_TOOLS"),
        (lambda request: setattr(request.request, "n", 99), "INVALID_N"),
        (lambda request: request.positions.add(), "INVALID_RESUME"),
        (lambda request: setattr(request.request, "model", "other"), "MODEL_NOT_FOUND"),
    ],
)
async def test_refusals(model: Path, change: Callable[[chat.ChatRequest], object], reason: str) -> None:
    async with chat_cluster(model, "x") as cluster:
        with pytest.raises(TwinpoolError) as caught:
            await turn(cluster, ask(change))
        assert caught.value.reason == reason
        assert not cluster.workers["p0"].prefills, "no work was started"


async def test_an_unknown_call_format_is_an_error_at_the_start(model: Path) -> None:
    with pytest.raises(TwinpoolError, match="call_format"):
        async with chat_cluster(model, "x", call_format="strange"):
            pass
