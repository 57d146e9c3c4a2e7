# SPDX-License-Identifier: Apache-2.0
"""Streamed text equals the library's text of the whole list, however the stream is cut."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from tests.unit.text import tokenizers_zoo as zoo
from twinpool.text import TokenizerLoadError, UnknownTokenError
from twinpool.text.detokenizer import DetokenizerFactory

FACTORIES = {make: DetokenizerFactory(make()) for make in zoo.ALL}


def pieces(tokens: list[int], cuts: list[int]) -> Iterator[list[int]]:
    bounds = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    for begin, end in pairwise(bounds):
        yield tokens[begin:end]


@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from(zoo.ALL), st.booleans())
def test_deltas_join_to_the_whole(data: st.DataObject, make: Callable[[], Backend], skip: bool) -> None:
    backend, factory = make(), FACTORIES[make]
    # Bytes of the middle of characters, special and added tokens all appear often.
    token = st.one_of(
        st.integers(0, factory.vocab_size - 1),
        st.integers(max(0, factory.vocab_size - 6), factory.vocab_size - 1),
    )
    tokens = data.draw(st.lists(token, max_size=24))
    cuts = data.draw(st.lists(st.integers(0, 24), max_size=24))
    stream = factory.create(skip_special_tokens=skip)
    text = "".join(stream.push(piece) for piece in pieces(tokens, cuts)) + stream.flush()
    assert text == backend.decode(tokens, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40), st.sampled_from([zoo.byte_level, zoo.gemma]))
def test_a_round_trip_streams_every_character_as_soon_as_it_is_whole(
    text: str, make: Callable[[], Backend]
) -> None:
    backend = make()
    tokens = backend.encode(text, add_special_tokens=False).ids
    stream = FACTORIES[make].create()
    got = ""
    for count, token in enumerate(tokens, start=1):
        got += stream.push([token])
        if make is zoo.byte_level:
            whole = backend.decode(tokens[:count])
            assert got == whole.rstrip("�") or got == whole
    assert got + stream.flush() == backend.decode(tokens)


def test_a_character_of_four_tokens_is_held_until_it_is_whole() -> None:
    backend = zoo.byte_level()
    tokens = [backend.token_to_id(character) for character in "ðŁĻĪ"]  # U+1F648 byte by byte
    assert None not in tokens
    stream = FACTORIES[zoo.byte_level].create()
    assert [stream.push([token]) for token in tokens] == ["", "", "", "🙈"]
    assert stream.flush() == ""


def test_what_stays_incomplete_is_flushed_as_a_replacement() -> None:
    backend = zoo.byte_level()
    stream = FACTORIES[zoo.byte_level].create()
    assert stream.push([backend.token_to_id("ð"), backend.token_to_id("Ł")]) == ""
    assert stream.flush() == "�"


def test_the_leading_space_goes_once() -> None:
    backend = zoo.llama2()
    the = backend.token_to_id("▁the")
    stream = FACTORIES[zoo.llama2].create()
    begin = backend.token_to_id("<s>")
    assert [stream.push([token]) for token in (begin, the, the)] == ["", "the", " the"]


@pytest.mark.parametrize("make", zoo.ALL)
def test_a_token_outside_the_vocabulary_is_an_error(make: Callable[[], Backend]) -> None:
    factory = FACTORIES[make]
    for token in (-1, factory.vocab_size, 2**31 - 1):
        with pytest.raises(UnknownTokenError, match=f"{token} .*vocabulary of {factory.vocab_size}"):
            factory.create().push([0, token])


def test_a_hole_in_the_vocabulary_is_an_error() -> None:
    backend = Backend.from_str(zoo.no_decoder().to_str().replace('"b":1', '"b":7'))
    factory = DetokenizerFactory(backend)
    assert factory.vocab_size == 8
    assert factory.create().push([7]) == "b"
    with pytest.raises(UnknownTokenError, match="token id 5"):
        factory.create().push([5])


def test_decoders_that_cannot_be_streamed_are_refused_by_name() -> None:
    for backend, word in zoo.unsupported():
        with pytest.raises(TokenizerLoadError, match=word):
            DetokenizerFactory(backend)
