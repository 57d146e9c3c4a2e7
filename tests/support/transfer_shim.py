# SPDX-License-Identifier: Apache-2.0
"""Faults on the way of KV blocks: a shim around a real agent, and one around the messages of the hand-off.

Reads are numbered from 1 in the order of posting; data reads and generation reads are counted apart. All faults are
planned by number, so a test that fails replays exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from twinpool.ids import WorkerKey
from twinpool.transfer.base import (
    PENDING,
    Blocks,
    Fault,
    Generations,
    PeerDescriptor,
    ReadHandle,
    ReadState,
    ReadStatus,
    TransferAgent,
    TransferError,
)

M = TypeVar("M")


@dataclass
class ReadFaults:
    """What happens to which read. Keys are numbers of reads."""

    refuse: dict[int, Fault] = field(default_factory=dict)
    """The post raises: nothing is in flight."""
    report: dict[int, ReadState] = field(default_factory=dict)
    """The read ends in this state, whatever really became of it."""
    delay_seconds: dict[int, float] = field(default_factory=dict)
    """The bytes move only so long after the post. They do move, also if the caller has given up."""
    hold: set[int] = field(default_factory=set)
    """The bytes move only once the number is taken out."""
    after: dict[int, Callable[[], object]] = field(default_factory=dict)
    """Called when the read is done, before anyone learns of it: the place to reuse a block at the owner."""


class _ShimRead(ReadHandle):
    __slots__ = ("due", "faults", "number", "post", "real", "state")

    def __init__(self, number: int, faults: ReadFaults, due: float, post: Callable[[], ReadHandle]) -> None:
        self.number = number
        self.faults = faults
        self.due = due
        self.post = post
        self.real: ReadHandle | None = None
        self.state = PENDING


class ShimAgent:
    """A :class:`TransferAgent` with faults. ``clock`` is what delays are measured against."""

    def __init__(self, real: TransferAgent, clock: Callable[[], float]) -> None:
        self.real = real
        self.data = ReadFaults()
        self.generation = ReadFaults()
        self.data_reads = 0
        self.generation_reads = 0
        self._clock = clock
        self._delayed: list[_ShimRead] = []

    @property
    def delayed(self) -> int:
        """Reads whose bytes have yet to move."""
        return len(self._delayed)

    @property
    def descriptor(self) -> PeerDescriptor:
        return self.real.descriptor

    def connect(self, peer: PeerDescriptor) -> None:
        self.real.connect(peer)

    def disconnect(self, peer: WorkerKey) -> None:
        self.real.disconnect(peer)

    def connected(self, peer: WorkerKey) -> bool:
        return self.real.connected(peer)

    def read(self, peer: WorkerKey, remote: Blocks, local: Blocks) -> ReadHandle:
        self.data_reads += 1
        return self._post(self.data_reads, self.data, lambda: self.real.read(peer, remote, local))

    def read_generations(self, peer: WorkerKey, remote: Blocks) -> ReadHandle:
        if peer == self.descriptor.worker:
            # A worker's probe of its own memory is no part of any hand-off.
            return self._post(0, ReadFaults(), lambda: self.real.read_generations(peer, remote))
        self.generation_reads += 1
        return self._post(
            self.generation_reads, self.generation, lambda: self.real.read_generations(peer, remote)
        )

    def generations(self, handle: ReadHandle) -> Generations:
        read = _own(handle)
        assert read.real is not None
        return self.real.generations(read.real)

    def poll(self, handle: ReadHandle) -> ReadState:
        read = _own(handle)
        if read.state.status is not ReadStatus.PENDING:
            return read.state
        self._post_due()
        if read.real is None:
            return read.state
        state = self.real.poll(read.real)
        if state.status is ReadStatus.PENDING:
            return PENDING
        if state.status is ReadStatus.DONE:
            read.faults.after.get(read.number, lambda: None)()
        read.state = read.faults.report.get(read.number, state)
        return read.state

    def release(self, handle: ReadHandle) -> None:
        read = _own(handle)
        if read.real is not None:
            self.real.release(read.real)

    def progress(self) -> None:
        self._post_due()
        self.real.progress()

    def close(self) -> None:
        self.real.close()

    def _post(self, number: int, faults: ReadFaults, post: Callable[[], ReadHandle]) -> ReadHandle:
        if number in faults.refuse:
            raise TransferError(faults.refuse[number], f"the shim refuses read {number}")
        read = _ShimRead(number, faults, self._clock() + faults.delay_seconds.get(number, 0.0), post)
        if self._is_due(read):
            read.real = post()
        else:
            self._delayed.append(read)
        return read

    def _is_due(self, read: _ShimRead) -> bool:
        return read.due <= self._clock() and read.number not in read.faults.hold

    def _post_due(self) -> None:
        """Moves the bytes of delayed reads, whether or not anyone still asks for them."""
        for read in [read for read in self._delayed if self._is_due(read)]:
            self._delayed.remove(read)
            try:
                read.real = read.post()
            except TransferError as error:
                read.state = ReadState(ReadStatus.FAILED, True, error.fault, error.detail)


class NoteShim(Generic[M]):
    """Messages of one direction, numbered from 1; some are dropped, some come twice, the rest goes on unchanged."""

    def __init__(self, deliver: Callable[[M], None]) -> None:
        self.drop: Callable[[int, M], bool] = lambda _number, _message: False
        self.duplicate: Callable[[int, M], bool] = lambda _number, _message: False
        self.count = 0
        self._deliver = deliver

    def __call__(self, message: M) -> None:
        self.count += 1
        if self.drop(self.count, message):
            return
        self._deliver(message)
        if self.duplicate(self.count, message):
            self._deliver(message)


def _own(handle: ReadHandle) -> _ShimRead:
    assert isinstance(handle, _ShimRead)
    return handle
