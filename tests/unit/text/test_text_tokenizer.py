# SPDX-License-Identifier: Apache-2.0
"""Token ids equal those of transformers over the same files; broken files are named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from tests.unit.text import tokenizers_zoo as zoo
from twinpool.text import ChatTemplateError, Tokenizer, TokenizerLoadError

CHATML = (
    "{% for message in messages %}{{'<|user|>' + message['role'] + '\n' + message['content'] + '<|end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|user|>assistant\n' }}{% endif %}"
)
# What published templates use: bos_token, namespaces, loop controls, tojson, trimming, the generation tag, errors.
RICH = """{{- bos_token }}
{%- set ns = namespace(system='', count=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set ns.system = ns.system + message.content | trim %}
        {%- continue %}
    {%- endif %}
    {%- if message.role not in ['user', 'assistant'] %}
        {{- raise_exception('roles must be user or assistant, not ' + message.role) }}
    {%- endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if ns.count > 4 %}{% break %}{% endif %}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
    {%- else %}
        {{- '<|user|>' }} {{ message.content }}{{ eos_token }}
    {%- endif %}
    {% if loop.first and tools %}
    {{ tools | tojson(indent=2) }}
    {% endif %}
{%- endfor %}
{{ {'system': ns.system, 'tags': '<&>é'} | tojson }}
{%- if add_generation_prompt %}<|begin|>{% endif %}
"""

MESSAGES = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": 'What\'s 1 < 2 & "x"? <|user|> 日本'},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "  And\n\nnow?  "},
]


def write(root: Path, backend: Backend, config: dict[str, Any], **files: object) -> Path:
    root.mkdir(exist_ok=True)
    (root / "tokenizer.json").write_text(backend.to_str())
    (root / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
    )
    for name, content in files.items():
        (root / name.replace("__", ".")).write_text(
            content if isinstance(content, str) else json.dumps(content)
        )
    return root


def oracle(root: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(str(root))


NAMED = {
    "bos_token": "<|begin|>",
    "eos_token": {"__type": "AddedToken", "content": "<|end|>", "special": True},
    "pad_token": None,
}
CONFIGS: list[dict[str, Any]] = [
    {},
    NAMED,
    {**NAMED, "add_bos_token": True},
    {**NAMED, "add_bos_token": True, "add_eos_token": True},
    {**NAMED, "add_bos_token": False},
    {"add_bos_token": True},
    {**NAMED, "additional_special_tokens": ["<tool_call>"]},
    {**NAMED, "extra_special_tokens": {"image_token": "<image>"}},
    {"bos_token": "<new>", "add_bos_token": True},
    {
        "added_tokens_decoder": {
            "3": {"content": "<tool_call>", "special": True},
            "1": {"content": "<|end|>", "lstrip": True, "rstrip": True},
        }
    },
    {**NAMED, "unk_token": {"__type": "AddedToken", "content": "Hello", "rstrip": True}},
    {"added_tokens_decoder": {"900": {"content": "<late>", "special": True, "lstrip": True}}},
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("make", [zoo.byte_level, zoo.llama2])
def test_encode_and_decode_equal_transformers(
    tmp_path: Path, make: Callable[[], Backend], config: dict[str, Any]
) -> None:
    if make is zoo.llama2 and config.get("bos_token") == "<|begin|>":
        config = {**config, "bos_token": "<s>", "eos_token": "</s>"}
    root = write(tmp_path / "model", make(), config)
    ours, theirs = Tokenizer.from_pretrained(root), oracle(root)
    assert len(theirs) == ours.vocab_size
    assert dict(ours.special_tokens) == theirs.special_tokens_map
    texts = [
        "",
        "Hello world",
        "  two  spaces ",
        "<|begin|>x<|end|> <s>y</s> <tool_call>z <image> <new> <late>",
        "日本 🙈 \x00 \u2028",
        "<0x41>",
    ]
    for text in texts:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids.tolist() == theirs.encode(text, add_special_tokens=special)
        for skip in (True, False):
            assert ours.decode(ids.tolist(), skip_special_tokens=skip) == theirs.decode(
                ids.tolist(), skip_special_tokens=skip
            )


@pytest.mark.parametrize("template", [CHATML, RICH])
@pytest.mark.parametrize("where", ["config", "file", "list"])
def test_chat_equals_transformers(tmp_path: Path, template: str, where: str) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}] if where == "list" else None
    named = {**NAMED, "add_bos_token": True}
    listed = [
        {"name": "default", "template": template},
        {"name": "tool_use", "template": template + "{{ tools | tojson }}"},
    ]
    config = {"config": {**named, "chat_template": template}, "list": {**named, "chat_template": listed}}
    files = {"chat_template__jinja": template} if where == "file" else {}
    root = write(tmp_path / "model", zoo.byte_level(), config.get(where, named), **files)
    ours, theirs = Tokenizer.from_pretrained(root), oracle(root)
    assert ours.has_chat_template
    for messages in (MESSAGES, MESSAGES[1:2], [*MESSAGES, MESSAGES[2], *MESSAGES[1:], MESSAGES[1]]):
        for prompt in (True, False):
            expected = theirs.apply_chat_template(
                messages, tools=tools, add_generation_prompt=prompt, tokenize=False
            )
            assert (
                ours.chat(tools is not None).render(messages, add_generation_prompt=prompt, tools=tools)
                == expected
            )
            ids = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt)["input_ids"]
            assert ours.encode_chat(messages, prompt, tools=tools).tolist() == ids


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_round_trip(text: str) -> None:
    tokenizer = Tokenizer(zoo.byte_level(), special_tokens={}, chat_templates={}, eos_token_ids=[])
    assert tokenizer.decode(tokenizer.encode(text).tolist(), skip_special_tokens=False) == text


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = Backend.from_str(zoo.byte_level().to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.from_pretrained(write(tmp_path / "model", backend, {}))
    assert (
        tokenizer.encode("a long enough text").tolist() == zoo.byte_level().encode("a long enough text").ids
    )


@pytest.mark.parametrize(
    ("generation", "model", "named", "expected"),
    [
        ({"eos_token_id": [7, 2, 7]}, {"eos_token_id": 1}, True, (7, 2)),
        ({"eos_token_id": 0}, {"eos_token_id": 1}, True, (0,)),
        ({}, {"eos_token_id": 5}, True, (5,)),
        (None, None, True, (1,)),
        (None, None, False, ()),
    ],
)
def test_eos_ids(tmp_path: Path, generation: Any, model: Any, named: bool, expected: tuple[int, ...]) -> None:
    files = {"generation_config__json": generation, "config__json": model}
    root = write(
        tmp_path / "model",
        zoo.byte_level(),
        NAMED if named else {},
        **{name: value for name, value in files.items() if value is not None},
    )
    assert Tokenizer.from_pretrained(root).eos_token_ids == expected


def test_files_at_fault_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerLoadError, match=r"tokenizer\.json: missing"):
        Tokenizer.from_pretrained(tmp_path)
    root = write(tmp_path / "model", zoo.byte_level(), {})
    for name, content, message in [
        ("tokenizer_config.json", "{", "not JSON"),
        ("tokenizer_config.json", "[]", "expected an object"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id 'x'"),
        ("chat_template.jinja", "line\n{% if %}", "line 2"),
    ]:
        path = root / name
        before = path.read_text() if path.exists() else None
        path.write_text(content)
        with pytest.raises(TokenizerLoadError, match=message) as raised:
            Tokenizer.from_pretrained(root)
        assert "model" in str(raised.value)
        path.unlink() if before is None else path.write_text(before)
    (root / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(TokenizerLoadError, match=r"tokenizer\.json"):
        Tokenizer.from_pretrained(root)


def test_a_model_without_a_template_refuses_chat(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(write(tmp_path / "model", zoo.byte_level(), {}))
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.encode_chat(MESSAGES)
