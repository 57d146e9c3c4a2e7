# SPDX-License-Identifier: Apache-2.0
"""The sending half of a stream: a bounded queue that a gRPC handler or call drains."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final, Generic, TypeAlias, TypeVar

import grpc.aio

from twinpool.errors import TwinpoolError

QUEUED_MESSAGES_MAX: Final = 16384
"""Messages that may wait for a slow peer. At one a step, that is minutes of decoding."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""What gRPC hands to a servicer's method."""

M = TypeVar("M")


class MessageQueue(Generic[M]):
    """Messages for one peer. Used on the asyncio thread alone.

    A peer that does not read for too long loses its stream: the worker's memory must not depend on it.
    """

    def __init__(self, limit: int = QUEUED_MESSAGES_MAX) -> None:
        self.error: TwinpoolError | None = None
        self._limit = limit
        self._queue: asyncio.Queue[M | None] = asyncio.Queue()
        self._closed = False
        self._dropping = False

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called: nothing more is accepted."""
        return self._closed

    def send(self, message: M) -> bool:
        """Queues a message. False if the stream is closed, or is closed by this for being too slow."""
        if self._closed:
            return False
        if self._queue.qsize() >= self._limit:
            self.close(TwinpoolError("QUEUE_FULL", f"{self._limit} messages wait for the peer"), drop=True)
            return False
        self._queue.put_nowait(message)
        return True

    def close(self, error: TwinpoolError | None = None, *, drop: bool = False) -> None:
        """Ends the stream after what is queued; ``drop`` ends it at once. ``error`` is how the stream is to end."""
        if self._closed:
            return
        self._closed = True
        self._dropping = drop
        self.error = error
        self._queue.put_nowait(None)

    async def messages(self) -> AsyncIterator[M]:
        """What to send, until the queue is closed."""
        while (message := await self._queue.get()) is not None and not self._dropping:
            yield message
