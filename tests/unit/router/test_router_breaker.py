# SPDX-License-Identifier: Apache-2.0
"""Workers that fail what they are given get nothing for a while; failures that nothing cures do not multiply the load."""

import asyncio
from pathlib import Path

import pytest

from tests.support.fake_cluster import fake_cluster, generate, prompt
from tests.support.fake_worker import Script
from tests.support.waiting import until
from twinpool.config import load_config
from twinpool.config.router import RouterSection
from twinpool.errors import ConfigError
from twinpool.ids import WorkerKey
from twinpool.router.breaker import Breakers, BreakerState
from twinpool.router.outcome import Outcome, leaving, lost, said_by
from twinpool.router.retry import Retries, RetryBudget
from twinpool.v1 import worker_pb2 as pb

P, D, E = WorkerKey("p", 1), WorkerKey("d", 2), WorkerKey("e", 3)


class Bench:
    """Breakers over a clock of the test's own; what they ask for is kept."""

    def __init__(self, *, replaceable: bool = True, failures: int = 3) -> None:
        self.now = 0.0
        self.replaceable = replaceable
        self.held: list[tuple[WorkerKey, float, bool]] = []
        self.breakers = Breakers(
            RouterSection(breaker_failures=failures, breaker_open_seconds=4.0),
            lambda *asked: self.held.append(asked),
            lambda key: self.replaceable,
            lambda: self.now,
        )

    def fail(self, key: WorkerKey, times: int, peer: WorkerKey | None = None) -> None:
        for _ in range(times):
            self.breakers.failed(key, peer)


# --- the breaker itself ---------------------------------------------------------------------


def test_failures_in_a_row_open_it_and_one_success_closes_it() -> None:
    bench = Bench()
    bench.fail(D, 2)
    bench.breakers.succeeded(D)
    bench.fail(D, 2)
    assert bench.breakers.closed(D)
    bench.fail(D, 1)
    assert bench.breakers.state(D) is BreakerState.OPEN
    assert bench.held == [(D, 4.0, True)]
    bench.now = 3.0
    assert bench.breakers.hold_seconds(D) == 1.0
    bench.fail(D, 9)  # what was placed before
    bench.now = 4.0
    assert bench.breakers.state(D) is BreakerState.HALF_OPEN
    bench.breakers.succeeded(D)
    assert bench.breakers.closed(D)
    assert bench.held[1:] == [(D, 0.0, False)]
    assert bench.breakers.hold_seconds(D) is None


def test_it_stays_open_twice_as_long_each_time_up_to_a_bound() -> None:
    bench = Bench()
    bench.fail(D, 3)
    for _ in range(6):
        bench.now += bench.held[-1][1]
        bench.fail(D, 1)
    assert [seconds for _, seconds, _ in bench.held] == [4.0, 8.0, 16.0, 32.0, 64.0, 64.0, 64.0]


def test_one_peer_alone_does_not_say_who_is_at_fault() -> None:
    bench = Bench()
    bench.fail(P, 5, D)
    assert bench.breakers.closed(P)
    bench.fail(P, 1, D)
    assert not bench.breakers.closed(P)
    other = Bench()
    other.fail(P, 2, D)
    other.fail(P, 1, E)
    assert not other.breakers.closed(P)


def test_the_last_worker_of_a_role_is_never_taken_out() -> None:
    bench = Bench(replaceable=False)
    bench.fail(D, 50)
    assert bench.breakers.closed(D)
    bench.replaceable = True
    bench.fail(D, 1)
    assert not bench.breakers.closed(D)


def test_a_proof_that_nobody_hears_of_is_asked_for_again() -> None:
    bench = Bench()
    bench.fail(D, 3)
    bench.now = 4.0
    bench.breakers.watch()
    assert len(bench.held) == 1
    bench.now = 8.0
    bench.breakers.watch()
    assert bench.held[1:] == [(D, 0.0, True)]
    bench.breakers.forget(D)
    bench.breakers.watch()
    assert bench.breakers.closed(D)


def test_it_can_be_switched_off() -> None:
    bench = Bench(failures=0)
    bench.fail(D, 100)
    assert bench.breakers.closed(D)
    assert bench.held == []


# --- the budget -----------------------------------------------------------------------------


def test_a_budget_is_a_share_of_the_requests() -> None:
    budget = RetryBudget(RouterSection(retry_ratio=0.5, retry_burst=2.0))
    assert [budget.take(forced=False) for _ in range(3)] == [True, True, False]
    budget.request()
    assert not budget.take(forced=False)
    budget.request()
    assert budget.take(forced=False)
    for _ in range(100):
        budget.request()
    assert budget.left == 2.0


def test_answers_that_have_begun_go_on_without_it_and_deepen_the_debt_to_a_bound() -> None:
    budget = RetryBudget(RouterSection(retry_ratio=0.5, retry_burst=2.0))
    assert all(budget.take(forced=True) for _ in range(50))
    assert budget.left == -2.0
    assert not budget.take(forced=False)


