# SPDX-License-Identifier: Apache-2.0
"""A client's call as handlers know it from grpc.aio."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn

import grpc
import grpc.aio

from twinpool.rpc.native.inflate import Raw
from twinpool.rpc.native.transport import Outlet, Transport

if TYPE_CHECKING:
    from twinpool._transport import Call, Headers

Serialize = Callable[[Any], bytes]
Parse = Callable[[bytes], Any]

_OVER: Final = "RPC already finished."
_OK: Final = (0, "", ())


class Context(grpc.aio.ServicerContext[Any, Any]):
    """See grpc.aio.ServicerContext. Differs where a message is concerned: ``write`` returns when it is queued, and waits only where
    what was written before has not left."""

    def __init__(
        self,
        transport: Transport,
        call: Call,
        metadata: Headers,
        deadline: float,
    ) -> None:
        self.outlet = Outlet(transport, call)
        self.task: asyncio.Task[None] | None = None
        self._call = call
        self._loop = transport.loop
        self._identity: Mapping[str, Iterable[bytes]] | None = None
        self._metadata = metadata
        self._deadline = deadline
        # What the method's handler has them as.
        self.parse: Callable[[Any], Any]
        self.serialize: Serialize
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._trailing: tuple[tuple[str, str | bytes], ...] = ()
        self._callbacks: list[Callable[[Any], None]] = []
        self._incoming: deque[Raw | None] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._read_all = False
        self._ended = self._cancelled = self._done = False

    # --- what the transport says ----------------------------------------------------------

    def on_message(self, raw: Raw | None) -> None:
        """See Party."""
        self._incoming.append(raw)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def on_closed(self, code: int, details: bytes, trailing: Headers) -> None:
        """The client has gone, cancelled, or run out of time."""
        self._cancelled = True
        if self.task is not None:
            self.task.cancel()

    def on_writable(self) -> None:
        """See Party."""
        self.outlet.on_writable()

    # --- messages -------------------------------------------------------------------------

    async def read(self) -> Any:
        """The next message of the client; EOF behind the last one."""
        self._check()
        while not self._incoming:
            if self._read_all:
                return grpc.aio.EOF
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        raw = self._incoming.popleft()
        if raw is None:
            self._read_all = True
            return grpc.aio.EOF
        return self.parse(raw)

    async def write(self, message: Any) -> None:
        """See the class."""
        if self._ended or self._cancelled:
            raise grpc.aio.UsageError(_OVER)
        if not self.outlet.put(self.serialize(message)):
            await self.outlet.room()

    async def send_initial_metadata(self, initial_metadata: Any) -> NoReturn:
        """Refused: no handler of this project has any to send."""
        raise grpc.aio.UsageError("headers of an answer cannot be set")

    # --- the end --------------------------------------------------------------------------

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        """Ends the call with a status."""
        self._check()
        trailing = tuple((str(key), value) for key, value in trailing_metadata or self._trailing)
        self.end(code, details or self._details, trailing)
        raise grpc.aio.AbortError("Locally aborted.")

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        """Ends the call with a status."""
        await self.abort(status.code, status.details, status.trailing_metadata)

    def end(
        self, code: grpc.StatusCode, details: str, trailing: Iterable[tuple[str, str | bytes]] = ()
    ) -> None:
        """Ends the call. Only the first end counts."""
        if not self._ended:
            self._ended = True
            self._code, self._details, self._trailing = code, details, tuple(trailing)
            self.outlet.end((code.value[0], details, self._trailing))

    def finish(self) -> None:
        """The handler has returned: the call ends well, unless it has set another status."""
        if not self._ended and self._code is None and not self._details and not self._trailing:
            self._ended = True
            self._code = grpc.StatusCode.OK
            self.outlet.end(_OK)
            return
        self.end(self._code or grpc.StatusCode.OK, self._details, self._trailing)

    def over(self) -> None:
        """Nothing of the call runs any more."""
        self._done = True
        for callback in self._callbacks:
            callback(self)

    def _check(self) -> None:
        if self._ended:
            raise grpc.aio.UsageError(_OVER)

    # --- what is known of it --------------------------------------------------------------

    def invocation_metadata(self) -> Any:
        """What came with the call."""
        return self._metadata

    def time_remaining(self) -> Any:
        """Seconds to the deadline; None: there is none."""
        return None if self._deadline == float("inf") else max(0.0, self._deadline - time.monotonic())

    def peer(self) -> str:
        """The client's address."""
        return self._call.peer()

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """What the handshake has shown of the client."""
        if self._identity is None:
            self._identity = self._call.identity()
        return self._identity

    def peer_identities(self) -> Iterable[bytes] | None:
        """The names of the client's certificate."""
        key = self.peer_identity_key()
        return self.auth_context().get(key) if key is not None else None

    def peer_identity_key(self) -> str | None:
        """Which of the context's entries has the names."""
        shown = self.auth_context()
        names = ("x509_subject_alternative_name", "x509_common_name")
        return next((name for name in names if name in shown), None)

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """Goes out with the end."""
        self._check()
        self._trailing = tuple((str(key), value) for key, value in trailing_metadata)

    def trailing_metadata(self) -> Any:
        """What goes out with the end."""
        return self._trailing

    def set_code(self, code: grpc.StatusCode) -> None:
        """The status with which the call is to end when the handler returns."""
        self._check()
        self._code = code

    def code(self) -> Any:
        """The status that is set."""
        return self._code

    def set_details(self, details: str) -> None:
        """The text beside the status."""
        self._check()
        self._details = details

    def details(self) -> str:
        """The text that is set."""
        return self._details

    def set_compression(self, compression: grpc.Compression) -> None:
        """Answers are not compressed: they are short, or tokens."""

    def disable_next_message_compression(self) -> None:
        """See ``set_compression``."""

    def cancelled(self) -> bool:
        """Whether the client has gone before the end."""
        return self._cancelled

    def done(self) -> bool:
        """Whether nothing of the call runs any more."""
        return self._done

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """``callback`` gets this context when nothing of the call runs any more."""
        self._callbacks.append(callback)
