# SPDX-License-Identifier: Apache-2.0
"""Which worker holds which prefix, as far as the router has seen it.

The index is fed from what passed through this router: a finished prefill leaves the prompt's full blocks on the prefill
worker, a finished answer leaves prompt and output on the decode worker. Workers evict without telling, so each worker's
part is bounded by its pool with the worker's own order (least recently used first, leaves before ancestors), and every
count of cached tokens that a worker reports corrects what was believed.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from twinpool import metrics
from twinpool._core import RouterCore, hash_blocks
from twinpool.ids import WorkerKey
from twinpool.router.request import Prepared

_HASH_BYTES = 16


class Locality:
    """Feeds and corrects the core's prefix index."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self._held: dict[WorkerKey, OrderedDict[bytes, None]] = {}
        self._capacity: dict[WorkerKey, int] = {}

    def set_capacity(self, key: WorkerKey, num_blocks: int) -> None:
        """The most blocks that a worker can hold."""
        self._capacity[key] = num_blocks

    def drop(self, key: WorkerKey) -> None:
        """Forgets an incarnation of a worker; the core has dropped its part of the index already."""
        self._held.pop(key, None)
        self._capacity.pop(key, None)

    def blocks(self, key: WorkerKey) -> int:
        """Blocks believed to be on a worker."""
        return len(self._held.get(key, ()))

    def prefilled(
        self, key: WorkerKey, prepared: Prepared, predicted_blocks: int, cached_tokens: int
    ) -> None:
        """Prefill is done: the worker holds all of the prompt's full blocks, and said how many it had before."""
        block_tokens = prepared.group.block_tokens
        metrics.ROUTER_PREDICTED_CACHED_TOKENS.inc(
            min(predicted_blocks * block_tokens, prepared.prompt_tokens)
        )
        metrics.ROUTER_CACHED_TOKENS.inc(cached_tokens)
        metrics.ROUTER_KV_HIT_RATE.observe(cached_tokens / prepared.prompt_tokens)
        self._store(key, prepared.hashes)

    def reserved(self, key: WorkerKey, prepared: Prepared, cached_blocks: int) -> None:
        """The decode worker said how many leading blocks it holds: what was believed beyond them is gone."""
        held = self._held.get(key)
        if held is None or cached_blocks >= len(prepared.hashes):
            return
        gone = [name for name in _split(prepared.hashes[cached_blocks:]) if name in held]
        if gone:
            self._remove(key, held, gone)

    def decoded(self, key: WorkerKey, prepared: Prepared, outputs: Sequence[Sequence[int]]) -> None:
        """The answer is finished: prompt and output are on the decode worker, but for each choice's last token,
        whose KV nobody computed."""
        block_tokens = prepared.group.block_tokens
        full = len(prepared.hashes)
        parent = prepared.hashes[-1].tobytes() if full else prepared.root
        tail = prepared.tokens[full * block_tokens :]
        for output in outputs:
            if len(tail) + len(output) > block_tokens:
                tokens = np.concatenate([tail, np.asarray(output[:-1], np.int32)])
                self._store(key, hash_blocks(parent, tokens, block_tokens))
        # After its leaves, so that it is younger than they are.
        self._store(key, prepared.hashes)

    def _store(self, key: WorkerKey, hashes: NDArray[np.uint8]) -> None:
        capacity = self._capacity.get(key)
        if capacity is None or not len(hashes):
            return
        held = self._held.setdefault(key, OrderedDict())
        # Leaves first, so that an ancestor is always younger than what hangs on it.
        for name in reversed(_split(hashes)):
            held[name] = None
            held.move_to_end(name)
        self._core.index_stored(key.name, key.incarnation, hashes)
        excess = len(held) - capacity
        if excess > 0:
            oldest = iter(held)
            self._remove(key, held, [next(oldest) for _ in range(excess)])

    def _remove(self, key: WorkerKey, held: OrderedDict[bytes, None], names: list[bytes]) -> None:
        for name in names:
            held.pop(name, None)
        gone = np.frombuffer(b"".join(names), np.uint8).reshape(-1, _HASH_BYTES)
        self._core.index_removed(key.name, key.incarnation, gone)


def _split(hashes: NDArray[np.uint8]) -> list[bytes]:
    raw = hashes.tobytes()
    return [raw[at : at + _HASH_BYTES] for at in range(0, len(raw), _HASH_BYTES)]
