# SPDX-License-Identifier: Apache-2.0
"""Simulated pools whose workers change their roles: nothing is lost, caches stay, loads are followed, runs repeat."""

import functools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.control.simulated import BLOCK_TOKENS, MODEL, sessions, setup
from twinpool.config import RebalanceSection
from twinpool.control.cli.main import app
from twinpool.control.rebalance.history import reversals
from twinpool.control.replay.trace import Request, Trace, compress
from twinpool.control.simulate.cluster import Cluster
from twinpool.control.simulate.faults import Fault
from twinpool.control.simulate.job import Status
from twinpool.control.simulate.policies import make_router
from twinpool.control.simulate.results import Run, simulate
from twinpool.control.simulate.setup import Setup
from twinpool.control.simulate.worker import Worker

FAST = RebalanceSection(
    interval_seconds=1,
    window_seconds=10,
    confirm_seconds=2,
    dwell_seconds=20,
    cooldown_seconds=3,
    reversal_seconds=60,
    flip_seconds=2,
    horizon_seconds=100,
    ttft_seconds=1.0,
    itl_seconds=0.05,
)


def load_step(seconds: float = 90.0, seed: int = 0) -> Trace:
    """Long prompts with short answers, then short prompts with long answers."""
    draw = random.Random(seed)
    requests: list[Request] = []
    fresh = 1
    for begin, rate, prompt, answer in ((0.0, 6.0, 600, 4), (seconds, 12.0, 48, 200)):
        at = begin + draw.expovariate(rate)
        while at < begin + seconds:
            blocks = prompt // BLOCK_TOKENS
            runs = compress(range(fresh, fresh + blocks))
            fresh += blocks
            requests.append(Request(len(requests), prompt, answer, at, runs))
            at += draw.expovariate(rate)
    return Trace("step", BLOCK_TOKENS, requests)


def pool(rebalance: RebalanceSection | None = FAST, **changes: object) -> Setup:
    chosen: dict[str, object] = {
        "prefill": 3,
        "decode": 3,
        "model": replace(MODEL, prefill_token=1e-3),
        "rebalance": rebalance,
        "flip_seconds": 0.5,
        "max_new_tokens": 200,
    }
    return setup(**(chosen | changes))


def flip(run: Setup, trace: Trace, at: float, name: str, to: str) -> Cluster:
    """A run in which one worker is flipped by hand, as soon as it has something to do."""
    cluster = Cluster(trace, run, make_router("ours", run))

    def begin() -> None:
        worker = cluster.find(name)
        assert worker is not None
        if cluster.idle(worker):
            cluster.clock.at(cluster.clock.now + 0.01, begin)
        else:
            cluster.flips.begin(worker, to)

    cluster.clock.at(at, begin)
    cluster.run()
    return cluster


def every(cluster: Cluster) -> list[Worker]:
    found: list[Worker] = []
    for last in [*cluster.prefill.values(), *cluster.decode.values()]:
        worker: Worker | None = last
        while worker is not None:
            found.append(worker)
            worker = worker.former
    return found


@pytest.mark.parametrize(("name", "to"), [("prefill-0", "decode"), ("decode-0", "prefill")])
def test_a_flip_loses_nothing_and_keeps_the_cache(name: str, to: str) -> None:
    trace = sessions(count=10, turns=6)
    cluster = flip(setup(core={"prefix_fetch": 1.0}), trace, 1.0, name, to)
    assert all(job.status is Status.SERVED and job.attempts == 1 for job in cluster.jobs)
    (done,) = cluster.flips.log
    assert done.succeeded
    assert done.began < done.drained
    assert done.ended - done.drained == pytest.approx(cluster.setup.flip_seconds)
    worker = cluster.find(name)
    assert worker is not None
    assert worker.role == to
    assert worker.former is not None
    assert worker.cache is worker.former.cache
    assert worker.incarnation == worker.former.incarnation
    assert sum(job.computed for job in cluster.jobs) == sum(each.computed_tokens for each in every(cluster))
    for each in every(cluster):
        assert each.cache.held == 0
        each.cache.check()


def test_a_flipped_worker_is_given_work_of_its_new_role() -> None:
    """What a router believes of prefill steps must not keep answers away from the worker that made them."""
    trace = load_step()
    cluster = flip(pool(None), trace, 95.0, "prefill-0", "decode")
    assert cluster.decode["prefill-0"].busy_seconds > 10.0


def test_cached_prefixes_still_hit_after_a_flip() -> None:
    """One prompt again after its worker has become a decode worker: the blocks are taken from there."""
    runs = compress(range(1, 21))
    requests = [Request(n, 20 * BLOCK_TOKENS + 5, 3, at, runs) for n, at in ((0, 0.0), (1, 30.0))]
    chosen = setup(prefill=2, decode=1, core={"prefix_fetch": 1.0})
    cluster = Cluster(Trace("again", BLOCK_TOKENS, requests), chosen, make_router("ours", chosen))

    def begin() -> None:
        holder = next(worker for worker in cluster.prefill.values() if worker.computed_tokens)
        cluster.flips.begin(holder, "decode")

    cluster.clock.at(10.0, begin)
    cluster.run()
    (done,) = cluster.flips.log
    assert done.succeeded
    second = cluster.jobs[1]
    assert second.cached == 20 or (second.local and second.decode_cached >= 20)


