# SPDX-License-Identifier: Apache-2.0
"""Case 42: workers and blocks come and go, and the router stays as large as it is."""

import gc

import numpy as np
import psutil
import pytest

from tests.support.event_world import add_worker, core_with
from tests.support.fake_cache import FakeCache
from tests.support.watching import wait_until
from twinpool.config import KvEventsConfig
from twinpool.ids import WorkerKey
from twinpool.kv_events import CacheState, KVEventBatch, digest, wire
from twinpool.kv_events.hashes import split
from twinpool.router.index import Follower, Mirror
from twinpool.v1.control_pb2 import WorkerRecord

ROUNDS = 10


def resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_million_blocks_and_churn_leave_nothing_behind() -> None:
    """Each round: eight new workers of 6,000 blocks from etcd, then events that replace all of them twice."""
    core = core_with()
    source = np.random.default_rng(1)
    sizes = []
    for round_number in range(1, ROUNDS + 1):
        keys = [WorkerKey(f"w{number}", round_number) for number in range(8)]
        for key in keys:
            add_worker(core, key)
            mirror = Mirror(core, key)
            raw = source.bytes(16 * 6000)
            mirror.adopt(CacheState(raw, 0))
            mirror.need = None
            check = digest(raw)
            for sequence in range(12):
                old, new = raw[: 16 * 1000], source.bytes(16 * 1000)
                raw = raw[16 * 1000 :] + new
                check ^= digest(old) ^ digest(new)
                events = [wire.removed(split(old)), wire.stored(split(new), None, 16)]
                mirror.event(sequence, KVEventBatch(float(sequence), events, None, round_number, 6000, check))
            assert (mirror.need, mirror.next) == (None, 12)
        assert core.stats()["index_blocks"] == 8 * 6000
        for key in keys:
            core.remove_worker(0.0, key.name, key.incarnation)
        assert core.stats()["index_blocks"] == 0
        sizes.append(resident_bytes())
    assert sizes[-1] <= 1.1 * sizes[1], sizes


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_followed_workers_that_come_and_go_leave_nothing_behind() -> None:
    """With real sockets: connections, subscriptions and what waits in them go with their worker."""
    core = core_with()
    settings = KvEventsConfig(heartbeat_seconds=0.1)
    follower = Follower(core, settings, lambda key: None)
    follower.start()
    process, sizes, files = psutil.Process(), [], []
    tokens = np.random.default_rng(2)
    for round_number in range(1, 3 * ROUNDS + 1):
        caches = [FakeCache(WorkerKey(f"w{number}", round_number), 64, 16, settings) for number in range(6)]
        for cache in caches:
            hashes = np.frombuffer(tokens.bytes(16 * 32), np.uint8).reshape(-1, 16)
            cache.use(hashes, b"r" * 16, 32 * 16 + 1)
            add_worker(core, cache.key)
            follower.follow(cache.key, WorkerRecord(**cache.endpoints()))
        wait_until(lambda: core.stats()["index_blocks"] == 6 * 32)
        for cache in caches:
            core.remove_worker(0.0, cache.key.name, cache.key.incarnation)
            follower.drop(cache.key)
            cache.close()
        wait_until(lambda: not follower.statuses())
        sizes.append(resident_bytes())
        files.append(process.num_fds())
    follower.close()
    assert sizes[-1] <= 1.1 * sizes[ROUNDS], sizes
    assert files[-1] <= files[ROUNDS] + 8, files
