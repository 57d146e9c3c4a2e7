# SPDX-License-Identifier: Apache-2.0
"""What the store says of a cluster: its workers and routers, followed by watches."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from twinpool.config import TwinpoolConfig
from twinpool.errors import TwinpoolError
from twinpool.membership import REGISTER_SECONDS, RouterWatch, WorkerWatch
from twinpool.store import Store
from twinpool.v1.control_pb2 import WORKER_STATE_READY, RouterRecord, WorkerRecord

T = TypeVar("T")

# Processes that die say nothing to the store, so a wait looks after them this often.
CHECK_SECONDS = 0.25


class ClusterView:
    """Live lists of workers and routers. All methods on one event loop."""

    def __init__(self, store: Store, config: TwinpoolConfig) -> None:
        self._changed = asyncio.Event()
        cluster = config.cluster
        grace = cluster.lease_ttl_seconds + REGISTER_SECONDS
        self._workers = WorkerWatch(store, cluster.name, on_event=self._on_event, grace_seconds=grace)
        self._routers = RouterWatch(store, cluster.name, on_event=self._on_event, grace_seconds=grace)

    @property
    def connected(self) -> bool:
        """Whether the list of workers follows the store now."""
        return self._workers.connected

    async def wait_synced(self, timeout: float) -> bool:
        """Waits for the first list of workers; whether there was one."""
        return await self._workers.wait_synced(timeout)

    async def start(self) -> None:
        """Starts to follow the store."""
        await self._workers.start()
        await self._routers.start()

    async def stop(self) -> None:
        """Ends the watches."""
        await self._workers.stop()
        await self._routers.stop()

    def workers(self, pool: str = "") -> list[WorkerRecord]:
        """Registered workers, ordered by name; of one pool if given."""
        records = [record for record in self._workers.records() if not pool or record.pool == pool]
        return sorted(records, key=lambda record: record.worker.name)

    def routers(self) -> list[RouterRecord]:
        """Registered routers, ordered by name."""
        return sorted(self._routers.records(), key=lambda record: record.name)

    async def wait_workers(
        self, count: int, timeout: float, progress: Callable[[int], None], check: Callable[[], None]
    ) -> list[WorkerRecord]:
        """Returns once ``count`` workers are ready. ``check`` may raise what keeps them from it."""

        def ready() -> list[WorkerRecord] | None:
            check()
            found = [record for record in self.workers() if record.state == WORKER_STATE_READY]
            progress(len(found))
            return found if len(found) >= count else None

        return await self._wait(ready, timeout, f"{count} ready workers")

    async def wait_routers(self, count: int, timeout: float, check: Callable[[], None]) -> list[RouterRecord]:
        """Returns once ``count`` routers are registered."""

        def ready() -> list[RouterRecord] | None:
            check()
            found = self.routers()
            return found if len(found) >= count else None

        return await self._wait(ready, timeout, f"{count} routers")

    async def changed(self, timeout: float) -> None:
        """Returns once something has changed, after ``timeout`` seconds at the latest. Look first, then wait."""
        event = self._changed
        event.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), min(timeout, CHECK_SECONDS))

    def _on_event(self, _event: object) -> None:
        self._changed.set()

    async def _wait(self, ready: Callable[[], T | None], timeout: float, what: str) -> T:
        deadline = asyncio.get_running_loop().time() + timeout
        while (found := ready()) is None:
            if asyncio.get_running_loop().time() > deadline:
                raise TwinpoolError("DEADLINE_EXCEEDED", f"waited {timeout:g} s in vain for {what}")
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), CHECK_SECONDS)
        return found
