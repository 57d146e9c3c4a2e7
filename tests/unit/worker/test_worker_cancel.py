# SPDX-License-Identifier: Apache-2.0
"""How long a cancel takes, counted: a chunk for prefill, a step for decode, a round trip for blocks.

The cancel arrives at the worst moment: a step has just begun, with the attempt in it.
"""

from collections.abc import Callable
from typing import Any

import pytest
from worker_pair import BLOCK, Pair, Worker, cancel_command, random_prompt

PROMPT = random_prompt(12 * BLOCK + 3)
CHUNKS = 3
"""Steps of the prompt that are over before the cancel."""


def intrude(worker: Worker, at_step: int, act: Callable[[], None]) -> list[int]:
    """Calls ``act`` in the middle of the worker's step number ``at_step``; the list grows by each step's tokens."""
    runner = worker.stack.runner
    step, tokens = runner.step, list[int]()

    def wrapped(plan: Any, draws: Any) -> Any:
        tokens.append(int(plan.q_start[-1]))
        if len(tokens) == at_step:
            act()
        return step(plan, draws)

    runner.step = wrapped  # type: ignore[method-assign]
    return tokens


def cancel(pair: Pair) -> None:
    pair.decode.do(cancel_command())
    pair.prefill.do(cancel_command())


def held(worker: Worker) -> int:
    """Blocks of sequences, pins and quarantine."""
    blocks = worker.stack.blocks
    return blocks.held_blocks + blocks.quarantined_blocks


def test_prefill_stops_within_the_chunk_that_runs() -> None:
    pair = Pair()
    tokens = intrude(pair.prefill, CHUNKS + 1, lambda: cancel(pair))
    pair.start(PROMPT, max_tokens=40)
    pair.run(lambda: len(tokens) > CHUNKS)
    pair.turn()
    assert len(pair.prefill.take("cancelled")) == 1
    pair.settle()
    assert len(tokens) == CHUNKS + 1, "a chunk was computed after the cancel"
    assert tokens[-1] < len(PROMPT)
    pair.assert_quiet()


def test_decode_stops_within_the_step_that_runs() -> None:
    pair = Pair()
    tokens = intrude(pair.decode, 5, lambda: pair.decode.do(cancel_command()))
    pair.start(PROMPT, max_tokens=40)
    pair.run(lambda: len(tokens) >= 5)
    pair.turn()
    assert len(pair.decode.take("cancelled")) == 1
    steps = len(pair.decode.take("step"))
    pair.settle()
    assert len(tokens) == 5, "a token was drawn after the cancel"
    assert steps <= 5
    assert not pair.decode.take("step")
    pair.assert_quiet()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_blocks_are_free_within_one_round_trip(phase: str) -> None:
    """A turn takes what has come and answers it: the turn that sees the cancel frees this side, and what it tells the
    other side is seen in that side's next turn."""
    pair = Pair()
    worker = pair.prefill if phase == "prefill" else pair.decode
    tokens = intrude(worker, CHUNKS + 1, lambda: pair.decode.do(cancel_command()))
    pair.start(PROMPT, max_tokens=40)
    pair.run(lambda: len(tokens) > CHUNKS)
    assert held(pair.decode)
    for _ in range(2):
        pair.turn()
    assert len(pair.decode.take("cancelled")) == 1
    assert (held(pair.prefill), held(pair.decode)) == (0, 0)
    pair.assert_quiet()
