# SPDX-License-Identifier: Apache-2.0
"""The parts of a request's path as a test walks them by hand, over sessions with real workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from tests.support.fleet import Fleet
from tests.support.worker_client import (
    ANSWER_SECONDS,
    Answer,
    AttemptFailedError,
    Request,
    RouterSession,
    generate,
    next_message,
)
from twinpool.v1 import worker_pb2 as pb


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids that no other seed gives; special tokens are left out."""
    drawn: list[int] = np.random.default_rng([seed, length]).integers(8, 500, length).tolist()
    return drawn


@dataclass
class Legs:
    """Sessions with the two workers of a request."""

    fleet: Fleet
    prefill: RouterSession
    decode: RouterSession

    async def generate(self, request: Request) -> Answer:
        return await generate(self.prefill, self.decode, request)

    async def reserve(self, request: Request) -> int:
        """Blocks of the prompt that the decode worker holds already."""
        queue = self.decode.attempt(request.request_id, request.attempt)
        self.decode.send(request.decode(self.prefill.record))
        return (await next_message(queue, "decode")).reserved.cached_blocks

    async def prefilled(self, request: Request) -> pb.PrefillDone:
        """Reserves and computes; the hand-off goes on by itself."""
        cached = await self.reserve(request)
        queue = self.prefill.attempt(request.request_id, request.attempt)
        self.prefill.send(request.prefill(self.decode.record, cached))
        return (await next_message(queue, "prefill")).prefill_done

    async def rest(self, request: Request, done: pb.PrefillDone) -> Answer:
        """What follows ``prefilled``. Raises AttemptFailedError."""
        answer = Answer([[] for _ in range(request.n)], [0] * request.n)
        for first in done.first_tokens:
            answer.add(first.index, 0, first.token_id, first.finish)
        queue = self.decode.attempt(request.request_id, request.attempt)
        answer.bytes = (await next_message(queue, "decode")).handoff_done.stats.bytes
        while not all(answer.finish):
            message = await next_message(queue, "decode")
            for token in message.step.tokens:
                answer.add(token.index, token.offset, token.token_id, token.finish)
        return answer

    async def check(self, tokens: Sequence[int], name: str, max_tokens: int = 6) -> Answer:
        """One request against the oracle."""
        answer = await self.generate(self.fleet.request(tokens, name, max_tokens=max_tokens))
        assert answer.tokens == [self.fleet.oracle.greedy(tokens, max_tokens)], name
        return answer

    async def cancel(self, request: Request, side: str = "both") -> None:
        """Cancels legs; returns when each has acknowledged, or had failed before."""
        sessions = {"prefill": self.prefill, "decode": self.decode}
        chosen = list(sessions.values()) if side == "both" else [sessions[side]]
        for session in chosen:
            session.send(request.cancel())
        for session in chosen:
            queue = session.attempt(request.request_id, request.attempt)
            while (await asyncio.wait_for(queue.get(), ANSWER_SECONDS)).WhichOneof("message") != "cancelled":
                pass


@asynccontextmanager
async def legs(fleet: Fleet, prefill: str = "prefill-0", decode: str = "decode-0") -> AsyncIterator[Legs]:
    """Sessions with a pair of workers."""
    async with fleet.session(prefill) as to_p, fleet.session(decode) as to_d:
        yield Legs(fleet, to_p, to_d)


async def failure_of(queue: asyncio.Queue[pb.SessionResponse]) -> pb.AttemptFailed:
    """The failure that ends an attempt on one leg. Fails on a token: an attempt that fails must not have drawn one."""
    while True:
        message = await asyncio.wait_for(queue.get(), ANSWER_SECONDS)
        kind = message.WhichOneof("message")
        if kind == "failed":
            return message.failed
        assert kind in ("reserved", "prefill_done"), f"{kind} before the failure"


async def patient(walk: Legs, tokens: Sequence[int], name: str, max_tokens: int = 6) -> Answer:
    """As a router: refused for lack of room, placed anew under the next attempt."""
    for attempt in range(1, 400):
        request = walk.fleet.request(tokens, name, attempt=attempt, max_tokens=max_tokens)
        try:
            answer = await walk.generate(request)
        except AttemptFailedError as error:
            if error.reason != pb.FAILURE_REASON_NO_CAPACITY:
                raise
            await asyncio.sleep(0.02)
            continue
        assert answer.tokens == [walk.fleet.oracle.greedy(tokens, max_tokens)], name
        return answer
    raise AssertionError(f"{name} never had room")
