# SPDX-License-Identifier: Apache-2.0
"""The other systems' rules on hand-made cases."""

import pytest

from tests.unit.control.simulated import BLOCK_TOKENS, MODEL, setup
from tests.unit.control.test_control_workers import Host
from twinpool.control.replay.blocks import BlockMap
from twinpool.control.replay.figures import Timing
from twinpool.control.replay.trace import Request, compress
from twinpool.control.simulate.job import Attempt, Job
from twinpool.control.simulate.policies import make_router
from twinpool.control.simulate.policies.base import Dispatcher
from twinpool.control.simulate.policies.threshold import Threshold
from twinpool.control.simulate.prefill import PrefillWorker
from twinpool.control.simulate.router import Placement
from twinpool.control.simulate.worker import Worker


class Bench:
    """A router with three prefill workers and two decode workers that do nothing."""

    def __init__(self, policy: str) -> None:
        router = make_router(policy, setup())
        assert isinstance(router, Dispatcher)
        self.router = router
        self.prefill = [
            PrefillWorker(Host(), f"prefill-{n}", n + 1, MODEL, 50, BLOCK_TOKENS) for n in range(3)
        ]
        self.decode = [self._decode(n) for n in range(2)]
        for worker in [*self.prefill, *self.decode]:
            router.worker_up(0.0, worker, 50)
        self._next = 0

    @staticmethod
    def _decode(number: int) -> Worker:
        worker = PrefillWorker(Host(), f"decode-{number}", number + 11, MODEL, 50, BLOCK_TOKENS)
        worker.role = "decode"
        return worker

    def job(self, ids: list[int], rest: int = 1) -> Job:
        request = Request(self._next, len(ids) * BLOCK_TOKENS + rest, 5, 0.0, compress(ids))
        self._next += 1
        hashes = BlockMap(BLOCK_TOKENS, BLOCK_TOKENS).hashes(request)
        return Job(request, hashes, len(hashes), len(hashes), 0, Timing(0.0))

    def place(self, ids: list[int], rest: int = 1) -> Placement:
        assert self.router.submit(0.0, self.job(ids, rest)) == ""
        (placement,) = self.router.plan(0.0)
        assert isinstance(placement, Placement)
        return placement

    def holds(self, worker: int, ids: list[int]) -> None:
        self.router.cache_event(self.prefill[worker], "stored", self.job(ids).hashes)

    def done(self, placement: Placement, *, answer: bool = False) -> None:
        attempt = Attempt(placement.job, 1, placement.prefill, placement.decode)
        self.router.first_token(0.0, attempt, 0.1)
        if answer:
            self.router.finished(0.0, attempt)


def names(*placements: Placement) -> list[str]:
    return [placement.prefill.name for placement in placements]


def test_round_robin_takes_turns() -> None:
    bench = Bench("round_robin")
    placed = [bench.place([0]) for _ in range(4)]
    assert len(set(names(*placed[:3]))) == 3
    assert placed[3].prefill is placed[0].prefill
    assert placed[0].decode is placed[2].decode is not placed[1].decode


def test_least_loaded_counts_requests_in_flight() -> None:
    bench = Bench("least_loaded")
    placed = [bench.place([n]) for n in range(3)]
    assert len(set(names(*placed))) == 3
    bench.done(placed[1])
    assert bench.place([9]).prefill is placed[1].prefill


def test_longest_prefix_ignores_load() -> None:
    bench = Bench("longest_prefix")
    bench.holds(1, [1, 2, 3])
    bench.holds(2, [1, 2])
    assert names(*[bench.place([1, 2, 3, 4]) for _ in range(4)]) == ["prefill-1"] * 4
    assert bench.place([1, 2, 3, 4]).predicted == 3
    # Nobody holds it: the least loaded of them.
    assert bench.place([50]).prefill.name == "prefill-0"


def test_additive_weighs_queued_work_against_the_prefix() -> None:
    bench = Bench("additive")
    bench.holds(1, [1, 2, 3])
    first = bench.place([1, 2, 3, 4])
    assert (first.prefill.name, first.predicted) == ("prefill-1", 3)
    # Two uncached blocks wait there now; three blocks cached still outweigh them, five waiting do not.
    assert bench.place([1, 2, 3, 5], rest=15).prefill.name == "prefill-1"
    assert bench.place([1, 2, 3, 6]).prefill.name != "prefill-1"
    bench.done(first)
    assert bench.place([1, 2, 3, 7]).prefill.name == "prefill-1"


def test_additive_gives_decode_to_the_fewest_blocks() -> None:
    bench = Bench("additive")
    long = bench.place(list(range(9)))
    short = bench.place([20])
    assert short.decode is not long.decode
    assert bench.place([30]).decode is short.decode
    bench.done(long, answer=True)
    assert bench.place([40]).decode is long.decode


def test_threshold_follows_the_prefix_until_loads_part() -> None:
    bench = Bench("threshold")
    first = bench.place([1, 2, 3, 4])
    # More than half of the prompt was routed there; less than half goes where the tree is smallest.
    assert bench.place([1, 2, 3, 5]).prefill is first.prefill
    other = bench.place([1, 2, 50, 51, 52])
    assert other.prefill is not first.prefill
    third = bench.place([60])
    assert len({first.prefill.name, other.prefill.name, third.prefill.name}) == 3
    placed = [bench.place([1, 2, 3, 4]) for _ in range(Threshold.balance_abs + 5)]
    assert placed[0].prefill is first.prefill
    assert placed[-1].prefill is not first.prefill


def test_a_failed_request_is_tried_anew_until_its_first_token() -> None:
    bench = Bench("additive")
    placed = bench.place([1, 2])
    bench.router.worker_down(0.0, placed.prefill)
    assert bench.router.failed(0.0, Attempt(placed.job, 1, placed.prefill, placed.decode), placed.prefill)
    (again,) = bench.router.plan(0.0)
    assert isinstance(again, Placement)
    assert again.prefill is not placed.prefill
    again.job.delivered = True
    bench.done(again)
    assert not bench.router.failed(0.0, Attempt(again.job, 2, again.prefill, again.decode), again.decode)
    assert not bench.router.queued


def test_requests_wait_while_a_role_is_missing() -> None:
    bench = Bench("round_robin")
    for worker in bench.decode:
        bench.router.worker_down(0.0, worker)
    bench.router.submit(0.0, bench.job([1]))
    assert bench.router.plan(0.0) == []
    assert bench.router.queued
    bench.router.worker_up(0.0, bench.decode[0], 50)
    assert len(bench.router.plan(0.0)) == 1


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match="unknown policy 'x'; known: ours"):
        make_router("x", setup())