def test_a_worker_that_dies_in_its_flip_fails_it_and_the_pool_goes_on() -> None:
    faults = [Fault(2.0, "kill", "prefill-0"), Fault(6.0, "start", "prefill-0")]
    chosen = setup(faults=faults, flip_seconds=3.0)
    cluster = flip(chosen, sessions(count=10, turns=6), 1.0, "prefill-0", "decode")
    (done,) = cluster.flips.log
    assert not done.succeeded
    worker = cluster.find("prefill-0")
    assert worker is not None
    assert worker.role == "prefill"
    assert all(job.status is Status.SERVED for job in cluster.jobs if job.attempts == 1)


@functools.cache
def auto() -> Run:
    """Looked at by several tests, changed by none."""
    return simulate(load_step(), pool(), "ours")


def test_a_pool_follows_a_load_step() -> None:
    run = auto()
    figures, cluster = run.figures, run.cluster
    assert figures["served"] == len(cluster.jobs)
    flips = figures["flips"]
    assert isinstance(flips, list)
    assert {flip["to"] for flip in flips} == {"prefill", "decode"}
    assert all(flip["succeeded"] for flip in flips)
    assert all(flip["to"] == "prefill" for flip in flips if flip["at"] < 90.0)
    assert figures["reversals"] == 1
    goodputs = [
        simulate(load_step(), pool(None, prefill=count, decode=6 - count), "ours").figures
        for count in (2, 3, 4)
    ]
    best = max(row["met_objectives"] for row in goodputs)  # type: ignore[type-var]
    assert figures["met_objectives"] > 1.1 * best  # type: ignore[operator]


def test_equal_runs_flip_equally() -> None:
    one, two = auto(), simulate(load_step(), pool(), "ours")
    assert one.figures == two.figures
    assert [moment.decision for moment in one.cluster.rebalancer.timeline] == [  # type: ignore[union-attr]
        moment.decision
        for moment in two.cluster.rebalancer.timeline  # type: ignore[union-attr]
    ]


def test_a_dry_run_decides_and_changes_nothing() -> None:
    dry = simulate(load_step(), pool(FAST.model_copy(update={"dry_run": True})), "ours")
    assert dry.figures["flips"] == []
    assert (len(dry.cluster.prefill), len(dry.cluster.decode)) == (3, 3)
    assert dry.cluster.rebalancer is not None
    assert any(moment.decision.kind == "flip" for moment in dry.cluster.rebalancer.timeline)


def test_a_steady_load_is_left_alone() -> None:
    trace = sessions(count=60, turns=8, gap=1.0)
    run = simulate(trace, setup(rebalance=FAST, core={"prefix_fetch": 1.0}), "ours")
    assert run.cluster.rebalancer is not None
    moves = run.cluster.rebalancer.history.moves
    assert len(moves) <= 1
    assert reversals(moves) == 0


def test_faults_and_flips_together_lose_no_request_that_was_not_on_the_dead_worker() -> None:
    faults = [
        Fault(30.0, "kill", "decode-1"),
        Fault(50.0, "start", "decode-1"),
        Fault(100.0, "slow", "prefill-1", 2.0),
    ]
    run = simulate(load_step(), pool(faults=faults), "ours")
    causes = run.figures["causes"]
    assert isinstance(causes, dict)
    assert set(causes) <= {"decode_lost"}
    assert all(job.status is not Status.WAITING for job in run.cluster.jobs)


def test_other_policies_know_no_flips() -> None:
    with pytest.raises(ValueError, match="allowed with a rebalancer: ours"):
        simulate(load_step(), pool(), "round_robin")


# --- the command --------------------------------------------------------------------------------


def written(tmp_path: Path) -> Path:
    lines = [
        json.dumps(
            {
                "id": request.id,
                "timestamp": int(request.arrival * 1e3),
                "after": None,
                "think_ms": 0,
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": [int(block) for block in request.block_ids()],
            }
        )
        for request in load_step(60.0).requests
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_simulate_shows_flips_with_their_reasons(tmp_path: Path) -> None:
    trace, plot = written(tmp_path), tmp_path / "use.svg"
    common = [
        "simulate",
        str(trace),
        "--preset",
        "cpu-tiny",
        "--prefill",
        "2",
        "--decode",
        "4",
        "--format",
        "scaled",
    ]
    keys = [
        "interval_seconds=1",
        "window_seconds=10",
        "confirm_seconds=2",
        "utilisation_high=0.05",
        "utilisation_low=0.02",
    ]
    sets = [part for key in keys for part in ("--rebalance-set", key)]
    done = CliRunner().invoke(app, [*common, "--rebalance", *sets, "--plot", str(plot), "-o", "json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["setup"]["rebalance"]["window_seconds"] == 10
    assert document["policies"][0]["flips"]
    assert "prefill at" in document["policies"][0]["flips"][0]["message"]
    assert "prefill needed" in plot.read_text()
    shown = CliRunner().invoke(app, [*common, "--rebalance", *sets])
    assert shown.exit_code == 0
    assert "flips, " in shown.output


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--rebalance-set", "window_seconds=5"], "without --rebalance"),
        (["--rebalance", "--rebalance-set", "window_seconds"], "expected name=value"),
        (["--rebalance", "--rebalance-set", "windows=5"], "unknown key"),
        (["--rebalance", "--rebalance-set", "utilisation_low=0.9"], "is not below"),
        (["--rebalance", "--policy", "additive"], "allowed with a rebalancer: ours"),
    ],
)
def test_simulate_refuses_what_makes_no_sense(tmp_path: Path, wrong: list[str], said: str) -> None:
    command = ["simulate", str(written(tmp_path)), "--preset", "cpu-tiny", "--format", "scaled", *wrong]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2, done.output
    assert said in done.output
