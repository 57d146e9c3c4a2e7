# SPDX-License-Identifier: Apache-2.0
"""Whole simulated runs: what goes in comes out, twice the same, and never more hits than an infinite cache."""

import itertools
from dataclasses import replace

import pytest

from tests.unit.control.simulated import BLOCK_TOKENS, MODEL, sessions, setup
from twinpool.control.replay.trace import Request, Trace, compress
from twinpool.control.simulate.clock import Clock
from twinpool.control.simulate.faults import Fault, parse_faults
from twinpool.control.simulate.job import Status
from twinpool.control.simulate.policies import POLICIES
from twinpool.control.simulate.results import Run, simulate
from twinpool.control.simulate.sweep import best, sweep
from twinpool.control.simulate.worker import Worker

FETCH = {"prefix_fetch": 1.0}


def workers_of(run: Run) -> list[Worker]:
    return [*run.cluster.prefill.values(), *run.cluster.decode.values()]


def check_run(run: Run) -> None:
    """The invariants of every run."""
    cluster, figures = run.cluster, run.figures
    for job in cluster.jobs:
        hits = min(job.decode_cached, job.usable) + job.fetched if job.local else job.cached
        assert 0 <= job.fetched <= hits <= job.usable <= job.listed
        assert job.status is not Status.WAITING
        if job.status is Status.SERVED:
            assert job.timing.arrival < job.timing.first <= job.timing.end
            if job.attempts == 1:
                # Work is conserved: every prompt token was computed once or found in a cache.
                assert job.computed == job.request.input_length - hits * BLOCK_TOKENS
    assert sum(job.computed for job in cluster.jobs) == sum(
        worker.computed_tokens for worker in [*workers_of(run), *cluster.lost]
    )
    assert figures["share_of_infinite"] <= 1.0  # type: ignore[operator]
    for worker in workers_of(run):
        assert worker.cache.held == 0
        worker.cache.check()
        load = worker.load()
        assert (load.running, load.waiting, load.waiting_tokens) == (0, 0, 0)
        assert load.available == worker.cache.num_blocks


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("closed", [False, True])
def test_work_is_conserved(policy: str, closed: bool) -> None:
    trace = sessions(closed=closed)
    run = simulate(trace, setup(closed=closed, core=FETCH), policy)
    assert run.figures["served"] == len(trace.requests)
    assert sum(run.cluster.step_tokens) == sum(request.output_length - 1 for request in trace.requests)
    check_run(run)


def test_small_caches_evict_and_lose_nothing() -> None:
    trace = sessions(count=10, turns=6)
    run = simulate(trace, setup(prefill_blocks=60, decode_blocks=60, core=FETCH), "ours")
    assert run.figures["served"] == len(trace.requests)
    assert run.figures["share_of_infinite"] < 1.0  # type: ignore[operator]
    check_run(run)


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_runs_are_equal(policy: str) -> None:
    figures = [simulate(sessions(seed=1), setup(core=FETCH), policy).figures for _ in range(2)]
    assert figures[0] == figures[1]
    assert simulate(sessions(seed=2), setup(core=FETCH), policy).figures != figures[0]


def test_an_idle_cluster_serves_at_the_speed_of_its_model() -> None:
    request = Request(0, 100, 11, 1.0, compress(range(6)))
    run = simulate(Trace("one", BLOCK_TOKENS, [request]), setup(prefill=1, decode=1), "ours")
    timing = run.cluster.jobs[0].timing
    first = MODEL.prefill_base + MODEL.prefill_seconds(100, 0) + 4 * MODEL.hop
    assert timing.first - timing.arrival == pytest.approx(first)
    transfer = run.cluster.links.seconds(7)
    steps = sum(MODEL.step_base + MODEL.step_sequence + MODEL.step_token * (101 + step) for step in range(10))
    assert timing.end - timing.first == pytest.approx(transfer + steps + MODEL.hop)
    assert run.figures["transfer_bytes"] == 7 * MODEL.block_bytes(BLOCK_TOKENS)


def test_a_closed_loop_waits_for_answers() -> None:
    run = simulate(sessions(closed=True), setup(closed=True), "ours")
    jobs = {job.request.id: job for job in run.cluster.jobs}
    for job in jobs.values():
        if job.request.after is not None:
            before = jobs[job.request.after].timing
            assert job.timing.arrival == pytest.approx(before.end + job.request.think)


def test_a_horizon_ends_a_run() -> None:
    trace = sessions(closed=True)
    run = simulate(trace, setup(closed=True, horizon=1.5), "ours")
    assert 0 < len(run.cluster.jobs) < len(trace.requests)
    assert all(job.timing.arrival < 1.5 for job in run.cluster.jobs)
    assert run.figures["not_sent"] == len(trace.requests) - len(run.cluster.jobs)


def test_a_prefix_is_fetched_from_a_busy_holder() -> None:
    """Two prompts share a long prefix; its holder is busy with a third one: pulling beats waiting and computing."""
    shared = list(range(40))
    requests = [
        Request(0, 40 * 16 + 1, 2, 0.0, compress(shared)),
        Request(1, 40 * 16 + 321, 2, 2.0, compress([*shared, *range(100, 120)])),
        Request(2, 40 * 16 + 321, 2, 2.001, compress([*shared, *range(200, 220)])),
    ]
    trace = Trace("fetch", BLOCK_TOKENS, requests)
    # As fast as the core takes a worker to be that it has not measured yet.
    model = replace(MODEL, link_bytes_per_second=1e10)
    pulled = simulate(trace, setup(model=model, core=FETCH), "ours")
    assert [job.fetched for job in pulled.cluster.jobs] == [0, 0, 40]
    check_run(pulled)
    alone = simulate(trace, setup(model=model, core={"prefix_fetch": 0.0}), "ours")
    assert [job.fetched for job in alone.cluster.jobs] == [0, 0, 0]
    assert pulled.figures["block_hit_rate"] >= alone.figures["block_hit_rate"]  # type: ignore[operator]
    check_run(alone)


