# SPDX-License-Identifier: Apache-2.0
"""A tokenizer whose ids are bytes: id 65 is "A". 256 begins a text, 257 ends an answer."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, VOCAB_SIZE = 256, 257, 258

_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(hidden)}


def write_byte_tokenizer(directory: Path) -> Path:
    """Writes tokenizer.json and its companions; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab = {character: byte for byte, character in byte_characters().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken("<|bos|>", special=True, normalized=False),
            AddedToken("<|eos|>", special=True, normalized=False),
        ]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": _TEMPLATE})
    )
    (directory / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return directory
