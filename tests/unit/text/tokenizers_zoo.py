# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers of the kinds that published checkpoints have."""

from functools import cache

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Don't panic!  Two  spaces, and a tab\there.\n",
    "Füße, naïve café, 日本語のテキスト, 한국어, emoji 😀🏳️‍🌈, maths ∑∂√, digits 0123456789.\n",
    '<tool_call>{"name": "look", "arguments": {"at": [1, 2, 3]}}</tool_call>\n',
] * 4

SPECIAL = ["<|begin|>", "<|end|>", "<|user|>"]


@cache
def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen, DeepSeek and SmolLM: every token is a string of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=SPECIAL
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Added tokens are not written in the byte alphabet; one of these looks as if it were.
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("Ġodd"), AddedToken("né\u2028日")])
    return tokenizer


def _sentence_piece(decoder: decoders.Decoder) -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", "▁the", "the", "▁▁", "a", "b", "é", "日", "▁Füße", "x▁y", "<0xZZ>", "�"]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@cache
def llama2() -> Tokenizer:
    """As Llama 2 and Mistral: one leading space of the whole text goes."""
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _sentence_piece(decoders.Sequence(chain))


@cache
def gemma() -> Tokenizer:
    """As Gemma: leading spaces stay."""
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _sentence_piece(decoders.Sequence(chain))


@cache
def metaspace() -> Tokenizer:
    return _sentence_piece(decoders.Metaspace())


@cache
def metaspace_never() -> Tokenizer:
    return _sentence_piece(decoders.Metaspace(prepend_scheme="never"))


@cache
def strip_each() -> Tokenizer:
    return _sentence_piece(decoders.Sequence([decoders.Strip("▁", 1, 0), decoders.Replace("the", "THE")]))


@cache
def strip_ends() -> Tokenizer:
    return _sentence_piece(decoders.Strip("e", 0, 1))


@cache
def no_decoder() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "<s>": 3}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


ALL = [byte_level, llama2, gemma, metaspace, metaspace_never, strip_each, strip_ends, no_decoder]


def unsupported() -> list[tuple[Tokenizer, str]]:
    """Tokenizers that can't be streamed exactly, with a word that the refusal must hold."""
    fuse = decoders.Fuse()
    made = [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Sequence([fuse, decoders.ByteFallback()]), "ByteFallback"),
        (decoders.Sequence([fuse, decoders.Replace("ab", "c")]), "Replace"),
        (decoders.Replace(Regex("a+"), "c"), "Replace"),
        (decoders.Sequence([fuse, decoders.Strip(" ", 0, 1)]), "Strip"),
    ]
    return [(_sentence_piece(decoder), word) for decoder, word in made]
