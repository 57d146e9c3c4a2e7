# SPDX-License-Identifier: Apache-2.0
"""Leadership: one holder of a key, by lease."""

from __future__ import annotations

import threading
from collections.abc import Callable

from twinpool.logs import get_logger
from twinpool.store.lease import LeaseKeeper
from twinpool.store.types import Lease, Store
from twinpool.store.watch import Batch, PrefixWatch

_log = get_logger(__name__)


class Election:
    """A candidate for the leadership that a key stands for. Runs on threads of its own.

    ``on_change`` is called there with True when this candidate becomes leader and False when it is not any more; by
    then its lease may have just ended, so what a leader does must be guarded by ``fence`` where two must never act.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        candidate: bytes,
        *,
        ttl_seconds: int,
        on_change: Callable[[bool], None] | None = None,
    ) -> None:
        """``key``: its parent prefix is watched, so that a free leadership is taken at once."""
        self._store = store
        self._key = key
        self._candidate = candidate
        self._on_change = on_change
        self._lock = threading.Lock()
        self._fence = 0
        self._keeper = LeaseKeeper(store, ttl_seconds, self, name="election")
        self._watch = PrefixWatch(store, key.rsplit("/", 1)[0] + "/", self._seen, name="election")

    @property
    def is_leader(self) -> bool:
        """Whether this candidate surely leads now: by the lease, and by our own clock."""
        return self._fence > 0 and self._keeper.valid

    @property
    def fence(self) -> int:
        """Creation revision of the held key, 0 without leadership. A later leader's is greater: compare it on write."""
        return self._fence if self.is_leader else 0

    def start(self) -> None:
        """Becomes a candidate. Returns at once."""
        self._watch.start()
        self._keeper.start()

    def stop(self) -> None:
        """Gives the leadership up, at once for the others if etcd can be reached."""
        self._watch.close()
        self._keeper.stop()
        self._set(0)

    def leader(self) -> bytes | None:
        """Who leads, as far as is known here."""
        item = self._watch.items().get(self._key)
        return item.value if item is not None else None

    def hold(self, lease: Lease) -> None:
        """Takes the key if it is free, and learns whether it is ours."""
        self._store.create(self._key, self._candidate, lease.id)
        # Also after a refusal: an earlier call may have succeeded without an answer.
        item = self._store.get(self._key)
        self._set(item.create_revision if item is not None and item.lease_id == lease.id else 0)

    def lost(self) -> None:
        """The lease is gone, and the key with it."""
        self._set(0)

    def _seen(self, batch: Batch) -> None:
        if any(change.key == self._key for change in batch.changes):
            self._keeper.nudge()

    def _set(self, fence: int) -> None:
        with self._lock:
            before, self._fence = self._fence, fence
        if (before > 0) == (fence > 0):
            return
        _log.info("leadership_changed", key=self._key, leader=fence > 0)
        if self._on_change is not None:
            self._on_change(fence > 0)
