# SPDX-License-Identifier: Apache-2.0
"""The follower's thread over real sockets: publishers that come, go, restart and fall silent."""

import socket
from collections.abc import Iterator

import pytest
import zmq

from tests.support.cache_world import BLOCK_TOKENS, CHAINS
from tests.support.event_world import add_worker, core_with
from tests.support.fake_cache import FakeCache
from tests.support.tcp_proxy import TcpProxy
from tests.support.watching import wait_until
from twinpool.config import KvEventsConfig
from twinpool.ids import WorkerKey
from twinpool.kv_events import CacheState, wire
from twinpool.router.index import Follower, WorkerLocality
from twinpool.v1.control_pb2 import WorkerRecord

SETTINGS = KvEventsConfig(heartbeat_seconds=0.05, silence_seconds=0.4, resync_timeout_seconds=0.3)
KEY = WorkerKey("w", 1)
CHAIN = CHAINS[0][1]


class World:
    """A follower with its core, and the caches that it follows. ``etcd``: what lies there of a worker."""

    def __init__(self) -> None:
        self.core = core_with()
        self.etcd: dict[WorkerKey, CacheState] = {}
        self.follower = Follower(self.core, SETTINGS, self.etcd.get)
        self.follower.start()
        self.caches: list[FakeCache] = []

    def cache(self, key: WorkerKey = KEY, *, port: int = 0) -> FakeCache:
        made = FakeCache(key, 64, BLOCK_TOKENS, SETTINGS, port=port)
        self.caches.append(made)
        return made

    def follow(self, cache: FakeCache) -> None:
        add_worker(self.core, cache.key)
        self.follower.follow(cache.key, WorkerRecord(**cache.endpoints()))

    def held(self, name: str = "w", chain: int = 0) -> int:
        return dict(self.core.longest_prefix(CHAINS[chain][1])).get(name, 0)

    def status(self, key: WorkerKey = KEY) -> WorkerLocality:
        wait_until(lambda: any(status.key == key for status in self.follower.statuses()))
        return next(status for status in self.follower.statuses() if status.key == key)

    def wait_live(self, key: WorkerKey = KEY) -> None:
        wait_until(lambda: self.status(key).state == "live" and self.status(key).heard_seconds >= 0)

    def close(self) -> None:
        self.follower.close()
        for cache in self.caches:
            cache.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def fill(cache: FakeCache, blocks: int, chain: int = 0) -> None:
    root, hashes = CHAINS[chain]
    cache.use(hashes[:blocks], root, blocks * BLOCK_TOKENS + 1)


def test_a_worker_is_known_from_a_snapshot_and_followed(world: World) -> None:
    cache = world.cache()
    fill(cache, 3)
    world.follow(cache)
    wait_until(lambda: world.held() == 3)
    fill(cache, 6)
    wait_until(lambda: world.held() == 6)
    cache.evict()
    wait_until(lambda: world.held() == 0)
    assert world.status().resyncs == 1


def test_a_worker_is_known_from_etcd_and_followed_from_there(world: World) -> None:
    cache = world.cache()
    fill(cache, 3)
    wait_until(lambda: cache.publisher.position().blocks == 3)
    world.etcd[KEY] = CacheState(CHAIN[:3].tobytes(), cache.publisher.position().next_sequence)
    fill(cache, 5)
    world.follow(cache)
    wait_until(lambda: world.held() == 5)
    world.wait_live()
    assert world.status().resyncs == 1


def test_a_worker_that_cannot_be_reached_is_known_from_etcd(world: World) -> None:
    world.etcd[KEY] = CacheState(CHAIN[:2].tobytes(), 7)
    add_worker(world.core, KEY)
    # Nobody listens there.
    world.follower.follow(KEY, WorkerRecord(events_endpoint="127.0.0.1:9", replay_endpoint="127.0.0.1:9"))
    wait_until(lambda: world.held() == 2)
    wait_until(lambda: world.status().state == "unreachable")
    world.etcd[KEY] = CacheState(CHAIN[:4].tobytes(), 9)
    world.follower.segments_changed(KEY)
    wait_until(lambda: world.held() == 4)
    assert world.status().failures > 0


def test_a_worker_without_events_is_known_from_etcd(world: World) -> None:
    add_worker(world.core, KEY)
    world.follower.follow(KEY, WorkerRecord())
    wait_until(lambda: world.follower.statuses())
    assert world.status().state == "segments"
    world.etcd[KEY] = CacheState(CHAIN[:4].tobytes(), 9)
    world.follower.segments_changed(KEY)
    wait_until(lambda: world.held() == 4)
    world.etcd[KEY] = CacheState(CHAIN[:1].tobytes(), 8)
    world.follower.segments_changed(KEY)
    world.etcd[KEY] = CacheState(CHAIN[:3].tobytes(), 10)
    world.follower.segments_changed(KEY)
    wait_until(lambda: world.held() == 3)


