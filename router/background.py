# SPDX-License-Identifier: Apache-2.0
"""Work that outlives the call that started it: waiting for acknowledgements, closing streams."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from twinpool.logs import get_logger

log = get_logger(__name__)


class Background:
    """Holds the tasks, so that none is collected while it runs and a stop can wait for them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs ``work`` on its own. An exception in it is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def drain(self, timeout: float) -> None:
        """Waits until nothing is left, at most ``timeout`` seconds; then cancels the rest."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout)
        for task in self._tasks:
            task.cancel()

    def __len__(self) -> int:
        return len(self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background_task_failed", type=type(error).__name__, exc_info=error)
