# SPDX-License-Identifier: Apache-2.0
"""Replays a trace against a running cluster, through the client that everybody uses.

Open loop: requests are sent at their recorded times, whatever the cluster does. Closed loop: a request that followed an answer is
sent a think time after that answer. Both are bounded: by the number of requests, by how many are in flight, by time.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twinpool.client import Client, request
from twinpool.control.replay.blocks import TokenMaker
from twinpool.control.replay.figures import Objectives, Timing, latency_figures, weighted_spread
from twinpool.control.replay.trace import Release, Request, Trace
from twinpool.errors import TwinpoolError
from twinpool.v1 import inference_pb2 as pb

# Below it are the special tokens of most vocabularies; none of them may end a prompt's template or an answer.
_FIRST_TOKEN = 256


@dataclass(frozen=True)
class Limits:
    """What a replay may do at most."""

    in_flight: int = 256
    """Requests at a time; more wait and count as late."""
    seconds: float = 600.0
    """Nothing is sent later than this."""
    request_seconds: float = 120.0
    """Longest wait for one answer."""


@dataclass(slots=True)
class Answered:
    """What became of one request. Times are seconds since the replay's start."""

    request: Request
    timing: Timing
    error: str = ""
    """Reason of the error table; empty: served."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between the events with tokens, a mean a token."""
    cached_tokens: int = 0
    decode_cached_tokens: int = 0
    kv_bytes: int = 0
    prefill_worker: str = ""
    attempts: int = 0


@dataclass
class Progress:
    """How far a replay is."""

    total: int
    sent: int = 0
    in_flight: int = 0
    served: int = 0
    failed: int = 0
    skipped: int = 0


Tell = Callable[[Progress], None]


class Replay:
    """One replay. ``run`` drives it to its end."""

    def __init__(
        self,
        trace: Trace,
        clients: Sequence[Client],
        model: pb.Model,
        *,
        closed: bool,
        limits: Limits,
        seed: int,
        tell: Tell,
    ) -> None:
        """``clients`` take turns. ``tell`` is called at each change."""
        self._clients = itertools.cycle(clients)
        self._model = model
        low = min(_FIRST_TOKEN, model.vocab_size // 2)
        self._maker = TokenMaker(trace.block_tokens, low, model.vocab_size, seed)
        self._release = Release(trace.requests, closed)
        self._limits = limits
        self._tell = tell
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(limits.in_flight)
        self._start = 0.0
        self.progress = Progress(len(trace.requests))
        self.answered: list[Answered] = []
        self.late = 0
        """Requests that waited for one of the slots."""

    async def run(self) -> None:
        """Sends everything and waits for the answers. Cancelled, it cancels what is in flight."""
        self._start = time.monotonic()
        try:
            for item in self._release.initial:
                if item.arrival >= self._limits.seconds:
                    self._skip(item)
                    continue
                await self._until(item.arrival)
                self._send(item)
            while self._tasks:
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _now(self) -> float:
        return time.monotonic() - self._start

    async def _until(self, at: float) -> None:
        delay = at - self._now()
        if delay > 0:
            await asyncio.sleep(delay)

    def _send(self, item: Request, at: float = 0.0) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(item, at))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, item: Request, at: float) -> None:
        await self._until(at)
        if item.input_length + item.output_length > self._model.max_context_tokens:
            self._skip(item)
            return
        if self._slots.locked():
            self.late += 1
        async with self._slots:
            if self._now() >= self._limits.seconds:
                self._skip(item)
                return
            self._note(sent=1, in_flight=1)
            answered = Answered(item, Timing(self._now()))
            try:
                await self._ask(answered)
            except TwinpoolError as error:
                answered.error = error.reason
            finally:
                self._note(in_flight=-1)
        self.answered.append(answered)
        if answered.error:
            self._note(failed=1)
            self._drop(item)
            return
        self._note(served=1)
        for follower in self._release.ended(item.id):
            at = self._now() + follower.think
            if at >= self._limits.seconds:
                self._skip(follower)
            else:
                self._send(follower, at)

    async def _ask(self, answered: Answered) -> None:
        item, timing = answered.request, answered.timing
        message = request(
            self._maker.tokens(item).tolist(),
            model=self._model.name,
            max_tokens=item.output_length,
            temperature=0.0,
            ignore_eos=True,
        )
        last = timing.arrival
        async for event in next(self._clients).stream(message, timeout=self._limits.request_seconds):
            kind = event.WhichOneof("event")
            if kind == "tokens":
                now, count = self._now(), len(event.tokens.token_ids)
                if timing.output_tokens:
                    answered.gaps += [(now - last) / count] * count
                else:
                    timing.first = now
                    # Tokens that came along with the first one had no pause of their own.
                    answered.gaps += [0.0] * (count - 1)
                timing.output_tokens += count
                last = now
            elif kind == "finished":
                _note_finish(answered, event.finished)
        timing.end = last

    def _skip(self, item: Request) -> None:
        self._note(skipped=1)
        self._drop(item)

    def _drop(self, item: Request) -> None:
        self._note(skipped=self._release.dropped(item.id))

    def _note(
        self, sent: int = 0, in_flight: int = 0, served: int = 0, failed: int = 0, skipped: int = 0
    ) -> None:
        progress = self.progress
        progress.sent += sent
        progress.in_flight += in_flight
        progress.served += served
        progress.failed += failed
        progress.skipped += skipped
        self._tell(progress)


def _note_finish(answered: Answered, done: pb.GenerateFinished) -> None:
    answered.cached_tokens = done.usage.cached_tokens
    answered.decode_cached_tokens = done.usage.decode_cached_tokens
    answered.kv_bytes = done.handoff.bytes
    answered.prefill_worker = done.prefill_worker
    answered.attempts = done.attempts


def replay_figures(replay: Replay, objectives: Objectives) -> dict[str, object]:
    """Latency, goodput and locality of a finished replay. Cached tokens are the workers' own counts."""
    answered = replay.answered
    served = [each for each in answered if not each.error]
    prompt = sum(each.request.input_length for each in served)
    gaps = [gap for each in served for gap in each.gaps]
    uncached = Counter[str]()
    for each in served:
        uncached[each.prefill_worker] += each.request.input_length - each.cached_tokens
    work = list(uncached.values())
    return latency_figures([each.timing for each in answered], objectives) | {
        "failed": len(answered) - len(served),
        "causes": dict(Counter(each.error for each in answered if each.error)),
        "skipped": replay.progress.skipped,
        "late": replay.late,
        "token_itl_seconds": weighted_spread(gaps, [1.0] * len(gaps)),
        "prompt_tokens": prompt,
        "token_hit_rate": sum(each.cached_tokens for each in served) / prompt if prompt else 0.0,
        "decode_token_hit_rate": sum(each.decode_cached_tokens for each in served) / prompt
        if prompt
        else 0.0,
        "imbalance": max(work) * len(work) / sum(work) if sum(work) else 1.0,
        "kv_bytes": sum(each.kv_bytes for each in served),
        "attempts": sum(each.attempts for each in served),
    }
