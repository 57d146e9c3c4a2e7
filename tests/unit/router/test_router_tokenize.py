# SPDX-License-Identifier: Apache-2.0
"""The hop that tokenises: a conversation's turn costs its new text, and its ids are those of the whole."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.byte_tokenizer import EOS, write_byte_tokenizer
from twinpool.config import RouterSection
from twinpool.router.request import Group
from twinpool.router.tokenize import TokenizeHop
from twinpool.text import Tokenizer
from twinpool.v1 import inference_pb2 as pb

GROUP = Group("default", "fake", "fp", "llama", 258, 16, 1 << 20, 1 << 20, (EOS,), "")
TEMPLATE = (
    "{% for message in messages %}<|bos|>{{ message.role }}\n{{ message.content }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)
Turn = tuple[str, str]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_byte_tokenizer(tmp_path_factory.mktemp("chat"))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return directory


@pytest.fixture
async def hop() -> AsyncIterator[TokenizeHop]:
    made = TokenizeHop(RouterSection())
    yield made
    made.close()


def chat(turns: list[Turn], *, tenant: str = "", model: str = "") -> pb.GenerateRequest:
    request = pb.GenerateRequest(tenant=tenant, model=model)
    request.chat.messages.extend(pb.ChatMessage(role=role, content=content) for role, content in turns)
    return request


def conversation(turns: int) -> list[Turn]:
    return [(("user", "assistant")[turn % 2], f"{turn} naïve 日本 " * 60) for turn in range(turns)]


async def test_each_turn_costs_its_new_text(hop: TokenizeHop, path: Path) -> None:
    tokenizer, plain = await hop.load(str(path)), Tokenizer.from_pretrained(path)
    turn_chars = len(conversation(1)[0][1]) + 40
    for turns in range(1, 8, 2):
        known = hop.cache.new_chars
        tokens, field = await hop.prompt(chat(conversation(turns)), tokenizer, GROUP)
        assert field == "chat.messages"
        whole = plain.encode_chat([{"role": r, "content": c} for r, c in conversation(turns)])
        np.testing.assert_array_equal(tokens, whole)
        # The new question, the answer before it, and the prompt's open end.
        assert hop.cache.new_chars - known <= 2 * turn_chars + 20
    assert hop.cache.found_chars > 8 * turn_chars


async def test_a_long_text_that_holds_special_tokens_is_kept_too(hop: TokenizeHop, path: Path) -> None:
    tokenizer = await hop.load(str(path))
    text = "<|bos|>" + "x" * 2000 + "<|eos|>" + "y" * 2000 + "<|eos|>"
    for _ in range(2):
        tokens, _ = await hop.prompt(pb.GenerateRequest(text=text), tokenizer, GROUP)
        np.testing.assert_array_equal(tokens, tokenizer.encode(text))
    assert hop.cache.found_chars > 3900


async def test_tenants_do_not_share_what_was_tokenised(hop: TokenizeHop, path: Path) -> None:
    tokenizer = await hop.load(str(path))
    for tenant in ("a", "b", ""):
        await hop.prompt(chat(conversation(3), tenant=tenant), tokenizer, GROUP)
    assert hop.cache.found_chars == 0
    await hop.prompt(chat(conversation(3), tenant="a"), tokenizer, GROUP)
    assert hop.cache.found_chars > 0


async def test_a_cache_of_no_bytes(path: Path) -> None:
    hop = TokenizeHop(RouterSection(token_cache_bytes=0))
    tokenizer = await hop.load(str(path))
    for _ in range(2):
        await hop.prompt(chat(conversation(3)), tokenizer, GROUP)
    assert (len(hop.cache), hop.cache.found_chars) == (0, 0)
    hop.close()
