# SPDX-License-Identifier: Apache-2.0
"""From what a client sent to token ids and block hashes, once a request.

Short texts are tokenised on the event loop: handing them to a thread would cost more. Long ones, and all chat
templates (they come with the weights and may be slow), go to a small pool of threads. What a conversation begins with is
tokenised once (``TokenCache``); its hashes are made anew, since 100,000 tokens take 0.3 ms.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from twinpool import metrics
from twinpool._core import hash_blocks, root_hash
from twinpool.config.router import RouterSection
from twinpool.errors import TwinpoolError
from twinpool.router.chat.conversation import check_conversation, render
from twinpool.router.chat.prompt import TurnPlan
from twinpool.router.request import Group
from twinpool.router.validate import check_text, check_token_ids
from twinpool.text import TokenCache, Tokenizer
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import router_pb2
from twinpool.v1.resume_pb2 import TurnForm

# About half a millisecond of tokenising.
_INLINE_CHARS: Final = 1024

T = TypeVar("T")


class TokenizeHop:
    """Loads tokenizers, renders, tokenises and hashes."""

    def __init__(self, limits: RouterSection, salt: Callable[[str], str] = str) -> None:
        """``salt`` of a tenant: tenants of one salt share cached prefixes."""
        self._limits = limits
        self._salt = salt
        self._threads = ThreadPoolExecutor(limits.tokenizer_threads, thread_name_prefix="tokenize")
        self.cache = TokenCache(limits.token_cache_bytes)

    def close(self) -> None:
        """Drops what waits; a text that is being tokenised ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def load(self, path: str) -> Tokenizer:
        """The tokenizer of a checkpoint's directory. Raises TokenizerLoadError."""
        return await self.run(_load, path, self._limits.chat_template or None)

    def show(self) -> None:
        """Sets the gauges of the cache."""
        metrics.ROUTER_TOKEN_CACHE_BYTES.set(self.cache.size_bytes)
        metrics.ROUTER_TOKENIZED_CHARS.labels("cache").set(self.cache.found_chars)
        metrics.ROUTER_TOKENIZED_CHARS.labels("new").set(self.cache.new_chars)

    async def prompt(
        self,
        request: pb.GenerateRequest | pb.TokenizeRequest | router_pb2.LookupPrefixRequest,
        tokenizer: Tokenizer,
        group: Group,
    ) -> tuple[NDArray[np.int32], str]:
        """The prompt's token ids and the name of the field that held it. Raises for a prompt that cannot be."""
        if not isinstance(request, pb.TokenizeRequest) and request.WhichOneof("prompt") == "token_ids":
            # The container offers its memory: no Python integer is made.
            given = np.array(request.token_ids.ids, np.uint32)
            return check_token_ids(given, group), "token_ids.ids"
        kind = request.WhichOneof("prompt")
        tenant = "" if isinstance(request, pb.TokenizeRequest) else request.tenant
        if kind == "text":
            check_text(request.text, "text", self._limits)
            return await self._encode(tokenizer, request.text, tenant), "text"
        if kind == "chat":
            check_conversation(request.chat, self._limits)
            return await self.run(self._encode_chat, request.chat, tokenizer, tenant), "chat.messages"
        raise TwinpoolError(
            "EMPTY_PROMPT", "prompt is not set; the limit is one of token_ids, text, chat", field="prompt"
        )

    async def _encode(self, tokenizer: Tokenizer, text: str, tenant: str) -> NDArray[np.int32]:
        if len(text) <= _INLINE_CHARS:
            return tokenizer.encode(text)
        return await self.run(partial(self.cache.encode, tenant=tenant), tokenizer, text)

    def _encode_chat(self, chat: pb.ChatMessages, tokenizer: Tokenizer, tenant: str) -> NDArray[np.int32]:
        return self._encode_rendered(tokenizer, render(chat, tokenizer), tenant)

    def _encode_rendered(self, tokenizer: Tokenizer, text: str, tenant: str) -> NDArray[np.int32]:
        # A template writes special tokens itself: adding them again would double the first one.
        return self.cache.encode(tokenizer, text, tenant=tenant, add_special_tokens=False)

    async def turn(
        self, plan: TurnPlan, tokenizer: Tokenizer, tenant: str
    ) -> tuple[NDArray[np.int32], TurnForm]:
        """The token ids of a planned turn's prompt, and how its answer is read. Raises for a conversation that the model's template
        refuses."""

        def make() -> tuple[NDArray[np.int32], TurnForm]:
            text, form = plan.completed(render(plan.conversation, tokenizer))
            return self._encode_rendered(tokenizer, text, tenant), form

        return await self.run(make)

    def hash(
        self, tokens: NDArray[np.int32], group: Group, tenant: str, adapter: str
    ) -> tuple[bytes, NDArray[np.uint8]]:
        """The root of the request's namespace and the hashes of the prompt's full blocks, uint8 ``[blocks, 16]``."""
        root = root_hash(group.fingerprint.encode(), self._salt(tenant).encode(), adapter.encode())
        return root, hash_blocks(root, tokens, group.block_tokens)

    async def run(self, work: Callable[..., T], *args: object) -> T:
        """Does what would hold the event loop up in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)


def _load(path: str, chat_template: str | None) -> Tokenizer:
    tokenizer = Tokenizer.from_pretrained(path, chat_template=chat_template)
    tokenizer.prepare()
    return tokenizer
