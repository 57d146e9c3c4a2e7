# SPDX-License-Identifier: Apache-2.0
"""What routers know of caches: from the workers alone, the same in each router, and honest where it is wrong."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from tests.support.fake_cache import FakeCache
from tests.support.fake_cluster import FakeCluster, fake_cluster, generate, prompt
from tests.support.waiting import until
from twinpool import metrics
from twinpool.config import TwinpoolConfig
from twinpool.ids import WorkerKey
from twinpool.router.app import Router
from twinpool.router.index.status import WorkerLocality
from twinpool.router.locality_condition import ERROR_SAMPLES_MIN, FULL_SECONDS, LocalityCondition
from twinpool.v1 import worker_pb2 as worker

BLOCK = 16


@asynccontextmanager
async def cached_cluster(
    model_path: Path, prefill: int = 2, num_blocks: int = 256
) -> AsyncIterator[FakeCluster]:
    """Prefill workers with caches that publish, and one decode worker without."""
    async with fake_cluster(model_path, prefill=0, decode=1) as cluster:
        caches = []
        for number in range(prefill):
            made = await cluster.add(f"p{number}", worker.ROLE_PREFILL, model_path=str(model_path))
            made.cache = FakeCache(made.key, num_blocks)
            caches.append(made.cache)
            cluster.router.fleet.upsert(made.record())
        await cluster.ready()
        await until(
            lambda: all(s.state == "live" for s in cluster.router.locality.statuses() if s.key.name != "d0")
        )
        try:
            yield cluster
        finally:
            for cache in caches:
                cache.close()


def held(router: Router, tokens: list[int]) -> dict[str, int]:
    """Leading blocks of a prompt by worker, as a router knows it."""
    group = router.models.resolve("").group
    _, hashes = router.tokenize.hash(np.array(tokens, np.int32), group, "", "")
    return dict(router.core.longest_prefix(hashes))


def longest(router: Router, tokens: list[int]) -> int:
    """Leading blocks of a prompt on the worker that holds most."""
    return max(held(router, tokens).values(), default=0)


def counted() -> dict[str, float]:
    """The counters of locality."""
    return {
        "query": metrics.ROUTER_QUERY_TOKENS._value.get(),
        "best": metrics.ROUTER_BEST_CACHED_TOKENS._value.get(),
        "predicted": metrics.ROUTER_PREDICTED_CACHED_TOKENS._value.get(),
        "actual": metrics.ROUTER_CACHED_TOKENS._value.get(),
    }


async def test_predicted_is_what_the_worker_finds(model_path: Path) -> None:
    """Never only "at least one cached token": the exact number, for every turn and for two workers."""
    async with cached_cluster(model_path) as cluster:
        before = counted()
        conversation = prompt(40, seed=1)
        for turn in range(1, 5):
            answer = await cluster.ask(generate(conversation))
            expected = (len(conversation) - 28) // BLOCK * BLOCK if turn > 1 else 0
            assert answer.finished.usage.cached_tokens == expected
            await until(lambda told=conversation: longest(cluster.router, told) == len(told) // BLOCK)
            conversation = conversation + prompt(28, seed=turn + 1)
        after = {name: value - before[name] for name, value in counted().items()}
        assert after["predicted"] == after["actual"] == after["best"] > 0
        assert after["query"] == 40 + 68 + 96 + 124
        cluster.router.locality.watch()
        assert cluster.router.locality.condition.error == 0.0


async def test_a_whole_prompt_in_the_cache_is_not_predicted_beyond_its_last_block(model_path: Path) -> None:
    async with cached_cluster(model_path, prefill=1) as cluster:
        tokens = prompt(4 * BLOCK)
        await cluster.ask(generate(tokens))
        await until(lambda: held(cluster.router, tokens).get("p0") == 4)
        before = counted()
        answer = await cluster.ask(generate(tokens))
        assert answer.finished.usage.cached_tokens == 3 * BLOCK
        after = {name: value - before[name] for name, value in counted().items()}
        assert after["best"] == after["predicted"] == after["actual"] == 3 * BLOCK


async def test_two_routers_know_the_same(model_path: Path) -> None:
    """Also one that starts late and has placed nothing."""
    async with cached_cluster(model_path, num_blocks=40) as cluster:
        prompts = [prompt(16 * (2 + seed % 4), seed=seed) for seed in range(30)]
        for tokens in prompts:
            await cluster.ask(generate(tokens))
        late = Router(TwinpoolConfig(), "router-late")
        await late.start()
        try:
            for made in cluster.workers.values():
                late.fleet.upsert(made.record())
            keys = [made.key for made in cluster.workers.values()]
            await until(lambda: all((session := late.fleet.session(key)) and session.up for key in keys))
            await until(
                lambda: (
                    [late_held(late, tokens) for tokens in prompts]
                    == [late_held(cluster.router, tokens) for tokens in prompts]
                )
            )
            assert any(late_held(late, tokens) for tokens in prompts)
            assert not all(late_held(late, tokens) for tokens in prompts), "some were evicted"
            ours, theirs = (
                {row["name"]: row for row in router.core.workers()} for router in (cluster.router, late)
            )
            assert {name: row["indexed_blocks"] for name, row in ours.items()} == {
                name: row["indexed_blocks"] for name, row in theirs.items()
            }
        finally:
            await late.stop(0.0)


def late_held(router: Router, tokens: list[int]) -> dict[str, int]:
    try:
        return held(router, tokens)
    except Exception:
        # Its tokenizer is still loading.
        return {"": -1}


async def test_own_reservations_and_reports_are_kept_apart(model_path: Path) -> None:
    async with cached_cluster(model_path, prefill=1) as cluster:
        gate = asyncio.Event()
        cluster.workers["p0"].script.prefill_gate = gate
        asked = asyncio.ensure_future(cluster.ask(generate(prompt(64))))
        await until(lambda: cluster.workers["p0"].held)
        cluster.workers["p0"].report(running_requests=7, waiting_prefill_tokens=4000, available_blocks=9)
        row = lambda: next(row for row in cluster.router.core.workers() if row["name"] == "p0")  # noqa: E731
        await until(lambda: row()["reported"])
        assert row()["running"] == 7
        assert row()["reserved_prefill_tokens"] == 64
        gate.set()
        await asked
        await until(lambda: row()["reserved_prefill_tokens"] == 0)
        assert row()["running"] == 7


async def test_an_eviction_is_known_before_the_next_placement(model_path: Path) -> None:
    async with cached_cluster(model_path, prefill=1) as cluster:
        tokens = prompt(64)
        await cluster.ask(generate(tokens))
        await until(lambda: held(cluster.router, tokens) == {"p0": 4})
        cache = cluster.workers["p0"].cache
        assert cache is not None
        cache.evict()
        await until(lambda: not held(cluster.router, tokens))


# --- the condition ------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def status(name: str, state: str, cause: str = "") -> WorkerLocality:
    return WorkerLocality(WorkerKey(name, 1), state, cause, 0, 0, 0.0, 0, 0)


def causes(condition: LocalityCondition) -> list[str]:
    return [one.cause for one in condition.causes]


def gauge(cause: str) -> float:
    return metrics.ROUTER_LOCALITY_DEGRADED.labels(cause)._value.get()


def test_workers_out_of_step_have_a_grace_and_silent_ones_have_none() -> None:
    clock = Clock()
    condition = LocalityCondition(clock)
    workers = [status("a", "live"), status("b", "resyncing", "gap")]
    condition.update(workers, evicted=0, store_lost=False)
    assert not condition.degraded
    clock.now += 5.1
    condition.update(workers, evicted=0, store_lost=False)
    assert causes(condition) == ["resyncing"]
    assert condition.causes[0].detail == "b (gap)"
    assert gauge("resyncing") == 1
    condition.update([status("a", "live"), status("b", "live")], evicted=0, store_lost=False)
    assert not condition.degraded
    assert gauge("resyncing") == 0
    condition.update([status("a", "unreachable"), status("b", "segments")], evicted=0, store_lost=False)
    assert causes(condition) == ["unreachable", "no_event_stream"]
    # Out of step anew: the grace begins anew.
    condition.update(workers, evicted=0, store_lost=False)
    assert not condition.degraded


def test_predictions_that_fail_are_a_cause_and_right_ones_end_it() -> None:
    condition = LocalityCondition(Clock())
    for _ in range(ERROR_SAMPLES_MIN - 1):
        condition.observe(-50, 100)
    condition.update([], evicted=0, store_lost=False)
    assert not condition.degraded
    condition.observe(50, 100)
    condition.update([], evicted=0, store_lost=False)
    assert causes(condition) == ["prediction_error"]
    assert "50%" in condition.causes[0].detail
    for _ in range(60):
        condition.observe(0, 100)
    condition.update([], evicted=0, store_lost=False)
    assert not condition.degraded


def test_an_index_that_forgets_is_a_cause_for_a_while() -> None:
    clock = Clock()
    condition = LocalityCondition(clock)
    condition.update([], evicted=3, store_lost=False)
    assert causes(condition) == ["index_full"]
    clock.now += FULL_SECONDS
    condition.update([], evicted=3, store_lost=False)
    assert not condition.degraded


def test_a_lost_store_matters_where_it_is_needed() -> None:
    condition = LocalityCondition(Clock())
    condition.update([status("a", "live")], evicted=0, store_lost=True)
    assert not condition.degraded
    condition.update([status("a", "live"), status("b", "segments")], evicted=0, store_lost=True)
    assert causes(condition) == ["no_event_stream", "store_lost"]


def test_many_names_are_not_all_shown() -> None:
    condition = LocalityCondition(Clock())
    condition.update([status(f"w{at}", "segments") for at in range(9)], evicted=0, store_lost=False)
    assert condition.causes[0].detail == "w0, w1, w2, w3, w4 and 4 more"
