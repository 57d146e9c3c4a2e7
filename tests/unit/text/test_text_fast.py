# SPDX-License-Identifier: Apache-2.0
"""A faster tokenizer is used where it gives the same ids, and nowhere else."""

import sys
import types
from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from tests.unit.text import tokenizers_zoo as zoo
from twinpool.text import Tokenizer
from twinpool.text.fast import corpus


class Native:
    """What ``fastokens.Tokenizer`` does, by the reference, with a fault if one is asked for."""

    calls = 0

    def __init__(self, backend: Backend, fault: Callable[[str, list[int]], list[int]]) -> None:
        self._backend, self._fault = backend, fault

    def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
        Native.calls += 1
        assert not add_special_tokens
        ids = [self._fault(text, self._backend.encode(text, add_special_tokens=False).ids) for text in texts]
        flat = np.array([one for each in ids for one in each], np.uint32).tobytes()
        edges = np.cumsum([0, *(len(each) for each in ids)]).astype(np.uint64).tobytes()
        return flat, edges


def install(monkeypatch: pytest.MonkeyPatch, fault: Callable[[str, list[int]], list[int]]) -> None:
    module = types.ModuleType("fastokens")

    def from_json_str(json: str) -> Native:
        return Native(Backend.from_str(json), fault)

    module.Tokenizer = types.SimpleNamespace(from_json_str=from_json_str)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastokens", module)
    monkeypatch.setattr(Native, "calls", 0)


def prepared() -> Tokenizer:
    tokenizer = Tokenizer(zoo.llama2(), special_tokens={}, chat_templates={}, eos_token_ids=[])
    tokenizer.prepare()
    return tokenizer


def test_the_same_ids_and_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, lambda text, ids: ids)
    tokenizer = prepared()
    before = Native.calls
    assert tokenizer.encode("the a").tolist() == zoo.llama2().encode("the a").ids
    assert (
        tokenizer.encode("the a", add_special_tokens=False).tolist()
        == zoo.llama2().encode("the a", add_special_tokens=False).ids
    )
    assert Native.calls == before + 2


def test_one_text_that_differs_is_enough_not_to_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = next(text for text in corpus(["<s>"]) if "\U0001f3fc" in text or "\u0301" in text)
    install(monkeypatch, lambda text, ids: ids[::-1] if text == odd else ids)
    tokenizer = prepared()
    before = Native.calls
    assert tokenizer.encode("the a").tolist() == zoo.llama2().encode("the a").ids
    assert Native.calls == before


def test_what_it_refuses_the_reference_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(text: str, ids: list[int]) -> list[int]:
        if "é" in text:
            raise ValueError("byte 0xc3 has no token in vocabulary")
        return ids

    install(monkeypatch, refuse)
    tokenizer = prepared()
    assert tokenizer.encode("é the").tolist() == zoo.llama2().encode("é the").ids
    first, second = tokenizer.encode_parts(["é", "the"])
    assert first.tolist() == zoo.llama2().encode("é", add_special_tokens=False).ids
    assert second.tolist() == zoo.llama2().encode("the", add_special_tokens=False).ids
    before = Native.calls
    tokenizer.encode("the")
    assert Native.calls == before + 1


def test_a_kind_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("fastokens")

    def unknown(json: str) -> Native:
        raise RuntimeError("unsupported model")

    module.Tokenizer = types.SimpleNamespace(from_json_str=unknown)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastokens", module)
    assert prepared().encode("the a").tolist() == zoo.llama2().encode("the a").ids


def test_not_installed_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert prepared().encode("the a").tolist() == zoo.llama2().encode("the a").ids


def test_the_corpus_is_wide() -> None:
    texts = corpus(["<s>", "</s>"])
    joined = "".join(texts)
    assert texts == corpus(["<s>", "</s>"])
    assert len(set(joined)) > 800
    assert {"\x00", "\r", "\u0301", "日", "\u200d", "\U0001f1e6"} & set(joined) >= {
        "\x00",
        "\u0301",
        "\u200d",
    }
    assert joined.count("<s>") > 50
