# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints are ordinary Hugging Face directories, reproducible, and of every family."""

from pathlib import Path

import jinja2
import pytest
import torch
from engine_oracle import Oracle
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.support.float8 import read_all, widen
from twinpool.engine.checkpoint import SINGLE_FILE, Checkpoint
from twinpool.engine.config import FAMILIES, Family, ModelConfig
from twinpool.engine.tiny import write_tiny
from twinpool.engine.tiny_tokenizer import MIN_VOCAB, SPECIAL_TOKENS, build_tokenizer
from twinpool.errors import CheckpointError

TEXTS = [
    "",
    "Hello, how are you today?",
    "naïve café, 東京 🚀",
    "a\n\n  b\tc",
    "<|im_start|>user\nhi<|im_end|>",
]


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_finds_every_tensor_and_no_other(family: Family, tmp_path: Path) -> None:
    path = write_tiny(tmp_path, family)
    oracle = Oracle(path)
    assert not any(oracle.loading.values()), oracle.loading
    assert oracle.model.config.max_position_embeddings >= 2048
    assert set(contents(path)) == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert ModelConfig.from_pretrained(path).eos_token_ids == (1, 3)


def test_same_arguments_same_bytes_and_the_seed_matters(tmp_path: Path) -> None:
    first = contents(write_tiny(tmp_path / "a", "deepseek_v3"))
    assert contents(write_tiny(tmp_path / "b", "deepseek_v3")) == first
    other = contents(write_tiny(tmp_path / "c", "deepseek_v3", seed=1))
    assert [name for name in first if first[name] != other[name]] == [SINGLE_FILE]


def test_rewriting_with_other_shards_leaves_no_old_file(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3", shards=4)
    tensors = Checkpoint(tmp_path).tensors
    assert len({stored.file for stored in tensors.values()}) == 4
    write_tiny(tmp_path, "qwen3")
    assert Checkpoint(tmp_path).files == {SINGLE_FILE: None}
    assert set(load_file(tmp_path / SINGLE_FILE)) == set(tensors)


def test_sizes_and_overrides_are_obeyed(tmp_path: Path) -> None:
    path = write_tiny(
        tmp_path, "llama", layers=2, hidden=64, vocab=700, max_context=8192, dtype="bfloat16",
        overrides={"num_key_value_heads": 6},
    )  # fmt: skip
    config = ModelConfig.from_pretrained(path)
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (2, 64, 700)
    assert (config.max_position_embeddings, config.num_kv_heads, config.dtype) == (8192, 6, "bfloat16")
    assert {stored.dtype for stored in Checkpoint(path).tensors.values()} == {"BF16"}
    assert Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab_size() == 700


@pytest.mark.parametrize("shards", [1, 3])
def test_float8_packs_the_same_weights_as_deepseek_does(shards: int, tmp_path: Path) -> None:
    """Codes and float32 scales of every linear layer; embedding, head, norms, router stay; each weight to 1/16 of itself or
    of the smallest step that its block's scale leaves."""
    sizes = {"hidden": 200, "dtype": "bfloat16"}
    plain = read_all(write_tiny(tmp_path / "plain", "deepseek_v3", **sizes))  # type: ignore[arg-type]
    path = write_tiny(tmp_path / "packed", "deepseek_v3", **sizes, shards=shards, float8=True)  # type: ignore[arg-type]
    assert len(list(path.glob("*.safetensors"))) == shards
    assert ModelConfig.from_pretrained(path).float8_weights
    packed = read_all(path)
    kept = ("embed_tokens", "lm_head", "norm", "mlp.gate.")
    for name, weight in plain.items():
        if any(part in name for part in kept):
            assert torch.equal(packed.pop(name), weight)
            continue
        codes, scales = packed.pop(name), packed.pop(f"{name}_scale_inv")
        assert (codes.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
        assert scales.shape == tuple(-(-size // 128) for size in weight.shape)
        error = (widen(codes, scales) - weight.float()).abs()
        step = widen(torch.full_like(weight, 2.0**-9).to(torch.float8_e4m3fn), scales)
        assert bool((error <= torch.maximum(weight.float().abs() / 16, step) * 1.001).all()), name
    assert not packed


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"family": "gpt2"}, ValueError, "family 'gpt2' is not one of llama"),
        ({"shards": 0}, ValueError, "shards must be at least 1, not 0"),
        ({"dtype": "int4"}, ValueError, "dtype 'int4' is not one of"),
        ({"vocab": 100}, ValueError, f"vocab must be at least {MIN_VOCAB}, not 100"),
        ({"layers": 0}, CheckpointError, "num_hidden_layers = 0"),
        ({"overrides": {"num_key_value_heads": 4}}, CheckpointError, "must divide num_attention_heads"),
    ],
)
def test_bad_arguments_are_named(
    tmp_path: Path, kwargs: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        write_tiny(tmp_path, **({"family": "llama"} | kwargs))  # type: ignore[arg-type]


@pytest.mark.parametrize("vocab", [MIN_VOCAB, 512, 4096])
def test_tokenizer_round_trips_any_text_within_its_vocabulary(vocab: int) -> None:
    tokenizer = build_tokenizer(vocab)
    assert tokenizer.get_vocab_size() == vocab
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert all(0 <= token < vocab for token in ids)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode("The capital of France").ids) < 21 or vocab == MIN_VOCAB


def test_chat_template_is_one_that_everybody_renders_alike(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "qwen2", layers=1)
    theirs = AutoTokenizer.from_pretrained(path)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ours = jinja2.Environment().from_string(theirs.chat_template)
    assert ours.render(messages=messages, add_generation_prompt=True) == text
    assert text.endswith("<|im_start|>assistant\n")
    ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert ids == theirs(text, add_special_tokens=False)["input_ids"]
    assert theirs.eos_token_id == 1
