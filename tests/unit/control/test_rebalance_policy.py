# SPDX-License-Identifier: Apache-2.0
"""The rebalancer's policy: what it asks for, what holds it back, what it never does."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.control.rebalancing import SETTINGS, Loop, asking, pool, spec, telemetry
from twinpool.control.rebalance.history import History, Move, reversals
from twinpool.control.rebalance.policy import Policy
from twinpool.control.rebalance.split import Split, best_split, served, within
from twinpool.control.rebalance.telemetry import Role

POLICY = Policy(SETTINGS)
DEMAND = st.floats(0.0, 12.0, allow_nan=False)
WORKERS = st.integers(1, 8)


# --- what it does -------------------------------------------------------------------------------


def test_takes_a_worker_from_the_role_that_has_room() -> None:
    decision = asking(POLICY, telemetry(4.4, 1.0, pool(4, 4)), spec())
    assert (decision.kind, decision.to, decision.reason) == ("flip", "prefill", "MorePrefill")
    assert decision.worker.startswith("decode-")
    assert decision.target == Split(6, 2)
    assert decision.effect is not None
    assert decision.effect.prefill == pytest.approx(1.1)
    assert decision.effect.prefill_after == pytest.approx(0.88)
    assert decision.effect.served_after > decision.effect.served
    assert "prefill at 110 %" in decision.message


def test_leaves_a_balanced_pool_alone() -> None:
    decision = asking(POLICY, telemetry(2.8, 3.0, pool(4, 4)), spec())
    assert (decision.kind, decision.reason, decision.wish) == ("nothing", "Balanced", None)


def test_knows_nothing_before_half_a_window() -> None:
    decision = asking(POLICY, telemetry(9.0, 0.1, pool(4, 4), seconds=14.0), spec())
    assert (decision.kind, decision.reason) == ("nothing", "Unknown")


def test_a_role_must_ask_for_a_while() -> None:
    what = telemetry(6.8, 1.0, pool(4, 4))
    history = History().asked("more prefill", what.at - 9.0)
    assert POLICY.decide(what, spec(), history, what.at).reason == "Confirming"
    history = History().asked("more prefill", what.at - 10.0)
    assert POLICY.decide(what, spec(), history, what.at).kind == "flip"
    history = History().asked("more decode", what.at - 100.0)
    assert POLICY.decide(what, spec(), history, what.at).reason == "Confirming"


def test_a_role_that_is_short_of_little_asks_for_longer() -> None:
    what = telemetry(4 * 0.85 * 1.25, 1.0, pool(4, 4))
    assert (
        POLICY.decide(what, spec(), History().asked("more prefill", what.at - 39.0), what.at).reason
        == "Confirming"
    )
    assert (
        POLICY.decide(what, spec(), History().asked("more prefill", what.at - 41.0), what.at).kind == "flip"
    )
    least = telemetry(4 * 0.851, 1.0, pool(4, 4))
    assert (
        POLICY.decide(least, spec(), History().asked("more prefill", least.at - 61.0), least.at).kind
        == "flip"
    )


def test_both_busy_roles_give_nothing_to_one_another() -> None:
    decision = asking(POLICY, telemetry(4.4, 3.2, pool(4, 4)), spec())
    assert (decision.kind, decision.reason) == ("nothing", "BothBusy")


def test_the_emptiest_worker_goes() -> None:
    workers = list(pool(2, 3))
    workers[2] = replace(workers[2], drain_seconds=30.0)
    workers[3] = replace(workers[3], drain_seconds=2.0, cached_tokens=900)
    workers[4] = replace(workers[4], drain_seconds=2.0, cached_tokens=100)
    assert asking(POLICY, telemetry(2.5, 0.4, tuple(workers)), spec()).worker == "decode-2"


@pytest.mark.parametrize("change", [{"state": "draining"}, {"state": "starting"}, {"cordoned": True}])
def test_only_workers_that_serve_go(change: dict[str, object]) -> None:
    workers = list(pool(2, 3))
    workers[2] = replace(workers[2], **change)  # type: ignore[arg-type]
    workers[3] = replace(workers[3], drain_seconds=50.0)
    workers[4] = replace(workers[4], drain_seconds=60.0)
    decision = asking(POLICY, telemetry(3.0, 0.2, tuple(workers)), spec())
    assert decision.worker == "decode-1"


def test_a_flip_that_costs_more_than_it_wins_is_left() -> None:
    """The answers on the worker last about as long as the load is looked ahead."""
    workers = tuple(replace(worker, drain_seconds=299.0) for worker in pool(4, 4))
    decision = asking(POLICY, telemetry(4.4, 1.0, workers), spec())
    assert (decision.kind, decision.reason) == ("nothing", "NoGain")
    assert decision.effect is not None
    assert not decision.effect.pays


def test_the_bounds_of_the_pool_hold() -> None:
    assert asking(POLICY, telemetry(9.0, 0.1, pool(4, 2)), spec(least=2)).reason == "AtBounds"
    assert asking(POLICY, telemetry(9.0, 0.1, pool(4, 4)), spec(most=4)).reason == "AtBounds"
    assert asking(POLICY, telemetry(9.0, 0.1, pool(4, 1)), spec(least=0)).reason == "AtBounds"


def test_waits_for_the_flip_under_way_and_rests_after_it() -> None:
    what = telemetry(6.0, 0.5, pool(4, 4))
    history = History().began("decode-0", "prefill", what.at - 50.0)
    assert asking(POLICY, what, spec(), history).reason == "UnderWay"
    history = history.ended("decode-0", what.at - 19.0)
    assert asking(POLICY, what, spec(), history).reason == "Cooldown"
    assert asking(POLICY, replace(what, at=what.at + 1.0), spec(), history).kind == "flip"


def test_workers_under_way_count_where_they_go() -> None:
    loose = Policy(SETTINGS.model_copy(update={"max_flips": 2}))
    what = telemetry(4.4, 0.5, pool(4, 4))
    history = History().began("decode-0", "prefill", what.at - 50.0)
    assert asking(loose, what, spec(), history).effect is not None
    decision = asking(loose, replace(what, workers=pool(4, 2)), spec(), History())
    assert decision.effect is not None
    assert decision.effect.split == Split(4, 2)
    assert asking(loose, what, spec(), history).effect.split == Split(5, 3)  # type: ignore[union-attr]


def test_a_second_reversal_in_a_window_is_refused() -> None:
    what = telemetry(6.0, 0.5, pool(4, 4))
    history = History(
        (
            Move("prefill-0", "prefill", 500.0, 505.0),
            Move("decode-0", "decode", 800.0, 805.0),
        )
    )
    assert asking(POLICY, what, spec(), history).reason == "Reversal"
    assert asking(POLICY, replace(what, at=1101.0), spec(), history).kind == "flip"
    once = History(history.moves[1:])
    assert asking(POLICY, what, spec(), once).kind == "flip"


def test_scales_only_if_it_may() -> None:
    busy = telemetry(4.4, 4.4, pool(4, 4))
    assert asking(POLICY, busy, spec()).kind == "nothing"
    scaling = Policy(SETTINGS.model_copy(update={"scale": True}))
    decision = asking(scaling, busy, spec())
    assert (decision.kind, decision.reason, decision.target) == ("scale", "Grow", Split(5, 4))
    assert asking(scaling, busy, spec(most=4)).reason == "AtBounds"
    quiet = asking(scaling, telemetry(0.5, 0.5, pool(4, 4)), spec())
    assert (quiet.kind, quiet.reason) == ("scale", "Shrink")
    assert asking(scaling, telemetry(0.5, 0.5, pool(4, 4)), spec(least=4)).reason == "Balanced"


def test_a_scale_is_reckoned_from_what_the_pool_is_to_have() -> None:
    """Workers that start, or are unfit for work at the moment, are neither taken away nor started twice."""
    scaling = Policy(SETTINGS.model_copy(update={"scale": True}))
    bounds = spec(most=9)
    bounds.prefill.desired, bounds.decode.desired = 4, 6
    busy = telemetry(4.4, 4.4, pool(4, 4))
    grown = asking(scaling, busy, bounds)
    assert (grown.reason, grown.target) == ("Grow", Split(5, 6))
    waiting = asking(scaling, telemetry(4.4, 4.6, pool(4, 4)), bounds)
    assert (waiting.kind, waiting.reason) == ("nothing", "Starting")
    fewer = asking(scaling, telemetry(0.5, 2.5, pool(4, 4)), bounds)
    assert (fewer.reason, fewer.target) == ("Shrink", Split(3, 6))
    bounds.prefill.least = 4
    assert asking(scaling, telemetry(0.5, 1.5, pool(4, 4)), bounds).target == Split(4, 5)


def test_reversals_are_counted_without_flips_that_failed() -> None:
    moves = [
        Move("a", "prefill", 0.0, 1.0),
        Move("b", "decode", 10.0, 11.0, succeeded=False),
        Move("c", "prefill", 20.0, 21.0),
        Move("d", "decode", 30.0),
    ]
    assert reversals(moves) == 1
    assert reversals(moves, 30.0) == 0


# --- what always holds --------------------------------------------------------------------------


@given(DEMAND, DEMAND, st.floats(0.0, 4.0), WORKERS, WORKERS, st.integers(1, 3), st.integers(3, 9))
def test_more_demand_never_gives_fewer_workers(
    prefill: float, decode: float, more: float, first: int, second: int, least: int, most: int
) -> None:
    now, bounds = Split(first, second), spec(least, most)
    one = best_split({"prefill": prefill, "decode": decode}, now, bounds)
    two = best_split({"prefill": prefill + more, "decode": decode}, now, bounds)
    assert two.prefill >= one.prefill
    three = best_split({"prefill": prefill, "decode": decode + more}, now, bounds)
    assert three.decode >= one.decode


@given(DEMAND, DEMAND, WORKERS, WORKERS)
def test_no_split_serves_more_than_the_best(prefill: float, decode: float, first: int, second: int) -> None:
    demand: dict[Role, float] = {"prefill": prefill, "decode": decode}
    now = Split(first, second)
    best = best_split(demand, now, spec())
    assert best.prefill + best.decode == first + second
    total = first + second
    most = max(served(demand, Split(count, total - count), 0.85) for count in range(1, total))
    assert served(demand, best, 0.85) == pytest.approx(most)


@given(DEMAND, DEMAND, st.floats(0.0, 4.0), WORKERS, WORKERS)
def test_more_demand_of_a_role_never_takes_a_worker_from_it(
    prefill: float, decode: float, more: float, first: int, second: int
) -> None:
    workers = pool(first, second)
    one = asking(POLICY, telemetry(prefill, decode, workers), spec())
    two = asking(POLICY, telemetry(prefill + more, decode, workers), spec())
    if one.to != "decode":
        assert two.to != "decode"


@settings(max_examples=150)
@given(
    st.lists(st.tuples(DEMAND, DEMAND, st.integers(1, 12)), min_size=1, max_size=8),
    WORKERS,
    WORKERS,
    st.integers(1, 3),
    st.floats(0.0, 60.0),
    st.integers(1, 3),
)
def test_bounds_dwell_pace_and_reversals_hold_under_any_load(
    phases: list[tuple[float, float, int]], prefill: int, decode: int, least: int, takes: float, flips: int
) -> None:
    loop = Loop(prefill, decode, SETTINGS.model_copy(update={"max_flips": flips}))
    bounds = spec(least)
    began = Split(prefill, decode)
    for first, second, minutes in phases:
        for _ in range(minutes * 12):
            loop.step(first, second, bounds, takes)
            if within(bounds, began):
                assert loop.count("prefill") >= least
                assert loop.count("decode") >= least
            assert loop.history.under_way <= flips
    moves = loop.history.moves
    for worker in loop.workers:
        own = [move for move in moves if move.worker == worker]
        for before, after in itertools.pairwise(own):
            assert before.ended is not None
            assert after.began - before.ended >= SETTINGS.dwell_seconds
    for move in moves:
        assert reversals(moves, move.began - SETTINGS.reversal_seconds) - reversals(moves, move.began) <= 1


@settings(max_examples=60)
@given(DEMAND, DEMAND, WORKERS, WORKERS, st.integers(0, 1 << 32))
def test_noise_alone_never_swings_the_pool(
    prefill: float, decode: float, first: int, second: int, seed: int
) -> None:
    """A tenth up and down on each role, for half an hour: flips go one way, and they end."""
    loop = Loop(first, second, SETTINGS.model_copy(update={"reversal_seconds": 0.0}))
    noise = random.Random(seed).uniform
    for _ in range(360):
        loop.step(prefill * noise(0.9, 1.1), decode * noise(0.9, 1.1), spec())
    assert len({decision.to for decision in loop.flips}) <= 1
    assert len(loop.flips) < first + second
    assert loop.history.under_way == 0 or loop.history.moves[-1].began > loop.now - 30.0


@pytest.mark.parametrize("start", [(1, 7), (4, 4), (7, 1)])
def test_a_load_step_is_followed_and_then_left_alone(start: tuple[int, int]) -> None:
    loop = Loop(*start)
    for prefill, decode, role in ((5.2, 1.2, "prefill"), (0.8, 5.4, "decode")):
        for _ in range(120):
            loop.step(prefill, decode, spec())
        demand: dict[Role, float] = {"prefill": prefill, "decode": decode}
        assert served(demand, Split(loop.count("prefill"), loop.count("decode")), 1.0) == 1.0, role
        settled = len(loop.flips)
        for _ in range(60):
            loop.step(prefill, decode, spec())
        assert len(loop.flips) == settled
