# SPDX-License-Identifier: Apache-2.0
"""Takes cache events off the step thread."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from twinpool import metrics
from twinpool._core import BlockManager
from twinpool.worker.kv_events.shadow import RawEvent

ROOTS_MAX: Final = 65_536
"""Namespaces whose roots are known, 16 bytes each. A root is noted with each request, so one that is forgotten had none
in all the requests of the last 65,536 namespaces."""


class CacheTap:
    """Owned by the step thread. Costs a call of the core a turn, and a copy of the events if there are any."""

    def __init__(self, blocks: BlockManager, publish: Callable[[list[RawEvent]], None]) -> None:
        """``publish`` hands events over; it must not block."""
        self._blocks = blocks
        self._publish = publish
        self._roots: OrderedDict[bytes, None] = OrderedDict()

    def saw_root(self, root: bytes) -> None:
        """A request of this namespace has come. The block manager does not tell a root from the hash of a block."""
        if root in self._roots:
            self._roots.move_to_end(root)
            return
        self._roots[root] = None
        if len(self._roots) > ROOTS_MAX:
            self._roots.popitem(last=False)

    def drain(self) -> None:
        """Hands over what happened since the last call."""
        events = self._blocks.drain_events()
        if events:
            metrics.WORKER_EVICTED_BLOCKS.inc(
                sum(len(hashes) for kind, hashes, _ in events if kind == "removed")
            )
            self._publish(
                [
                    RawEvent(hashes.tobytes(), parent, parent in self._roots)
                    if kind == "stored"
                    else RawEvent(hashes.tobytes(), None, False)
                    for kind, hashes, parent in events
                ]
            )