def test_a_dropped_worker_is_followed_no_more_and_others_are(world: World) -> None:
    first, second = world.cache(), world.cache(WorkerKey("ww", 1))
    for cache in (first, second):
        world.follow(cache)
        fill(cache, 2)
    wait_until(lambda: (world.held("w"), world.held("ww")) == (2, 2))
    world.core.remove_worker(0.0, KEY.name, KEY.incarnation)
    world.follower.drop(KEY)
    fill(first, 4)
    fill(second, 4)
    wait_until(lambda: world.held("ww") == 4)
    assert world.held("w") == 0
    assert [status.key.name for status in world.follower.statuses()] == ["ww"]


def test_followed_again_it_is_known_again(world: World) -> None:
    """The core has forgotten its part of the index with the worker."""
    cache = world.cache()
    fill(cache, 3)
    for _ in range(3):
        world.follow(cache)
        wait_until(lambda: world.held() == 3)
        world.core.remove_worker(0.0, KEY.name, KEY.incarnation)
        world.follower.drop(KEY)
    assert world.held() == 0


def test_a_restart_on_the_same_port_takes_the_old_cache_with_it(world: World) -> None:
    port = _two_free_ports()
    old = world.cache(port=port)
    fill(old, 4)
    world.follow(old)
    wait_until(lambda: world.held() == 4)
    old.close()
    new = world.cache(WorkerKey("w", 2), port=port)
    fill(new, 2)
    # Before any word from etcd: who speaks there now is another.
    wait_until(lambda: world.held() == 0)
    assert world.status().cause == "incarnation"
    world.core.remove_worker(0.0, "w", 1)
    world.follower.drop(KEY)
    world.follow(new)
    wait_until(lambda: world.held() == 2)


def test_a_silent_worker_is_asked_and_then_called_unreachable(world: World) -> None:
    cache = world.cache()
    fill(cache, 3)
    world.follow(cache)
    world.wait_live()
    cache.close()
    wait_until(lambda: world.status().state == "unreachable")
    assert world.status().cause == "silence"
    assert world.held() == 3, "the last view stays"


def test_a_worker_that_comes_back_is_in_step_again(world: World) -> None:
    """The same incarnation: its network was gone, not the worker."""
    cache = world.cache()
    proxies = [TcpProxy(endpoint) for endpoint in cache.endpoints().values()]
    events, replay = (proxy.endpoint for proxy in proxies)
    add_worker(world.core, KEY)
    world.follower.follow(KEY, WorkerRecord(events_endpoint=events, replay_endpoint=replay))
    fill(cache, 2)
    wait_until(lambda: world.held() == 2)
    for proxy in proxies:
        proxy.cut()
    wait_until(lambda: world.status().state == "unreachable")
    fill(cache, 6)
    for proxy in proxies:
        proxy.heal()
    wait_until(lambda: world.held() == 6)
    wait_until(lambda: world.status().state == "live")
    for proxy in proxies:
        proxy.close()


def test_messages_that_make_no_sense_harm_nobody(world: World) -> None:
    good = world.cache()
    world.follow(good)
    fill(good, 2)
    wait_until(lambda: world.held() == 2)
    rogue = Rogue()
    add_worker(world.core, WorkerKey("r", 1))
    world.follower.follow(WorkerKey("r", 1), rogue.record())
    for frames in (
        [b"kv@r.0000000000000001@m"],
        [b"kv@r.0000000000000001@m", b"12345678", b"junk"],
        [b"kv@r.0000000000000001@m", b"1", b"junk"],
        [b"kv@r.0000000000000001@m", b"12345678", wire.encode(wire.KVEventBatch(1.0, [], incarnation=2))],
        [b"kv@r.", b"12345678", b""],
    ):
        rogue.say(frames)
    fill(good, 5)
    wait_until(lambda: world.held() == 5)
    assert world.status().state == "live"
    rogue.close()


def test_a_hundred_workers_start_a_few_at_a_time(world: World) -> None:
    caches = [world.cache(WorkerKey(f"n{number}", 1)) for number in range(24)]
    for cache in caches:
        fill(cache, 3)
        world.follow(cache)
    wait_until(lambda: all(world.held(cache.key.name) == 3 for cache in caches))


class Rogue:
    """Publishes whatever it is told to."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self._heard = False

    def record(self) -> WorkerRecord:
        return WorkerRecord(events_endpoint=f"127.0.0.1:{self._port}", replay_endpoint="127.0.0.1:9")

    def say(self, frames: list[bytes]) -> None:
        # The first subscription says that somebody listens.
        if not self._heard:
            self._pub.setsockopt(zmq.RCVTIMEO, 60_000)
            self._pub.recv()
            self._heard = True
        self._pub.send_multipart(frames)

    def close(self) -> None:
        self._context.destroy(linger=0)


def _two_free_ports() -> int:
    """A port that is free together with the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return int(port)
