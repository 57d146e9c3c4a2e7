# SPDX-License-Identifier: Apache-2.0
"""What the client reads is what the workers drew: text, offsets, stop strings, log-probabilities, in any chunking."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.byte_tokenizer import EOS, write_byte_tokenizer
from twinpool.errors import TwinpoolError
from twinpool.router.stream import MAX_TOKENS_A_MESSAGE, Answer, AnswerSpec
from twinpool.text import TextStream, Tokenizer
from twinpool.v1 import inference_pb2 as pb

RUNNING, STOP, LENGTH = pb.FINISH_REASON_UNSPECIFIED, pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_pretrained(write_byte_tokenizer(tmp_path_factory.mktemp("bytes")))


def make(
    tokenizer: Tokenizer,
    stop: tuple[str, ...] = (),
    n: int = 1,
    logprobs: bool = False,
    limit: int = 10_000,
    min_tokens: int = 0,
) -> Answer:
    spec = AnswerSpec(n=n, logprobs=logprobs, max_buffered_tokens=limit)
    return Answer(spec, lambda: TextStream(tokenizer.detokenizer(), stop, min_tokens=min_tokens))


def feed(
    answer: Answer, data: bytes, finish: "pb.FinishReason.ValueType" = RUNNING, index: int = 0, start: int = 0
) -> None:
    for offset, byte in enumerate(data):
        last = offset == len(data) - 1
        answer.push(index, byte, start + offset, finish if last else RUNNING, None)


def joined(messages: list[pb.GenerateResponse], index: int = 0) -> tuple[list[int], str]:
    ids: list[int] = []
    text = ""
    for message in messages:
        if message.tokens.index == index:
            assert message.tokens.offset == len(ids), "offsets have no gap and no overlap"
            ids += message.tokens.token_ids
            text += message.tokens.text
    return ids, text


def test_tokens_that_wait_make_one_message(tokenizer: Tokenizer) -> None:
    answer = make(tokenizer)
    feed(answer, b"hello")
    messages = answer.take()
    assert len(messages) == 1
    assert joined(messages) == ([*b"hello"], "hello")
    assert answer.take() == []
    assert not answer.drawn


def test_a_character_in_four_tokens_comes_whole(tokenizer: Tokenizer) -> None:
    answer = make(tokenizer)
    messages = []
    for offset, byte in enumerate("a🦉b".encode()):
        answer.push(0, byte, offset, RUNNING, None)
        messages += answer.take()
    assert [message.tokens.text for message in messages] == ["a", "", "", "", "🦉", "b"]


def test_an_incomplete_character_at_the_end_is_flushed(tokenizer: Tokenizer) -> None:
    answer = make(tokenizer)
    feed(answer, "x🦉".encode()[:3], LENGTH)
    assert joined(answer.take()) == ([*"x🦉".encode()[:3]], "x\N{REPLACEMENT CHARACTER}")
    assert answer.finished


def test_the_stop_token_counts_but_is_no_text(tokenizer: Tokenizer) -> None:
    answer = make(tokenizer)
    feed(answer, b"hi!", STOP)
    assert joined(answer.take()) == ([*b"hi!"], "hi")
    assert answer.summaries() == [pb.ChoiceFinish(index=0, reason=STOP, stop_token_id=ord("!"))]
    answer = make(tokenizer)
    answer.push(0, EOS, 0, STOP, None)
    assert joined(answer.take()) == ([EOS], "")
    assert answer.completion_tokens == 1


def test_a_stop_string_across_tokens(tokenizer: Tokenizer) -> None:
    answer = make(tokenizer, ("END",))
    feed(answer, b"go E")
    assert joined(answer.take()) == ([*b"go E"], "go "), "what may become the stop string is held back"
    feed(answer, b"ND and more", start=4)
    messages = answer.take()
    assert [(list(m.tokens.token_ids), m.tokens.text) for m in messages] == [([*b"ND"], "")]
    assert answer.finished
    assert answer.completion_tokens == len(b"go END")
    assert answer.summaries() == [pb.ChoiceFinish(index=0, reason=STOP, stop_string="END")]
    feed(answer, b"!", start=15)
    assert answer.take() == [], "nothing comes after the end"


def test_a_stop_string_that_is_not_completed_is_returned_at_the_end(tokenizer: Tokenizer) -> None:
    answer = make(tokenizer, ("END",))
    feed(answer, b"go EN", LENGTH)
    assert joined(answer.take()) == ([*b"go EN"], "go EN")
    assert answer.summaries()[0].reason == LENGTH


def test_a_stop_string_wins_over_the_end_by_length(tokenizer: Tokenizer) -> None:
    answer = make(tokenizer, ("END",))
    feed(answer, b"go END", LENGTH)
    assert joined(answer.take()) == ([*b"go END"], "go ")
    assert answer.summaries()[0].stop_string == "END"


def test_min_tokens_holds_for_stop_strings(tokenizer: Tokenizer) -> None:
    answer = make(tokenizer, ("b",), min_tokens=3)
    feed(answer, b"abcab")
    assert joined(answer.take()) == ([*b"abcab"], "abca")


@given(data=st.data(), text=st.text(alphabet="abEND🦉é", max_size=40))
def test_chunking_does_not_change_the_answer(tokenizer: Tokenizer, data: st.DataObject, text: str) -> None:
    raw = text.encode()
    stops = ("END", "ab")
    whole = make(tokenizer, stops)
    feed(whole, raw, LENGTH)
    expected = joined(whole.take())
    pieces = make(tokenizer, stops)
    messages = []
    for offset, byte in enumerate(raw):
        pieces.push(0, byte, offset, LENGTH if offset == len(raw) - 1 else RUNNING, None)
        if data.draw(st.booleans()):
            messages += pieces.take()
    messages += pieces.take()
    assert joined(messages) == expected
    assert pieces.summaries() == whole.summaries()
    assert not any(stop in expected[1] for stop in stops)


def test_what_gathered_for_long_comes_in_messages_of_a_bounded_size(tokenizer: Tokenizer) -> None:
    raw = bytes(65 + at % 26 for at in range(2 * MAX_TOKENS_A_MESSAGE + 7))
    answer = make(tokenizer, ("never",))
    feed(answer, raw, LENGTH)
    messages = answer.take()
    assert [len(message.tokens.token_ids) for message in messages] == [MAX_TOKENS_A_MESSAGE] * 2 + [7]
    assert joined(messages) == ([*raw], raw.decode())
    assert answer.summaries()[0].reason == LENGTH


def test_choices_are_apart(tokenizer: Tokenizer) -> None:
    answer = make(tokenizer, n=2)
    feed(answer, b"one", LENGTH, index=0)
    feed(answer, b"second", index=1)
    messages = answer.take()
    assert joined(messages, 0) == ([*b"one"], "one")
    assert joined(messages, 1) == ([*b"second"], "second")
    assert not answer.drawn
    feed(answer, b"!", LENGTH, index=1, start=6)
    assert answer.drawn
    assert not answer.finished, "the last token was not taken yet"
    answer.take()
    assert answer.finished
    assert answer.completion_tokens == 10


def test_logprobs_go_with_their_tokens_only_if_asked_for(tokenizer: Tokenizer) -> None:
    def logprob(token: int) -> pb.PositionLogprobs:
        return pb.PositionLogprobs(chosen=pb.TokenLogprob(token_id=token, logprob=-0.5))

    with pytest.raises(TwinpoolError, match="without log-probabilities"):
        make(tokenizer, logprobs=True).push(0, 65, 0, RUNNING, None)
    for wanted in (True, False):
        answer = make(tokenizer, ("b",), logprobs=wanted)
        for offset, byte in enumerate(b"aab~"):
            answer.push(0, byte, offset, RUNNING, logprob(byte))
        (message,) = answer.take()
        assert [entry.chosen.token_id for entry in message.tokens.logprobs] == ([*b"aab"] if wanted else [])


def test_a_repeat_is_dropped_and_a_gap_fails(tokenizer: Tokenizer) -> None:
    answer = make(tokenizer)
    feed(answer, b"ab")
    answer.push(0, ord("a"), 0, RUNNING, None)
    assert joined(answer.take()) == ([*b"ab"], "ab")
    answer.push(0, ord("c"), 2, LENGTH, None)
    answer.push(0, ord("d"), 3, RUNNING, None)
    assert [message.tokens.text for message in answer.take()] == ["c"], "nothing comes after the last token"
    assert answer.finished
    answer = make(tokenizer)
    feed(answer, b"ab")
    with pytest.raises(TwinpoolError, match="token 5 came where 2 was due"):
        answer.push(0, 1, 5, RUNNING, None)
    with pytest.raises(TwinpoolError, match="choice 1 of 1"):
        answer.push(1, 1, 0, RUNNING, None)


def test_a_token_without_text_fails_with_internal(tokenizer: Tokenizer) -> None:
    for stop in ((), ("x",)):
        answer = make(tokenizer, stop)
        answer.push(0, 258, 0, RUNNING, None)
        with pytest.raises(TwinpoolError) as caught:
            answer.take()
        assert caught.value.reason == "DETOKENIZE_FAILED"


def test_what_may_wait_is_bounded(tokenizer: Tokenizer) -> None:
    answer = make(tokenizer, limit=10)
    feed(answer, b"0123456789")
    with pytest.raises(TwinpoolError) as caught:
        answer.push(0, 65, 10, RUNNING, None)
    assert caught.value.reason == "CLIENT_TOO_SLOW"
    assert "11 tokens" in caught.value.message
    assert "10" in caught.value.message


def test_tokenizer_directory_is_complete(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(write_byte_tokenizer(tmp_path))
    assert tokenizer.encode("Aé").tolist() == [65, 0xC3, 0xA9]
    assert tokenizer.eos_token_ids == (EOS,)
