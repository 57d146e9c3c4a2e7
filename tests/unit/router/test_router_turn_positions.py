# SPDX-License-Identifier: Apache-2.0
"""A turn goes on behind any event of it, and what a client has in the end is what it would have had."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.turns import ToldChoice, told
from twinpool.errors import TwinpoolError
from twinpool.router.chat.turn import Turn
from twinpool.text.calls import Thinking, find_format
from twinpool.v1 import chat_pb2 as chat
from twinpool.v1 import inference_pb2 as pb

STARTED = pb.GenerateResponse(started=pb.GenerateStarted(request_id="r"))
FINISHED = pb.GenerateResponse(
    finished=pb.GenerateFinished(choices=[pb.ChoiceFinish(reason=pb.FINISH_REASON_STOP)])
)
HERMES = '<tool_call>\n{"name": "look", "arguments": {"at": "Zürich 😀"}}\n</tool_call>'
DEEPSEEK = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{"at": [1, 2]}\n```<｜tool▁call▁end｜>'
    '\n<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"at": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
WRITTEN = {
    "hermes": [
        f"<think>Hm, so.\n</think>\n\nLet me look.\n{HERMES}\n{HERMES} Done.",
        "So: <tool_call>oops</tool_call> and on",
        '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call> x',
        "  plain text \n with < and </tool_call>  ",
        "",
    ],
    "deepseek": [f"Yes. {DEEPSEEK}", "<｜tool▁call▁begin｜>" + "n" * 300 + "<｜tool▁sep｜>{} tail"],
    "llama3_json": [
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": "{}"}',
        '{"no": "name"} rest',
    ],
    "mistral": ['[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', '[TOOL_CALLS]f[ARGS]{"a": [1]}!'],
    "": ["<think>only\nthis</think>and that "],
}
CASES = [(kind, text) for kind, texts in WRITTEN.items() for text in texts]


def answer(text: str, cuts: Sequence[int], begin: int = 0) -> list[pb.GenerateResponse]:
    """The events of an answer from token ``begin`` on; a token is a character. ``cuts``: between which messages end."""
    out = [STARTED]
    for at, end in pairwise(sorted({begin, len(text), *(cut for cut in cuts if begin < cut < len(text))})):
        ids = [ord(character) for character in text[at:end]]
        logprobs = [pb.PositionLogprobs(chosen=pb.TokenLogprob(token_id=id_)) for id_ in ids]
        tokens = pb.GenerateTokens(offset=at, token_ids=ids, text=text[at:end], logprobs=logprobs)
        out.append(pb.GenerateResponse(tokens=tokens))
    return [*out, FINISHED]


def events(
    kind: str,
    text: str,
    cuts: Sequence[int],
    had: chat.ChatPosition | None = None,
    *,
    thinking: Thinking | None = None,
    opening: str = "",
    single_call: bool = False,
) -> list[chat.ChatResponse]:
    """What a client is told that has ``had``."""
    position = had or chat.ChatPosition()
    turn = Turn(
        1,
        find_format(kind) if kind else None,
        thinking,
        opening=opening,
        single_call=single_call,
        ids=b"the same",
        resumable=True,
        had=[position],
        before=lambda _, tokens: text[:tokens],
    )
    given = answer(text, cuts, position.next_index)
    return [response for event in given for response in turn.responses(event)]


def with_each_cut(
    kind: str, text: str, first: Sequence[int], second: Sequence[int], **options: object
) -> None:
    """After each event of one stream another one takes over, whose messages are cut in another way."""
    (whole,) = told(events(kind, text, first, **options))  # type: ignore[arg-type]
    stream = events(kind, text, first, **options)  # type: ignore[arg-type]
    assert stream[-1].HasField("finished")
    for have in range(len(stream)):
        before = stream[:have]
        position = next((event.delta.position for event in reversed(before) if event.HasField("delta")), None)
        after = events(kind, text, second, position, **options)  # type: ignore[arg-type]
        assert told([*before, *after]) == [whole], f"after {have} events"
        assert after[-1] == stream[-1]


@pytest.mark.parametrize(("kind", "text"), CASES)
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_behind_each_event(kind: str, text: str, step: int) -> None:
    cuts = range(0, len(text), step)
    for other in (1, 5, 1000):
        with_each_cut(kind, text, cuts, range(0, len(text), other), thinking=Thinking())


@pytest.mark.parametrize("kind", ["hermes", "deepseek", "llama3_json", "mistral"])
@pytest.mark.parametrize("name", ["", "look"])
def test_in_a_call_that_must_be_made(kind: str, name: str) -> None:
    calls = find_format(kind)
    rest = calls.before_arguments + '{"at": [1, "x"]}' + calls.after_arguments
    text = rest if name else "look" + calls.after_name + rest
    with_each_cut(kind, text, range(0, len(text), 2), range(0, len(text), 3), opening=calls.opening(name))


def test_of_a_single_call() -> None:
    text = '{"name": "a", "parameters": {"b": 1}};{"name": "b", "parameters": {}}'
    with_each_cut("llama3_json", text, range(len(text)), range(0, len(text), 4), single_call=True)


PIECES = st.sampled_from(
    [" ", "\n", "a", "ü", "😀", "{", "}", "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f"',
     ', "arguments": {"x": "y"}', "}", "[TOOL_CALLS]", "[", "]", "[ARGS]", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json",
     "<｜tool▁call▁end｜>", "n" * 300, ";"]
)  # fmt: skip


@given(
    text=st.lists(PIECES, max_size=12).map("".join),
    kind=st.sampled_from(sorted(WRITTEN)),
    opened=st.sampled_from([None, False, True]),
    first=st.lists(st.integers(0, 200), max_size=8),
    second=st.lists(st.integers(0, 200), max_size=8),
)
def test_whatever_is_written_and_however_it_is_cut(
    text: str, kind: str, opened: bool | None, first: list[int], second: list[int]
) -> None:
    thinking = None if opened is None else Thinking(open=opened)
    with_each_cut(kind, text, first, second, thinking=thinking)


def test_a_position_of_another_turn_is_refused() -> None:
    text = f"Let me look. {HERMES}"
    stream = events("hermes", text, range(len(text)))
    position = stream[20].delta.position
    assert position.told > 5
    for other in (text.replace("me", "us"), "Let", "<tool_call>oops"):
        with pytest.raises(TwinpoolError, match="INVALID_RESUME"):
            events("hermes", other, range(len(other)), position)


def test_reasoning_is_no_content_of_the_same_letters() -> None:
    thinking = Thinking()
    position = events("", "<think>abcd", range(11), thinking=thinking)[-2].delta.position
    assert position.told == 4
    with pytest.raises(TwinpoolError, match="INVALID_RESUME"):
        events("", "abcdefgh", range(8), position, thinking=thinking)


def test_what_is_not_resumable_has_no_positions() -> None:
    turn = Turn(1, None, None)
    (delta,) = (each.delta for each in turn.responses(answer("abc", [])[1]))
    assert delta.content == "abc"
    assert not delta.HasField("position")


def test_an_end_of_a_call_that_says_nothing_is_no_event() -> None:
    turn = Turn(1, find_format("hermes"), None)
    pieces = [pb.GenerateTokens(text=character) for character in HERMES]
    for piece in pieces:
        for event in turn.responses(pb.GenerateResponse(tokens=piece)):
            assert event.delta != chat.ChatDelta()


def test_choices_stand_where_they_stand() -> None:
    def tokens(index: int, offset: int, text: str) -> pb.GenerateResponse:
        return pb.GenerateResponse(
            tokens=pb.GenerateTokens(index=index, offset=offset, token_ids=[*text.encode()], text=text)
        )

    texts = ("<think>ab</think>cd", "xyz")
    first = Turn(2, None, Thinking(), ids=b"i", resumable=True)
    stream = [STARTED, tokens(0, 0, texts[0][:8]), tokens(1, 0, "xy")]
    had = [each for event in stream for each in first.responses(event)]
    positions = [chat.ChatPosition(), chat.ChatPosition()]
    for event in had[1:]:
        positions[event.delta.index] = event.delta.position
    second = Turn(
        2,
        None,
        Thinking(),
        ids=b"i",
        resumable=True,
        had=positions,
        before=lambda index, count: texts[index][:count],
    )
    ended = [pb.ChoiceFinish(index=index, reason=pb.FINISH_REASON_STOP) for index in range(2)]
    rest = [
        STARTED,
        tokens(1, 2, "z"),
        tokens(0, 8, texts[0][8:]),
        pb.GenerateResponse(finished=pb.GenerateFinished(choices=ended)),
    ]
    after = [each for event in rest for each in second.responses(event)]
    assert told([*had, *after], 2) == [
        ToldChoice(text=[("reasoning", "ab"), ("content", "cd")]),
        ToldChoice(text=[("content", "xyz")]),
    ]
