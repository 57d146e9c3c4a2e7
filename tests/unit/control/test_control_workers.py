# SPDX-License-Identifier: Apache-2.0
"""The simulated workers against the real step scheduler and against steps taken one by one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.control.simulated import BLOCK_TOKENS, MODEL
from twinpool._core import BlockManager, SchedulerConfig, StepScheduler
from twinpool.control.replay.blocks import BlockMap, Hashes
from twinpool.control.replay.figures import Timing
from twinpool.control.replay.trace import Request, compress
from twinpool.control.simulate.clock import Clock
from twinpool.control.simulate.decode import DecodeWorker
from twinpool.control.simulate.job import Attempt, Job
from twinpool.control.simulate.links import Links
from twinpool.control.simulate.prefill import PrefillWorker
from twinpool.control.simulate.worker import Worker


class Host:
    """Notes what workers tell."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.links = Links(MODEL, BLOCK_TOKENS)
        self.chunks: list[tuple[float, int, int]] = []
        self.ended: dict[int, float] = {}
        self.tokens = 0

    def cache_event(self, worker: Worker, kind: str, hashes: Hashes) -> None:
        pass

    def chunk_done(self, attempt: Attempt) -> None:
        self.chunks.append((self.clock.now, attempt.job.request.id, attempt.chunk))

    def decoded(self, attempt: Attempt) -> None:
        self.ended[attempt.job.request.id] = self.clock.now

    def step(self, seconds: float, tokens: int) -> None:
        self.tokens += tokens


def attempt(request: Request, worker: Worker) -> Attempt:
    hashes = BlockMap(BLOCK_TOKENS, BLOCK_TOKENS).hashes(request)
    usable = min(len(hashes), (request.input_length - 1) // BLOCK_TOKENS)
    job = Job(request, hashes, len(hashes), usable, 0, Timing(request.arrival))
    return Attempt(job, 1, worker, worker)


prompts = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, BLOCK_TOKENS - 1)),
    min_size=1,
    max_size=8,
)


@given(prompts)
@settings(max_examples=40, deadline=None)
def test_prefill_steps_are_those_of_the_step_scheduler(prompts: list[tuple[int, int, int]]) -> None:
    """Same prompts at once, some sharing a prefix: the same chunks in the same steps, and the same cache hits."""
    host = Host()
    worker = PrefillWorker(host, "p", 1, MODEL, 400, BLOCK_TOKENS)
    generations = np.zeros(400, np.uint64)
    blocks = BlockManager(400, BLOCK_TOKENS, generations)
    config = SchedulerConfig(max_num_seqs=16, max_batched_tokens=256, max_chunk_tokens=128)
    scheduler = StepScheduler(blocks, config)
    made, numbers = [], {}
    for number, (shared, own, rest) in enumerate(prompts):
        ids = [*range(shared), *range(1000 * (number + 1), 1000 * (number + 1) + own)]
        request = Request(number, len(ids) * BLOCK_TOKENS + rest, 1, 0.0, compress(ids))
        made.append(attempt(request, worker))
        tokens = np.zeros(request.input_length, np.int32)
        numbers[scheduler.add(tokens, made[-1].job.hashes, bytes(16), max_new_tokens=0)] = number
    # A prompt of one token starts a step, during which all others come.
    first = attempt(Request(99, 1, 1, 0.0), worker)
    worker.add(first)
    for each in made:
        worker.add(each)
    host.clock.run(lambda: False)
    host.chunks.pop(0)

    steps: list[dict[int, int]] = []
    while not (plan := scheduler.plan(0.0)).empty:
        counts = np.diff(plan.q_start).tolist()
        steps.append({numbers[seq]: count for seq, count in zip(plan.seq.tolist(), counts, strict=True)})
        scheduler.advance(plan, np.zeros(len(counts), np.int32))
    found: dict[float, dict[int, int]] = {}
    for at, number, chunk in host.chunks:
        found.setdefault(at, {})[number] = chunk
    assert list(found.values()) == steps
    for seq, number in numbers.items():
        assert made[number].job.cached * BLOCK_TOKENS == scheduler.cached_tokens(seq)
    assert worker.load().waiting_tokens == 0
    for each in [first, *made]:
        worker.release(each)
    assert worker.cache.held == 0
    worker.cache.check()


