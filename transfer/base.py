# SPDX-License-Identifier: Apache-2.0
"""Types that every part of the transfer layer shares, and the protocol of an agent that moves bytes.

A *read* copies whole blocks from a peer's pool into this worker's pool. Until it is *fenced* its bytes may still
land, whatever the caller has decided meanwhile: a destination block must not be reused before that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from twinpool.ids import WorkerKey
from twinpool.transfer.shard import KvShard
from twinpool.v1 import worker_pb2

Blocks: TypeAlias = NDArray[np.int32]
"""Physical block numbers, ``int32[n]``."""

Generations: TypeAlias = NDArray[np.uint64]
"""Generation counters, ``uint64[n]``."""

MemoryType = Literal["DRAM", "VRAM"]
MEMORY_TYPES: tuple[str, ...] = get_args(MemoryType)

GENERATION_BYTES = 8
"""Bytes of one entry of a generation table."""


class AttemptKey(NamedTuple):
    """One placement of one request."""

    request_id: str
    attempt: int

    @classmethod
    def of(cls, message: worker_pb2.AttemptId) -> AttemptKey:
        return cls(message.request_id, message.attempt)

    def fetch_by(self, reader: WorkerKey) -> AttemptKey:
        """The name of the attempt's prefix fetch by ``reader``: apart from the hand-off of the same attempt, which may
        run between the same two workers."""
        return AttemptKey(f"{self.request_id}<{reader}", self.attempt)

    def message(self) -> worker_pb2.AttemptId:
        return worker_pb2.AttemptId(request_id=self.request_id, attempt=self.attempt)

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


class Fault(StrEnum):
    """Why a read, or a connection, failed. Anything that is not named here becomes UNKNOWN, never a success."""

    PEER_LOST = "PEER_LOST"  # the connection broke: the peer's process is gone or unreachable
    PEER_UNKNOWN = "PEER_UNKNOWN"  # this incarnation of the peer is not connected (any more)
    PEER_REFUSED = "PEER_REFUSED"  # the peer's descriptor failed a check
    BACKEND = "BACKEND"  # the transport reported an error
    CANCELLED = "CANCELLED"  # the transport reported a cancellation that nobody asked for
    INVALID = "INVALID"  # the transport refused the arguments
    DEADLINE = "DEADLINE"  # our own deadline passed
    ABORTED = "ABORTED"  # the caller cancelled
    CLOSED = "CLOSED"  # the agent was closed meanwhile
    UNKNOWN = "UNKNOWN"  # anything else


class TransferError(Exception):
    """A transfer operation that was refused or failed. Raised by a read, it says that nothing was posted."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(f"{fault}: {detail}")
        self.fault = fault
        self.detail = detail


class AgentBusy(Exception):
    """The agent has no room for another small read now; try again after a poll."""


