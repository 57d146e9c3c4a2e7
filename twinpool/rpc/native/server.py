# SPDX-License-Identifier: Apache-2.0
"""A server whose handlers are those of grpc.aio and whose transport is gRPC's C core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import isasyncgenfunction
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from twinpool import _transport
from twinpool.logs import get_logger
from twinpool.rpc.native.context import Context
from twinpool.rpc.native.inflate import DECOMPRESS_OPTION, BrokenError, Raw, TooLargeError, inflated
from twinpool.rpc.native.transport import Transport

if TYPE_CHECKING:
    from twinpool._transport import Certificates, Headers, Options, ServerCall

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Details:
    """See grpc.HandlerCallDetails. Of a method, not of a call: what wraps a handler is asked once."""

    method: str
    invocation_metadata: Headers = ()


class _Method:
    """How the calls of one method are served."""

    def __init__(self, handler: Any, max_message_bytes: int) -> None:
        self.many = bool(handler.request_streaming)
        self._deserialize = handler.request_deserializer or _as_it_is
        self._max_message_bytes = max_message_bytes
        self.serialize = handler.response_serializer or _as_it_is
        self._streams = bool(handler.response_streaming)
        taken, given = "stream" if self.many else "unary", "stream" if self._streams else "unary"
        self._inner = getattr(handler, f"{taken}_{given}")
        self._generates = isasyncgenfunction(self._inner)

    def parse(self, raw: Raw) -> Any:
        """A request. Raises TooLargeError, BrokenError."""
        if not isinstance(raw, bytes):
            raw = inflated(raw, self._max_message_bytes)
        return self._deserialize(raw)

    async def serve(self, context: Context, raw: Raw | None) -> None:
        """One call, from its request to the end of its handler."""
        context.parse, context.serialize = self.parse, self.serialize
        if self.many:
            request: Any = _requests(context)
        elif raw is None:
            context.end(grpc.StatusCode.INTERNAL, "the call came without a request")
            return
        else:
            request = self.parse(raw)
        if self._generates:
            async for answer in self._inner(request, context):
                await context.write(answer)
            return
        answer = await self._inner(request, context)
        if not self._streams:
            context.outlet.put(self.serialize(answer))


class NativeServer(grpc.aio.Server):
    """See grpc.aio.Server. Bound, started and stopped on one event loop."""

    def __init__(
        self,
        options: Options,
        interceptors: Sequence[Any] = (),
        fetch: Callable[[], Certificates | None] | None = None,
    ) -> None:
        """``fetch``: TLS with these certificates, which is asked at each handshake."""
        self._options = (*options, DECOMPRESS_OPTION)
        self._max_message_bytes = int(dict(options)["grpc.max_receive_message_length"])
        self._fetch = fetch
        self._loop: asyncio.AbstractEventLoop
        self._transport: Transport
        self._server: _transport.Server | None = None
        self._interceptors = interceptors
        self._generic: list[Any] = []
        self._methods: dict[str, _Method] = {}
        self._stopping: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[Any]) -> None:
        """Adds services."""
        self._generic.extend(generic_rpc_handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Any) -> None:
        """Generated code adds each service this way, too."""

    def add_insecure_port(self, address: str) -> int:
        """The port; 0 if it cannot be had. With TLS where the server was made with certificates."""
        return self._bound().bind(address)

    def add_secure_port(self, address: str, server_credentials: Any) -> int:
        """See ``add_insecure_port``."""
        return self._bound().bind(address)

    async def start(self) -> None:
        """Takes calls from now on."""
        for path in _paths(self._generic):
            handler = await self._handler(path)
            if handler is not None:
                self._methods[path] = _Method(handler, self._max_message_bytes)
        self._bound().start([path for path, method in self._methods.items() if method.many])

    async def stop(self, grace: float | None) -> None:
        """New calls are refused; running ones have ``grace`` seconds to end. Returns when all have."""
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop(grace or 0.0))
        await asyncio.shield(self._stopping)

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        """Returns when the server has stopped; false: it still runs after ``timeout`` seconds."""
        try:
            await asyncio.wait_for(self._stopped.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def _bound(self) -> _transport.Server:
        """What is there once a port is: a server that is never bound holds nothing."""
        if self._server is None:
            self._loop = asyncio.get_running_loop()
            self._transport = Transport.use()
            self._server = _transport.Server(self._transport.engine, self._options, self._fetch)
            self._transport.servers[self._server.id] = self
        return self._server

    async def _stop(self, grace: float) -> None:
        if self._server is None:
            return
        self._transport.flush()
        self._server.stop()
        try:
            async with asyncio.timeout(grace):
                await self._stopped.wait()
        except TimeoutError:
            self._server.cancel_all()
            await self._stopped.wait()
        del self._transport.servers[self._server.id]
        self._transport.release()

    async def _handler(self, path: str) -> Any:
        async def found(wanted: Any) -> Any:
            handlers = (each.service(wanted) for each in self._generic)
            return next((handler for handler in handlers if handler is not None), None)

        continuation: Any = found
        for interceptor in reversed(self._interceptors):
            continuation = partial(interceptor.intercept_service, continuation)
        return await continuation(_Details(path))

    # --- from the transport ---------------------------------------------------------------

    def on_stopped(self) -> None:
        """See Accepting."""
        self._stopped.set()

    def on_opened(
        self, number: int, call: ServerCall, path: str, metadata: Headers, deadline: float, raw: Raw | None
    ) -> None:
        """See Accepting."""
        context = Context(self._transport, call, metadata, deadline)
        self._transport.parties[number] = context
        method = self._methods.get(path)
        found = self._run_unlisted(path, context, raw) if method is None else _run(method, path, context, raw)
        task = self._loop.create_task(found)
        context.task = task
        task.add_done_callback(partial(self._over, number, context))

    async def _run_unlisted(self, path: str, context: Context, raw: Raw | None) -> None:
        handler = await self._handler(path)
        if handler is None:
            context.end(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            return
        method = _Method(handler, self._max_message_bytes)
        if method.many:
            context.on_message(raw)
            context.on_message(None)
        await _run(method, path, context, raw)

    def _over(self, number: int, context: Context, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            # Before its first step.
            context.end(grpc.StatusCode.CANCELLED, "")
        self._transport.parties.pop(number, None)
        context.over()


async def _run(method: _Method, path: str, context: Context, raw: Raw | None) -> None:
    try:
        await method.serve(context, raw)
        context.finish()
    except grpc.aio.AbortError:
        pass
    except asyncio.CancelledError:
        context.end(grpc.StatusCode.CANCELLED, "")
    except TooLargeError as error:
        context.end(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
    except BrokenError as error:
        context.end(grpc.StatusCode.INTERNAL, str(error))
    except Exception as error:
        # As grpc.aio has it. Servicers raise errors of the table, which end before.
        _log.exception("handler_failed", method=path, type=type(error).__name__)
        context.end(context.code() or grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")


async def _requests(context: Context) -> AsyncIterator[Any]:
    while (request := await context.read()) is not grpc.aio.EOF:
        yield request


def _paths(generic: Iterable[Any]) -> Iterator[str]:
    """Which methods there are must be known before the first call: some of them are opened without a message."""
    for handlers in generic:
        # Handlers are asked for a method by its name; a service's are a table. Of others the methods are found when they are called.
        yield from vars(handlers).get("_method_handlers", ())


def _as_it_is(raw: Any) -> Any:
    return raw
