# SPDX-License-Identifier: Apache-2.0
"""Keeps this worker's locality segments in etcd up to date, at a bounded rate."""

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from twinpool import metrics
from twinpool.errors import TwinpoolError
from twinpool.ids import WorkerKey
from twinpool.logs import get_logger
from twinpool.store import Keys, LeaseLostError, Store
from twinpool.worker.kv_events.segment_log import Drop, Write

log = get_logger(__name__)

MIN_INTERVAL_SECONDS: Final = 0.5
"""At most two writes a second, whatever is configured and whatever happens here."""

_MAX_BACKOFF_SECONDS: Final = 8.0


class SegmentSource(Protocol):
    """Who knows what to write; see ``SegmentLog``. Safe from any thread."""

    def next_write(self) -> Write | None: ...

    def done(self, write: Write) -> None: ...

    def restart(self) -> None: ...


class SegmentWriter:
    """A thread of its own: etcd may be slow or gone, and nobody here waits for it."""

    def __init__(
        self,
        store: Store,
        cluster: str,
        worker: WorkerKey,
        source: SegmentSource,
        lease_id: Callable[[], int],
        interval_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``lease_id``: the worker's lease, under which the segments vanish with the worker; 0: there is none now."""
        self._store = store
        self._keys = Keys(cluster)
        self._worker = worker
        self._source = source
        self._lease_id = lease_id
        self._interval = max(MIN_INTERVAL_SECONDS, interval_seconds)
        self._clock = clock
        self._written_under = 0
        self._failures = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="twinpool-locality", daemon=True)

    def start(self) -> None:
        """Starts to write."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Ends the thread; the segments stay until their lease ends. False if it still runs after ``timeout`` seconds."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = self._clock()
            wrote = False
            try:
                wrote = self.turn()
            except Exception as error:
                self._failures += 1
                log.exception("segment_writer_failed", type=type(error).__name__)
            pause = self._interval if wrote or not self._failures else self._backoff()
            self._stopping.wait(max(0.0, began + pause - self._clock()))

    def _backoff(self) -> float:
        return min(_MAX_BACKOFF_SECONDS, self._interval * 2.0 ** min(self._failures, 10))

    def turn(self) -> bool:
        """Makes one write if there is one to make and a lease to make it under; whether etcd was asked."""
        lease_id = self._lease_id()
        if not lease_id:
            return False
        if lease_id != self._written_under:
            # What was written has gone with the other lease.
            self._source.restart()
            self._written_under = lease_id
        write = self._source.next_write()
        if write is None:
            return False
        try:
            self._write(write, lease_id)
        except LeaseLostError:
            # The registration finds out by itself and gets another one.
            self._written_under = 0
            self._count(write, "lease_lost")
        except TwinpoolError as error:
            self._failures += 1
            self._count(write, "failed")
            if self._failures == 1:
                log.warning("segment_not_written", reason=error.reason, error=error.message)
            return False
        else:
            self._failures = 0
            self._source.done(write)
            self._count(write, "done")
        return True

    def _write(self, write: Write, lease_id: int) -> None:
        name, incarnation = self._worker.name, self._worker.incarnation
        if isinstance(write, Drop):
            self._store.delete_prefix(self._keys.locality_generation(name, incarnation, write.generation))
            return
        key = self._keys.locality_segment(name, incarnation, write.generation, write.segment)
        self._store.put(key, write.value, lease_id)
        metrics.WORKER_LOCALITY_BYTES.inc(len(write.value))

    @staticmethod
    def _count(write: Write, result: str) -> None:
        kind = "drop" if isinstance(write, Drop) else write.segment.partition("-")[0]
        metrics.WORKER_LOCALITY_WRITES.labels(kind, result).inc()
