# SPDX-License-Identifier: Apache-2.0
"""What is read from a journal is what was written, from any position on, however it was written and however it is read."""

import asyncio
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.byte_tokenizer import EOS, write_byte_tokenizer
from twinpool.errors import TwinpoolError
from twinpool.router.journal import Journal, JournalSpec
from twinpool.router.stream import MAX_TOKENS_A_MESSAGE, Answer, AnswerSpec
from twinpool.text import TextStream, Tokenizer
from twinpool.v1 import inference_pb2 as pb

STOP = pb.FINISH_REASON_STOP
MakeText = Callable[[], TextStream]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_pretrained(write_byte_tokenizer(tmp_path_factory.mktemp("bytes")))


def journal_of(text: MakeText, n: int = 1, logprobs: bool = False, limit: int = 1 << 20) -> Journal:
    return Journal(JournalSpec(n, logprobs, text, b"token", limit))


def entry(token_id: int) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(chosen=pb.TokenLogprob(token_id=token_id, logprob=-1.0))


def write(
    journal: Journal, text: MakeText, rows: Sequence[bytes], cuts: Sequence[int], logprobs: bool = False
) -> list[str]:
    """Draws the rows into an answer that is taken wherever a cut is; the text of each choice. Each ends with its last byte and
    EOS."""
    spec = AnswerSpec(n=len(rows), logprobs=logprobs, max_buffered_tokens=1 << 20)
    answer = Answer(spec, text)
    texts = ["" for _ in rows]

    def take() -> None:
        for message in answer.take():
            texts[message.tokens.index] += message.tokens.text
            journal.put(message)

    journal.put(pb.GenerateResponse(started=pb.GenerateStarted(request_id="r")))
    for at in range(max(len(row) for row in rows) + 1):
        for index, row in enumerate(rows):
            if at <= len(row):
                token = row[at] if at < len(row) else EOS
                answer.push(index, token, at, STOP if token == EOS else 0, entry(token) if logprobs else None)
        if at in cuts:
            take()
    take()
    journal.put(pb.GenerateResponse(finished=pb.GenerateFinished(choices=answer.summaries())))
    return texts


async def read(journal: Journal, at: Sequence[int]) -> list[pb.GenerateResponse]:
    return [event async for event in journal.attach(at).events()]


def joined(events: list[pb.GenerateResponse], index: int, at: int) -> tuple[list[int], str, list[int]]:
    ids: list[int] = []
    text, chosen = "", []
    for event in events:
        if event.HasField("tokens") and event.tokens.index == index:
            assert event.tokens.offset == at + len(ids)
            assert 0 < len(event.tokens.token_ids) <= MAX_TOKENS_A_MESSAGE
            ids += event.tokens.token_ids
            text += event.tokens.text
            chosen += [position.chosen.token_id for position in event.tokens.logprobs]
    return ids, text, chosen


TEXTS = st.text(st.sampled_from("ab cé€😀"), min_size=0, max_size=12).map(str.encode)


@given(st.data())
def test_any_position_and_any_chunking(tokenizer: Tokenizer, data: st.DataObject) -> None:
    rows = data.draw(st.lists(TEXTS, min_size=1, max_size=3))
    stop = tuple(data.draw(st.lists(st.sampled_from(["b c", "€", "aa"]), max_size=2)))
    longest = max(len(row) for row in rows)
    cuts = data.draw(st.sets(st.integers(0, longest)))
    logprobs = data.draw(st.booleans())

    def text() -> TextStream:
        return TextStream(tokenizer.detokenizer(), stop)

    journal = journal_of(text, len(rows), logprobs)
    texts = write(journal, text, rows, sorted(cuts), logprobs)
    whole = [list(row) for row in journal.outputs]
    positions = [data.draw(st.integers(0, len(row) + 1)) for row in whole]
    events = asyncio.run(read(journal, positions))
    assert events[0].started.resume_token == b"token"
    assert events[-1].HasField("finished")
    for index, at in enumerate(positions):
        ids, got, chosen = joined(events, index, at)
        assert ids == whole[index][at:]
        assert chosen == (ids if logprobs else [])
        # What a client has that read one token at a time up to there.
        stream, before = text(), ""
        for position, token in enumerate(whole[index][:at]):
            last = position == len(whole[index]) - 1
            before += texts[index][len(before) :] if last else stream.push([token]).text
        assert before + got == texts[index]


def test_a_long_answer_comes_in_messages_that_every_client_takes(tokenizer: Tokenizer) -> None:
    def text() -> TextStream:
        return TextStream(tokenizer.detokenizer())

    journal = journal_of(text)
    (whole,) = write(journal, text, [b"x" * 5000], range(0, 5000, 7))
    for at in (0, 1, 4999, 5000, 5001):
        ids, got, _ = joined(asyncio.run(read(journal, [at])), 0, at)
        assert len(ids) == 5001 - at
        assert got == whole[at:]
    assert journal.size_bytes < 5001 * 12, "some bytes a token"


