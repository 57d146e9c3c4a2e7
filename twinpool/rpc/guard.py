# SPDX-License-Identifier: Apache-2.0
"""Turns every exception of a servicer into a status of the error table."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio

from twinpool.errors import TwinpoolError, abort, as_twinpool_error
from twinpool.logs import get_logger
from twinpool.rpc.roles import RoleGuard

_log = get_logger(__name__)

if TYPE_CHECKING:
    _Method = grpc.RpcMethodHandler[Any, Any]

_Handler = Callable[[Any, Any], Any]

# Ends that gRPC itself raises or expects; they are not errors of ours.
_PASS = (asyncio.CancelledError, grpc.aio.AbortError)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """A servicer raises TwinpoolError and the client gets its status.

    Any other exception becomes INTERNAL, without its text. With ``roles`` a call of somebody who may not make it ends before.
    """

    def __init__(self, roles: RoleGuard | None = None) -> None:
        self._roles = roles

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
        make = getattr(grpc, f"{_arity(found)}_rpc_method_handler")
        inner = getattr(found, _arity(found))
        wrapped = _guard(inner, method, self._roles, streams=bool(found.response_streaming))
        handler: _Method = make(
            wrapped,
            request_deserializer=found.request_deserializer,
            response_serializer=found.response_serializer,
        )
        return handler


def _arity(handler: Any) -> str:
    request = "stream" if handler.request_streaming else "unary"
    response = "stream" if handler.response_streaming else "unary"
    return f"{request}_{response}"


def _guard(inner: _Handler, method: str, roles: RoleGuard | None, *, streams: bool) -> _Handler:
    if streams and inspect.isasyncgenfunction(inner):

        async def generate(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            try:
                if roles is not None:
                    roles.check(method, context)
                async with contextlib.aclosing(inner(request, context)) as answers:
                    async for answer in answers:
                        yield answer
            except _PASS:
                raise
            except Exception as error:
                await _end(error, method, context)

        return generate

    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            if roles is not None:
                roles.check(method, context)
            return await inner(request, context)
        except _PASS:
            raise
        except Exception as error:
            await _end(error, method, context)

    return call


async def _end(error: Exception, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    if not isinstance(error, TwinpoolError):
        # The exception's text may hold user content: log where it happened, not what it says.
        frames = traceback.format_list(traceback.extract_tb(error.__traceback__))
        _log.error("rpc_failed", method=method, type=type(error).__name__, frames="".join(frames))
    await abort(context, as_twinpool_error(error))
