# SPDX-License-Identifier: Apache-2.0
"""What a caller has of an answer or of a turn, and how any router is asked for the rest of it."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any, Protocol, TypeVar

import grpc.aio

from twinpool.errors import TwinpoolError
from twinpool.v1 import chat_pb2 as chat
from twinpool.v1 import chat_pb2_grpc, inference_pb2_grpc
from twinpool.v1 import inference_pb2 as pb

E_co = TypeVar("E_co", covariant=True)

Metadata = tuple[tuple[str, str], ...] | None
AnyCall = grpc.aio.UnaryStreamCall[Any, Any]


class PartedError(TwinpoolError):
    """An answer that was lost was drawn again and is another one: what the caller has of it cannot be gone on with."""


class Progress(Protocol[E_co]):
    """What the caller has. ``token`` resumes it; empty: it is asked for anew."""

    token: bytes
    sent: bool
    started: bool
    finished: bool

    @property
    def request(self) -> pb.GenerateRequest:
        """What was asked for, with all that it takes to send it again."""
        ...

    @property
    def amount(self) -> int:
        """Grows with whatever is new to the caller."""
        ...

    def call(self, channel: grpc.aio.Channel, timeout: float | None, metadata: Metadata) -> AnyCall:
        """Asks a router for the rest."""
        ...

    def take(self, message: Any) -> E_co | None:
        """What of a call's message is new to the caller; None: nothing. Raises PartedError."""
        ...

    def explained(self, error: TwinpoolError) -> TwinpoolError:
        """What the caller is told of a call that has failed."""
        ...


class AnswerProgress:
    """Of ``InferenceService.Generate``: tokens and text."""

    def __init__(self, message: pb.GenerateRequest) -> None:
        self.request = message
        self.token = b""
        self.sent = self.started = self.finished = False
        self.ids: list[list[int]] = [[] for _ in range(message.n or 1)]
        self._chars = [0] * len(self.ids)
        # Of a stream that begins anew: what of it has come, choice by choice.
        self._seen: list[tuple[int, int]] = []
        # The position of the prompt behind those that the caller has heard of.
        self._scored = 0

    @property
    def amount(self) -> int:
        """All tokens that the caller has."""
        return sum(map(len, self.ids))

    def call(self, channel: grpc.aio.Channel, timeout: float | None, metadata: Metadata) -> AnyCall:
        """See ``Progress``."""
        stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
        if not self.token:
            self._seen = [(0, 0)] * len(self.ids)
            _again(self.request, self)
            return stub.Generate(self.request, timeout=timeout, metadata=metadata)
        self._seen = [(len(ids), chars) for ids, chars in zip(self.ids, self._chars, strict=True)]
        counts = [len(ids) for ids in self.ids]
        request = pb.ResumeRequest(token=self.token, next_index=counts, tenant=self.request.tenant)
        return stub.Resume(request, timeout=timeout, metadata=metadata)

    def take(self, message: pb.GenerateResponse | pb.ResumeResponse) -> pb.GenerateResponse | None:
        """See ``Progress``."""
        event = message.response if isinstance(message, pb.ResumeResponse) else message
        kind = event.WhichOneof("event")
        if kind == "started":
            return event if _begun(event.started, self) else None
        if kind == "finished":
            self.finished = True
            return event
        if kind == "prompt_logprobs":
            return self._take_scores(event)
        return self._take_tokens(event)

    def explained(self, error: TwinpoolError) -> TwinpoolError:
        """See ``Progress``."""
        return error

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


class TurnProgress:
    """Of ``ChatService.Chat``: a position a choice. Routers leave out what is before it, so that nothing comes twice."""

    def __init__(self, message: chat.ChatRequest) -> None:
        self.message = message
        self.token = b""
        self.sent = self.started = self.finished = False
        self.positions = [chat.ChatPosition() for _ in range(message.request.n or 1)]

    @property
    def request(self) -> pb.GenerateRequest:
        """See ``Progress``."""
        return self.message.request

    @property
    def amount(self) -> int:
        """All that the caller was told, in characters and tokens."""
        return sum(position.told + position.next_index for position in self.positions)

    def call(self, channel: grpc.aio.Channel, timeout: float | None, metadata: Metadata) -> AnyCall:
        """See ``Progress``."""
        stub: chat_pb2_grpc.ChatServiceAsyncStub = chat_pb2_grpc.ChatServiceStub(channel)
        if not self.token:
            _again(self.request, self)
            if self.amount:
                del self.message.positions[:]
                self.message.positions.extend(self.positions)
            return stub.Chat(self.message, timeout=timeout, metadata=metadata)
        request = chat.ChatServiceResumeRequest(
            token=self.token, positions=self.positions, tenant=self.request.tenant
        )
        return stub.Resume(request, timeout=timeout, metadata=metadata)

    def take(self, message: chat.ChatResponse | chat.ChatServiceResumeResponse) -> chat.ChatResponse | None:
        """See ``Progress``."""
        event = message.response if isinstance(message, chat.ChatServiceResumeResponse) else message
        kind = event.WhichOneof("event")
        if kind == "started":
            return event if _begun(event.started, self) else None
        if kind == "finished":
            self.finished = True
        else:
            self.positions[event.delta.index] = event.delta.position
        return event

    def explained(self, error: TwinpoolError) -> TwinpoolError:
        """See ``Progress``. That a position is of another turn can only be where the turn was drawn again."""
        if error.reason == "INVALID_RESUME" and self.amount:
            return PartedError("WORKER_LOST", "the turn was drawn again and parted from what was told")
        return error


def resumable(message: pb.GenerateRequest, grace_seconds: float) -> pb.GenerateRequest:
    """The request with all that it takes to send it again. Changes and returns it."""
    if not message.HasField("resume_grace"):
        message.resume_grace.FromNanoseconds(int(grace_seconds * 1e9))
    if not message.idempotency_key:
        message.idempotency_key = secrets.token_hex(16)
    if not message.sampling.HasField("seed"):
        # Two routers would draw two seeds. It follows from the key, so that who sends the key again sends the same request.
        digest = hashlib.sha256(message.idempotency_key.encode()).digest()
        message.sampling.seed = int.from_bytes(digest[:8]) >> 1
    return message


def _again(request: pb.GenerateRequest, progress: Progress[object]) -> None:
    """The request is about to be sent. gRPC reads it later, so it says now what it is, and not after the call was made."""
    request.repeated = request.repeated or progress.sent
    progress.sent = True


def _begun(started: pb.GenerateStarted, progress: Progress[object]) -> bool:
    """Takes the first event of a stream; whether it is the first one of all."""
    progress.token = started.resume_token or progress.token
    first, progress.started = not progress.started, True
    return first
