# SPDX-License-Identifier: Apache-2.0
"""Workers that change their roles: no new work, until nothing runs there; then the change itself, with the cache kept."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from twinpool.control.simulate.clock import Clock
from twinpool.control.simulate.router import Router
from twinpool.control.simulate.setup import Setup
from twinpool.control.simulate.worker import Worker

LOOK_SECONDS = 0.05
"""Between two looks whether a worker is empty."""

Done = Callable[[bool], None]
"""Told of the end of a flip: whether the worker has the role."""


class Flipping(Protocol):
    """The cluster as flips need it."""

    @property
    def clock(self) -> Clock: ...
    @property
    def setup(self) -> Setup: ...
    @property
    def router(self) -> Router: ...

    def idle(self, worker: Worker) -> bool:
        """Whether no request needs the worker, and nobody reads from it."""
        ...

    def change_role(self, worker: Worker, role: str) -> None:
        """Gives an idle worker the other role."""


@dataclass(slots=True)
class Flip:
    """One change of role."""

    worker: str
    to: str
    began: float
    drained: float = -1.0
    """When nothing ran there any more; negative: it does yet."""
    ended: float = -1.0
    succeeded: bool = False


class Flips:
    """Of one cluster."""

    def __init__(self, cluster: Flipping) -> None:
        self._cluster = cluster
        self.log: list[Flip] = []

    def begin(self, worker: Worker, to: str, done: Done = lambda _: None) -> None:
        """Begins to give a worker the other role. One that flips already goes on with that."""
        if worker.flipping or worker.role == to:
            return
        now = self._cluster.clock.now
        worker.flipping = True
        self._cluster.router.worker_leaves(now, worker)
        flip = Flip(worker.name, to, now)
        self.log.append(flip)
        self._drain(flip, worker, done)

    def _drain(self, flip: Flip, worker: Worker, done: Done) -> None:
        clock = self._cluster.clock
        if not worker.alive:
            self._end(flip, done, False)
        elif self._cluster.idle(worker):
            flip.drained = clock.now
            clock.at(clock.now + self._cluster.setup.flip_seconds, self._commit, flip, worker, done)
        else:
            clock.at(clock.now + LOOK_SECONDS, self._drain, flip, worker, done)

    def _commit(self, flip: Flip, worker: Worker, done: Done) -> None:
        if worker.alive and not self._cluster.idle(worker):
            # Somebody reads a prefix from it: a read is over soon.
            self._cluster.clock.at(self._cluster.clock.now + LOOK_SECONDS, self._commit, flip, worker, done)
            return
        if worker.alive:
            self._cluster.change_role(worker, flip.to)
        self._end(flip, done, worker.alive)

    def _end(self, flip: Flip, done: Done, succeeded: bool) -> None:
        flip.ended, flip.succeeded = self._cluster.clock.now, succeeded
        done(succeeded)
