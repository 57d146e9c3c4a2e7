# SPDX-License-Identifier: Apache-2.0
"""gRPC's C core and one event loop: what happens comes in batches, and what is sent in one turn of the loop leaves together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakKeyDictionary

from twinpool._transport import Engine, send
from twinpool.rpc.native.inflate import Raw

if TYPE_CHECKING:
    from twinpool._transport import Call, End, ServerCall

OPENED: Final = 0
MESSAGE: Final = 1
CLOSED: Final = 2
WRITABLE: Final = 3
STOPPED: Final = 4

UNSENT_BYTES: Final = 16 * 1024
"""A write of a call with more that gRPC has not accepted yet waits: the other side does not read, or the connection is full."""


class Party(Protocol):
    """Who is told what happens to a call: one end of it."""

    def on_message(self, raw: Raw | None) -> None:
        """A message; None: the other side sends no more."""

    def on_closed(self, code: int, details: bytes, trailing: tuple[tuple[str, str | bytes], ...]) -> None:
        """The call is over, before this side has ended it."""

    def on_writable(self) -> None:
        """As much as was asked for has left."""


class Accepting(Protocol):
    """A server, as the transport sees it."""

    def on_opened(
        self,
        number: int,
        call: ServerCall,
        path: str,
        metadata: tuple[tuple[str, str | bytes], ...],
        deadline: float,
        raw: Raw | None,
    ) -> None:
        """A client has called. ``deadline``: of ``time.monotonic()``, or infinity."""

    def on_stopped(self) -> None:
        """The last call has ended."""


class Transport:
    """One an event loop, for as long as somebody uses it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = Engine()
        self.parties: dict[int, Party] = {}
        self.servers: dict[int, Accepting] = {}
        self.loop = loop
        self._users = 0
        self._outgoing: list[Outlet] = []
        loop.add_reader(self.engine.wakeup_fd, self._take)

    @classmethod
    def use(cls) -> Transport:
        """That of the running loop. Each use ends with ``release``."""
        loop = asyncio.get_running_loop()
        found = _of_loop.get(loop)
        if found is None:
            found = _of_loop[loop] = cls(loop)
        found._users += 1
        return found

    def release(self) -> None:
        """Ends a use; with the last one all calls that still run are cancelled."""
        self._users -= 1
        if self._users:
            return
        _of_loop.pop(self.loop, None)
        self.flush()
        self.loop.remove_reader(self.engine.wakeup_fd)
        self.engine.close()
        self._take()

    def add(self, outlet: Outlet) -> None:
        """``outlet`` has something to send. It leaves with what else is sent before the loop's next turn."""
        if not self._outgoing:
            self.loop.call_soon(self.flush)
        self._outgoing.append(outlet)

    def flush(self) -> None:
        """Sends what is queued now."""
        if self._outgoing:
            outgoing, self._outgoing = self._outgoing, []
            send([outlet.taken() for outlet in outgoing])

    def _take(self) -> None:
        parties = self.parties
        for event in self.engine.take():
            kind = event[0]
            if kind == OPENED:
                server = self.servers.get(event[7])
                if server is not None:
                    server.on_opened(*event[1:7])
            elif kind == STOPPED:
                if (stopped := self.servers.get(event[1])) is not None:
                    stopped.on_stopped()
            elif (party := parties.get(event[1])) is not None:
                if kind == MESSAGE:
                    party.on_message(event[2])
                elif kind == WRITABLE:
                    party.on_writable()
                else:
                    party.on_closed(*event[2:])


class Outlet:
    """What one call sends, with back-pressure."""

    __slots__ = ("_bytes", "_call", "_end", "_messages", "_transport", "_waiting")

    def __init__(self, transport: Transport, call: Call) -> None:
        self._transport = transport
        self._call = call
        self._messages: list[bytes] = []
        self._bytes = 0
        self._end: End | None = None
        self._waiting: asyncio.Future[None] | None = None

    def put(self, raw: bytes) -> bool:
        """Sends a message. Returns whether the next one need not wait for ``room``."""
        if not self._messages:
            self._transport.add(self)
        self._messages.append(raw)
        self._bytes += len(raw)
        if self._bytes + self._call.waiting_bytes <= UNSENT_BYTES:
            return True
        self._transport.flush()
        return self._call.writable(UNSENT_BYTES)

    def end(self, end: End) -> None:
        """Sends the status, behind all messages. Once."""
        if not self._messages:
            self._transport.add(self)
        self._end = end

    def taken(self) -> tuple[Call, list[bytes], End | None]:
        """What is to be sent now."""
        messages, self._messages, self._bytes = self._messages, [], 0
        end, self._end = self._end, None
        return self._call, messages, end

    async def room(self) -> None:
        """Returns when the next message need not wait. One waits at a time."""
        self._waiting = self._transport.loop.create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def on_writable(self) -> None:
        """See Party."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


_of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Transport] = WeakKeyDictionary()
