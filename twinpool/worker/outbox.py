# SPDX-License-Identifier: Apache-2.0
"""What the step thread says to the asyncio thread, handed over in batches.

A hand-over wakes the event loop through a pipe, which costs more than the message. So messages are gathered
while the step thread works and cross once, however many requests a step served.
"""

from collections.abc import Callable
from typing import Protocol

from twinpool.ids import WorkerKey
from twinpool.v1 import handoff_pb2 as handoff
from twinpool.v1 import worker_pb2 as pb


class Receiver(Protocol):
    """The asyncio side. Each call finds its stream and queues the message; a stream that is gone drops it."""

    def to_session(self, session: int, message: pb.SessionResponse) -> None:
        """For the router of this session."""
        ...

    def to_reader(self, stream: int, message: handoff.ExchangeResponse) -> None:
        """For the reader at the other end of an Exchange stream that this worker serves."""
        ...

    def to_owner(self, owner: WorkerKey, endpoint: str, message: handoff.ExchangeRequest) -> None:
        """For an owner that this worker reads from. Dials ``endpoint`` if it is not empty and no link is up."""
        ...


class Outbox:
    """Messages of the step thread, in order. Used by the step thread alone."""

    def __init__(self, receiver: Receiver, post: Callable[[Callable[[], None]], object]) -> None:
        """``post`` runs a callable on the asyncio thread: ``loop.call_soon_threadsafe``."""
        self._receiver = receiver
        self._post = post
        self._items: list[Callable[[], None]] = []

    def session(self, session: int, message: pb.SessionResponse) -> None:
        """Queues a message for a router."""
        self._items.append(lambda: self._receiver.to_session(session, message))

    def reader(self, stream: int, message: handoff.ExchangeResponse) -> None:
        """Queues a message for a reader."""
        self._items.append(lambda: self._receiver.to_reader(stream, message))

    def owner(self, owner: WorkerKey, message: handoff.ExchangeRequest, *, endpoint: str = "") -> None:
        """Queues a message for an owner; with ``endpoint`` a link is opened if there is none."""
        self._items.append(lambda: self._receiver.to_owner(owner, endpoint, message))

    def flush(self) -> None:
        """Hands everything over at once. Nothing to do costs nothing."""
        if not self._items:
            return
        batch, self._items = self._items, []

        def deliver() -> None:
            for item in batch:
                item()

        try:
            self._post(deliver)
        except RuntimeError:
            # The event loop is closed: the process is stopping and nobody is left to tell.
            return
