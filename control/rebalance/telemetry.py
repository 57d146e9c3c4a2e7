# SPDX-License-Identifier: Apache-2.0
"""What the policy looks at: a pool at one time, its load averaged over a window."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Role = Literal["prefill", "decode"]
ROLES: Final[tuple[Role, Role]] = ("prefill", "decode")


def other(role: Role) -> Role:
    """The role that a flip takes a worker from."""
    return "decode" if role == "prefill" else "prefill"


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker."""

    name: str
    role: Role
    state: str = "ready"
    """"starting", "ready", "draining", "flipping" or "unready"."""
    epoch: int = 1
    cordoned: bool = False
    busy: float = 0.0
    """Share of the time in which it ran a step, 0 to 1."""
    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    """Share of its blocks that are neither free nor evictable, 0 to 1."""
    cached_tokens: int = 0
    """Tokens of its cached prefixes: what would be of less use in the other role."""
    drain_seconds: float = 0.0
    """How long what runs there is expected to take yet."""

    @property
    def serving(self) -> bool:
        """Whether it takes work."""
        return self.state == "ready" and not self.cordoned


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """What one role of a pool has to do, in workers: 1 is what one worker can do within the objectives."""

    arriving: float = 0.0
    """Of the requests that come."""
    backlog: float = 0.0
    """Of those that have come and wait, spread over the time in which they should be gone."""
    held: float = 0.0
    """Of what the role holds now: a lower bound while ``arriving`` is not known well yet."""

    @property
    def demand(self) -> float:
        """Workers that it takes."""
        return max(self.arriving + self.backlog, self.held)


@dataclass(frozen=True, slots=True)
class Telemetry:
    """A pool at one time."""

    pool: str
    at: float
    """Seconds, on the clock of ``now``."""
    workers: tuple[WorkerLoad, ...]
    load: Mapping[Role, RoleLoad] = field(default_factory=lambda: dict.fromkeys(ROLES, RoleLoad()))
    queued: int = 0
    """Requests that wait in routers."""
    queue_growth: float = 0.0
    """Requests a second."""
    ttft: float = 0.0
    """Time to first token that a request of now is predicted to see, in seconds."""
    itl: float = 0.0
    """Time between tokens on the slowest decode worker, in seconds."""
    prefill_tokens_per_second: float = 0.0
    """Prompt tokens that come and are not cached."""
    decode_tokens_per_second: float = 0.0
    """Output tokens that the requests that come will have, as far as earlier ones tell."""
    capacity: Mapping[Role, float] = field(default_factory=dict)
    """Of a worker, in tokens a second, by its cost model and within the objectives."""
    seconds: float = 0.0
    """How much of the window was seen; 0: nothing is known yet."""

    def serving(self, role: Role) -> int:
        """Workers of a role that take work."""
        return sum(worker.role == role and worker.serving for worker in self.workers)

    def count(self, role: Role) -> int:
        """Workers of a role, those included that start."""
        return sum(worker.role == role and worker.state != "draining" for worker in self.workers)
