# SPDX-License-Identifier: Apache-2.0
"""Prefixes that are pulled and prompts that decode workers compute: what commands say, and what becomes of failures."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.support.fake_cache import FakeCache
from tests.support.fake_cluster import FakeCluster, collect, fake_cluster, generate, prompt
from tests.support.fake_worker import FIRST_TOKEN, Script
from tests.support.waiting import until
from twinpool import metrics
from twinpool.v1 import worker_pb2 as pb

BLOCK = 16
PROMPT = prompt(20 * BLOCK + 3)

# Pulls are cheap, tokens dear: what can be pulled is pulled.
FETCH: dict[str, object] = {"prior_prefill_token_seconds": 0.01, "fetch_backoff_seconds": 30.0}
LOCAL: dict[str, object] = {"local_prefill": True, "prefix_fetch": False}


@asynccontextmanager
async def cached_cluster(
    model_path: Path, settings: dict[str, object], *, prefill: int = 1, decode: int = 1
) -> AsyncIterator[FakeCluster]:
    """Workers with caches that publish."""
    async with fake_cluster(model_path, prefill=0, decode=0, settings=settings) as cluster:
        roles = [("p", pb.ROLE_PREFILL, prefill), ("d", pb.ROLE_DECODE, decode)]
        for letter, role, count in roles:
            for number in range(count):
                made = await cluster.add(f"{letter}{number}", role, model_path=str(model_path))
                made.cache = FakeCache(made.key)
                cluster.router.fleet.upsert(made.record())
        await cluster.ready()
        await until(lambda: all(s.state == "live" for s in cluster.router.locality.statuses()))
        try:
            yield cluster
        finally:
            for worker in cluster.workers.values():
                assert worker.cache is not None
                worker.cache.close()


async def learn(cluster: FakeCluster, name: str, tokens: list[int]) -> None:
    """A worker caches a prompt that it was never asked for here, and the router hears of it."""
    made = cluster.workers[name]
    assert made.cache is not None
    group = cluster.router.models.resolve("").group
    root, hashes = cluster.router.tokenize.hash(np.array(tokens, np.int32), group, "", "")
    made.cache.use(hashes, root, len(tokens))
    await until(lambda: dict(cluster.router.core.longest_prefix(hashes)).get(name) == len(hashes))


def fetches(reason: str) -> float:
    return metrics.ROUTER_PREFIX_FETCHES.labels(reason)._value.get()


async def test_the_source_is_named_and_what_moved_is_told(model_path: Path) -> None:
    async with cached_cluster(model_path, FETCH) as cluster:
        owner = cluster.workers["d0"]
        await learn(cluster, "d0", PROMPT)
        before = fetches("FETCHED"), metrics.ROUTER_PREFIX_FETCHED_BYTES._value.get()
        answer = await cluster.ask(generate(PROMPT))
        (command,) = cluster.workers["p0"].prefills
        assert command.prefix.owner == pb.WorkerId(name="d0", incarnation=owner.key.incarnation)
        assert (command.prefix.endpoint, command.prefix.blocks) == (owner.endpoint, 20)
        assert not cluster.workers["d0"].decodes[0].HasField("prefix"), "only who computes pulls"
        assert answer.finished.usage.cached_tokens == 20 * BLOCK
        assert answer.finished.prefix_fetch.blocks == 20
        assert fetches("FETCHED") - before[0] == 1
        moved = metrics.ROUTER_PREFIX_FETCHED_BYTES._value.get() - before[1]
        assert moved == answer.finished.prefix_fetch.bytes > 0
        await cluster.assert_quiescent()


async def test_nothing_is_named_for_what_nobody_has(model_path: Path) -> None:
    async with cached_cluster(model_path, FETCH) as cluster:
        answer = await cluster.ask(generate(PROMPT))
        assert not cluster.workers["p0"].prefills[0].HasField("prefix")
        assert not answer.finished.HasField("prefix_fetch")


async def test_a_source_that_does_not_deliver_is_left_out_for_a_while(model_path: Path) -> None:
    async with cached_cluster(model_path, FETCH) as cluster:
        prefill = cluster.workers["p0"]
        prefill.script = Script(fail_fetch=pb.FAILURE_REASON_PEER_LOST)
        for seed in range(3):
            await learn(cluster, "d0", prompt(320, seed))
        before = fetches("PEER_LOST")
        for seed in range(2):
            answer = await cluster.ask(generate(prompt(320, seed)))
            assert answer.finished.usage.cached_tokens == 0, "computed"
        assert [command.HasField("prefix") for command in prefill.prefills] == [True, False]
        assert fetches("PEER_LOST") - before == 1
        later = time.monotonic() + 31.0
        cluster.router.prefixes._clock = lambda: later
        await cluster.ask(generate(prompt(320, 2)))
        assert prefill.prefills[2].HasField("prefix")
        await cluster.assert_quiescent()


async def test_a_source_that_has_evicted_is_asked_again_for_other_prompts(model_path: Path) -> None:
    async with cached_cluster(model_path, FETCH) as cluster:
        prefill = cluster.workers["p0"]
        for seed in range(2):
            await learn(cluster, "d0", prompt(320, seed))
            prefill.script = Script(fail_fetch=pb.FAILURE_REASON_NOT_CACHED)
            answer = await cluster.ask(generate(prompt(320, seed)))
            assert answer.error is None
        assert all(command.HasField("prefix") for command in prefill.prefills)


async def test_a_failure_that_this_version_does_not_know(model_path: Path) -> None:
    async with cached_cluster(model_path, FETCH) as cluster:
        await learn(cluster, "d0", PROMPT)
        cluster.workers["p0"].script = Script(fail_fetch=99)  # type: ignore[arg-type]
        before = fetches("UNKNOWN")
        assert (await cluster.ask(generate(PROMPT))).error is None
        assert fetches("UNKNOWN") - before == 1


# --- decode workers that compute prompts


async def test_a_short_suffix_needs_no_prefill_worker(model_path: Path) -> None:
    async with cached_cluster(model_path, LOCAL) as cluster:
        await learn(cluster, "d0", PROMPT)
        before = metrics.ROUTER_LOCAL_PREFILLS._value.get()
        answer = await cluster.ask(generate(PROMPT, max_tokens=5))
        assert answer.tokens() == [FIRST_TOKEN + at for at in range(5)]
        assert cluster.workers["p0"].prefills == []
        (command,) = cluster.workers["d0"].decodes
        assert not command.HasField("owner")
        assert not command.owner_endpoint
        assert (answer.finished.prefill_worker, answer.finished.decode_worker) == ("d0", "d0")
        assert answer.finished.usage.cached_tokens == 20 * BLOCK
        assert answer.finished.handoff.bytes == 0
        assert metrics.ROUTER_LOCAL_PREFILLS._value.get() - before == 1
        await cluster.assert_quiescent()


async def test_a_long_prompt_goes_the_usual_way(model_path: Path) -> None:
    async with cached_cluster(model_path, LOCAL | {"prior_prefill_token_seconds": 0.01}) as cluster:
        answer = await cluster.ask(generate(PROMPT))
        assert (answer.finished.prefill_worker, answer.finished.decode_worker) == ("p0", "d0")
        await cluster.assert_quiescent()


@pytest.mark.parametrize("max_tokens", [1, 2])
@pytest.mark.parametrize("n", [1, 3])
async def test_few_tokens_and_several_choices(model_path: Path, max_tokens: int, n: int) -> None:
    async with cached_cluster(model_path, LOCAL) as cluster:
        answer = await cluster.ask(generate(prompt(20), max_tokens=max_tokens, n=n))
        for index in range(n):
            assert answer.tokens(index) == [FIRST_TOKEN + at + index for at in range(max_tokens)]
        assert answer.finished.prefill_worker == "d0"
        await cluster.assert_quiescent()


async def test_a_decode_worker_pulls_what_another_has_before_it_computes(model_path: Path) -> None:
    settings = FETCH | {"local_prefill": True}
    async with cached_cluster(model_path, settings, decode=2) as cluster:
        await learn(cluster, "d0", PROMPT)
        busy = cluster.workers["d0"]
        # d0 is full, so the prompt goes to d1.
        busy.report(running_requests=64, available_blocks=4000, total_blocks=4096)
        await until(
            lambda: next(w for w in cluster.router.core.workers() if w["name"] == "d0")["running"] == 64
        )
        answer = await cluster.ask(generate(PROMPT))
        (command,) = cluster.workers["d1"].decodes
        assert not command.HasField("owner")
        assert command.prefix.owner.name == "d0"
        assert answer.finished.prefix_fetch.blocks == 20
        await cluster.assert_quiescent()


async def test_a_refusal_goes_elsewhere(model_path: Path) -> None:
    async with cached_cluster(model_path, LOCAL, decode=2) as cluster:
        await learn(cluster, "d0", PROMPT)
        cluster.workers["d0"].script = Script(refuse=pb.FAILURE_REASON_NO_CAPACITY)
        answer = await cluster.ask(generate(PROMPT))
        assert answer.finished.decode_worker == "d1"
        assert answer.finished.attempts == 2
        await cluster.assert_quiescent()


async def test_a_prompt_that_fails_there_is_placed_anew(model_path: Path) -> None:
    async with cached_cluster(model_path, LOCAL, decode=2) as cluster:
        await learn(cluster, "d0", PROMPT)
        cluster.workers["d0"].script = Script(fail_prefill=pb.FAILURE_REASON_INTERNAL)
        answer = await cluster.ask(generate(PROMPT))
        assert answer.finished.decode_worker == "d1"
        await cluster.assert_quiescent()


async def test_the_worker_dies_before_its_first_token(model_path: Path) -> None:
    async with cached_cluster(model_path, LOCAL, decode=2) as cluster:
        await learn(cluster, "d0", PROMPT)
        doomed = cluster.workers["d0"]
        doomed.script = Script(prefill_gate=asyncio.Event())
        asking = asyncio.create_task(cluster.ask(generate(PROMPT)))
        await until(lambda: doomed.decodes)
        await doomed.kill()
        assert (await asking).finished.decode_worker == "d1"
        await until(lambda: not cluster.held())


async def test_the_worker_dies_after_its_first_token(model_path: Path) -> None:
    async with cached_cluster(model_path, LOCAL, decode=2) as cluster:
        await learn(cluster, "d0", PROMPT)
        doomed = cluster.workers["d0"]
        doomed.script = Script(step_seconds=0.02, hold_after_tokens=8)
        asking = asyncio.create_task(cluster.ask(generate(PROMPT, max_tokens=60)))
        await until(lambda: any(session.running for session in doomed.sessions))
        await doomed.kill()
        answer = await asking
        assert (answer.error, len(answer.tokens())) == (None, 60)
        assert (answer.finished.decode_worker, answer.finished.attempts) == ("d1", 2)
        await cluster.assert_quiescent()


async def test_a_client_that_leaves_while_the_prompt_is_computed(model_path: Path) -> None:
    async with cached_cluster(model_path, LOCAL) as cluster:
        worker = cluster.workers["d0"]
        worker.script = Script(prefill_gate=asyncio.Event())
        call = cluster.stub.Generate(generate(prompt(20)), timeout=120.0)
        asking = asyncio.create_task(collect(call))
        await until(lambda: worker.decodes)
        call.cancel()
        await asking
        await cluster.assert_quiescent()
        assert len(worker.cancels) == 1
