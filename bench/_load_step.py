# SPDX-License-Identifier: Apache-2.0
"""A load that changes: requests of public traces, chosen by their lengths, in phases.

Lengths and shared prefixes are the recordings'; arrivals are drawn anew (exponential gaps, seeded), at one rate a phase. A
choice that is used up begins again under another namespace, so that no prompt comes twice.
"""

import dataclasses
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinpool.control.replay.load import Selection, load_trace
from twinpool.control.replay.trace import Request, Trace

CONVERSATION = "mooncake_conversation_trace.jsonl"
SYNTHETIC = "mooncake_synthetic_trace.jsonl"


@dataclass(frozen=True)
class Mix:
    """Requests of a trace within bounds of their lengths, in tokens."""

    file: str
    prompt: tuple[int, int]
    answer: tuple[int, int]

    def of(self, directory: Path) -> list[Request]:
        """The chosen requests, in the order of their arrival."""
        trace = load_trace(directory / self.file, "auto", Selection())
        return [
            request
            for request in trace.requests
            if self.prompt[0] <= request.input_length <= self.prompt[1]
            and self.answer[0] <= request.output_length <= self.answer[1]
        ]


PREFILL_HEAVY = Mix(CONVERSATION, (2000, 8000), (1, 200))
"""Long prompts, short answers."""
DECODE_HEAVY = Mix(SYNTHETIC, (1, 512), (256, 4096))
"""Short prompts, long answers."""


@dataclass(frozen=True)
class Phase:
    """A load that lasts."""

    mix: Mix
    seconds: float
    rate: float
    """Requests a second."""


def load_step(directory: Path, phases: Sequence[Phase], seed: int = 0) -> Trace:
    """A trace of the phases, one after the other."""
    sources = {phase.mix: _endless(phase.mix.of(directory), number) for number, phase in enumerate(phases)}
    draw = random.Random(seed)
    requests: list[Request] = []
    begin = 0.0
    for phase in phases:
        at = begin + draw.expovariate(phase.rate)
        while at < begin + phase.seconds:
            requests.append(dataclasses.replace(next(sources[phase.mix]), id=len(requests), arrival=at))
            at += draw.expovariate(phase.rate)
        begin += phase.seconds
    return Trace("load step", 512, requests)


def _endless(chosen: list[Request], mix: int) -> Iterator[Request]:
    if not chosen:
        raise ValueError("no request of the trace has such lengths")
    turn = 0
    while True:
        namespace = mix * 1_000_000 + turn
        yield from (dataclasses.replace(each, namespace=namespace, after=None) for each in chosen)
        turn += 1
