# SPDX-License-Identifier: Apache-2.0
"""Selections of a trace, block ids to hashes and tokens, the infinite cache, figures."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.control.replay.blocks import BlockMap, TokenMaker, hashes_of, own_hashes
from twinpool.control.replay.figures import Objectives, Timing, latency_figures, weighted_spread
from twinpool.control.replay.infinite import InfiniteCache
from twinpool.control.replay.trace import Release, Request, Trace, compress, expand


def chain(*steps: tuple[int | None, float, float]) -> Trace:
    """Requests of session "a" as (after, arrival, think)."""
    return Trace(
        "chain",
        16,
        [
            Request(number, 16, 1, arrival, compress([number]), session="a", after=after, think=think)
            for number, (after, arrival, think) in enumerate(steps)
        ],
    )


@given(st.lists(st.integers(0, 40), max_size=30))
@settings(max_examples=40, deadline=None)
def test_runs_keep_the_ids(ids: list[int]) -> None:
    assert expand(compress(ids)).tolist() == ids


def test_head_takes_the_first_arrivals_and_renumbers() -> None:
    trace = chain((None, 5.0, 0.0), (0, 8.0, 1.0), (None, 0.0, 0.0), (2, 6.0, 1.0))
    head = trace.head(3)
    assert [(request.id, request.arrival, request.after) for request in head.requests] == [
        (0, 5.0, None),
        (1, 0.0, None),
        (2, 6.0, 1),
    ]
    assert trace.head(99) is trace


def test_spread_starts_sessions_apart_and_cuts_pauses() -> None:
    trace = chain((None, 0.0, 0.0), (0, 5.0, 3.0), (1, 9000.0, 8990.0))
    moved = trace.spread(100.0, 60.0, seed=3).requests
    assert 0 <= moved[0].arrival <= 100
    assert moved[1].arrival - moved[0].arrival == pytest.approx(5.0)
    assert moved[2].think == 60.0
    assert moved[2].arrival - moved[1].arrival == pytest.approx(60.0 + 5.0)
    assert trace.spread(100.0, 60.0, seed=3).requests == moved
    assert trace.spread(100.0, 60.0, seed=4).requests != moved


def test_faster_divides_arrivals_and_pauses() -> None:
    fast = chain((None, 4.0, 0.0), (0, 8.0, 2.0)).faster(2.0).requests
    assert [(request.arrival, request.think) for request in fast] == [(2.0, 0.0), (4.0, 1.0)]


def test_release_in_a_closed_loop() -> None:
    trace = chain((None, 0.0, 0.0), (0, 1.0, 0.0), (1, 2.0, 0.0), (None, 0.5, 0.0))
    release = Release(trace.requests, closed=True)
    assert [request.id for request in release.initial] == [0, 3]
    assert release.dropped(0) == 2
    assert release.ended(0) == []
    release = Release(trace.requests, closed=True)
    assert [request.id for request in release.ended(0)] == [1]
    assert release.dropped(3) == 0
    assert len(Release(trace.requests, closed=False).initial) == 4


def test_equal_ids_are_equal_tokens_and_hashes() -> None:
    one = Request(0, 40, 1, 0.0, compress([3, 4]), tail_id=9)
    two = Request(1, 36, 1, 0.0, compress([3, 4]), tail_id=9)
    other = Request(2, 36, 1, 0.0, compress([3, 4]), namespace=1)
    maker = TokenMaker(16, 100, 500)
    first, second, third = maker.tokens(one), maker.tokens(two), maker.tokens(other)
    assert (len(first), first.dtype) == (40, np.int32)
    assert first.min() >= 100
    assert first.max() < 500
    assert first[:36].tolist() == second.tolist()
    assert not (first[:32] == third[:32]).all()
    assert maker.tokens(one).tolist() == first.tolist()
    assert TokenMaker(16, 100, 500, seed=1).tokens(one).tolist() != first.tolist()
    assert hashes_of(one.block_ids(), 0).tolist() == hashes_of(two.block_ids(), 0).tolist()
    assert hashes_of(one.block_ids(), 0).tolist() != hashes_of(one.block_ids(), 1).tolist()


def test_hashes_are_distinct() -> None:
    many = np.concatenate([hashes_of(np.arange(5000, dtype=np.int64), space) for space in range(4)])
    assert len({row.tobytes() for row in many}) == 20_000


def test_blocks_of_another_size() -> None:
    request = Request(0, 4 * 32 + 20, 1, 0.0, compress([5, 6, 7, 8]), tail_id=9)
    same = BlockMap(32, 32).hashes(request)
    assert len(same) == 4
    # Two make one, named by the second.
    assert BlockMap(32, 64).hashes(request).tolist() == same[1::2].tolist()
    small = BlockMap(32, 16).hashes(request)
    assert len(small) == 9
    # Requests that share two blocks share four halves, and not a fifth.
    sharing = Request(1, 100, 1, 0.0, compress([5, 6, 70]))
    assert (BlockMap(32, 16).hashes(sharing)[:6] == small[:6]).all(axis=1).tolist() == [True] * 4 + [
        False
    ] * 2
    with pytest.raises(ValueError, match="blocks of 48 tokens do not fit"):
        BlockMap(32, 48)
    assert len(BlockMap(0, 16).hashes(sharing)) == 6


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=12))
@settings(max_examples=40, deadline=None)
def test_infinite_cache_is_a_set_of_prefixes(prompts: list[list[int]]) -> None:
    cache, seen = InfiniteCache(), set[tuple[int, ...]]()
    numbers: dict[tuple[int, ...], int] = {}
    for prompt in prompts:
        prefixes = [tuple(prompt[: end + 1]) for end in range(len(prompt))]
        ids = [numbers.setdefault(prefix, len(numbers)) for prefix in prefixes]
        expected = sum(prefix in seen for prefix in prefixes)
        assert cache.hits(hashes_of(np.array(ids, np.int64), 0), 4) == min(4, expected)
        seen.update(prefixes)


def test_own_hashes_are_nobody_elses() -> None:
    assert own_hashes(1, 0, 3).tolist() != own_hashes(2, 0, 3).tolist()
    assert own_hashes(1, 1, 2).tolist() == own_hashes(1, 0, 3)[1:].tolist()


def test_figures_count_what_met_both_objectives() -> None:
    timings = [
        Timing(0.0, 1.0, 3.0, 3),  # TTFT 1, ITL 1
        Timing(2.0, 5.0, 5.0, 1),  # TTFT 3, one token
        Timing(4.0, 4.5, 10.0, 2),  # TTFT 0.5, ITL 5.5
        Timing(5.0),  # not served
    ]
    figures = latency_figures(timings, Objectives(ttft=2.0, itl=2.0))
    assert (figures["requests"], figures["served"], figures["seconds"]) == (4, 3, 10.0)
    assert (figures["met_ttft"], figures["met_objectives"], figures["attainment"]) == (2, 1, 0.25)
    assert figures["goodput_per_second"] == pytest.approx(0.1)
    assert figures["itl_seconds"]["max"] == pytest.approx(5.5)  # type: ignore[index]
    assert latency_figures([Timing(0.0)], Objectives())["goodput_per_second"] == 0.0


def test_weighted_percentiles() -> None:
    found = weighted_spread([3.0, 1.0], [1.0, 99.0])
    assert (found["p50"], found["p99"], found["max"]) == (1.0, 1.0, 3.0)
    assert found["mean"] == pytest.approx(1.02)
    assert weighted_spread([], []) == {}