def one_by_one(arrivals: list[tuple[float, int, int]]) -> dict[int, float]:
    """When each sequence (arrival, prompt, output) ends if every step is taken by itself."""
    now, running, ends = 0.0, dict[int, list[int]](), dict[int, float]()
    waiting = sorted(range(len(arrivals)), key=lambda number: (arrivals[number][0], number))
    while waiting or running:
        # An idle worker starts at once with the one that came; the next ones join at the next step.
        idle = not running and arrivals[waiting[0]][0] >= now
        now = arrivals[waiting[0]][0] if idle else now
        while waiting and arrivals[waiting[0]][0] <= now + 1e-12 and not (idle and running):
            number = waiting.pop(0)
            _, prompt, output = arrivals[number]
            running[number] = [prompt + 1, output - 1]
        held = sum(context for context, _ in running.values())
        now += MODEL.step_base + MODEL.step_sequence * len(running) + MODEL.step_token * held
        for number in list(running):
            running[number][0] += 1
            running[number][1] -= 1
            if running[number][1] == 0:
                ends[number] = now
                del running[number]
    return ends


arrivals = st.lists(
    st.tuples(st.floats(0, 2), st.integers(1, 300), st.integers(2, 60)), min_size=1, max_size=10
)


@given(arrivals)
@settings(max_examples=60, deadline=None)
def test_decode_in_closed_form_is_decode_step_by_step(arrivals: list[tuple[float, int, int]]) -> None:
    host = Host()
    worker = DecodeWorker(host, "d", 1, MODEL, 400, BLOCK_TOKENS)
    for number, (at, prompt, output) in enumerate(arrivals):
        request = Request(
            number, prompt, output, at, compress(range(number * 100, number * 100 + prompt // 16))
        )
        made = attempt(request, worker)
        assert worker.reserve(made)
        host.clock.at(at, worker.start, made)
    host.clock.run(lambda: False)
    expected = one_by_one(arrivals)
    assert host.ended.keys() == expected.keys()
    for number, end in expected.items():
        assert host.ended[number] == pytest.approx(end, rel=1e-6, abs=1e-6)
    assert host.tokens == sum(output - 1 for _, _, output in arrivals)
    assert worker.cache.held == 0
    worker.cache.check()


def test_decode_preempts_when_blocks_run_out_and_finishes_all() -> None:
    host = Host()
    worker = DecodeWorker(host, "d", 1, MODEL, 14, BLOCK_TOKENS)
    outputs = [100, 90, 80]
    made = []
    for number, output in enumerate(outputs):
        request = Request(number, 40, output, 0.0, compress([10 * number, 10 * number + 1]))
        made.append(attempt(request, worker))
        assert worker.reserve(made[-1])
        host.clock.at(0.001 * number, worker.start, made[-1])
    host.clock.run(lambda: False)
    assert sorted(host.ended) == [0, 1, 2]
    assert worker.computed_tokens > 0  # someone was computed again
    assert worker.cache.held == 0
    worker.cache.check()


def test_decode_refuses_what_has_no_room() -> None:
    host = Host()
    worker = DecodeWorker(host, "d", 1, replace(MODEL, max_num_seqs=2), 10, BLOCK_TOKENS)
    requests = [Request(n, 30, 5, 0.0, compress([n * 10])) for n in range(4)]
    assert not worker.reserve(attempt(Request(9, 160, 5, 0.0, compress(range(100, 110))), worker))
    assert worker.reserve(attempt(requests[0], worker))
    assert worker.reserve(attempt(requests[1], worker))
    assert not worker.reserve(attempt(requests[2], worker))
    assert worker.load().waiting == 2


def test_transfers_share_a_link() -> None:
    links = Links(MODEL, BLOCK_TOKENS)
    alone = links.seconds(10)
    assert alone == pytest.approx(1e-3 + 10 * 1e-5 + 10 * 16_000 / 1e8)
    assert links.move(5.0, "a", "x", 10) == pytest.approx(5.0 + alone)
    assert links.move(5.0, "b", "x", 10) == pytest.approx(5.0 + 2 * alone)
    assert links.move(5.0, "c", "y", 10) == pytest.approx(5.0 + alone)
    assert links.move(5.0, "a", "x", 0) == 5.0
    assert (links.transfers, links.bytes) == (3, 3 * 10 * 16_000)
    links.slow("c", 4.0)
    assert links.move(9.0, "c", "z", 10) == pytest.approx(9.0 + 4 * alone)
