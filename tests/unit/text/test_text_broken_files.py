# SPDX-License-Identifier: Apache-2.0
"""Tokenizer files that are wrong in every way: one error, which names where it came from."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.byte_tokenizer import write_byte_tokenizer
from twinpool.text import Tokenizer
from twinpool.text.chat_template import ChatTemplate
from twinpool.text.errors import ChatTemplateError, TokenizerLoadError

WORDS = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"},
}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", {"version": "1.0", "model": {"type": "Nothing"}}),
        ("tokenizer.json", []),
        ("tokenizer.json", WORDS),
        (
            "tokenizer.json",
            WORDS | {"model": {"type": "WordLevel", "vocab": {"a": 1_000_000_000}, "unk_token": "a"}},
        ),
        ("tokenizer_config.json", {"added_tokens_decoder": 2.5}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "<x>"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"300": {"content": "\ud800"}}}),
        ("tokenizer_config.json", {"chat_template": [{"template": "x"}]}),
        ("tokenizer_config.json", {"chat_template": [1]}),
        ("tokenizer_config.json", {"extra_special_tokens": 3}),
        ("tokenizer_config.json", {"bos_token": "\ud800"}),
        ("generation_config.json", {"eos_token_id": "x"}),
        ("special_tokens_map.json", 7),
    ],
)
def test_what_is_wrong_is_an_error_of_loading(tmp_path: Path, file: str, content: Any) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(TokenizerLoadError):
        Tokenizer.from_pretrained(tmp_path).prepare()


def test_json_as_deep_as_it_goes(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"a":' + "[" * 200_000)
    with pytest.raises(TokenizerLoadError):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("template", ["\ud800", "{{ half }}", "{{ messages[0].content }}"])
def test_half_a_character_is_refused_before_it_is_tokenised(template: str) -> None:
    """A client can send one within JSON: in a tool's parameters, or as a variable of the template."""
    with pytest.raises(ChatTemplateError, match="UnicodeEncodeError"):
        ChatTemplate(template, {}).render(
            [{"role": "user", "content": "\udc00"}], variables={"half": "\ud800"}
        )
