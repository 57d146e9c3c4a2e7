# SPDX-License-Identifier: Apache-2.0
"""A worker that leaves hands its prefixes to one that stays, within its bounds of bytes and time. Two whole workers in one process."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from worker_pair import random_prompt

from tests.support.quiescence import inspect
from tests.support.waiting import until, until_told
from tests.support.worker_client import Request, RouterSession, next_message
from twinpool.config import TwinpoolConfig
from twinpool.engine.tiny import write_tiny
from twinpool.store import Keys, StoreServer, start_store
from twinpool.v1.control_pb2 import WORKER_STATE_READY, WorkerRecord
from twinpool.worker.host import WorkerHost

BLOCK = 16
WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"), "llama", layers=2, hidden=32, vocab=300)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    server = start_store(tmp_path_factory.mktemp("store"), prefer_embedded=True)
    yield server
    server.stop()


@asynccontextmanager
async def running(model: Path, store: StoreServer, name: str, **worker: object) -> AsyncIterator[WorkerHost]:
    host = WorkerHost(
        TwinpoolConfig.model_validate(
            {
                "cluster": {"name": "unit", "etcd_endpoints": [store.endpoint]},
                "model": {"path": str(model)},
                "kv": {"num_blocks": 24, "block_tokens": BLOCK},
                "transfer": {"backend": "loopback"},
                "worker": {"name": name, "calibration_seconds": 0, "linger_seconds": 0} | worker,
                "metrics": {"enabled": False},
            }
        ),
        "decode",
    )
    await host.start()

    async def known() -> bool:
        """Whether others read of it that it is ready, which comes a little later than it is."""
        assert host._store is not None
        item = await asyncio.to_thread(host._store.get, Keys("unit").worker("default", name))
        return item is not None and WorkerRecord.FromString(item.value).state == WORKER_STATE_READY

    try:
        await until_told(known, WAIT_SECONDS)
        yield host
    finally:
        await host.stop(0.0)


async def computed(host: WorkerHost, tokens: list[int], name: str) -> None:
    """The worker computes a prompt itself, and caches it."""
    assert host._record is not None
    request = Request(tokens, name, host._record.fingerprint, max_tokens=2)
    session = RouterSession(host._record)
    await session.open()
    try:
        command = request.decode(host._record)
        command.decode.ClearField("owner")
        command.decode.ClearField("owner_endpoint")
        session.send(command)
        queue = session.attempt(name)
        kinds: list[str | None] = []
        while "step" not in kinds:
            kinds.append((await next_message(queue, "decode")).WhichOneof("message"))
    finally:
        await session.close()
    assert host._serving is not None
    role = host._serving._loop.role
    await until(lambda: role.requests == 0, WAIT_SECONDS)


async def test_what_is_cached_is_with_the_other_one_when_it_is_gone(model: Path, store: StoreServer) -> None:
    async with running(model, store, "leaves") as leaves, running(model, store, "stays") as stays:
        await computed(leaves, random_prompt(3 * BLOCK + 1), "one")
        assert (await inspect(stays.endpoint)).cached_blocks == 0
        await leaves.stop()
        counts = await inspect(stays.endpoint)
        assert counts.cached_blocks == 3
        assert counts.bytes_read >= 3 * BLOCK * counts.kv_bytes_per_token
        assert (counts.requests, counts.held_blocks, counts.transfers) == (0, 0, 0)


@pytest.mark.parametrize(("bounds", "taken"), [(2, 2), (0, 0)])
async def test_no_more_is_offered_than_it_may(
    model: Path, store: StoreServer, bounds: int, taken: int
) -> None:
    async with running(model, store, "stays") as stays:
        size = BLOCK * (await inspect(stays.endpoint)).kv_bytes_per_token
        async with running(model, store, "leaves", offer_bytes=bounds * size) as leaves:
            await computed(leaves, random_prompt(5 * BLOCK + 1), "one")
            await leaves.stop()
            assert (await inspect(stays.endpoint)).cached_blocks == taken


async def test_one_that_does_not_answer_keeps_nobody_from_leaving(model: Path, store: StoreServer) -> None:
    async with (
        running(model, store, "stays") as stays,
        running(model, store, "leaves", offer_seconds=0.2) as leaves,
    ):
        await computed(leaves, random_prompt(2 * BLOCK + 1), "one")
        release = threading.Event()
        assert stays._serving is not None
        stays._serving._loop.post(lambda: release.wait(WAIT_SECONDS))
        await asyncio.wait_for(leaves.stop(), WAIT_SECONDS / 2)
        release.set()
        # What it had begun to take is given up, and leaves nothing behind.
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                counts = await inspect(stays.endpoint)
                if counts.free_blocks + counts.cached_blocks == counts.total_blocks and not counts.requests:
                    break
                await asyncio.sleep(0.02)


async def test_without_anybody_else_it_just_leaves(model: Path, store: StoreServer) -> None:
    async with running(model, store, "leaves") as leaves:
        await computed(leaves, random_prompt(2 * BLOCK + 1), "one")
        await asyncio.wait_for(leaves.stop(), WAIT_SECONDS)
