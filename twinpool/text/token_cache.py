# SPDX-License-Identifier: Apache-2.0
"""Tokenises the new part of a conversation only.

A prompt is cut at its safe boundaries (``boundaries``); the parts of earlier prompts are kept in a tree, one node a part, so
what two prompts begin with is kept once. A prompt's last part, which ends at no boundary, is tokenised each time.

Trees are kept apart by tenant: how fast an answer comes must not tell one tenant what another has sent.
"""

import sys
import threading
from collections import OrderedDict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from twinpool.text.tokenizer import Tokenizer

_NODE_BYTES: Final = 400
# A node without its text and tokens.

Key = tuple[int, str]


class _Node:
    __slots__ = ("children", "parent", "part", "size_bytes", "tokens")

    def __init__(self, parent: "_Node | None", part: str, tokens: NDArray[np.int32]) -> None:
        self.parent = parent
        self.part = part
        self.tokens = tokens
        self.children: dict[str, _Node] = {}
        self.size_bytes = _NODE_BYTES + sys.getsizeof(part) + tokens.nbytes


class TokenCache:
    """Thread-safe. Bounded by bytes; what was used longest ago goes first, leaves before what they hang on."""

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes`` 0: nothing is kept."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._roots: dict[Key, _Node] = {}
        # Oldest first. A node is younger than its children: each use moves the leaf first.
        self._nodes: OrderedDict[_Node, Key] = OrderedDict()
        self._tokenizers: dict[int, Tokenizer] = {}
        self.size_bytes = 0
        self.found_chars = 0
        self.new_chars = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def encode(
        self, tokenizer: Tokenizer, text: str, *, tenant: str = "", add_special_tokens: bool = True
    ) -> NDArray[np.int32]:
        """The same ids as ``tokenizer.encode``."""
        boundaries, around = tokenizer.boundaries, tokenizer.around if add_special_tokens else ((), ())
        parts = (
            boundaries.split(text)
            if boundaries is not None and around is not None and self._max_bytes
            else [text]
        )
        if len(parts) == 1 or around is None:
            self.new_chars += len(text)
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        key = (id(tokenizer), tenant)
        with self._lock:
            # Holds on to the tokenizer, so that no other one ever has its id.
            self._tokenizers[key[0]] = tokenizer
            found = self._walk(key, parts[:-1])
            chars = sum(len(node.part) for node in found)
            self.found_chars += chars
            self.new_chars += len(text) - chars
        fresh = tokenizer.encode_parts(parts[len(found) :])
        if len(fresh) > 1:
            with self._lock:
                self._keep(key, parts[:-1], fresh[:-1])
        before, after = (np.asarray(ids, np.int32) for ids in around)
        return np.concatenate([before, *(node.tokens for node in found), *fresh, after])

    # --- with the lock held

    def _walk(self, key: Key, parts: list[str]) -> list[_Node]:
        node, found = self._roots.get(key), []
        for part in parts:
            node = node.children.get(part) if node is not None else None
            if node is None:
                break
            found.append(node)
        self._touch(found)
        return found

    def _touch(self, path: list[_Node]) -> None:
        for node in reversed(path):
            self._nodes.move_to_end(node)

    def _keep(self, key: Key, parts: list[str], fresh: list[NDArray[np.int32]]) -> None:
        """Adds the last ``len(fresh)`` of ``parts``. What is below them may have gone or come meanwhile."""
        node = self._roots.setdefault(key, _Node(None, "", np.empty(0, np.int32)))
        known = len(parts) - len(fresh)
        path: list[_Node] = []
        for at, part in enumerate(parts):
            child = node.children.get(part)
            if child is None:
                if at < known:
                    return
                # A copy: a view would keep the whole batch's ids alive.
                child = node.children[part] = _Node(node, part, fresh[at - known].copy())
                self._nodes[child] = key
                self.size_bytes += child.size_bytes
            path.append(child)
            node = child
        self._touch(path)
        while self.size_bytes > self._max_bytes:
            self._evict()

    def _evict(self) -> None:
        node, key = self._nodes.popitem(last=False)
        self.size_bytes -= node.size_bytes
        assert node.parent is not None
        del node.parent.children[node.part]
        root = self._roots[key]
        if not root.children:
            del self._roots[key]
