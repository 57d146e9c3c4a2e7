# SPDX-License-Identifier: Apache-2.0
"""Records what a watch reports."""

import threading
import time
from collections.abc import Callable

from tests.support.waiting import GIVE_UP_SECONDS
from twinpool.store import Batch, Origin, PrefixWatch, Store

Seen = tuple[str, str | None]


def wait_until(condition: Callable[[], object], seconds: float = GIVE_UP_SECONDS) -> None:
    """Returns once ``condition()`` is true; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


class Recorder:
    """A started watch with everything it told. Keys are given without the prefix."""

    def __init__(self, store: Store, prefix: str) -> None:
        self.prefix = prefix
        self.batches: list[Batch] = []
        self.connected: list[bool] = []
        self._lock = threading.Lock()
        self.watch = PrefixWatch(
            store, prefix, self._on_batch, name="test", on_connected=self.connected.append
        )
        self.watch.start()

    def _on_batch(self, batch: Batch) -> None:
        with self._lock:
            self.batches.append(batch)

    def seen(self, *origins: Origin) -> list[Seen]:
        """(key, new value or None) of all changes so far, of some origins or of all."""
        with self._lock:
            return [
                (
                    change.key.removeprefix(self.prefix),
                    None if change.now is None else change.now.value.decode(),
                )
                for batch in self.batches
                if not origins or batch.origin in origins
                for change in batch.changes
            ]

    def origins(self) -> list[Origin]:
        """Origins of the batches, in order."""
        with self._lock:
            return [batch.origin for batch in self.batches]

    def synced(self) -> "Recorder":
        """Waits for the first listing and the stream behind it."""
        wait_until(lambda: self.origins() and self.watch.connected)
        return self

    def close(self) -> None:
        """Ends the watch."""
        self.watch.close()
