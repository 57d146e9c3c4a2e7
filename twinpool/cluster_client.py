# SPDX-License-Identifier: Apache-2.0
"""A client of a cluster with several routers, which loses no answer when one of them is lost.

Every request can be resumed. Before its first event it is repeated under its idempotency key; after it, the stream is resumed on
any router from the very next token; where nobody has the answer any more, the request is sent again with the same seed, and
what the caller has is left out. So the caller sees one stream: each token once, the same as without any loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Final, Self

import grpc
import grpc.aio

from twinpool.client import Completion
from twinpool.config import RpcConfig, TlsConfig
from twinpool.errors import TwinpoolError, from_rpc_error
from twinpool.retry import Breakers, RetryBudget, RetryPolicy, lost, may_pass
from twinpool.rpc import channel
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import inference_pb2_grpc

_CANCEL_SECONDS: Final = 2.0

Events = AsyncGenerator[pb.GenerateResponse, None]


class PartedError(TwinpoolError):
    """An answer that was lost was drawn again and is another one: what the caller has of it cannot be gone on with."""


class _Answer:
    """What the caller has of one answer."""

    def __init__(self, message: pb.GenerateRequest) -> None:
        self.message = message
        self.token = b""
        self.ids: list[list[int]] = [[] for _ in range(message.n or 1)]
        self._chars = [0] * len(self.ids)
        # Of a stream that begins anew: what of it has come, choice by choice.
        self._seen: list[tuple[int, int]] = []
        # The position of the prompt behind those that the caller has heard of.
        self._scored = 0
        self.started = False
        self.finished = False

    @property
    def next_index(self) -> list[int]:
        """For Resume."""
        return [len(ids) for ids in self.ids]

    @property
    def tokens(self) -> int:
        """All tokens that the caller has."""
        return sum(map(len, self.ids))

    def attached(self, anew: bool) -> None:
        """A stream begins: where the caller stands, or ``anew`` with the first token."""
        if anew:
            self._seen = [(0, 0)] * len(self.ids)
        else:
            self._seen = [(len(ids), chars) for ids, chars in zip(self.ids, self._chars, strict=True)]

    def take(self, event: pb.GenerateResponse) -> pb.GenerateResponse | None:
        """What of an event is new to the caller; None: nothing."""
        kind = event.WhichOneof("event")
        if kind == "started":
            self.token = event.started.resume_token or self.token
            first, self.started = not self.started, True
            return event if first else None
        if kind == "finished":
            self.finished = True
            return event
        if kind == "prompt_logprobs":
            return self._take_scores(event)
        return self._take_tokens(event)

    def _take_scores(self, event: pb.GenerateResponse) -> pb.GenerateResponse | None:
        """Until the first token each stream begins with the prompt; what the caller has of it is left out."""
        part = event.prompt_logprobs
        end, known = part.offset + len(part.positions), max(0, self._scored - part.offset)
        if end <= self._scored:
            return None
        if known:
            del part.positions[:known]
            part.offset += known
            part.ClearField("first_token_id")
        self._scored = end
        return event

    def _take_tokens(self, event: pb.GenerateResponse) -> pb.GenerateResponse | None:
        tokens = event.tokens
        index = tokens.index
        seen, chars = self._seen[index]
        if tokens.offset != seen:
            raise TwinpoolError(
                "INTERNAL", f"choice {index}: token {tokens.offset} came where {seen} was due"
            )
        ids, have = list(tokens.token_ids), self.ids[index]
        self._seen[index] = (seen + len(ids), chars + len(tokens.text))
        known = max(0, min(len(have) - seen, len(ids)))
        if have[seen : seen + known] != ids[:known]:
            raise PartedError("WORKER_LOST", f"choice {index} was drawn again and parted after token {seen}")
        if known:
            # The text that tokens settle does not depend on how they came, so what the caller has is a beginning of it.
            text = tokens.text[max(0, self._chars[index] - chars) :]
            if known == len(ids) and not text:
                return None
            event = pb.GenerateResponse()
            event.tokens.index, event.tokens.offset, event.tokens.text = index, seen + known, text
            event.tokens.token_ids.extend(ids[known:])
            event.tokens.logprobs.extend(tokens.logprobs[known:])
        have.extend(ids[known:])
        self._chars[index] = max(self._chars[index], chars + len(tokens.text))
        return event


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

    async def stream(
        self, message: pb.GenerateRequest, *, timeout: float | None = None, traceparent: str = ""
    ) -> Events:
        """Yields the events of an answer: ``started`` once, each token once, ``finished``. Leaving the loop early cancels the
        request. ``timeout`` in seconds, of all together."""
        answer = _Answer(_resumable(message, self.policy))
        deadline = None if timeout is None else time.monotonic() + timeout
        metadata = (("traceparent", traceparent),) if traceparent else None
        self._budget.request()
        failures, endpoint = 0, ""
        try:
            while not answer.finished:
                before, endpoint = answer.tokens, self._breakers.pick(avoid=endpoint if failures else "")
                try:
                    async with contextlib.aclosing(
                        self._once(endpoint, answer, deadline, metadata)
                    ) as events:
                        async for event in events:
                            yield event
                except TwinpoolError as error:
                    # One that has brought something may be gone on with at once: that repeats nothing.
                    failures = 1 if answer.tokens > before else failures + 1
                    await self._after(error, endpoint, answer, failures, deadline)
        finally:
            if answer.message.repeated and not answer.finished:
                await self._cancel(endpoint, answer)

    # --- one call -------------------------------------------------------------------------

    async def _once(
        self,
        endpoint: str,
        answer: _Answer,
        deadline: float | None,
        metadata: tuple[tuple[str, str], ...] | None,
    ) -> Events:
        """One stream of the answer. Raises what ended it, also if that was too early."""
        call = self._call(endpoint, answer, deadline, metadata)
        answer.attached(anew=not answer.token)
        try:
            while True:
                async with asyncio.timeout(self._hang):
                    message: Any = await call.read()
                if message is grpc.aio.EOF:
                    break
                self._breakers.worked(endpoint)
                told: pb.GenerateResponse = (
                    message.response if isinstance(message, pb.ResumeResponse) else message
                )
                event = answer.take(told)
                if event is not None:
                    yield event
            if not answer.finished:
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

    def _call(
        self,
        endpoint: str,
        answer: _Answer,
        deadline: float | None,
        metadata: tuple[tuple[str, str], ...] | None,
    ) -> grpc.aio.UnaryStreamCall[Any, Any]:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        stub = self._stub(endpoint)
        if answer.token:
            self.resumes += 1
            request = pb.ResumeRequest(
                token=answer.token, next_index=answer.next_index, tenant=answer.message.tenant
            )
            return stub.Resume(request, timeout=left, metadata=metadata)
        call = stub.Generate(answer.message, timeout=left, metadata=metadata)
        answer.message.repeated = True
        return call

    def _stub(self, endpoint: str) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        if endpoint not in self._channels:
            self._channels[endpoint] = channel(endpoint, self._rpc, self._tls, key=self._key)
        return inference_pb2_grpc.InferenceServiceStub(self._channels[endpoint])

    # --- between two calls ----------------------------------------------------------------

    async def _after(
        self, error: TwinpoolError, endpoint: str, answer: _Answer, failures: int, deadline: float | None
    ) -> None:
        """Waits until the next try is due, or raises the error if there is none."""
        if lost(error) or error.reason == "DRAINING":
            self._breakers.failed(endpoint)
        gone = answer.token and error.reason in ("RESUME_LOST", "RESUME_TOKEN_INVALID")
        if gone:
            # Nobody has it: the same request with the same seed draws the same answer.
            answer.token = b""
        hopeless = isinstance(error, PartedError) or not (gone or may_pass(error))
        if hopeless or failures > self.policy.tries:
            raise error
        if failures > 1 or not answer.started:
            if not self._budget.retry():
                raise error
            self.retries += 1
        wait = 0.0 if failures == 1 and answer.started else self.policy.pause(failures, error.retry_after)
        if deadline is not None and time.monotonic() + wait >= deadline:
            raise error
        await asyncio.sleep(wait)

    async def _cancel(self, endpoint: str, answer: _Answer) -> None:
        """The caller has left, or has given up. Without an answer to this, the grace ends it."""
        message = answer.message
        request = pb.CancelRequest(
            token=answer.token, tenant=message.tenant, idempotency_key=message.idempotency_key
        )
        with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
            await self._stub(endpoint).Cancel(request, timeout=_CANCEL_SECONDS)


def _resumable(message: pb.GenerateRequest, policy: RetryPolicy) -> pb.GenerateRequest:
    """The request with all that it takes to send it again."""
    made = pb.GenerateRequest()
    made.CopyFrom(message)
    if not made.HasField("resume_grace"):
        made.resume_grace.FromNanoseconds(int(policy.grace_seconds * 1e9))
    if not made.idempotency_key:
        made.idempotency_key = secrets.token_hex(16)
    if not made.sampling.HasField("seed"):
        # Two routers would draw two seeds.
        made.sampling.seed = secrets.randbits(63)
    return made
