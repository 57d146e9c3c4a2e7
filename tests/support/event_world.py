# SPDX-License-Identifier: Apache-2.0
"""Workers with real caches and real event streams, routers with real cores, and all that can go wrong in between."""

import random
from dataclasses import dataclass, field

from tests.support.cache_world import BLOCK_TOKENS, CHAINS, CacheWorld
from twinpool._core import AdmissionConfig, RouterCore
from twinpool.config import KvEventsConfig
from twinpool.ids import WorkerKey
from twinpool.kv_events import CacheState, decode, read_state
from twinpool.router.index.mirror import Mirror, Numbered
from twinpool.worker.kv_events.segment_log import Put
from twinpool.worker.kv_events.stream import EventStream

FAULT = 0.04


def core_with(*keys: WorkerKey, **limits: int) -> RouterCore:
    """A router's core that knows these workers."""
    core = RouterCore(AdmissionConfig(**limits))
    for key in keys:
        add_worker(core, key)
    return core


def add_worker(core: RouterCore, key: WorkerKey) -> None:
    """A ready prefill worker."""
    core.upsert_worker(0.0, key.name, key.incarnation, "p", "prefill", "ready", "f", 64, BLOCK_TOKENS, 8)


def decoded(messages: list[tuple[int, bytes]]) -> list[Numbered]:
    """As they come out of a socket."""
    return [(sequence, decode(payload)) for sequence, payload in messages]


@dataclass
class Message:
    """On its way to one router."""

    kind: str
    sequence: int
    payload: bytes


class ModelWorker:
    """One name; ``restart`` makes another incarnation of it. ``values``: its segments in etcd."""

    def __init__(self, name: str, source: random.Random) -> None:
        self.name = name
        self.random = source
        self.incarnations = 0
        self.now = 0.0
        self.restart()

    def restart(self) -> None:
        """Everything is gone, etcd's part included: the lease has ended."""
        self.incarnations += 1
        self.key = WorkerKey(self.name, self.incarnations)
        self.cache = CacheWorld(self.random.choice([8, 16, 40]), self.random.randrange(1 << 30))
        config = KvEventsConfig(replay_batches=self.random.choice([4, 64]))
        self.stream = EventStream(config, self.key, BLOCK_TOKENS, wall_clock=self.tick)
        self.values: dict[tuple[int, str], bytes] = {}

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def work(self) -> list[Message]:
        """Does something and tells of it."""
        self.cache.step()
        told = [one for events in self.cache.drained() for one in self.stream.tell(events)]
        return [Message("event", sequence, payload) for sequence, payload in told]

    def alive(self) -> Message:
        return Message("alive", *self.stream.alive())

    def write(self) -> None:
        """One write to etcd, if there is one to make."""
        write = self.stream.log.next_write()
        if isinstance(write, Put):
            self.values[write.generation, write.segment] = write.value
        elif write is not None:
            self.values = {at: value for at, value in self.values.items() if at[0] != write.generation}
        if write is not None:
            self.stream.log.done(write)

    def segments(self) -> CacheState | None:
        return read_state(list(self.values.values()), self.key.incarnation)


@dataclass
class View:
    """What one router knows of one worker: its mirror, what is on its way, and the question it has asked."""

    mirror: Mirror
    channel: list[Message] = field(default_factory=list)
    asked: tuple[str, int] | None = None


