# SPDX-License-Identifier: Apache-2.0
"""Stop strings against a plain search over the whole text."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.text import tokenizers_zoo as zoo
from twinpool.text import StopStringMatcher, TextStream
from twinpool.text.detokenizer import DetokenizerFactory

FACTORY = DetokenizerFactory(zoo.byte_level())


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The match that ends first, the longest of those; the text before it."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


letters = st.text("ab", max_size=24)
patterns = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


@settings(max_examples=500, deadline=None)
@given(letters, patterns, st.lists(st.integers(0, 24), max_size=10))
@example("aabaab", ["aab"], [])
@example("ababac", ["abac", "bab"], [2, 3])
def test_the_outcome_is_that_of_a_plain_search(text: str, stops: list[str], cuts: list[int]) -> None:
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    matcher, got = StopStringMatcher(stops), ""
    for begin, end in pairwise(bounds):
        got += matcher.push(text[begin:end])
        if matcher.hit is None:
            # Held back is the longest end of the text that begins a stop string, and nothing more.
            seen = text[:end]
            held = max(
                (
                    n
                    for n in range(end + 1)
                    if any(s.startswith(seen[end - n :]) and n < len(s) for s in stops)
                ),
                default=0,
            )
            assert got == seen[: end - held]
            assert matcher.held == seen[end - held :]
    hit = matcher.hit
    got += matcher.flush()
    expected, stop = reference(text, stops)
    assert got == expected
    assert (hit.value if hit else None) == stop
    if hit is not None:
        assert stops[hit.index] == stop
        assert matcher.push("more") == ""


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStringMatcher(["a", ""])


def test_characters_with_a_meaning_in_patterns_are_plain() -> None:
    matcher = StopStringMatcher(["^]", "\\d", "-"])
    assert matcher.push("a^b]c\\e") == "a^b]c\\e"
    assert matcher.push("x-y") == "x"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_stream_cuts_text_and_tokens_at_the_stop(data: st.DataObject) -> None:
    text = data.draw(st.text("ab 日🙈", max_size=20))
    stops = data.draw(st.lists(st.text("ab 日", min_size=1, max_size=3), max_size=3))
    tokens = zoo.byte_level().encode(text).ids
    minimum = data.draw(st.integers(0, len(tokens)))
    included = data.draw(st.booleans())
    stream = TextStream(FACTORY.create(), stops, min_tokens=minimum, include_stop=included)
    got, counted, hit, position = "", 0, None, 0
    while position < len(tokens):
        step = data.draw(st.integers(1, 5))
        delta = stream.push(tokens[position : position + step])
        position += step
        got, counted, hit = got + delta.text, counted + delta.tokens, hit or delta.stop
    got += stream.finish().text
    before = FACTORY.create()
    unmatched = before.push(tokens[:minimum])
    expected, stop = reference(before.push(tokens[minimum:]) + before.flush(), stops)
    if included and stop is not None:
        assert got.endswith(stop)
        got = got.removesuffix(stop)
    assert got == unmatched + expected
    assert stream.tokens == counted
    if stop is None:
        assert hit is None
        assert counted == len(tokens)
    else:
        assert hit is not None
        assert hit.value == stop
        assert stream.stop == hit
        # The token that completed the match is the last one that counts.
        assert stop in FACTORY.create().push(tokens[:counted]) + FACTORY.create().flush()
        assert got + stop == FACTORY.create().push(tokens[:counted])[: len(got + stop)]


def test_a_stop_that_only_the_flush_completes() -> None:
    half = zoo.byte_level().token_to_id("ð")
    stream = TextStream(FACTORY.create(), ["�"])
    assert stream.push([half]).text == ""
    end = stream.finish()
    assert (end.text, end.stop.value if end.stop else None) == ("", "�")
    stream = TextStream(FACTORY.create(), ["�"], include_stop=True)
    assert stream.push([half]).text + stream.finish().text == "�"
