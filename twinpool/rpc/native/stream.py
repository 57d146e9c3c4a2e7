# SPDX-License-Identifier: Apache-2.0
"""Streams to other processes, as grpc.aio has them: calls of both of whose sides there are many messages."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import grpc
import grpc.aio

from twinpool import _transport
from twinpool.rpc.native.context import Parse, Serialize
from twinpool.rpc.native.inflate import Raw
from twinpool.rpc.native.transport import Outlet, Transport

if TYPE_CHECKING:
    from twinpool._transport import Certificates, Headers, Options

_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


class NativeStream:
    """What of grpc.aio.StreamStreamCall this project uses."""

    def __init__(
        self, transport: Transport, call: _transport.ClientCall, serialize: Serialize, parse: Parse
    ) -> None:
        self._transport = transport
        self._call = call
        self._outlet = Outlet(transport, call)
        self._serialize = serialize
        self._parse = parse
        self._incoming: deque[Raw] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._status: asyncio.Future[tuple[grpc.StatusCode, str, Headers]] = transport.loop.create_future()
        self._cancelled = False
        transport.parties[call.id] = self

    def on_message(self, raw: Raw | None) -> None:
        """See Party. The end has its own event, which says more."""
        if raw is not None:
            self._incoming.append(raw)
            self._wake()

    def on_closed(self, code: int, details: bytes, trailing: Headers) -> None:
        """See Party."""
        self._transport.parties.pop(self._call.id, None)
        self._end(_CODES.get(code, grpc.StatusCode.UNKNOWN), details.decode(errors="replace"), trailing)

    def on_writable(self) -> None:
        """See Party."""
        self._outlet.on_writable()

    async def read(self) -> Any:
        """The next message; EOF behind the last one of a stream that ended well. Raises AioRpcError for another end."""
        while not self._incoming:
            if self._status.done():
                self._raise_for_status()
                return grpc.aio.EOF
            self._reader = self._transport.loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        raw: Any = self._incoming.popleft()
        return self._parse(raw)

    async def write(self, message: Any) -> None:
        """Queues a message; waits where what was written before has not left. Raises AioRpcError if the stream has ended."""
        if self._status.done():
            self._raise_for_status()
            raise asyncio.InvalidStateError("RPC already finished.")
        if not self._outlet.put(self._serialize(message)):
            await self._outlet.room()
            if self._status.done():
                self._raise_for_status()

    def cancel(self) -> bool:
        """Ends the stream; whether it ran."""
        if self._status.done():
            return False
        self._cancelled = True
        self._transport.flush()
        self._call.cancel()
        self._end(grpc.StatusCode.CANCELLED, "Locally cancelled by application!", ())
        return True

    def cancelled(self) -> bool:
        """Whether this side has ended it."""
        return self._cancelled

    def done(self) -> bool:
        """Whether it is over."""
        return self._status.done()

    async def code(self) -> grpc.StatusCode:
        """How it ended, once it has."""
        return (await asyncio.shield(self._status))[0]

    async def details(self) -> str:
        """The text beside the status, once it has ended."""
        return (await asyncio.shield(self._status))[1]

    def _end(self, code: grpc.StatusCode, details: str, trailing: Headers) -> None:
        if not self._status.done():
            self._status.set_result((code, details, trailing))
        self._wake()
        self._outlet.on_writable()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _raise_for_status(self) -> None:
        code, details, trailing = self._status.result()
        if self._cancelled:
            raise asyncio.CancelledError
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


class NativeChannel:
    """A channel whose streams go over the C core. Calls of other kinds go over grpc.aio, which connects at the first of them."""

    def __init__(
        self, target: str, options: Options, certificates: Certificates | None, other: grpc.aio.Channel
    ) -> None:
        """Takes ``other``, a channel to the same target."""
        self._transport = Transport.use()
        self._channel: _transport.Channel | None = _transport.Channel(
            self._transport.engine, target, options, certificates
        )
        self._other = other
        self._streams: list[NativeStream] = []

    def stream_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        """What opens streams."""

        def open_stream() -> NativeStream:
            assert self._channel is not None, "the channel is closed"
            call = self._channel.stream(method)
            stream = NativeStream(self._transport, call, request_serializer, response_deserializer)
            self._streams.append(stream)
            return stream

        return open_stream

    async def close(self, grace: float | None = None) -> None:
        """Ends its streams."""
        if self._channel is None:
            return
        for stream in self._streams:
            stream.cancel()
        self._streams.clear()
        self._channel = None
        self._transport.release()
        await self._other.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)