class ModelRouter:
    """A core with a mirror for each worker."""

    def __init__(self, workers: list[ModelWorker], source: random.Random) -> None:
        self.random = source
        self.workers = workers
        self.restart()

    def restart(self) -> None:
        self.core = core_with()
        self.views: dict[str, View] = {}
        for worker in self.workers:
            self.learn(worker)

    def learn(self, worker: ModelWorker) -> None:
        """The worker's record in etcd is seen; an earlier incarnation goes with its part of the index."""
        view = self.views.get(worker.name)
        if view is not None and view.mirror.key == worker.key:
            return
        if view is not None:
            self.core.remove_worker(0.0, view.mirror.key.name, view.mirror.key.incarnation)
        add_worker(self.core, worker.key)
        self.views[worker.name] = view = View(Mirror(self.core, worker.key))
        self.adopt(worker, view)

    def adopt(self, worker: ModelWorker, view: View) -> None:
        state = worker.segments()
        known = view.mirror.next
        if state is not None and (known is None or state.next_sequence > known):
            view.mirror.adopt(state)

    def deliver(self, worker: ModelWorker, *, faulty: bool = True) -> None:
        """The next message arrives: or it is lost, comes twice or is overtaken."""
        view = self.views[worker.name]
        if not view.channel:
            return
        at = 0
        if faulty and len(view.channel) > 1 and self.random.random() < FAULT:
            at = self.random.randrange(1, min(4, len(view.channel)))
        message = view.channel.pop(at)
        fault = self.random.random() if faulty else 1.0
        if fault < FAULT:
            return
        if fault < 2 * FAULT:
            view.channel.insert(self.random.randint(0, len(view.channel)), message)
        batch = decode(message.payload)
        if batch.incarnation != view.mirror.key.incarnation:
            view.mirror.replaced()
        elif message.kind == "alive":
            view.mirror.alive(message.sequence, batch)
        else:
            view.mirror.event(message.sequence, batch)

    def ask(self, worker: ModelWorker) -> None:
        """Asks for what the mirror needs, if it has not asked yet."""
        view = self.views[worker.name]
        if view.asked is None and view.mirror.need is not None:
            kind = view.mirror.need.kind if view.mirror.next is not None else "snapshot"
            view.asked = (kind, view.mirror.next or 0)

    def answer(self, worker: ModelWorker, *, faulty: bool = True) -> None:
        """The answer to what was asked comes, or none."""
        view = self.views[worker.name]
        if view.asked is None:
            return
        (kind, start), view.asked = view.asked, None
        if faulty and self.random.random() < 0.2:
            self.adopt(worker, view)
        elif kind == "snapshot":
            view.mirror.snapshot(decoded(worker.stream.snapshot()))
        else:
            view.mirror.replayed(decoded(worker.stream.replay(start)))

    def settle(self, worker: ModelWorker) -> None:
        """Without further faults: what is on its way arrives, what is needed is asked for and answered."""
        self.learn(worker)
        view = self.views[worker.name]
        while view.channel:
            self.deliver(worker, faulty=False)
        for _ in range(6):
            self.answer(worker, faulty=False)
            view.channel.append(worker.alive())
            self.deliver(worker, faulty=False)
            self.ask(worker)
        assert view.mirror.need is None, view.mirror.need

    def assert_exact(self, worker: ModelWorker) -> None:
        """The index says of this worker what a lookup on it would find, for every chain."""
        for chain, (_, hashes) in enumerate(CHAINS):
            found = dict(self.core.longest_prefix(hashes)).get(worker.name, 0)
            assert found == worker.cache.findable(chain)
        assert self.views[worker.name].mirror.blocks == len(worker.cache.whole())


class EventWorld:
    """``step`` does one thing at random. ``events`` counts what the workers' caches told."""

    def __init__(self, seed: int, workers: int = 3, routers: int = 2) -> None:
        self.random = random.Random(seed)
        self.workers = [ModelWorker(f"w{number}", self.random) for number in range(workers)]
        self.routers = [ModelRouter(self.workers, self.random) for _ in range(routers)]
        self.events = 0
        self.causes: dict[str, int] = {}

    def step(self) -> None:
        worker, router = self.random.choice(self.workers), self.random.choice(self.routers)
        action = self.random.random()
        if action < 0.4:
            self._send(worker, worker.work())
        elif action < 0.45:
            self._send(worker, [worker.alive()])
        elif action < 0.80:
            router.deliver(worker)
        elif action < 0.85:
            worker.write()
        elif action < 0.98:
            router.ask(worker)
            router.answer(worker)
            self._count(router)
        elif action < 0.9803:
            worker.restart()
        elif action < 0.9997:
            router.learn(worker)
        else:
            router.restart()

    def _send(self, worker: ModelWorker, messages: list[Message]) -> None:
        self.events += sum(len(decode(message.payload).events) for message in messages)
        for router in self.routers:
            router.views[worker.name].channel += messages

    def _count(self, router: ModelRouter) -> None:
        for view in router.views.values():
            if view.mirror.need is not None:
                self.causes[view.mirror.need.cause] = self.causes.get(view.mirror.need.cause, 0) + 1

    def check(self) -> None:
        """After a while without faults every router knows every worker exactly."""
        for router in self.routers:
            for worker in self.workers:
                router.settle(worker)
            for worker in self.workers:
                router.assert_exact(worker)
            every = set().union(*(worker.cache.whole() for worker in self.workers))
            assert router.core.stats()["index_blocks"] == len(every)