def failed(reason: "pb.FailureReason.ValueType", key: WorkerKey, side: str) -> Outcome:
    return said_by(pb.AttemptFailed(reason=reason), key, side, reserving=False)


@pytest.mark.parametrize(
    ("outcome", "costs", "blamed"),
    [
        (failed(pb.FAILURE_REASON_TRANSFER, D, "decode"), True, {P, D}),
        (failed(pb.FAILURE_REASON_FENCED, D, "decode"), True, {P, D}),
        (failed(pb.FAILURE_REASON_INTERNAL, P, "prefill"), True, {P}),
        (failed(pb.FAILURE_REASON_INTERNAL, D, "decode"), True, {D}),
        (failed(pb.FAILURE_REASON_PEER_LOST, D, "decode"), False, {P}),
        (failed(pb.FAILURE_REASON_PEER_LOST, P, "prefill"), False, {D}),
        (failed(pb.FAILURE_REASON_NOT_SERVING, D, "decode"), False, set()),
        (failed(pb.FAILURE_REASON_NO_CAPACITY, P, "prefill"), False, set()),
        (failed(pb.FAILURE_REASON_INVALID, P, "prefill"), False, set()),
        (failed(pb.FAILURE_REASON_DEADLINE, P, "prefill"), False, set()),
        (lost(D, "decode", "its stream broke"), False, set()),
        (lost(D, "decode", "no answer", late=True), True, {D}),
        (leaving(D), False, set()),
    ],
)
def test_what_a_failure_costs_and_whom_it_is_put_down_to(
    outcome: Outcome, costs: bool, blamed: set[WorkerKey]
) -> None:
    bench = Bench(failures=1)
    retries = Retries(RouterSection(retry_ratio=0.0, retry_burst=1.0), bench.breakers)
    for _ in range(2):
        retries.failed(outcome, P, D)
    assert {key for key, _, _ in bench.held} == blamed
    assert [retries.allows(outcome, False) for _ in range(2)] == [True, not costs]
    assert retries.allows(outcome, True), "an answer that has begun is never given up for it"


def test_hedging_is_no_option() -> None:
    """Two attempts of one request never run at a time."""
    for key in ("router.hedging", "router.hedge_after_seconds"):
        with pytest.raises(ConfigError):
            load_config(None, {key: True}, env={})


# --- through a router -----------------------------------------------------------------------


async def test_a_decode_worker_that_fails_is_left_alone_and_proves_itself_with_one_request(
    model_path: Path,
) -> None:
    async with fake_cluster(
        model_path, decode=2, settings={"breaker_failures": 2, "breaker_open_seconds": 1.0}
    ) as cluster:
        bad, good = cluster.workers["d0"], cluster.workers["d1"]
        bad.script = Script(refuse=pb.FAILURE_REASON_INTERNAL)
        breakers = cluster.router.fleet.breakers
        seed = 0
        while breakers.closed(bad.key):
            seed += 1
            assert seed < 100, "it was never asked"
            await cluster.ask(generate(prompt(40, seed)))
        asked = len(bad.decodes)
        for more in range(6):
            answer = await cluster.ask(generate(prompt(40, 200 + more)))
            assert answer.finished.decode_worker == good.key.name
        assert len(bad.decodes) == asked or breakers.state(bad.key) is BreakerState.HALF_OPEN
        await until(lambda: breakers.state(bad.key) is BreakerState.HALF_OPEN, 60)
        gate = asyncio.Event()
        bad.script = good.script = Script(prefill_gate=gate)
        cluster.workers["p0"].script = Script(prefill_gate=gate)
        before = len(bad.decodes)
        asks = [asyncio.create_task(cluster.ask(generate(prompt(40, 300 + n)))) for n in range(8)]
        await until(lambda: len(bad.decodes) + len(good.decodes) >= before + 1 + 7, 60)
        # It has nothing to do, and yet gets no more than one.
        assert len(bad.decodes) <= before + 1
        gate.set()
        assert all(answer.error is None for answer in await asyncio.gather(*asks))
        await until(lambda: breakers.closed(bad.key), 60)
        await cluster.assert_quiescent()


async def test_without_budget_a_failed_attempt_is_not_placed_anew(model_path: Path) -> None:
    script = Script(fail_prefill=pb.FAILURE_REASON_FENCED)
    async with fake_cluster(
        model_path,
        prefill=2,
        decode=2,
        prefill_script=script,
        settings={"retry_ratio": 0.0, "retry_burst": 3.0, "breaker_failures": 0},
    ) as cluster:
        answers = [await cluster.ask(generate(prompt(40, seed))) for seed in range(4)]
        assert [answer.reason for answer in answers] == [
            "ATTEMPTS_EXHAUSTED",
            *["RETRY_BUDGET_EXHAUSTED"] * 3,
        ]
        assert answers[-1].error is not None
        assert answers[-1].error.metadata["cause"] == "KV_FENCED"
        # Three attempts of the first request, two of the second, one of each other.
        assert sum(len(worker.prefills) for worker in cluster.workers.values()) == 3 + 2 + 1 + 1
        await cluster.assert_quiescent()
