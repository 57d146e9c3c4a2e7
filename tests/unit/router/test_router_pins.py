# SPDX-License-Identifier: Apache-2.0
"""Warm with a pin, and Release: a real router, fake workers with real caches and the real books of pins."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import yaml

from tests.support.fake_cache import FakeCache
from tests.support.fake_cluster import FakeCluster, fake_cluster, generate, prompt
from tests.support.fake_pins import FakePins
from tests.support.waiting import until
from twinpool.client import Client, release_request
from twinpool.cluster_client import ClusterClient
from twinpool.config import SessionsSection
from twinpool.errors import TwinpoolError, from_rpc_error
from twinpool.rpc import digest_of
from twinpool.sync_client import SyncClusterClient
from twinpool.v1 import inference_pb2 as pb

BLOCK = 16
TOKENS = 5 * BLOCK + 3


@asynccontextmanager
async def pinning(
    model_path: Path, *, prefill: int = 2, sessions: dict[str, Any] | None = None, **settings: object
) -> AsyncIterator[FakeCluster]:
    """Prefill workers have caches that publish their events."""
    caches: list[FakeCache] = []
    async with fake_cluster(model_path, prefill=prefill, settings=settings) as cluster:
        for name, made in cluster.workers.items():
            if name.startswith("p"):
                made.cache = FakeCache(made.key, 64)
                made.pins = FakePins(made.cache, SessionsSection(**(sessions or {})))
                caches.append(made.cache)
                cluster.router.fleet.upsert(made.record())
        await until(
            lambda: all(s.state == "live" for s in cluster.router.locality.statuses() if s.key.name != "d0")
        )
        try:
            yield cluster
        finally:
            for cache in caches:
                cache.close()


def client(cluster: FakeCluster, key: str = "") -> Client:
    return Client(cluster.router.endpoint, key=key)


def pins(cluster: FakeCluster) -> int:
    return sum(made.cache.blocks.prefix_pins for made in cluster.workers.values() if made.cache is not None)


def prefills(cluster: FakeCluster) -> int:
    return sum(len(made.prefills) for made in cluster.workers.values())


async def refused(work: Callable[[], Any]) -> TwinpoolError:
    with pytest.raises(TwinpoolError) as caught:
        await work()
    return caught.value


async def test_warm_pins_where_it_computes_and_again_only_makes_it_longer(model_path: Path) -> None:
    async with pinning(model_path) as cluster, client(cluster) as one:
        message = generate(prompt(TOKENS), session_id="s")
        first = await one.warm(message, pin_seconds=60)
        assert (first.prompt_tokens, first.cached_tokens, first.pin.tokens) == (TOKENS, 0, 5 * BLOCK)
        assert 59 < first.pin.expires_in.ToNanoseconds() / 1e9 <= 60
        worker = cluster.workers[first.pin.worker]
        assert worker.cache is not None
        assert (worker.cache.blocks.prefix_pins, worker.cache.blocks.prefix_pinned_blocks) == (1, 5)
        before = prefills(cluster)
        again = await one.warm(message, pin_seconds=600)
        assert (again.pin.id, again.pin.worker) == (first.pin.id, first.pin.worker)
        assert again.pin.expires_in.ToSeconds() >= 599
        assert again.cached_tokens == 5 * BLOCK
        assert (prefills(cluster) - before, pins(cluster)) == (0, 1), "nothing is computed for it"
        plain = await one.warm(message)
        assert not plain.HasField("pin")
        await cluster.assert_quiescent()


async def test_another_router_finds_the_pin_by_the_index(model_path: Path) -> None:
    async with pinning(model_path, prefill=3) as cluster, client(cluster) as one:
        message = generate(prompt(TOKENS), tenant="t")
        first = await one.warm(message, pin_seconds=60)
        computed = cluster.workers[first.pin.worker].prefills[-1].prompt
        hashes = np.frombuffer(computed.block_hashes, np.uint8).reshape(-1, 16)
        for name, made in cluster.workers.items():
            if made.cache is not None and name != first.pin.worker:
                made.cache.use_prompt(computed)
        # What a router that has just started does not have.
        cluster.router.service._pins._where.clear()
        await until(lambda: [n for _, n in cluster.router.core.longest_prefix(hashes)] == [5, 5, 5])
        before = prefills(cluster)
        again = await one.warm(message, pin_seconds=60)
        assert (again.pin.id, again.pin.worker) == (first.pin.id, first.pin.worker)
        assert (prefills(cluster) - before, pins(cluster)) == (0, 1)


async def test_what_is_lost_is_restored_by_the_next_warm(model_path: Path) -> None:
    async with pinning(model_path, prefill=1) as cluster, client(cluster) as one:
        message = generate(prompt(TOKENS))
        await one.warm(message, pin_seconds=60)
        worker = cluster.workers["p0"]
        assert worker.cache is not None
        worker.cache.evict()
        assert pins(cluster) == 0
        restored = await one.warm(message, pin_seconds=60)
        assert (restored.cached_tokens, restored.pin.tokens, pins(cluster)) == (0, 5 * BLOCK, 1)


async def test_a_prompt_that_is_evicted_before_it_is_pinned_is_computed_again_so_often(
    model_path: Path,
) -> None:
    async with pinning(model_path, prefill=1) as cluster, client(cluster) as one:
        books = cluster.workers["p0"].pins
        assert books is not None
        books.evictions = 2
        made = await one.warm(generate(prompt(TOKENS)), pin_seconds=60)
        assert (made.pin.tokens, prefills(cluster)) == (5 * BLOCK, 3)
        books.evictions = 3
        error = await refused(lambda: one.warm(generate(prompt(TOKENS, 1)), pin_seconds=60))
        assert (error.reason, prefills(cluster)) == ("NO_CAPACITY", 6)
        await cluster.assert_quiescent()


async def test_release_by_session_by_id_and_by_prompt(model_path: Path) -> None:
    async with pinning(model_path, sessions={"max_pinned_ratio": 0.9}) as cluster, client(cluster) as one:
        messages = [generate(prompt(TOKENS, seed), session_id=f"s{seed % 2}") for seed in range(4)]
        made = [(await one.warm(message, pin_seconds=60)).pin for message in messages]
        assert (len({pin.id for pin in made}), pins(cluster)) == (4, 4)
        told = await one.release(session_id="s0")
        assert (told.pins, told.tokens, told.demoted_tokens) == (2, 10 * BLOCK, 10 * BLOCK)
        assert (await one.release(session_id="s0")).pins == 0
        assert (await one.release(pin_id=made[1].id)).pins == 1
        assert (await one.release(pin_id=made[1].id)).pins == 0
        assert (await one.release(pin_id="nonsense")).pins == 0
        assert (await one.release(prompt=messages[3], tenant="other")).pins == 0
        assert (await one.release(prompt=messages[3])).pins == 1
        assert (await one.release(prompt=generate(prompt(3)))).pins == 0, "no full block, so never pinned"
        assert pins(cluster) == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.stub.Release(pb.ReleaseRequest())
        assert from_rpc_error(caught.value).reason == "INVALID_ARGUMENT"
        error = await refused(lambda: one.release(session_id="x" * 129))
        assert error.reason == "INVALID_SESSION"
        await cluster.assert_quiescent()


async def test_a_worker_that_cannot_be_asked_is_counted(model_path: Path) -> None:
    async with pinning(model_path) as cluster, client(cluster) as one:
        made = await one.warm(generate(prompt(TOKENS), session_id="s"), pin_seconds=60)
        await cluster.workers[made.pin.worker].kill()
        told = await one.release(session_id="s")
        assert (told.pins, told.unreachable_workers) == (0, 1)


async def test_a_tenant_has_its_quota_and_only_its_own_pins(model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    tenants = [
        {"name": name, "keys": [digest_of(name)], "cache": "common", "max_pinned_tokens": quota}
        for name, quota in (("red", 6 * BLOCK), ("none", 0), ("blue", None))
    ]
    path.write_text(yaml.safe_dump({"tenants": tenants}))
    async with (
        pinning(model_path, prefill=1, tenants_file=str(path)) as cluster,
        client(cluster, "red") as red,
        client(cluster, "none") as none,
        client(cluster, "blue") as blue,
    ):
        message = generate(prompt(TOKENS), session_id="s")
        first = await red.warm(message, pin_seconds=60)
        error = await refused(lambda: red.warm(generate(prompt(2 * BLOCK, 1)), pin_seconds=60))
        assert (error.reason, error.metadata["limit"]) == ("PIN_QUOTA", str(6 * BLOCK))
        assert error.retry_after is not None
        before = prefills(cluster)
        for one, tokens in ((red, 7 * BLOCK), (none, BLOCK)):
            error = await refused(lambda: one.warm(generate(prompt(tokens, 2)), pin_seconds=60))  # noqa: B023
            assert error.reason == "PIN_QUOTA"
        assert prefills(cluster) == before, "no worker is asked to compute what none would pin"
        # The tenants share what is cached, but not whose pins it has.
        assert (await blue.warm(message, pin_seconds=60)).pin.id != first.pin.id
        assert (await none.release(pin_id=first.pin.id)).pins == 0
        assert (await none.release(session_id="s")).pins == 0
        assert (await none.release(prompt=generate(prompt(TOKENS)))).pins == 0
        error = await refused(lambda: none.release(session_id="s", tenant="red"))
        assert error.reason == "PERMISSION_DENIED"
        assert pins(cluster) == 2
        assert (await red.release(session_id="s")).pins == 1
        assert pins(cluster) == 1


async def test_limits_are_named(model_path: Path) -> None:
    sessions = {"max_pinned_ratio": 0.1}
    async with pinning(model_path, prefill=1, sessions=sessions) as cluster, client(cluster) as one:
        for seconds in (0.0, -1.0, 3601.0):
            error = await refused(lambda: one.warm(generate(), pin_seconds=seconds))  # noqa: B023
            assert (error.reason, error.field) == ("INVALID_PIN", "pin")
        error = await refused(lambda: one.warm(generate(prompt(BLOCK - 1)), pin_seconds=5))
        assert (error.reason, error.field) == ("INVALID_PIN", "request")
        error = await refused(lambda: one.warm(generate(prompt(8 * BLOCK)), pin_seconds=5))
        assert (error.reason, error.metadata["limit"]) == ("PIN_CAPACITY", "sessions.max_pinned_ratio=0.1")
        assert error.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        await cluster.assert_quiescent()


async def test_clients_of_a_cluster_find_a_router_that_answers(model_path: Path) -> None:
    async with pinning(model_path) as cluster:
        endpoints = ["127.0.0.1:1", cluster.router.endpoint]
        message = generate(prompt(TOKENS), session_id="s")
        async with ClusterClient(endpoints) as many:
            for _ in range(2):
                assert (await many.warm(message, pin_seconds=60)).pin.tokens == 5 * BLOCK
            assert (await many.release(session_id="s")).pins == 1
            retries = many.retries
            error = await refused(lambda: many.warm(message, pin_seconds=0))
            assert error.reason == "INVALID_PIN"
            assert many.retries - retries <= 1, "only what may pass is tried again"


async def test_the_client_without_an_event_loop_has_the_calls(model_path: Path) -> None:
    async with pinning(model_path) as cluster:
        message = generate(prompt(TOKENS), session_id="s")

        def blocking() -> tuple[int, int]:
            with SyncClusterClient([cluster.router.endpoint]) as one:
                made = one.warm(message, pin_seconds=60)
                return made.pin.tokens, one.release(pin_id=made.pin.id).pins

        assert await asyncio.to_thread(blocking) == (5 * BLOCK, 1)


def test_a_release_names_one_thing() -> None:
    for wrong in ({}, {"session_id": "a", "pin_id": "b"}):
        with pytest.raises(ValueError, match="one of"):
            release_request(**wrong)  # type: ignore[arg-type]
