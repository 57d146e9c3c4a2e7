# SPDX-License-Identifier: Apache-2.0
"""Small traces and setups for the simulator's tests."""

import random
from dataclasses import replace

from twinpool.control.replay.figures import Objectives
from twinpool.control.replay.trace import Request, Trace, compress
from twinpool.control.simulate.model import WorkerModel
from twinpool.control.simulate.setup import Setup

BLOCK_TOKENS = 16

MODEL = WorkerModel(
    name="test",
    source="made up",
    kv_bytes_per_token=1000,
    prefill_base=0.002,
    prefill_token=1e-4,
    prefill_pair=1e-8,
    step_base=0.01,
    step_sequence=1e-3,
    step_token=1e-6,
    link_bytes_per_second=1e8,
    link_latency=1e-3,
    link_block=1e-5,
    prefill_tokens=400 * BLOCK_TOKENS,
    decode_tokens=400 * BLOCK_TOKENS,
    block_tokens=BLOCK_TOKENS,
    max_num_seqs=16,
    max_batched_tokens=256,
    max_chunk_tokens=128,
)


def setup(**changes: object) -> Setup:
    """Two workers a role, unless changed."""
    base = Setup(MODEL, 2, 2, BLOCK_TOKENS, objectives=Objectives(1.0, 0.1), max_new_tokens=64)
    return replace(base, **changes)  # type: ignore[arg-type]


def sessions(count: int = 6, turns: int = 5, seed: int = 0, closed: bool = False, gap: float = 0.4) -> Trace:
    """Conversations whose prompts grow from turn to turn; all share their first block."""
    draw = random.Random(seed)
    requests: list[Request] = []
    fresh = 1
    for session in range(count):
        ids, at, before = [0], draw.uniform(0, count * gap), None
        for _ in range(turns):
            more = draw.randint(1, 6)
            ids = [*ids, *range(fresh, fresh + more)]
            fresh += more
            requests.append(
                Request(
                    id=0,
                    input_length=len(ids) * BLOCK_TOKENS + draw.randint(0, BLOCK_TOKENS - 1),
                    output_length=draw.randint(1, 40),
                    arrival=at,
                    runs=compress(ids),
                    session=str(session),
                    after=before,
                    think=0.2 if closed else 0.0,
                )
            )
            before = len(requests) - 1 if closed else None
            at += draw.uniform(gap, 3 * gap)
    return Trace("sessions", BLOCK_TOKENS, [replace(each, id=number) for number, each in enumerate(requests)])