class ReadStatus(Enum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ReadState:
    """State of a posted read. ``fenced``: no byte of it can land any more."""

    status: ReadStatus
    fenced: bool
    fault: Fault | None = None
    detail: str = ""


PENDING = ReadState(ReadStatus.PENDING, fenced=False)
DONE = ReadState(ReadStatus.DONE, fenced=True)


def failed(fault: Fault, detail: str, *, fenced: bool = True) -> ReadState:
    """A failed read. ``fenced`` False: only the end of the agent proves that nothing lands any more."""
    return ReadState(ReadStatus.FAILED, fenced, fault, detail)


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """``length_bytes`` at ``address`` of the owning process, in memory of one device."""

    address: int
    length_bytes: int
    memory_type: MemoryType = "DRAM"
    device_id: int = 0


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """A worker's block-major KV pool: block ``i`` is ``block_bytes`` at ``region.address + i * block_bytes``.

    ``keepalive`` is whatever owns the memory. It must never be unmapped while a peer may read (a deregistered
    region crashes its owner over TCP), so it lives as long as the agent.
    """

    region: MemoryRegion
    block_bytes: int
    num_blocks: int
    keepalive: Any = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.block_bytes <= 0 or self.num_blocks <= 0:
            raise ValueError(f"a pool of {self.num_blocks} blocks of {self.block_bytes} bytes")
        if self.region.length_bytes != self.block_bytes * self.num_blocks:
            raise ValueError(
                f"pool of {self.region.length_bytes} bytes is not {self.num_blocks} x {self.block_bytes}"
            )

    @classmethod
    def of_array(cls, array: NDArray[Any]) -> PoolMemory:
        """A pool in host memory: ``array[blocks, ...]``, C-contiguous."""
        if not array.flags.c_contiguous or array.ndim < 1 or array.nbytes == 0:
            raise ValueError(f"a pool must be a C-contiguous, non-empty array, not shape {array.shape}")
        region = MemoryRegion(array.ctypes.data, array.nbytes)
        return cls(region, array.nbytes // array.shape[0], array.shape[0], array)

    @classmethod
    def of_tensor(cls, tensor: Any) -> PoolMemory:
        """A pool in a torch tensor ``[blocks, ...]`` on the CPU or one CUDA device, contiguous."""
        if not tensor.is_contiguous() or tensor.dim() < 1 or tensor.numel() == 0:
            raise ValueError(
                f"a pool must be a contiguous, non-empty tensor, not shape {tuple(tensor.shape)}"
            )
        kinds: dict[str, MemoryType] = {"cpu": "DRAM", "cuda": "VRAM"}
        if tensor.device.type not in kinds:
            raise ValueError(f"no transfer from device {tensor.device}: use cpu or cuda")
        length = tensor.numel() * tensor.element_size()
        region = MemoryRegion(tensor.data_ptr(), length, kinds[tensor.device.type], tensor.device.index or 0)
        return cls(region, length // tensor.shape[0], tensor.shape[0], tensor)


@dataclass(frozen=True, slots=True)
class PeerDescriptor:
    """All that a peer needs to pull from a worker; checked when it comes from the wire (``descriptor``)."""

    worker: WorkerKey
    fingerprint: str
    pool: MemoryRegion
    block_bytes: int
    num_blocks: int
    generations: MemoryRegion
    agent_name: str
    agent_metadata: bytes = field(repr=False)
    shard: KvShard | None = None
    """What of each row the pool holds; None: whole rows."""


class ReadHandle:
    """A posted read. Opaque; belongs to the agent that made it and to the thread that drives that agent."""

    __slots__ = ()


class TransferAgent(Protocol):
    """Moves bytes from peers' pools into this worker's pool. Calls come from one thread at a time.

    ``read`` and ``read_generations`` raise TransferError if nothing was posted; everything after that is a state.
    Generations are to be read *after* the data read is DONE: the owner raises a block's generation before the first
    new byte goes into it, so an unchanged generation proves the bytes that were read before.
    """

    @property
    def descriptor(self) -> PeerDescriptor: ...

    def connect(self, peer: PeerDescriptor) -> None:
        """Makes ``peer`` readable. Another incarnation of the same worker replaces the old one. Raises TransferError."""

    def disconnect(self, peer: WorkerKey) -> None:
        """Forgets a peer; unknown ones are ignored. Does *not* fence reads in flight from it."""

    def connected(self, peer: WorkerKey) -> bool: ...

    def read(self, peer: WorkerKey, remote: Blocks, local: Blocks) -> ReadHandle:
        """Posts a read of blocks, ``remote[i]`` into ``local[i]``; at least one. Raises TransferError.

        From a rank of a worker of another degree only the part that both pools have: see :mod:`~twinpool.transfer.shard`.
        """
        ...

    def read_generations(self, peer: WorkerKey, remote: Blocks) -> ReadHandle:
        """Posts a read of the owner's generations of ``remote``. Raises TransferError, AgentBusy."""
        ...

    def generations(self, handle: ReadHandle) -> Generations:
        """What a DONE ``read_generations`` read: a fresh ``uint64[n]`` in the order that was asked for."""
        ...

    def poll(self, handle: ReadHandle) -> ReadState:
        """The state of a read; drives progress. A terminal state is final and may be asked for again."""
        ...

    def release(self, handle: ReadHandle) -> None:
        """Gives back the resources of a read in a terminal state."""

    def progress(self) -> None:
        """Serves readers of this worker: without it their reads do not complete."""

    def close(self) -> None:
        """Ends the agent: every read is fenced afterwards. Called once."""


class TransferObserver(Protocol):
    """What the transfer layer reports for metrics. Called on the thread where it happens; must not block."""

    def pulled(
        self, *, blocks: int, descriptors: int, size_bytes: int, seconds: float, post_seconds: float
    ) -> None:
        """Blocks and their generations arrived; ``seconds`` from post to done, ``post_seconds`` in posting."""

    def pull_failed(self, fault: Fault) -> None: ...

    def fence_failed(self, reason: str) -> None:
        """A ticket or a read was refused for a :class:`~twinpool.transfer.fence.HandoffFault`."""

    def leases_expired(self, count: int) -> None: ...

    def unknown_transfer(self, kind: str) -> None:
        """A message about a transfer or an attempt that is not known (any more)."""

    def release_unanswered(self) -> None:
        """The owner did not acknowledge a release in all its tries."""


class NullObserver:
    """Reports nothing."""

    def pulled(
        self, *, blocks: int, descriptors: int, size_bytes: int, seconds: float, post_seconds: float
    ) -> None:
        pass

    def pull_failed(self, fault: Fault) -> None:
        pass

    def fence_failed(self, reason: str) -> None:
        pass

    def leases_expired(self, count: int) -> None:
        pass

    def unknown_transfer(self, kind: str) -> None:
        pass

    def release_unanswered(self) -> None:
        pass
