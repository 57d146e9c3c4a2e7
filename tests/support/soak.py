# SPDX-License-Identifier: Apache-2.0
"""A soak: many clients, faults drawn from one seed, workers that die and come back.

All of it is drawn before anything runs: what is asked, who leaves when, which worker dies after how many answers, and
what each worker's shim does to its reads and messages. The same seed gives the same schedule; only the interleaving is
the machine's.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.asking import Outcome, ask
from tests.support.fleet import BLOCK, Fleet
from tests.support.oracle import Oracle
from tests.support.steps import prompt

SEED_VARIABLE = "TWINPOOL_SEED"
LONGEST_ANSWER = 48
DEADLINE_SECONDS = 120.0

WORKERS = {f"{role}-{number}": role for role in ("prefill", "decode") for number in range(3)}

CHANCES = {
    "refuse": 0.03,
    "report": 0.03,
    "delay": 0.2,
    "delay_seconds": 0.3,
    "late": 0.01,
    "late_seconds": 3.0,
    "drop": 0.1,
    "duplicate": 0.1,
    "twice": 0.01,
}
"""Of each read, and of each message that a network may lose or repeat. A late read is later than its deadline and the lease."""

TRUE_REASONS = {
    "WORKER_LOST",
    "TRANSFER_FAILED",
    "KV_FENCED",
    "ATTEMPTS_EXHAUSTED",
    "NO_CAPACITY",
    "NO_WORKERS",
}
"""How a request may fail under these faults. Anything else would be an excuse."""


def seed_of_run() -> int:
    """From the environment, or new; printed, so that a run that failed can be repeated."""
    seed = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().randrange(1 << 32))
    print(f"{SEED_VARIABLE}={seed}")
    return seed


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: ``leave_at`` is how many tokens its client waits for before it goes, None if it stays."""

    prompt: tuple[int, ...]
    max_tokens: int
    leave_at: int | None


@dataclass(frozen=True, slots=True)
class Schedule:
    """``kills[i]`` is (answers before it, worker)."""

    seed: int
    asked: list[Asked]
    kills: list[tuple[int, str]]

    @classmethod
    def of(cls, seed: int, requests: int, prompts: int, kills: int) -> Schedule:
        """``prompts`` different ones, in families that begin alike; kills are spread over the run, roles in turn."""
        draw = random.Random(seed)
        families = [
            prompt(draw.randint(1, 12) * BLOCK, draw.randrange(1 << 30)) for _ in range(prompts // 6 + 1)
        ]
        known: list[tuple[int, ...]] = []
        for _ in range(prompts):
            stem = draw.choice(families)
            # Lengths of 1, just below, at and just above a block's end are as likely as all the rest together.
            stem = stem[: draw.randint(0, len(stem) // BLOCK) * BLOCK] if draw.random() < 0.7 else []
            tail = draw.choice(
                (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, *(draw.randint(1, 6 * BLOCK) for _ in range(5)))
            )
            known.append(tuple([*stem, *prompt(max(tail, 1 - len(stem)), draw.randrange(1 << 30))]))
        asked = [
            Asked(
                draw.choice(known),
                draw.choice((1, 2, draw.randint(3, LONGEST_ANSWER))),
                draw.randint(0, 6) if draw.random() < 0.1 else None,
            )
            for _ in range(requests)
        ]
        gap = requests // (kills + 1)
        died = [
            ((number + 1) * gap, f"{('decode', 'prefill')[number % 2]}-{draw.randrange(3)}")
            for number in range(kills)
        ]
        return cls(seed, asked, died)

    @property
    def prompts(self) -> set[tuple[int, ...]]:
        return {asked.prompt for asked in self.asked}


class Answers:
    """The oracle's answers to a schedule's prompts, each computed once: a shorter answer begins a longer one."""

    def __init__(self, oracle: Oracle, prompts: set[tuple[int, ...]]) -> None:
        self._full = {
            tokens: oracle.greedy(tokens, LONGEST_ANSWER, ignore_eos=True) for tokens in sorted(prompts)
        }

    def greedy(
        self, prompt: Sequence[int], max_tokens: int, *, stop: Sequence[int] = (), ignore_eos: bool = False
    ) -> list[int]:
        """See :meth:`Oracle.greedy`; these answers end by their length alone."""
        assert ignore_eos
        assert not stop
        return self._full[tuple(prompt)][:max_tokens]


@dataclass
class Result:
    """What became of the requests, and how often each worker died."""

    outcomes: list[Outcome] = field(default_factory=list)
    kills: int = 0
    retries: int = 0

    @property
    def finished(self) -> int:
        return sum(outcome.finished is not None for outcome in self.outcomes)

    @property
    def left(self) -> int:
        return sum(outcome.finished is None and outcome.error is None for outcome in self.outcomes)

    @property
    def failures(self) -> Counter[str]:
        return Counter(outcome.reason for outcome in self.outcomes if outcome.error is not None)

    def __str__(self) -> str:
        return f"{self.finished} finished, {self.left} left, failed {dict(self.failures)}, {self.retries} retries, {self.kills} kills"


async def soak(fleet: Fleet, schedule: Schedule, answers: Answers, clients: int) -> Result:
    """Runs the schedule with ``clients`` at a time; every answer is checked as it comes (see ``ask``)."""
    result = Result()
    turns = iter(schedule.asked)
    ended = asyncio.Condition()

    async def serve() -> None:
        async with fleet.client() as client:
            for asked in turns:
                outcome = await ask(
                    client,
                    answers,
                    asked.prompt,
                    asked.max_tokens,
                    leave=lambda seen, at=asked.leave_at: at is not None and len(seen.tokens) >= at,
                    timeout=DEADLINE_SECONDS,
                )
                async with ended:
                    result.outcomes.append(outcome)
                    ended.notify_all()

    async def kill() -> None:
        for after, name in schedule.kills:
            async with ended:
                await ended.wait_for(lambda after=after: len(result.outcomes) >= after)
            worker = fleet.workers[name]
            worker.kill()
            result.kills += 1
            fleet.start(worker.role, name)
            await fleet.ready(name)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(serve())
        group.create_task(kill())
    return result