def test_a_decode_worker_computes_a_short_suffix_itself() -> None:
    trace = sessions(count=8, turns=6, gap=0.05)
    run = simulate(trace, setup(core={"local_prefill": 1.0, "harm_weight": 0.0}), "ours")
    assert run.figures["local_prefills"] > 0  # type: ignore[operator]
    assert run.figures["served"] == len(trace.requests)
    check_run(run)


def test_what_fits_nowhere_is_rejected() -> None:
    requests = [Request(0, 3000, 2, 0.0, compress(range(187))), Request(1, 20, 2, 0.0, compress([500]))]
    run = simulate(Trace("big", BLOCK_TOKENS, requests), setup(prefill_blocks=100), "threshold")
    assert run.figures["causes"] == {"REQUEST_EXCEEDS_CAPACITY": 1}
    assert run.figures["served"] == 1


@pytest.mark.parametrize("policy", ["ours", "additive"])
def test_a_killed_prefill_worker_loses_nothing(policy: str) -> None:
    trace = sessions(count=8, gap=0.1)
    faults = [Fault(1.0, "kill", "prefill-0"), Fault(1.2, "start", "prefill-0")]
    # So slow that something runs on it when it dies.
    slow = replace(MODEL, prefill_token=2e-3)
    run = simulate(trace, setup(model=slow, core=FETCH, faults=faults), policy)
    assert run.figures["served"] + run.figures["failed"] == len(trace.requests)  # type: ignore[operator]
    assert run.figures["attempts"] > len(trace.requests)  # type: ignore[operator]
    assert {job.cause for job in run.cluster.jobs} <= {"", "prefill_lost"}
    assert [worker.incarnation for worker in run.cluster.lost] == [1]
    check_run(run)


@pytest.mark.parametrize("policy", ["ours", "threshold"])
def test_a_killed_decode_worker_fails_streams_that_have_begun(policy: str) -> None:
    trace = sessions(count=8, gap=0.1)
    run = simulate(trace, setup(faults=[Fault(0.7, "kill", "decode-1")]), policy)
    failed = [job for job in run.cluster.jobs if job.status is Status.FAILED]
    assert failed
    assert all(job.delivered and job.timing.end < 0 for job in failed)
    assert run.figures["served"] == len(trace.requests) - len(failed)
    check_run(run)


def test_slow_workers_and_links_cost_time() -> None:
    def mean(faults: list[Fault]) -> float:
        found = simulate(sessions(), setup(prefill=1, decode=1, faults=faults), "ours").figures["e2e_seconds"]
        assert isinstance(found, dict)
        return float(found["mean"])

    usual = mean([])
    assert mean([Fault(0.0, "slow", "decode-0", 3.0)]) > 2 * usual
    assert mean([Fault(0.0, "slow", "prefill-0", 3.0)]) > usual
    assert mean([Fault(0.0, "link", "decode-0", 50.0)]) > usual
    assert mean([Fault(0.0, "kill", "prefill-7")]) == usual


def test_fault_scripts() -> None:
    faults = parse_faults("# nothing\n 9 slow decode-1 2.5 # late\n\n1 kill prefill-0\n")
    assert faults == [Fault(1.0, "kill", "prefill-0"), Fault(9.0, "slow", "decode-1", 2.5)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("5 explode prefill-0", "verb 'explode'"),
        ("5", "verb ''"),
        ("5 kill", "kill takes a worker"),
        ("5 slow prefill-0", "slow takes a worker and a factor"),
        ("x kill prefill-0", "line 1: could not convert"),
        ("-1 kill prefill-0", "before the start"),
        ("5 kill router-0", "allowed: prefill-N, decode-N"),
        ("5 link decode-0 0", "allowed: above 0"),
    ],
)
def test_bad_fault_scripts_say_what_is_wrong(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_faults(line)


def test_a_sweep_finds_the_best_split() -> None:
    trace = sessions(count=8, gap=0.05)
    seen: list[tuple[int, int]] = []
    rows = sweep(trace, setup(), "ours", 5, lambda prefill, decode: seen.append((prefill, decode)))
    assert seen == [(1, 4), (2, 3), (3, 2), (4, 1)]
    found = best(rows)
    assert found["goodput_per_second"] == max(row["goodput_per_second"] for row in rows)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="at least 2"):
        sweep(trace, setup(), "ours", 1)


def test_the_clock_keeps_order() -> None:
    clock, seen = Clock(), list[tuple[float, str]]()

    def note(name: str) -> None:
        seen.append((clock.now, name))
        if name == "b":
            clock.at(0.0, note, "late")

    for at, name in [(2.0, "c"), (1.0, "a"), (1.0, "b")]:
        clock.at(at, note, name)
    clock.run(lambda: False)
    assert seen == [(1.0, "a"), (1.0, "b"), (1.0, "late"), (2.0, "c")]
    assert all(before[0] <= after[0] for before, after in itertools.pairwise(seen))
