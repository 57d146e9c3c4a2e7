# SPDX-License-Identifier: Apache-2.0
"""Segments through a real store: how often they are written, what ends them, what a router makes of them."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.support.event_world import add_worker, core_with
from tests.support.fake_cache import FakeCache
from tests.support.tcp_proxy import TcpProxy
from tests.support.watching import wait_until
from twinpool._core import hash_blocks, root_hash
from twinpool.config import KvEventsConfig
from twinpool.errors import TwinpoolError
from twinpool.ids import WorkerKey
from twinpool.kv_events import split
from twinpool.router.index import Follower, SegmentView
from twinpool.store import EtcdStore, Keys, LeaseLostError
from twinpool.v1.control_pb2 import WorkerRecord
from twinpool.worker.kv_events import SegmentWriter
from twinpool.worker.kv_events.segment_log import MAX_VALUE_BYTES

KEY = WorkerKey("w", 1)
ROOT = root_hash(b"f", b"", b"")
BLOCK = 16


@dataclass
class Counted:
    """A store that notes its writes: (when, key, bytes); a deletion has 0 bytes."""

    store: EtcdStore
    writes: list[tuple[float, str, int]] = field(default_factory=list)

    def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        self.writes.append((time.monotonic(), key, len(value)))
        return self.store.put(key, value, lease_id)

    def delete_prefix(self, prefix: str) -> int:
        self.writes.append((time.monotonic(), prefix, 0))
        return self.store.delete_prefix(prefix)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


class Worker:
    """A cache with a writer, under a lease of its own. ``lease`` may be changed at any time."""

    def __init__(self, store: Any, lease_store: EtcdStore, cluster: str, key: WorkerKey = KEY) -> None:
        self.counted = Counted(store)
        self.lease = lease_store.grant(60).id
        self.cache = FakeCache(key, num_blocks=2048)
        self.writer = SegmentWriter(
            self.counted,  # type: ignore[arg-type]
            cluster,
            key,
            self.cache.publisher,
            lambda: self.lease,
            0.5,
        )
        self.writer.start()
        self.prompts = 0

    def work(self, prompts: int) -> None:
        """Computes new prompts of 4 blocks each; old ones are evicted once the cache is full."""
        for _ in range(prompts):
            self.prompts += 1
            tokens = np.full(4 * BLOCK, self.prompts, np.int32)
            self.cache.use(hash_blocks(ROOT, tokens, BLOCK), ROOT, 4 * BLOCK + 1)

    def known(self, view: SegmentView) -> bool:
        """Whether etcd says what the worker has told so far."""
        state, position = view.state(self.cache.key), self.cache.publisher.position()
        told = position.blocks == self.cache.blocks.cached_blocks
        return told and state is not None and state.next_sequence == position.next_sequence

    def close(self) -> None:
        self.writer.stop(60.0)
        self.cache.close()


@pytest.fixture
def view(store: EtcdStore, cluster: str) -> Iterator[SegmentView]:
    made = SegmentView(store, cluster, lambda key: None)
    made.start()
    assert made.wait_synced(60.0)
    yield made
    made.close()


@pytest.fixture
def worker(store: EtcdStore, cluster: str) -> Iterator[Worker]:
    made = Worker(store, store, cluster)
    yield made
    made.close()


def test_writes_do_not_grow_with_the_load(store: EtcdStore, cluster: str, view: SegmentView) -> None:
    for load in (5, 50):
        key = WorkerKey(f"w{load}", 1)
        worker = Worker(store, store, cluster, key)
        began = time.monotonic()
        pace = threading.Event()
        while time.monotonic() < began + 2.5:
            worker.work(load)
            pace.wait(0.05)
        seconds = time.monotonic() - began
        wait_until(lambda worker=worker: worker.known(view))  # type: ignore[misc]
        writes = worker.counted.writes
        assert len([at for at, _, _ in writes if at < began + seconds]) <= 2 * seconds + 1
        assert max(size for _, _, size in writes) <= MAX_VALUE_BYTES
        state = view.state(key)
        assert state is not None
        held = {name for name in split(state.hashes)}
        assert len(held) == worker.cache.blocks.cached_blocks
        worker.close()


def test_nothing_happens_and_nothing_is_written(worker: Worker, view: SegmentView) -> None:
    worker.work(3)
    wait_until(lambda: worker.known(view))
    before = len(worker.counted.writes)
    time.sleep(1.2)  # nothing may happen meanwhile
    assert len(worker.counted.writes) == before


def test_segments_end_with_the_lease_and_are_put_again_under_the_next(
    store: EtcdStore, worker: Worker, view: SegmentView
) -> None:
    worker.work(20)
    wait_until(lambda: worker.known(view))
    store.revoke(worker.lease)
    wait_until(lambda: view.state(KEY) is None)
    worker.work(1)
    with pytest.raises(LeaseLostError):
        store.keep_alive(worker.lease)
    worker.lease = store.grant(60).id
    wait_until(lambda: worker.known(view))


def test_without_a_lease_nothing_is_written(store: EtcdStore, worker: Worker, view: SegmentView) -> None:
    wait_until(lambda: worker.known(view))
    worker.lease = 0
    before = len(worker.counted.writes)
    worker.work(5)
    time.sleep(1.2)  # nothing may happen meanwhile
    assert len(worker.counted.writes) == before
    worker.lease = store.grant(60).id
    wait_until(lambda: worker.known(view))


@pytest.mark.faults
def test_etcd_is_gone_for_a_while(
    store: EtcdStore, far: EtcdStore, proxy: TcpProxy, cluster: str, view: SegmentView
) -> None:
    worker = Worker(far, store, cluster)
    worker.work(10)
    wait_until(lambda: worker.known(view))
    proxy.cut()
    for _ in range(5):
        worker.work(10)
    with pytest.raises(TwinpoolError):
        far.get("/x")
    before = view.state(KEY)
    assert before is not None
    assert before.blocks == 40
    proxy.heal()
    wait_until(lambda: worker.known(view))
    worker.close()


@pytest.mark.faults
def test_a_ghost_is_gone_and_the_others_are_not_told_anew(
    store: EtcdStore, far: EtcdStore, proxy: TcpProxy, cluster: str
) -> None:
    """Case 18: the watch is cut, a worker's lease ends, the history is compacted, the watch comes back."""
    keys = Keys(cluster)
    names = ("a", "ab", "abc")
    leases = {}
    for name in names:
        worker = Worker(store, store, cluster, WorkerKey(name, 1))
        leases[name] = worker.lease
        worker.work(2)
        wait_until(
            lambda name=name: any(  # type: ignore[misc]
                "delta" in key or "base" in key for key in store.list_prefix(keys.locality(name)).items
            )
        )
        worker.close()
    changed: list[WorkerKey] = []
    view = SegmentView(far, cluster, changed.append)
    view.start()
    assert view.wait_synced(60.0)
    assert {key.name for key in changed} == set(names)
    assert all(view.state(WorkerKey(name, 1)) is not None for name in names)
    changed.clear()
    proxy.cut()
    wait_until(lambda: not view.connected)
    store.revoke(leases["ab"])
    revision = store.put(f"/other/{cluster}", b"")
    store.compact(revision)
    proxy.heal()
    wait_until(lambda: view.state(WorkerKey("ab", 1)) is None)
    assert {key.name for key in changed} == {"ab"}
    assert view.state(WorkerKey("a", 1)) is not None
    assert view.state(WorkerKey("abc", 1)) is not None
    view.close()


def test_a_router_that_starts_late_begins_with_etcd(worker: Worker, view: SegmentView) -> None:
    worker.work(300)
    wait_until(lambda: worker.known(view))
    core = core_with()
    follower = Follower(core, KvEventsConfig(), view.state)
    follower.start()
    add_worker(core, KEY)
    # Its sockets lead nowhere: what it knows, it knows from etcd.
    record = {"events_endpoint": "127.0.0.1:9", "replay_endpoint": "127.0.0.1:9"}
    follower.follow(KEY, WorkerRecord(**record))
    wait_until(lambda: core.stats()["index_blocks"] == worker.cache.publisher.position().blocks)
    follower.close()
