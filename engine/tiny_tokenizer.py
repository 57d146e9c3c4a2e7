# SPDX-License-Identifier: Apache-2.0
"""A small byte-level BPE tokenizer with special tokens and a chat template, for tiny checkpoints."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, IM_START, IM_END, PAD = "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIAL_TOKENS = (BOS, EOS, IM_START, IM_END, PAD)
"""In order of their ids, from 0."""

MIN_VOCAB = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_CORPUS = """The prefill pool computes the keys and values of a prompt, and the decode pool pulls the blocks and writes
the answer, one token after another. A router admits each request, looks for the worker that holds the longest prefix,
and streams the text back to the client. What is the capital of France? The capital of France is Paris. Name three
planets: Mercury, Venus and Mars. Once upon a time there was a small machine that could read and write. It read every
word that people sent to it, and it wrote an answer for each of them. When one part of the machine stopped, another part
went on with the work, so that nobody had to wait. Sun, moon, stars, water, wind, fire, stone, tree, river, mountain.
One, two, three, four, five, six, seven, eight, nine, ten. Please explain how the cache works, and why it is faster to
move a block of memory than to compute it again. You are a helpful assistant. Hello, how are you today? I am fine.
"""


def build_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly ``vocab_size`` ids (at least ``MIN_VOCAB``, else ValueError): special tokens, the 256
    bytes, merges learned from a few sentences; reserved special tokens fill what is left. The same on every call."""
    if vocab_size < MIN_VOCAB:
        raise ValueError(f"vocab must be at least {MIN_VOCAB}, not {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    left = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken(f"<|reserved_{i}|>", special=True) for i in range(left)])
    return tokenizer


def write_tokenizer(path: Path, vocab_size: int, max_tokens: int) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json``."""
    build_tokenizer(vocab_size).save(str(path / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [IM_START, IM_END],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
