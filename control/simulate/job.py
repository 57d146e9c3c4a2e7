# SPDX-License-Identifier: Apache-2.0
"""A request on its way through the simulated cluster, and each placement of it."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from twinpool.control.replay.blocks import Hashes
from twinpool.control.replay.figures import Timing
from twinpool.control.replay.trace import Request

if TYPE_CHECKING:
    from twinpool.control.simulate.worker import Worker

Blocks = NDArray[np.int32]
NO_BLOCKS: Blocks = np.zeros(0, np.int32)


class Status(StrEnum):
    """How a request stands."""

    WAITING = "waiting"
    SERVED = "served"
    REJECTED = "rejected"
    """Refused by admission, or ended by it while it waited."""
    FAILED = "failed"
    """Lost with a worker after its first token, or too often."""


@dataclass(slots=True, eq=False)
class Job:
    """One request."""

    request: Request
    hashes: Hashes
    """Of the prompt's full blocks."""
    listed: int
    """Blocks of the prompt that hit rates are shares of."""
    usable: int
    """Leading blocks that a cache can serve: the last prompt token is always computed."""
    infinite: int
    """Of these, the blocks that an infinite cache would have had."""
    timing: Timing
    status: Status = Status.WAITING
    cause: str = ""
    attempts: int = 0
    attempt: "Attempt | None" = None
    delivered: bool = False
    """A token was given to the client."""
    placed_at: float = -1.0
    predicted: int = 0
    cached: int = 0
    """Blocks found in the prefill worker's cache, fetched ones included, by the attempt that gave the first token."""
    fetched: int = 0
    """Of these, the blocks pulled from another worker."""
    local: bool = False
    """The decode worker computed the prompt."""
    decode_cached: int = 0
    """Blocks found in the decode worker's cache."""
    computed: int = 0
    """Prompt tokens computed, all attempts together, and tokens computed again after a preemption."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One placement: what it holds on its two workers."""

    job: Job
    number: int
    prefill: "Worker"
    decode: "Worker"
    fetch_from: "Worker | None" = None
    local: bool = False
    dead: bool = False
    """Ended by a fault: later events of it are ignored."""
    handed_off: bool = False

    # On the prefill worker, or on the decode worker if ``local``.
    blocks: Blocks = field(default_factory=lambda: NO_BLOCKS)
    computed: int = 0
    """Prompt tokens whose KV is there."""
    published: int = 0
    """Full blocks of them that are in the prefix cache."""
    ready_at: float = 0.0
    """A prefix is being fetched until then."""
    chunk: int = 0
    """Tokens in the running step."""
    compute_seconds: float = 0.0
    """Of the steps that computed it, its share by tokens."""

    # On the decode worker.
    decode_blocks: Blocks = field(default_factory=lambda: NO_BLOCKS)
    reserved_cached: int = 0
    """Leading prompt blocks that it held already."""
    offered: int = 0
    """Prompt blocks that were sent to it, or that it held."""
    arrives_at: float = 0.0
    """When the last of the blocks sent so far is there."""
    pulled: int = 0
    pull_seconds: float = 0.0
    first_step: int = -1
    """Number of the step before its first one."""
    tokens: int = 1
    """Output tokens made when it last joined the running batch."""
