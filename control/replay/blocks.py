# SPDX-License-Identifier: Apache-2.0
"""From a trace's block ids to hashes (for the simulator) and to tokens (for a live cluster). Equal ids give equal ones."""

import numpy as np
from numpy.typing import NDArray

from twinpool.control.replay.trace import Ids, Request

Hashes = NDArray[np.uint8]  # [n, 16]
Tokens = NDArray[np.int32]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_OWN_NAMESPACE = 1 << 62
"""Blocks that no other request shares: prompts of traces without block ids, and outputs."""


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64: 64-bit numbers that look random, one for each value."""
    with np.errstate(over="ignore"):
        mixed = values + _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return mixed ^ (mixed >> np.uint64(31))


def hashes_of(ids: Ids, namespace: int) -> Hashes:
    """The 16-byte hash of each block id of a namespace."""
    salt = mix(np.array([namespace], np.uint64))
    halves = np.empty((len(ids), 2), np.uint64)
    halves[:, 0] = mix(ids.view(np.uint64) ^ salt)
    halves[:, 1] = mix(halves[:, 0] ^ mix(salt))
    return halves.view(np.uint8).reshape(-1, 16)


def own_hashes(request: int, first: int, count: int) -> Hashes:
    """Hashes of blocks that belong to one request alone."""
    return hashes_of(np.arange(first, first + count, dtype=np.int64), _OWN_NAMESPACE + request)


class BlockMap:
    """A trace's blocks in the block size of a cluster. Since an id names its whole prefix, several blocks make one whose id is
    that of the last; one block becomes several that are numbered on."""

    def __init__(self, trace_block_tokens: int, block_tokens: int) -> None:
        """Raises ValueError if neither size divides the other."""
        if block_tokens < 1:
            raise ValueError("block_tokens; allowed: at least 1")
        self.block_tokens = block_tokens
        self._trace_tokens = trace_block_tokens
        if trace_block_tokens and trace_block_tokens % block_tokens and block_tokens % trace_block_tokens:
            raise ValueError(
                f"blocks of {block_tokens} tokens do not fit the trace's, which have {trace_block_tokens}"
            )

    def hashes(self, request: Request) -> Hashes:
        """The hashes of a prompt's full blocks."""
        full = request.input_length // self.block_tokens
        if not self._trace_tokens:
            return own_hashes(request.id, 0, full)
        ids = request.block_ids()
        if self.block_tokens >= self._trace_tokens:
            step = self.block_tokens // self._trace_tokens
            return hashes_of(np.ascontiguousarray(ids[step - 1 :: step]), request.namespace)
        parts = self._trace_tokens // self.block_tokens
        known = hashes_of((ids[:, None] * parts + np.arange(parts)).reshape(-1), request.namespace)
        # What is left of the partial block is full by the cluster's measure.
        rest = full - len(known)
        if not rest:
            return known
        tail = np.arange(rest, dtype=np.int64) + np.int64(request.tail_id * parts)
        more = own_hashes(request.id, 0, rest) if request.tail_id < 0 else hashes_of(tail, request.namespace)
        return np.concatenate([known, more])


class TokenMaker:
    """Makes prompts of token ids: a block's tokens depend on its id, the rest of a prompt on its tail id or its request."""

    def __init__(self, block_tokens: int, low: int, high: int, seed: int = 0) -> None:
        """Token ids lie in [``low``, ``high``)."""
        if not 0 <= low < high:
            raise ValueError(f"token ids from {low} to {high}: the range is empty")
        self._block_tokens = block_tokens
        self._low = low
        self._span = np.uint64(high - low)
        self._seed = seed

    def tokens(self, request: Request) -> Tokens:
        """The prompt: ``input_length`` token ids."""
        parts = []
        made = 0
        if self._block_tokens:
            ids = request.block_ids()
            parts.append(self._draw(ids, request.namespace, self._block_tokens))
            made = len(ids) * self._block_tokens
        rest = request.input_length - made
        if rest and request.tail_id >= 0:
            parts.append(self._draw(np.array([request.tail_id], np.int64), request.namespace, rest))
        elif rest:
            own = np.array([request.id], np.int64)
            parts.append(self._draw(own, _OWN_NAMESPACE + self._seed, rest))
        return np.concatenate(parts)

    def _draw(self, ids: Ids, namespace: int, count: int) -> Tokens:
        salt = mix(np.array([namespace], np.uint64)) ^ mix(np.array([self._seed], np.uint64))
        keys = mix(ids.view(np.uint64) ^ salt)
        drawn = mix(keys[:, None] ^ mix(np.arange(count, dtype=np.uint64)))
        return (drawn % self._span).astype(np.int32).reshape(-1) + np.int32(self._low)
