# SPDX-License-Identifier: Apache-2.0
"""The workers' locality segments in etcd, as the watch knows them."""

import threading
from collections.abc import Callable

from twinpool.ids import WorkerKey
from twinpool.kv_events import CacheState, read_state
from twinpool.logs import get_logger
from twinpool.store import Batch, Keys, PrefixWatch, Store

log = get_logger(__name__)


class SegmentView:
    """Follows all segments of a cluster. ``state`` may be asked from any thread.

    Segments are only read when somebody asks: while the events of a worker are followed, nobody needs to.
    """

    def __init__(self, store: Store, cluster: str, on_change: Callable[[WorkerKey], None]) -> None:
        """``on_change``: a worker's segments differ. Called on the watch's thread."""
        self._keys = Keys(cluster)
        self._on_change = on_change
        self._lock = threading.Lock()
        self._values: dict[WorkerKey, dict[str, bytes]] = {}
        self._synced = threading.Event()
        self._watch = PrefixWatch(store, self._keys.locality(), self._on_batch, name="locality")

    @property
    def connected(self) -> bool:
        """Whether the view follows etcd now."""
        return self._watch.connected

    def start(self) -> None:
        """Starts to follow; returns at once."""
        self._watch.start()

    def close(self) -> None:
        """Ends the watch."""
        self._watch.close()

    def wait_synced(self, timeout_seconds: float) -> bool:
        """Waits for the first listing; whether there was one."""
        return self._synced.wait(timeout_seconds)

    def state(self, worker: WorkerKey) -> CacheState | None:
        """What a worker's segments say; None if they say nothing."""
        with self._lock:
            values = list(self._values.get(worker, {}).values())
        return read_state(values, worker.incarnation) if values else None

    def _on_batch(self, batch: Batch) -> None:
        changed: set[WorkerKey] = set()
        with self._lock:
            for change in batch.changes:
                try:
                    worker = self._keys.parse_locality(change.key)
                except ValueError as error:
                    log.warning("invalid_locality_key", detail=str(error))
                    continue
                changed.add(worker)
                segments = self._values.setdefault(worker, {})
                if change.now is not None:
                    segments[change.key] = change.now.value
                else:
                    segments.pop(change.key, None)
                    if not segments:
                        del self._values[worker]
        self._synced.set()
        for worker in changed:
            self._on_change(worker)
