# SPDX-License-Identifier: Apache-2.0
"""What the cluster asks of a policy: to choose workers for requests, and to hear what becomes of them."""

from dataclasses import dataclass
from typing import Protocol

from twinpool.control.replay.blocks import Hashes
from twinpool.control.simulate.job import Attempt, Job
from twinpool.control.simulate.worker import Load, Worker


@dataclass(frozen=True, slots=True)
class Placement:
    """A choice."""

    job: Job
    prefill: Worker
    decode: Worker
    fetch_from: Worker | None = None
    local: bool = False
    predicted: int = 0
    """Leading blocks that the prefill worker is believed to hold."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The router gave a waiting request up."""

    job: Job
    cause: str


class Router(Protocol):
    """A policy. All times are virtual seconds. Calls come in the order of time."""

    reports: bool
    """Whether it reads load reports."""
    waits: bool
    """A request that a decode worker has no room for waits at that worker; else it is placed anew."""

    @property
    def queued(self) -> bool:
        """Whether a request waits for ``plan``."""
        ...

    def worker_up(self, now: float, worker: Worker, num_blocks: int) -> None:
        """A worker can be chosen from now on. Its cache is empty, unless it was known in another role."""

    def worker_leaves(self, now: float, worker: Worker) -> None:
        """The worker gets no new work: it is about to change its role. ``worker_up`` follows with the new one."""

    def backlog(self) -> tuple[int, int]:
        """Requests that wait in the router, and their prompt tokens."""
        ...

    def worker_down(self, now: float, worker: Worker) -> None:
        """A worker is gone, and all that it held."""

    def cache_event(self, worker: Worker, kind: str, hashes: Hashes) -> None:
        """Blocks were "stored" or "removed" on a worker."""

    def report(self, now: float, worker: Worker, load: Load) -> None:
        """A worker's own view of its load."""

    def submit(self, now: float, job: Job) -> str:
        """A request came. Returns the reason of a refusal, or nothing."""
        ...

    def plan(self, now: float) -> list[Placement | Ended]:
        """Choices for requests that waited."""
        ...

    def next_wake(self, now: float) -> float | None:
        """When ``plan`` has something to do although nothing happens."""

    def reserved(self, now: float, attempt: Attempt) -> None:
        """The decode worker holds blocks for the request."""

    def refused(self, now: float, attempt: Attempt) -> None:
        """The decode worker has no room; the request waits for ``plan`` again."""

    def first_token(self, now: float, attempt: Attempt, seconds: float) -> None:
        """The prompt is computed; it took so long on its worker, waits left out."""

    def handed_off(self, now: float, attempt: Attempt, blocks: int, seconds: float) -> None:
        """The decode worker holds all KV; it pulled so many blocks."""

    def finished(self, now: float, attempt: Attempt) -> None:
        """The answer is complete."""

    def failed(self, now: float, attempt: Attempt, lost: Worker) -> bool:
        """A worker died under the attempt. True if the request waits for ``plan`` again, False if it is lost."""
        ...
