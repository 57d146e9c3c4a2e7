# SPDX-License-Identifier: Apache-2.0
"""A small asynchronous client of a Twinpool cluster, used by the CLI, the tests and the benchmarks."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from twinpool.config import RpcConfig, TlsConfig
from twinpool.errors import from_rpc_error
from twinpool.rpc import channel
from twinpool.v1 import chat_pb2, chat_pb2_grpc, inference_pb2_grpc
from twinpool.v1 import inference_pb2 as pb

Turn = tuple[str, str]  # (role, content)


@dataclass
class Completion:
    """A whole answer. ``token_ids[i]`` and ``texts[i]`` belong to choice ``i``."""

    token_ids: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[list[pb.PositionLogprobs]] = field(default_factory=list)
    prompt_logprobs: list[pb.PositionLogprobs] = field(default_factory=list)
    """Of the prompt's positions from 1 on, if asked for."""
    started: pb.GenerateStarted = field(default_factory=pb.GenerateStarted)
    finished: pb.GenerateFinished = field(default_factory=pb.GenerateFinished)

    def take(self, event: pb.GenerateResponse) -> None:
        """Takes the next event. Raises as ``add``."""
        kind = event.WhichOneof("event")
        if kind == "started":
            self.started = event.started
        elif kind == "prompt_logprobs":
            part = event.prompt_logprobs
            # A stream that was resumed before its first token begins again.
            self.prompt_logprobs[part.offset - 1 :] = part.positions
        elif kind == "tokens":
            self.add(event.tokens)
        elif kind == "finished":
            self.finished = event.finished

    def add(self, tokens: pb.GenerateTokens) -> None:
        """Appends one event's tokens; raises ValueError if the stream skipped or repeated a position."""
        while len(self.token_ids) <= tokens.index:
            self.token_ids.append([])
            self.texts.append("")
            self.logprobs.append([])
        have = self.token_ids[tokens.index]
        if tokens.offset != len(have):
            raise ValueError(
                f"choice {tokens.index}: event at position {tokens.offset}, expected {len(have)}"
            )
        have.extend(tokens.token_ids)
        self.texts[tokens.index] += tokens.text
        self.logprobs[tokens.index].extend(tokens.logprobs)


def request(
    prompt: str | Sequence[int] | None = None,
    *,
    chat: Sequence[Turn] | None = None,
    model: str = "",
    max_tokens: int | None = None,
    temperature: float | None = None,
    n: int = 1,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    request_id: str = "",
    session_id: str = "",
) -> pb.GenerateRequest:
    """Builds a request from text, token ids or chat turns; unset values keep the server's defaults."""
    message = pb.GenerateRequest(model=model, n=n, request_id=request_id, session_id=session_id)
    if chat is not None:
        message.chat.messages.extend(pb.ChatMessage(role=role, content=content) for role, content in chat)
    elif isinstance(prompt, str):
        message.text = prompt
    elif prompt is not None:
        message.token_ids.ids.extend(prompt)
    if temperature is not None:
        message.sampling.temperature = temperature
    if seed is not None:
        message.sampling.seed = seed
    if max_tokens is not None:
        message.stop.max_tokens = max_tokens
    if logprobs is not None:
        message.logprobs = logprobs
    if prompt_logprobs is not None:
        message.prompt_logprobs = prompt_logprobs
    message.stop.stop_strings.extend(stop)
    message.stop.stop_token_ids.extend(stop_token_ids)
    message.stop.ignore_eos = ignore_eos
    return message


def warm_request(message: pb.GenerateRequest, pin_seconds: float | None = None) -> pb.WarmRequest:
    """Builds a request to compute a prompt ahead of its turn, and to keep it cached for ``pin_seconds`` if given."""
    made = pb.WarmRequest(request=message)
    if pin_seconds is not None:
        made.pin.FromNanoseconds(int(pin_seconds * 1e9))
    return made


def release_request(
    *, session_id: str = "", pin_id: str = "", prompt: pb.GenerateRequest | None = None, tenant: str = ""
) -> pb.ReleaseRequest:
    """Builds a request to end the pins of a session, of an id or of a request's prompt: one of the three."""
    if (bool(session_id), bool(pin_id), prompt is not None).count(True) != 1:
        raise ValueError("give one of session_id, pin_id and prompt")
    made = pb.ReleaseRequest(tenant=tenant)
    if session_id:
        made.session_id = session_id
    elif pin_id:
        made.pin_id = pin_id
    else:
        made.request.CopyFrom(prompt or pb.GenerateRequest())
    return made


class Client:
    """One channel to a router. Errors of the server are raised as TwinpoolError with the server's reason."""

    def __init__(
        self, endpoint: str, rpc: RpcConfig | None = None, tls: TlsConfig | None = None, *, key: str = ""
    ) -> None:
        """``key``: the API key that every call shows."""
        self.endpoint = endpoint
        self._channel = channel(endpoint, rpc or RpcConfig(), tls, key=key)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._chats = chat_pb2_grpc.ChatServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel; calls in flight are cancelled."""
        await self._channel.close(None)

    async def stream(
        self, message: pb.GenerateRequest, *, timeout: float | None = None, traceparent: str = ""
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Yields the events of an answer. Leaving the loop early cancels the request. ``timeout`` in seconds;
        ``traceparent`` is the W3C trace context of the caller's span."""
        metadata = (("traceparent", traceparent),) if traceparent else None
        call = self._stub.Generate(message, timeout=timeout, metadata=metadata)
        try:
            async for event in call:
                yield event
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def chat(
        self, message: chat_pb2.ChatRequest, *, timeout: float | None = None
    ) -> AsyncIterator[chat_pb2.ChatResponse]:
        """Yields the events of a conversation's next turn. Leaving the loop early cancels it. ``timeout`` in seconds."""
        call = self._chats.Chat(message, timeout=timeout)
        try:
            async for event in call:
                yield event
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def complete(self, message: pb.GenerateRequest, *, timeout: float | None = None) -> Completion:
        """Collects a whole answer."""
        answer = Completion()
        async for event in self.stream(message, timeout=timeout):
            answer.take(event)
        return answer

    async def serving(self) -> bool:
        """Whether requests are welcome now. Needs no key."""
        wanted = health_pb2.HealthCheckRequest(
            service=pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
        )
        try:
            stub = health_pb2_grpc.HealthStub(self._channel)
            answer = await stub.Check(wanted)  # pyright: ignore[reportAttributeAccessIssue]
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def models(self) -> list[pb.Model]:
        """The models that the cluster serves."""
        try:
            return list((await self._stub.ListModels(pb.ListModelsRequest())).models)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def usage(self, tenant: str = "") -> pb.GetUsageResponse:
        """What a tenant has used of this router since it started; by default the caller's own."""
        try:
            return await self._stub.GetUsage(pb.GetUsageRequest(tenant=tenant))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def warm(
        self, message: pb.GenerateRequest, *, pin_seconds: float | None = None, timeout: float | None = None
    ) -> pb.WarmResponse:
        """Computes a prompt ahead of its turn. ``pin_seconds``: how long it is kept whatever else comes; again makes it longer."""
        try:
            return await self._stub.Warm(warm_request(message, pin_seconds), timeout=timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

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
        message = release_request(session_id=session_id, pin_id=pin_id, prompt=prompt, tenant=tenant)
        try:
            return await self._stub.Release(message, timeout=timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def tokenize(self, message: pb.TokenizeRequest) -> list[int]:
        """The token ids that Generate would use."""
        try:
            return list((await self._stub.Tokenize(message)).token_ids)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
