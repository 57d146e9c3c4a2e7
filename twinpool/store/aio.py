# SPDX-License-Identifier: Apache-2.0
"""The store for asyncio: every call on a small pool of threads of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from twinpool.store.types import Item, Lease, Snapshot, Store

T = TypeVar("T")

_THREADS = 4


class AsyncStore:
    """As :class:`Store`, awaitable. A slow etcd can hold these threads, never the loop or its default executor."""

    def __init__(self, store: Store) -> None:
        self.sync = store
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="store")

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    async def get(self, key: str) -> Item | None:
        """See :class:`Store`."""
        return await self._run(lambda: self.sync.get(key))

    async def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        """See :class:`Store`."""
        return await self._run(lambda: self.sync.put(key, value, lease_id))

    async def create(self, key: str, value: bytes, lease_id: int = 0) -> bool:
        """See :class:`Store`."""
        return await self._run(lambda: self.sync.create(key, value, lease_id))

    async def replace(self, key: str, value: bytes, mod_revision: int, lease_id: int = 0) -> bool:
        """See :class:`Store`."""
        return await self._run(lambda: self.sync.replace(key, value, mod_revision, lease_id))

    async def delete(self, key: str) -> bool:
        """See :class:`Store`."""
        return await self._run(lambda: self.sync.delete(key))

    async def delete_if(self, key: str, create_revision: int) -> bool:
        """See :class:`Store`."""
        return await self._run(lambda: self.sync.delete_if(key, create_revision))

    async def delete_prefix(self, prefix: str) -> int:
        """See :class:`Store`."""
        return await self._run(lambda: self.sync.delete_prefix(prefix))

    async def list_prefix(self, prefix: str) -> Snapshot:
        """See :class:`Store`."""
        return await self._run(lambda: self.sync.list_prefix(prefix))

    async def grant(self, ttl_seconds: int) -> Lease:
        """See :class:`Store`."""
        return await self._run(lambda: self.sync.grant(ttl_seconds))

    async def keep_alive(self, lease_id: int) -> int:
        """See :class:`Store`."""
        return await self._run(lambda: self.sync.keep_alive(lease_id))

    async def revoke(self, lease_id: int) -> None:
        """See :class:`Store`."""
        await self._run(lambda: self.sync.revoke(lease_id))

    async def close(self) -> None:
        """Closes the store and ends the threads."""
        await self._run(self.sync.close)
        self._executor.shutdown(wait=False)
