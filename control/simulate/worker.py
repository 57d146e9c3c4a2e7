# SPDX-License-Identifier: Apache-2.0
"""What prefill and decode workers of the simulator share."""

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

from twinpool.control.replay.blocks import Hashes
from twinpool.control.simulate.cache import Cache
from twinpool.control.simulate.clock import Clock
from twinpool.control.simulate.job import Attempt
from twinpool.control.simulate.links import Links
from twinpool.control.simulate.model import WorkerModel


class Load(NamedTuple):
    """A worker's own view of its load, as it reports it to routers."""

    running: int
    waiting: int
    waiting_tokens: int
    available: int
    step_seconds: float


class Host(Protocol):
    """What workers tell the cluster that they are part of."""

    clock: Clock
    links: Links

    def cache_event(self, worker: "Worker", kind: str, hashes: Hashes) -> None:
        """Blocks were stored or evicted."""

    def chunk_done(self, attempt: Attempt) -> None:
        """A chunk of a prompt was computed; the last one gave the first token."""

    def decoded(self, attempt: Attempt) -> None:
        """An answer is complete."""

    def step(self, seconds: float, tokens: int) -> None:
        """A decode step gave one token to each of so many sequences."""


class Worker(ABC):
    """One worker: a name, an incarnation, a cache and a speed."""

    role = ""

    def __init__(
        self, host: Host, name: str, incarnation: int, model: WorkerModel, num_blocks: int, block_tokens: int
    ) -> None:
        self.host = host
        self.name = name
        self.incarnation = incarnation
        self.model = model
        self.block_tokens = block_tokens
        self.cache = Cache(num_blocks, block_tokens, self._cache_event)
        self.slowness = 1.0
        """Factor on every step."""
        self.alive = True
        self.flipping = False
        """It takes no new work, to get the other role."""
        self.role_since = host.clock.now
        self.role_until = -1.0
        """When it got another role; negative: it has this one yet."""
        self.former: Worker | None = None
        """The same worker in the role that it had before."""
        self.busy_seconds = 0.0
        self.computed_tokens = 0
        """Prompt tokens computed."""
        self.step_seconds = 0.0
        """Of the last step."""

    def kill(self) -> None:
        """Stops at once; whatever it planned does not happen."""
        self.alive = False
        if self.former is not None:
            self.former.kill()

    def take_over(self, former: "Worker") -> None:
        """This is the same worker in another role: its cache, with all that is in it, and its speed stay."""
        self.former = former
        former.role_until = self.host.clock.now
        self.cache = former.cache
        self.cache.tell(self._cache_event)
        self.slowness = former.slowness

    @abstractmethod
    def answers_at(self) -> float:
        """When a message that comes now is answered: between two steps."""

    @abstractmethod
    def load(self) -> Load:
        """What a load report says now."""

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens need."""
        return -(-tokens // self.block_tokens)

    def _cache_event(self, kind: str, hashes: Hashes) -> None:
        if self.alive:
            self.host.cache_event(self, kind, hashes)
