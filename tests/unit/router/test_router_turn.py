# SPDX-License-Identifier: Apache-2.0
"""What a client of Chat is told while an answer is written."""

from collections.abc import Iterable

import pytest

from twinpool.router.chat.turn import Turn
from twinpool.text.calls import Thinking, find_format
from twinpool.v1 import chat_pb2 as chat
from twinpool.v1 import inference_pb2 as pb

CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
STARTED = pb.GenerateResponse(started=pb.GenerateStarted(request_id="r"))


def tokens(text: str, index: int = 0, logprobs: int = 0) -> pb.GenerateResponse:
    made = [pb.PositionLogprobs(chosen=pb.TokenLogprob(token_id=n)) for n in range(logprobs)]
    return pb.GenerateResponse(tokens=pb.GenerateTokens(index=index, text=text, logprobs=made))


def finished(*reasons: "pb.FinishReason.ValueType", stop: str | None = None) -> pb.GenerateResponse:
    choices = [
        pb.ChoiceFinish(index=index, reason=reason, stop_string=stop) for index, reason in enumerate(reasons)
    ]
    return pb.GenerateResponse(finished=pb.GenerateFinished(choices=choices))


def told(turn: Turn, answer: Iterable[pb.GenerateResponse]) -> list[chat.ChatResponse]:
    return [response for event in answer for response in turn.responses(event)]


def deltas(responses: Iterable[chat.ChatResponse]) -> list[chat.ChatDelta]:
    return [response.delta for response in responses if response.HasField("delta")]


def test_a_turn_with_everything() -> None:
    turn = Turn(1, find_format("hermes"), Thinking())
    text = f"<think>Hm.</think>Let me look.\n{CALL}\n{CALL}"
    responses = told(turn, [STARTED, *(tokens(part) for part in text), finished(pb.FINISH_REASON_STOP)])
    assert responses[0].started.request_id == "r"
    found = deltas(responses)
    assert "".join(delta.reasoning for delta in found) == "Hm."
    assert "".join(delta.content for delta in found) == "Let me look."
    calls = [call for delta in found for call in delta.tool_calls]
    for index in (0, 1):
        of_one = [call for call in calls if call.index == index]
        assert of_one[0].name == "look"
        assert len(of_one[0].id) == 24
        assert all(not call.id and not call.name for call in of_one[1:])
        assert "".join(call.arguments_json for call in of_one) == '{"at": 1}'
    assert responses[-1].finished.choices[0].reason == pb.FINISH_REASON_TOOL_CALLS


def test_one_message_of_tokens_is_one_message_of_the_turn() -> None:
    turn = Turn(1, find_format("hermes"), None)
    (response,) = turn.responses(tokens(f"Look. {CALL} {CALL}", logprobs=2))
    assert response.delta.content == "Look."
    assert [(call.name, call.arguments_json) for call in response.delta.tool_calls] == [
        ("look", '{"at": 1}')
    ] * 2
    assert len(response.delta.logprobs) == 2


def test_log_probabilities_come_even_where_there_is_no_text_yet() -> None:
    turn = Turn(1, find_format("hermes"), None)
    (response,) = turn.responses(tokens("<tool", logprobs=1))
    assert (response.delta.content, len(response.delta.logprobs)) == ("", 1)


def test_choices_are_apart() -> None:
    turn = Turn(2, find_format("mistral"), None)
    answer = [
        tokens("[TOOL_CALLS]", 1), tokens("Hello", 0), tokens('[{"name": "f"}]', 1),
        finished(pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH),
    ]  # fmt: skip
    responses = told(turn, answer)
    assert [delta.content for delta in deltas(responses) if delta.index == 0] == ["Hello"]
    (call,) = (call for delta in deltas(responses) if delta.index == 1 for call in delta.tool_calls)
    assert (call.name, len(call.id)) == ("f", 9)
    reasons = [choice.reason for choice in responses[-1].finished.choices]
    assert reasons == [pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH], "called, but cut off"


@pytest.mark.parametrize("kind", ["hermes", "deepseek", "llama3_json", "mistral"])
@pytest.mark.parametrize("name", ["", "look"])
def test_a_turn_that_must_call_begins_with_the_call(kind: str, name: str) -> None:
    calls = find_format(kind)
    turn = Turn(1, calls, Thinking(), opening=calls.opening(name))
    rest = '{"at": 1}' if name else "look" + calls.after_name + '{"at": 1}'
    found = deltas(told(turn, [STARTED, tokens(rest + "}]"), finished(pb.FINISH_REASON_STOP)]))
    calls_told = [call for delta in found for call in delta.tool_calls]
    assert calls_told[0].name == "look"
    assert "".join(call.arguments_json for call in calls_told) == '{"at": 1}'


def test_a_turn_of_a_single_call_ends_with_it() -> None:
    turn = Turn(1, find_format("hermes"), None, single_call=True)
    ended = finished(pb.FINISH_REASON_STOP, stop="</tool_call>")
    responses = told(turn, [tokens(CALL.removesuffix("</tool_call>")), ended])
    assert responses[-1].finished.choices[0] == pb.ChoiceFinish(reason=pb.FINISH_REASON_TOOL_CALLS)
    # A format without an end of its own: what comes later is not told.
    turn = Turn(1, find_format("llama3_json"), None, single_call=True)
    (delta,) = deltas(turn.responses(tokens('{"name": "a"};{"name": "b"}')))
    assert [call.name for call in delta.tool_calls] == ["a"]


def test_what_is_malformed_is_told_apart() -> None:
    turn = Turn(1, find_format("hermes"), None)
    found = deltas(told(turn, [tokens("So: <tool_call>oops"), finished(pb.FINISH_REASON_STOP)]))
    assert [(delta.content, delta.malformed) for delta in found] == [
        ("So:", False),
        ("<tool_call>", True),
        ("oops", False),
    ]
