# SPDX-License-Identifier: Apache-2.0
"""The clients of a chaos run: each asks one question after the other and checks every token of every answer."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from tests.support.oracle import Oracle
from tests.support.steps import prompt
from twinpool.client import request
from twinpool.errors import TwinpoolError
from twinpool.v1 import inference_pb2 as pb

BLOCK = 16
LONGEST_PROMPT_BLOCKS = 16
FAMILY = 6
ANSWER_SECONDS = 600.0
"""An answer that takes so long, faults and all, is lost."""

Stream = Callable[[pb.GenerateRequest], AsyncIterator[pb.GenerateResponse]]


class Questions:
    """Prompts in families that begin alike, and the oracle's answers to them, each computed once."""

    def __init__(self, seed: int, count: int, longest: int) -> None:
        draw = random.Random(seed)
        self.longest = longest
        self.prompts: list[list[int]] = []
        for number in range(count):
            if number % FAMILY == 0:
                stem = prompt(draw.randint(1, LONGEST_PROMPT_BLOCKS) * BLOCK, draw.randrange(1 << 30))
            shared = stem[: draw.randint(0, len(stem) // BLOCK) * BLOCK]
            tail = draw.choice((0, 1, BLOCK - 1, BLOCK, BLOCK + 1, draw.randint(2, 4 * BLOCK)))
            self.prompts.append([*shared, *prompt(max(tail, 1 - len(shared)), draw.randrange(1 << 30))])
        self.answers: list[list[int]] = []

    def solve(self, oracle: Oracle, solved: Callable[[int], None]) -> None:
        """Asks the oracle; ``solved`` hears of each."""
        for number, tokens in enumerate(self.prompts):
            self.answers.append(oracle.greedy(tokens, self.longest, ignore_eos=True))
            solved(number + 1)


@dataclass
class Tally:
    """What became of all streams. ``gaps``: the longest pause of each stream behind its first token, in seconds;
    ``firsts``: what the first tokens took; ``resumed_gaps``: of the streams that went on elsewhere."""

    streams: int = 0
    tokens: int = 0
    resumed: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    resumed_gaps: list[float] = field(default_factory=list)
    placements: Counter[int] = field(default_factory=Counter)

    @property
    def finished(self) -> int:
        return self.streams - self.lost.total()


class Clients:
    """``count`` of them, until they are told to stop; then each finishes what it has asked."""

    def __init__(self, questions: Questions, seed: int, streams: Sequence[Stream]) -> None:
        """``streams``: how each client asks."""
        self.tally = Tally()
        self.running = 0
        self._questions = questions
        self._seed = seed
        self._streams = streams
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True

    async def run(self) -> None:
        """Returns when all have finished."""
        async with asyncio.TaskGroup() as group:
            for number, stream in enumerate(self._streams):
                group.create_task(self._client(number, stream))

    async def _client(self, number: int, stream: Stream) -> None:
        draw = random.Random(f"{self._seed}-{number}")
        while not self._stopping:
            which = draw.randrange(len(self._questions.prompts))
            length = draw.choice((1, 2, *(draw.randint(3, self._questions.longest) for _ in range(6))))
            self.running += 1
            try:
                await self._ask(stream, which, length)
            finally:
                self.running -= 1

    async def _ask(self, stream: Stream, which: int, length: int) -> None:
        message = request(self._questions.prompts[which], max_tokens=length, temperature=0.0, ignore_eos=True)
        got: list[int] = []
        times = [time.monotonic()]
        end: pb.GenerateFinished | None = None
        reason = ""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                async for event in stream(message):
                    if event.HasField("tokens"):
                        if event.tokens.offset != len(got):
                            self.tally.wrong.append(f"offset {event.tokens.offset} behind {len(got)} tokens")
                        got += event.tokens.token_ids
                        times.append(time.monotonic())
                    elif event.HasField("finished"):
                        end = event.finished
        except TwinpoolError as error:
            reason = error.reason
        except TimeoutError:
            reason = "no end in time"
        self._count(which, length, got, times, end, reason)

    def _count(
        self,
        which: int,
        length: int,
        got: list[int],
        times: list[float],
        end: pb.GenerateFinished | None,
        reason: str,
    ) -> None:
        tally = self.tally
        tally.streams += 1
        tally.tokens += len(got)
        expected = self._questions.answers[which][:length]
        if got != expected[: len(got)] or (end is not None and len(got) != length):
            at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), len(got))
            placed = (
                f"{end.prefill_worker}, {end.decode_worker}, {end.attempts} placements" if end else reason
            )
            tally.wrong.append(f"prompt {which}, {length} tokens: wrong from {at} on ({placed})")
        if end is None:
            tally.lost[reason or "the stream ended without its last event"] += 1
            return
        tally.placements[end.attempts] += 1
        if len(times) > 1:
            tally.firsts.append(times[1] - times[0])
        if len(times) > 2:
            longest = max(after - before for before, after in itertools.pairwise(times[1:]))
            tally.gaps.append(longest)
            if end.attempts > 1:
                tally.resumed += 1
                tally.resumed_gaps.append(longest)