async def test_the_newest_reader_ends_the_one_before(tokenizer: Tokenizer) -> None:
    journal = journal_of(lambda: TextStream(tokenizer.detokenizer()))
    first = journal.attach([0])
    reading = asyncio.create_task(anext(first.events().__aiter__()))
    second = journal.attach([0])
    with pytest.raises(TwinpoolError, match="STREAM_SUPERSEDED"):
        await reading
    assert not journal.detach(first), "another one has taken its place"
    assert journal.detach(second)
    assert not journal.attached


async def test_an_answer_that_runs_far_ahead_of_its_reader_is_ended(tokenizer: Tokenizer) -> None:
    journal = journal_of(lambda: TextStream(tokenizer.detokenizer()), limit=3)

    def tokens(offset: int, count: int) -> pb.GenerateResponse:
        return pb.GenerateResponse(
            tokens=pb.GenerateTokens(offset=offset, token_ids=[65] * count, text="A" * count)
        )

    journal.put(pb.GenerateResponse(started=pb.GenerateStarted()))
    await journal.write(tokens(0, 3))
    events = journal.attach([0]).events()
    assert [(await anext(events)).WhichOneof("event") for _ in range(2)] == ["started", "tokens"]
    await journal.write(tokens(3, 3))
    with pytest.raises(TwinpoolError, match="CLIENT_TOO_SLOW"):
        await journal.write(tokens(6, 1))


async def test_tokens_come_before_the_error_that_ended_the_answer(tokenizer: Tokenizer) -> None:
    journal = journal_of(lambda: TextStream(tokenizer.detokenizer()))
    journal.put(pb.GenerateResponse(started=pb.GenerateStarted()))
    journal.put(pb.GenerateResponse(tokens=pb.GenerateTokens(token_ids=[65], text="A")))
    journal.fail(TwinpoolError("WORKER_LOST"))
    journal.fail(TwinpoolError("INTERNAL"))
    events = journal.attach([]).events()
    assert [(await anext(events)).WhichOneof("event") for _ in range(2)] == ["started", "tokens"]
    with pytest.raises(TwinpoolError, match="WORKER_LOST"):
        await anext(events)


def test_the_prompt_is_told_to_who_has_no_token(tokenizer: Tokenizer) -> None:
    grown: list[int] = []
    spec = JournalSpec(1, False, lambda: TextStream(tokenizer.detokenizer()), b"token", 1 << 20, 4)
    journal = Journal(spec, grown.append)
    parts = [
        pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(offset=at, positions=[entry(65)] * count))
        for at, count in ((1, 2), (3, 1))
    ]
    journal.put(pb.GenerateResponse(started=pb.GenerateStarted()))
    journal.put(parts[0])
    assert journal.whole, "the rest may come"
    journal.put(parts[1])
    journal.put(pb.GenerateResponse(tokens=pb.GenerateTokens(token_ids=[65], text="A")))
    journal.put(pb.GenerateResponse(finished=pb.GenerateFinished()))
    assert sum(grown) == journal.size_bytes > sum(part.ByteSize() for part in parts)
    kinds = ["started", "prompt_logprobs", "prompt_logprobs", "tokens", "finished"]
    for _ in range(2):
        assert [event.WhichOneof("event") for event in asyncio.run(read(journal, []))] == kinds
    assert [event.WhichOneof("event") for event in asyncio.run(read(journal, [1]))] == ["started", "finished"]
    moved = Journal(spec)
    moved.put(pb.GenerateResponse(started=pb.GenerateStarted()))
    moved.put(pb.GenerateResponse(tokens=pb.GenerateTokens(token_ids=[65], text="A")))
    assert not moved.whole
    with pytest.raises(TwinpoolError, match="RESUME_LOST"):
        moved.attach([0])
    moved.attach([1])


def test_log_probabilities_that_are_not_known_are_not_left_out(tokenizer: Tokenizer) -> None:
    journal = journal_of(lambda: TextStream(tokenizer.detokenizer()), logprobs=True)
    journal.put(pb.GenerateResponse(tokens=pb.GenerateTokens(token_ids=[65, 66], text="AB")))
    journal.put(
        pb.GenerateResponse(
            tokens=pb.GenerateTokens(offset=2, token_ids=[67], text="C", logprobs=[entry(67)])
        )
    )
    journal.put(pb.GenerateResponse(started=pb.GenerateStarted()))
    journal.put(pb.GenerateResponse(finished=pb.GenerateFinished()))
    with pytest.raises(TwinpoolError, match="RESUME_LOST"):
        journal.attach([1])
    assert joined(asyncio.run(read(journal, [2])), 0, 2) == ([67], "C", [67])
    assert journal.logprobs == [()]
