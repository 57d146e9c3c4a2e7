# SPDX-License-Identifier: Apache-2.0
"""The requests of one ModelStreamInfer stream, served side by side.

Responses to different requests may come between one another, as Triton has it for models that give several responses; each bears
the id of its request. A request that fails gets a response that says why, and the stream goes on.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio

from twinpool.errors import TwinpoolError, as_twinpool_error
from twinpool.logs import get_logger
from twinpool.router.kserve.answer import FINAL
from twinpool.router.utf8 import Unparsed
from twinpool.v1.kserve import open_inference_pb2 as kserve

log = get_logger(__name__)

Send = Callable[[kserve.ModelInferResponse], Awaitable[None]]
Serve = Callable[[Any, Send], Awaitable[None]]
"""Serves one request, whose responses go to ``Send``. Raises TwinpoolError."""


class InferStream:
    """One stream. ``run`` serves it to its end."""

    def __init__(
        self,
        serve: Serve,
        write: Callable[[kserve.ModelStreamInferResponse], Awaitable[None]],
        *,
        max_requests: int,
        stall_seconds: float,
    ) -> None:
        """``max_requests``: most at a time; the next one is read when one of them has ended. ``stall_seconds``: how long a client
        may read nothing while a response waits for it."""
        self._serve = serve
        self._write = write
        self._slots = asyncio.Semaphore(max_requests)
        self._stall_seconds = stall_seconds
        # gRPC takes one message at a time.
        self._writing = asyncio.Lock()
        self._torn = False
        self._drained = False

    async def run(self, requests: AsyncIterator[Any], draining: asyncio.Event) -> None:
        """Returns when the client has sent its last request and all have ended. Raises DRAINING when the router leaves, once the
        running ones have ended, and CLIENT_TOO_SLOW for a client that does not read."""
        try:
            async with asyncio.TaskGroup() as running:
                drained = running.create_task(draining.wait())
                while (request := await self._next(requests, drained)) is not None:
                    running.create_task(self._one(request))
                drained.cancel()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        if self._drained:
            raise TwinpoolError("DRAINING", "this router is shutting down", retry_after=0.5)

    async def _next(self, requests: AsyncIterator[Any], drained: asyncio.Task[Any]) -> Any:
        """The next request, once there is a slot for it; None: there is none any more."""
        read = asyncio.ensure_future(self._read(requests))
        try:
            await asyncio.wait({read, drained}, return_when=asyncio.FIRST_COMPLETED)
            self._drained = not read.done()
            return None if self._drained else read.result()
        finally:
            if not read.done():
                read.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await read

    async def _read(self, requests: AsyncIterator[Any]) -> Any:
        await self._slots.acquire()
        return await anext(requests, None)

    async def _one(self, request: kserve.ModelInferRequest | Unparsed) -> None:
        try:
            await self._serve(request, self._send)
        except Exception as error:
            await self._failed(request, error)
        finally:
            self._slots.release()

    async def _failed(self, request: kserve.ModelInferRequest | Unparsed, error: Exception) -> None:
        known = as_twinpool_error(error)
        if known.reason == "INTERNAL" and not isinstance(error, TwinpoolError):
            log.error("kserve_request_failed", type=type(error).__name__)
        if self._torn:
            raise known
        response = kserve.ModelStreamInferResponse(error_message=str(known))
        if isinstance(request, kserve.ModelInferRequest):
            response.infer_response.id = request.id
        parameters = response.infer_response.parameters
        parameters[FINAL].bool_param = True
        parameters["error_reason"].string_param = known.reason
        if known.field:
            parameters["error_field"].string_param = known.field
        await self._put(response)

    async def _send(self, response: kserve.ModelInferResponse) -> None:
        await self._put(kserve.ModelStreamInferResponse(infer_response=response))

    async def _put(self, response: kserve.ModelStreamInferResponse) -> None:
        try:
            # Only the write itself may stall: who waits behind another one's knows nothing of the client.
            async with self._writing, asyncio.timeout(self._stall_seconds):
                if self._torn:
                    raise _too_slow(self._stall_seconds)
                # gRPC still holds a message whose write was given up: no other one may follow it.
                self._torn = True
                await self._write(response)
                self._torn = False
        except TimeoutError:
            raise _too_slow(self._stall_seconds) from None
        except grpc.aio.BaseError as error:
            # The client is gone; its cancel has not reached the stream yet.
            self._torn = False
            raise asyncio.CancelledError from error


def _too_slow(seconds: float) -> TwinpoolError:
    return TwinpoolError("CLIENT_TOO_SLOW", f"the client has read nothing for {seconds:g} s")
