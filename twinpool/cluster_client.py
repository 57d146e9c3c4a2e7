# SPDX-License-Identifier: Apache-2.0
"""A client of a cluster with several routers, which loses no answer when one of them is lost.

Every request can be resumed. Before its first event it is repeated under its idempotency key; after it, the stream is resumed on
any router from the very next token; where nobody has the answer any more, the request is sent again with the same seed, and
what the caller has is left out. So the caller sees one stream: each token once, the same as without any loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import grpc
import grpc.aio

from twinpool.client import Completion, release_request, warm_request
from twinpool.config import RpcConfig, TlsConfig
from twinpool.errors import TwinpoolError, from_rpc_error
from twinpool.progress import AnswerProgress, Metadata, PartedError, Progress, TurnProgress, resumable
from twinpool.retry import Breakers, RetryBudget, RetryPolicy, lost, may_pass
from twinpool.rpc import channel
from twinpool.v1 import chat_pb2 as chat
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import inference_pb2_grpc

_CANCEL_SECONDS: Final = 2.0

E = TypeVar("E")
T = TypeVar("T")

_PIN_LIMITS: Final = ("PIN_QUOTA", "PIN_CAPACITY")
"""Refusals that may pass when another pin ends, which may take long."""


class ClusterClient:
    """Several routers as one. Errors are raised as TwinpoolError. One event loop; any number of answers at once.

    ``hang_seconds``: a stream that brings nothing for so long is taken for lost, and resumed elsewhere; None: never, since a
    queue or a long prompt may take its time. ``key``: the API key that every call shows.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        rpc: RpcConfig | None = None,
        tls: TlsConfig | None = None,
        *,
        policy: RetryPolicy | None = None,
        hang_seconds: float | None = None,
        key: str = "",
    ) -> None:
        self.policy = policy or RetryPolicy()
        self.retries = 0
        self.resumes = 0
        self._rpc = rpc or RpcConfig()
        self._tls = tls
        self._key = key
        self._hang = hang_seconds
        self._breakers = Breakers(endpoints)
        self._budget = RetryBudget(self.policy.ratio, self.policy.min_per_second)
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes all channels; calls in flight are cancelled."""
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(one.close(None) for one in channels.values()))

    async def complete(self, message: pb.GenerateRequest, *, timeout: float | None = None) -> Completion:
        """Collects a whole answer."""
        whole = Completion()
        async with contextlib.aclosing(self.stream(message, timeout=timeout)) as events:
            async for event in events:
                whole.take(event)
        return whole

    def stream(
        self, message: pb.GenerateRequest, *, timeout: float | None = None, traceparent: str = ""
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Yields the events of an answer: ``started`` once, each token once, ``finished``. Leaving the loop early cancels the
        request. ``timeout`` in seconds, of all together."""
        made = pb.GenerateRequest()
        made.CopyFrom(message)
        resumable(made, self.policy.grace_seconds)
        return self._stream(AnswerProgress(made), timeout, traceparent)

    def chat(
        self, message: chat.ChatRequest, *, timeout: float | None = None, traceparent: str = ""
    ) -> AsyncGenerator[chat.ChatResponse, None]:
        """As ``stream``, of a conversation's next turn: ``started`` once, each piece of reasoning, content and calls once,
        ``finished``."""
        made = chat.ChatRequest()
        made.CopyFrom(message)
        resumable(made.request, self.policy.grace_seconds)
        return self._stream(TurnProgress(made), timeout, traceparent)

    async def _stream(
        self, progress: Progress[E], timeout: float | None, traceparent: str
    ) -> AsyncGenerator[E, None]:
        deadline = None if timeout is None else time.monotonic() + timeout
        metadata = (("traceparent", traceparent),) if traceparent else None
        self._budget.request()
        failures, endpoint = 0, ""
        try:
            while not progress.finished:
                before, endpoint = progress.amount, self._breakers.pick(avoid=endpoint if failures else "")
                try:
                    async with contextlib.aclosing(
                        self._once(endpoint, progress, deadline, metadata)
                    ) as events:
                        async for event in events:
                            yield event
                except TwinpoolError as error:
                    # One that has brought something may be gone on with at once: that repeats nothing.
                    failures = 1 if progress.amount > before else failures + 1
                    await self._after(progress.explained(error), endpoint, progress, failures, deadline)
        finally:
            if progress.sent and not progress.finished:
                await self._cancel(endpoint, progress)

    async def warm(
        self, message: pb.GenerateRequest, *, pin_seconds: float | None = None, timeout: float | None = None
    ) -> pb.WarmResponse:
        """Computes a prompt ahead of its turn. ``pin_seconds``: how long it is kept whatever else comes; again makes it longer."""
        asked = warm_request(message, pin_seconds)
        return await self._anywhere(lambda stub, left: stub.Warm(asked, timeout=left), timeout)

    async def release(
        self,
        *,
        session_id: str = "",
        pin_id: str = "",
        prompt: pb.GenerateRequest | None = None,
        tenant: str = "",
        timeout: float | None = None,
    ) -> pb.ReleaseResponse:
        """Ends the pins of a session, of an id or of a prompt. Those that have ended, or never were, are no error."""
        asked = release_request(session_id=session_id, pin_id=pin_id, prompt=prompt, tenant=tenant)
        return await self._anywhere(lambda stub, left: stub.Release(asked, timeout=left), timeout)

    async def _anywhere(
        self,
        call: Callable[[inference_pb2_grpc.InferenceServiceAsyncStub, float | None], Awaitable[T]],
        timeout: float | None,
    ) -> T:
        """A call that may be repeated, on whichever router answers it."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._budget.request()
        failures, endpoint = 0, ""
        while True:
            endpoint = self._breakers.pick(avoid=endpoint if failures else "")
            try:
                stub = inference_pb2_grpc.InferenceServiceStub(self._channel(endpoint))
                told = await call(stub, None if deadline is None else deadline - time.monotonic())
            except grpc.RpcError as caught:
                error, failures = from_rpc_error(caught), failures + 1
                if lost(error) or error.reason == "DRAINING":
                    self._breakers.failed(endpoint)
                hopeless = error.reason in _PIN_LIMITS or not may_pass(error) or failures > self.policy.tries
                if hopeless or not self._budget.retry():
                    raise error from caught
                self.retries += 1
                wait = self.policy.pause(failures, error.retry_after)
                if deadline is not None and time.monotonic() + wait >= deadline:
                    raise error from caught
                await asyncio.sleep(wait)
            else:
                self._breakers.worked(endpoint)
                return told

    # --- one call -------------------------------------------------------------------------

    async def _once(
        self, endpoint: str, progress: Progress[E], deadline: float | None, metadata: Metadata
    ) -> AsyncGenerator[E, None]:
        """One stream of the answer. Raises what ended it, also if that was too early."""
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        self.resumes += bool(progress.token)
        call = progress.call(self._channel(endpoint), left, metadata)
        try:
            while True:
                async with asyncio.timeout(self._hang):
                    message: Any = await call.read()
                if message is grpc.aio.EOF:
                    break
                self._breakers.worked(endpoint)
                event = progress.take(message)
                if event is not None:
                    yield event
            if not progress.finished:
                code = await call.code()
                raise TwinpoolError(
                    "SERVER_UNREACHABLE",
                    f"{endpoint} ended the stream early",
                    metadata={"grpc_code": code.name},
                )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except TimeoutError as error:
            facts = {"grpc_code": "UNAVAILABLE"}
            raise TwinpoolError(
                "SERVER_UNREACHABLE", f"{endpoint} was silent for {self._hang} s", metadata=facts
            ) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling() or not call.cancelled():
                raise
            # The server is going away, and has cancelled the call.
            facts = {"grpc_code": "CANCELLED"}
            raise TwinpoolError("SERVER_UNREACHABLE", f"{endpoint} cancelled", metadata=facts) from None
        finally:
            call.cancel()

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        if endpoint not in self._channels:
            self._channels[endpoint] = channel(endpoint, self._rpc, self._tls, key=self._key)
        return self._channels[endpoint]

    # --- between two calls ----------------------------------------------------------------

    async def _after(
        self,
        error: TwinpoolError,
        endpoint: str,
        progress: Progress[object],
        failures: int,
        deadline: float | None,
    ) -> None:
        """Waits until the next try is due, or raises the error if there is none."""
        if lost(error) or error.reason == "DRAINING":
            self._breakers.failed(endpoint)
        gone = progress.token and error.reason in ("RESUME_LOST", "RESUME_TOKEN_INVALID")
        if gone:
            # Nobody has it: the same request with the same seed draws the same answer.
            progress.token = b""
        hopeless = isinstance(error, PartedError) or not (gone or may_pass(error))
        if hopeless or failures > self.policy.tries:
            raise error
        if failures > 1 or not progress.started:
            if not self._budget.retry():
                raise error
            self.retries += 1
        wait = 0.0 if failures == 1 and progress.started else self.policy.pause(failures, error.retry_after)
        if deadline is not None and time.monotonic() + wait >= deadline:
            raise error
        await asyncio.sleep(wait)

    async def _cancel(self, endpoint: str, progress: Progress[object]) -> None:
        """The caller has left, or has given up. Without an answer to this, the grace ends it."""
        message = progress.request
        request = pb.CancelRequest(
            token=progress.token, tenant=message.tenant, idempotency_key=message.idempotency_key
        )
        stub = inference_pb2_grpc.InferenceServiceStub(self._channel(endpoint))
        with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
            await stub.Cancel(request, timeout=_CANCEL_SECONDS)
