# SPDX-License-Identifier: Apache-2.0
"""Turns every exception of a servicer into a status of the error table."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio

from twinpool.errors import TwinpoolError, abort, as_twinpool_error
from twinpool.logs import get_logger
from twinpool.rpc.audit import AuditLog, Call
from twinpool.rpc.roles import RoleGuard

_log = get_logger(__name__)

if TYPE_CHECKING:
    _Method = grpc.RpcMethodHandler[Any, Any]

_Handler = Callable[[Any, Any], Any]
_Context = grpc.aio.ServicerContext[Any, Any]
_Admitted = Callable[[str, Any, _Context], contextlib.AbstractContextManager[Call]]

# Ends that gRPC itself raises or expects; they are not errors of ours.
_PASS = (asyncio.CancelledError, grpc.aio.AbortError)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """A servicer raises TwinpoolError and the client gets its status.

    Any other exception becomes INTERNAL, without its text. With ``roles`` a call of somebody who may not make it ends before, and
    with ``audit`` administrative calls are written down, those too.
    """

    def __init__(self, roles: RoleGuard | None = None, audit: AuditLog | None = None) -> None:
        self._roles = roles
        self._audit = audit
        # The handler of a method, and what it was wrapped to: grpc.aio asks at every call.
        self._wrapped: dict[str, tuple[Any, _Method]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Method | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Method | None:
        """Wraps the handler that serves this call; None: no one does."""
        found: Any = await continuation(handler_call_details)
        if found is None:
            return None
        method = handler_call_details.method
        known = self._wrapped.get(method)
        if known is not None and known[0] is found:
            return known[1]
        make = getattr(grpc, f"{_arity(found)}_rpc_method_handler")
        inner = getattr(found, _arity(found))
        wrapped = _guard(inner, method, self._admission_of(method), streams=bool(found.response_streaming))
        handler: _Method = make(
            wrapped,
            request_deserializer=found.request_deserializer,
            response_serializer=found.response_serializer,
        )
        self._wrapped[method] = found, handler
        return handler

    def _admission_of(self, method: str) -> _Admitted:
        roles = self._roles if self._roles is not None and self._roles.guards(method) else None
        audit = self._audit if self._audit is not None and self._audit.watches(method) else None
        if roles is None and audit is None:
            return _open_to_all

        @contextlib.contextmanager
        def admitted(method: str, request: Any, context: _Context) -> Iterator[Call]:
            with audit.call(method, request, context) if audit is not None else Call() as call:
                if roles is not None:
                    roles.check(method, context)
                call.admitted()
                yield call

        return admitted


_UNWATCHED = Call()


def _open_to_all(method: str, request: Any, context: _Context) -> Call:
    return _UNWATCHED


def _arity(handler: Any) -> str:
    request = "stream" if handler.request_streaming else "unary"
    response = "stream" if handler.response_streaming else "unary"
    return f"{request}_{response}"


def _guard(inner: _Handler, method: str, admitted: _Admitted, *, streams: bool) -> _Handler:
    if streams and inspect.isasyncgenfunction(inner):

        async def generate(request: Any, context: _Context) -> AsyncIterator[Any]:
            try:
                with admitted(method, request, context):
                    async with contextlib.aclosing(inner(request, context)) as answers:
                        async for answer in answers:
                            yield answer
            except _PASS:
                raise
            except Exception as error:
                await _end(error, method, context)

        return generate

    async def call(request: Any, context: _Context) -> Any:
        try:
            with admitted(method, request, context) as entered:
                answer = await inner(request, context)
                entered.answered(answer)
                return answer
        except _PASS:
            raise
        except Exception as error:
            await _end(error, method, context)

    return call


async def _end(error: Exception, method: str, context: _Context) -> NoReturn:
    if not isinstance(error, TwinpoolError):
        # The exception's text may hold user content: log where it happened, not what it says.
        frames = traceback.format_list(traceback.extract_tb(error.__traceback__))
        _log.error("rpc_failed", method=method, type=type(error).__name__, frames="".join(frames))
    await abort(context, as_twinpool_error(error))
