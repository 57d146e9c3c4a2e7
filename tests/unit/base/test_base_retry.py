# SPDX-License-Identifier: Apache-2.0
"""When a client tries again, where, and how often."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.errors import TABLE, TwinpoolError
from twinpool.retry import Breakers, RetryBudget, RetryPolicy, lost, may_pass


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_retries_are_a_share_of_the_requests() -> None:
    clock = Clock()
    budget = RetryBudget(0.2, 0.1, clock)
    for _ in range(100):
        budget.request()
    assert sum(budget.retry() for _ in range(1000)) == 21
    clock.now += 11.0
    assert sum(budget.retry() for _ in range(1000)) == 1, "what happened before the window is forgotten"


@given(st.lists(st.sampled_from(["request", "retry", "wait"]), max_size=200))
def test_the_budget_is_never_overdrawn(events: list[str]) -> None:
    clock = Clock()
    budget = RetryBudget(0.5, 0.2, clock)
    log: list[tuple[float, str]] = []
    for event in events:
        clock.now += event == "wait"
        if event == "request":
            budget.request()
            log.append((clock.now, event))
        elif event == "retry" and budget.retry():
            log.append((clock.now, event))
        recent = [kind for at, kind in log if clock.now - at <= 10.0]
        # A request that leaves the window leaves its retries behind until they leave it, too.
        assert recent.count("retry") <= 2.0 + 0.5 * len([kind for _, kind in log if kind == "request"])


def test_endpoints_take_turns_and_those_that_failed_rest() -> None:
    clock = Clock()
    breakers = Breakers(["a", "b", "c", "a"], clock)
    assert sorted(breakers.pick() for _ in range(3)) == ["a", "b", "c"]
    breakers.failed("a")
    assert {breakers.pick() for _ in range(6)} == {"b", "c"}
    clock.now += 0.2
    picks = [breakers.pick() for _ in range(6)]
    assert picks.count("a") == 1, "one call probes it"
    breakers.worked("a")
    assert {breakers.pick() for _ in range(3)} == {"a", "b", "c"}


def test_the_endpoint_that_has_just_failed_comes_last() -> None:
    breakers = Breakers(["a", "b"], Clock())
    for _ in range(4):
        assert breakers.pick(avoid="a") == "b"
    assert Breakers(["a"], Clock()).pick(avoid="a") == "a"


def test_if_all_have_failed_the_one_that_is_due_first_is_tried() -> None:
    clock = Clock()
    breakers = Breakers(["a", "b"], clock)
    breakers.failed("a")
    clock.now += 10
    for _ in range(6):
        breakers.failed("b")
    assert breakers.pick() == "a"
    with pytest.raises(ValueError, match="at least one"):
        Breakers([])


def test_pauses_grow_and_are_bounded_and_obey_the_server() -> None:
    policy = RetryPolicy(first_pause_seconds=0.1, longest_pause_seconds=1.0)
    for failures, ceiling in ((1, 0.1), (2, 0.2), (4, 0.8), (5, 1.0), (10_000, 1.0)):
        assert ceiling / 2 <= policy.pause(failures, None) <= ceiling
    assert policy.pause(1, 7.0) == 7.0


def test_what_may_pass() -> None:
    passing = {reason for reason in TABLE if may_pass(TwinpoolError(reason))}
    assert {"DRAINING", "NO_WORKERS", "QUEUE_FULL", "WORKER_LOST", "KV_FENCED"} <= passing
    assert not passing & {
        "EMPTY_PROMPT",
        "DEADLINE_EXCEEDED",
        "DEADLINE_UNREACHABLE",
        "CANCELLED",
        "INTERNAL",
    }
    assert not passing & {"STREAM_SUPERSEDED", "CLIENT_TOO_SLOW", "IDEMPOTENCY_MISMATCH", "RESUME_LOST"}
    broken = TwinpoolError("CANCELLED", metadata={"grpc_code": "CANCELLED"})
    assert lost(broken)
    assert may_pass(broken)
    assert not lost(TwinpoolError("SERVER_UNREACHABLE"))
