# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint, from people whom the operator may not know: a loader loads them or names what is wrong."""

import json
import random
import struct
import tempfile
from functools import cache
from pathlib import Path

from tests.fuzz.shake import json_mutator
from tests.fuzz.target import Target, mutate_bytes
from tests.support.byte_tokenizer import write_byte_tokenizer
from twinpool.errors import CheckpointError
from twinpool.text import Tokenizer
from twinpool.text.errors import ChatTemplateError, TokenizerLoadError

FLOAT8 = "llama-float8"
"""A tiny checkpoint whose linear layers hold float8 weights."""

HELD: list[tempfile.TemporaryDirectory[str]] = []
"""Directories that go with the process."""


@cache
def directory(name: str) -> Path:
    made = tempfile.TemporaryDirectory(prefix=f"twinpool-fuzz-{name}-")
    HELD.append(made)
    return Path(made.name)


# --- config.json


def run_config(data: bytes) -> None:
    """By a config.json that may claim anything, with the weights of its family beside it."""
    from twinpool.engine.config import ModelConfig
    from twinpool.engine.loader import load_model

    path = directory("config")
    (path / "config.json").write_bytes(data)
    try:
        found = ModelConfig.from_pretrained(path)
        family = FLOAT8 if found.float8_weights else "llama" if found.mla is None else "deepseek_v3"
        weights = path / "model.safetensors"
        weights.unlink(missing_ok=True)
        weights.symlink_to(tiny(family) / "model.safetensors")
        load_model(path)
    except CheckpointError as error:
        assert len(str(error)) < 4000


@cache
def tiny(family: str) -> Path:
    from twinpool.engine.tiny import write_tiny

    path = directory(f"tiny-{family}")
    name = "llama" if family == FLOAT8 else family
    write_tiny(path, name, layers=2, hidden=32, vocab=300, float8=family == FLOAT8)  # type: ignore[arg-type]
    return path


def config_seeds() -> list[bytes]:
    return [(tiny(family) / "config.json").read_bytes() for family in ("llama", "deepseek_v3", FLOAT8)]


# --- safetensors


def run_safetensors(data: bytes) -> None:
    """A whole load: header, shapes, data. By a config.json that names float8 weights where the header does."""
    from twinpool.engine.loader import load_model

    family = FLOAT8 if b"_scale_inv" in data else "llama"
    path = directory(f"safetensors-{family}")
    config = path / "config.json"
    if not config.exists():
        config.write_bytes((tiny(family) / "config.json").read_bytes())
    (path / "model.safetensors").write_bytes(data)
    try:
        load_model(path)
    except CheckpointError as error:
        assert len(str(error)) < 4000


def mutate_safetensors(data: bytes, source: random.Random) -> bytes:
    """Changes the header as JSON, or any byte."""
    if len(data) < 8 or source.random() < 0.4:
        return mutate_bytes_of_head(data, source)
    size = int.from_bytes(data[:8], "little")
    if size > len(data) - 8:
        return mutate_bytes_of_head(data, source)
    header = json_mutator(data[8 : 8 + size], source)
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


def mutate_bytes_of_head(data: bytes, source: random.Random) -> bytes:
    head = data[:2000]
    return mutate_bytes(head, source) + (data[2000:] if source.random() < 0.8 else b"")


def safetensors_seeds() -> list[bytes]:
    return [(tiny(family) / "model.safetensors").read_bytes() for family in ("llama", FLOAT8)]


# --- tokenizer

FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json")


def run_tokenizer(data: bytes) -> None:
    """An input is a JSON object: the files by name."""
    path = directory("tokenizer")
    try:
        files = json.loads(data)
    except (ValueError, RecursionError):
        files = {"tokenizer.json": data.decode("latin1")}
    for name in FILES:
        (path / name).unlink(missing_ok=True)
        content = files.get(name) if isinstance(files, dict) else None
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (path / name).write_text(text, errors="replace")
    try:
        tokenizer = Tokenizer.from_pretrained(path)
        tokenizer.prepare()
    except TokenizerLoadError as error:
        assert len(str(error)) < 4000
        return
    try:
        tokenizer.encode_chat([{"role": "user", "content": "hé"}])
    except ChatTemplateError:
        return


def tokenizer_seeds() -> list[bytes]:
    path = write_byte_tokenizer(directory("byte"))
    whole = {
        "tokenizer.json": json.loads((path / "tokenizer.json").read_text()),
        "tokenizer_config.json": json.loads((path / "tokenizer_config.json").read_text())
        | {"added_tokens_decoder": {"256": {"content": "<|bos|>", "special": True}}, "extra_special_tokens": ["<x>"]},
        "generation_config.json": {"eos_token_id": [257]},
        "special_tokens_map.json": {"eos_token": {"content": "<|eos|>"}},
    }  # fmt: skip
    small = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}
    config = {"chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}]}
    less = {"tokenizer.json": small | {"added_tokens": []}, "tokenizer_config.json": config}
    return [json.dumps(whole).encode(), json.dumps(less).encode()]


TARGETS = {
    "config_json": Target("config_json", run_config, config_seeds, json_mutator),
    "safetensors": Target("safetensors", run_safetensors, safetensors_seeds, mutate_safetensors),
    "tokenizer": Target("tokenizer", run_tokenizer, tokenizer_seeds, json_mutator),
}
