# SPDX-License-Identifier: Apache-2.0
"""The in-process twin of the NIXL agent: same protocol, same semantics, no transport.

Workers of one process meet in a :class:`Fabric`. As over TCP, a read completes only while its owner makes progress,
a killed owner breaks its readers' reads, a stopped one leaves them pending, and bytes of a read whose caller has
given up still land when the owner resumes.
"""

from __future__ import annotations

import ctypes
import threading

import numpy as np

from twinpool.ids import WorkerKey
from twinpool.transfer.base import (
    DONE,
    GENERATION_BYTES,
    PENDING,
    Blocks,
    Fault,
    Generations,
    MemoryRegion,
    PeerDescriptor,
    PoolMemory,
    ReadHandle,
    ReadState,
    ReadStatus,
    TransferError,
    failed,
)
from twinpool.transfer.descriptor import agent_name
from twinpool.transfer.shard import KvShard, share_of


class _Read(ReadHandle):
    __slots__ = ("blocks", "copies", "peer", "state", "table")

    def __init__(self, peer: WorkerKey, blocks: Blocks, copies: list[tuple[int, int, int]]) -> None:
        self.peer = peer
        self.blocks = blocks
        self.copies = copies  # (destination, source, bytes)
        self.state: ReadState = PENDING
        self.table: Generations | None = None


class Fabric:
    """Where the agents of one process find one another. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._alive: set[WorkerKey] = set()
        self._stopped: set[WorkerKey] = set()
        self._waiting: dict[WorkerKey, list[_Read]] = {}

    def join(self, worker: WorkerKey) -> None:
        """A worker becomes readable. Raises ValueError if this incarnation is or was here."""
        with self._lock:
            if worker in self._waiting:
                raise ValueError(f"{worker} is on the fabric already")
            self._alive.add(worker)
            self._waiting[worker] = []

    def leave(self, worker: WorkerKey) -> None:
        """The worker dies: reads from it fail."""
        with self._lock:
            self._alive.discard(worker)
            for read in self._waiting.get(worker, []):
                read.state = failed(Fault.PEER_LOST, f"{worker} is gone")
            if worker in self._waiting:
                self._waiting[worker] = []

    def stop(self, worker: WorkerKey) -> None:
        """As SIGSTOP: nobody notices, nothing completes."""
        with self._lock:
            self._stopped.add(worker)

    def resume(self, worker: WorkerKey) -> None:
        """As SIGCONT: what was posted meanwhile lands."""
        with self._lock:
            self._stopped.discard(worker)

    def serves(self, worker: WorkerKey) -> bool:
        """Whether the worker's process exists, stopped or not."""
        with self._lock:
            return worker in self._alive

    def post(self, read: _Read) -> None:
        """Queues a read at its owner."""
        with self._lock:
            if read.peer not in self._alive:
                read.state = failed(Fault.PEER_LOST, f"{read.peer} is gone")
            else:
                self._waiting[read.peer].append(read)

    def serve(self, owner: WorkerKey) -> None:
        """The owner makes progress: its readers' bytes move."""
        with self._lock:
            if owner not in self._alive or owner in self._stopped:
                return
            reads, self._waiting[owner] = self._waiting[owner], []
            for read in reads:
                for destination, source, size in read.copies:
                    ctypes.memmove(destination, source, size)
                read.state = DONE

    def withdraw(self, reads: list[_Read]) -> None:
        """The reader's agent ends: its reads never land."""
        with self._lock:
            for waiting in self._waiting.values():
                waiting[:] = [read for read in waiting if read not in reads]


class LoopbackAgent:
    """See :class:`~twinpool.transfer.base.TransferAgent`."""

    def __init__(
        self,
        worker: WorkerKey,
        fingerprint: str,
        pool: PoolMemory,
        generations: Generations,
        *,
        fabric: Fabric,
        shard: KvShard | None = None,
    ) -> None:
        if generations.dtype != np.uint64 or generations.shape != (pool.num_blocks,):
            raise ValueError(f"the generation table must be uint64[{pool.num_blocks}]")
        if pool.region.memory_type != "DRAM":
            raise ValueError("the loopback agent moves host memory only")
        self._pool = pool
        self._table = generations
        self._fabric = fabric
        self._peers: dict[WorkerKey, PeerDescriptor] = {}
        self._reads: list[_Read] = []
        table = MemoryRegion(generations.ctypes.data, generations.nbytes)
        name = agent_name(worker)
        self._descriptor = PeerDescriptor(
            worker,
            fingerprint,
            pool.region,
            pool.block_bytes,
            pool.num_blocks,
            table,
            name,
            b"loopback",
            shard,
        )
        fabric.join(worker)

    @property
    def descriptor(self) -> PeerDescriptor:
        return self._descriptor

    def connect(self, peer: PeerDescriptor) -> None:
        known = self._peers.get(peer.worker)
        if known is not None and known != peer:
            raise TransferError(Fault.PEER_REFUSED, f"{peer.worker} has changed its descriptor")
        if not self._fabric.serves(peer.worker):
            raise TransferError(Fault.PEER_LOST, f"{peer.worker} is not on the fabric")
        part = share_of(self._descriptor.shard, peer.shard)
        if part is not None and not part.runs:
            raise TransferError(Fault.PEER_REFUSED, f"{peer.worker} holds none of this rank's heads")
        for worker in [w for w in self._peers if w.name == peer.worker.name]:
            del self._peers[worker]
        self._peers[peer.worker] = peer

    def disconnect(self, peer: WorkerKey) -> None:
        self._peers.pop(peer, None)

    def connected(self, peer: WorkerKey) -> bool:
        return peer in self._peers and self._fabric.serves(peer)

    def read(self, peer: WorkerKey, remote: Blocks, local: Blocks) -> ReadHandle:
        owner = self._peer(peer)
        if len(remote) == 0 or len(remote) != len(local):
            raise TransferError(Fault.INVALID, f"{len(remote)} blocks into {len(local)}")
        part = share_of(self._descriptor.shard, owner.shard)
        copies = []
        for theirs, ours in zip(remote.tolist(), local.tolist(), strict=True):
            if not (0 <= theirs < owner.num_blocks and 0 <= ours < self._pool.num_blocks):
                raise TransferError(Fault.INVALID, f"block {theirs} into block {ours}")
            target = self._pool.region.address + ours * self._pool.block_bytes
            source = owner.pool.address + theirs * owner.block_bytes
            if part is None:
                copies.append((target, source, owner.block_bytes))
                continue
            copies += [
                (
                    target + row * part.local_row_bytes + run.local,
                    source + row * part.remote_row_bytes + run.remote,
                    run.length,
                )
                for row in range(part.rows)
                for run in part.runs
            ]
        return self._post(_Read(peer, remote, copies))

    def read_generations(self, peer: WorkerKey, remote: Blocks) -> ReadHandle:
        owner = self._peer(peer)
        if len(remote) == 0 or int(remote.min()) < 0 or int(remote.max()) >= owner.num_blocks:
            raise TransferError(Fault.INVALID, f"generations of {len(remote)} blocks")
        table = np.zeros(len(remote), dtype=np.uint64)
        source = owner.generations.address
        copies = [
            (table.ctypes.data + i * GENERATION_BYTES, source + block * GENERATION_BYTES, GENERATION_BYTES)
            for i, block in enumerate(remote.tolist())
        ]
        read = _Read(peer, remote, copies)
        read.table = table
        return self._post(read)

    def generations(self, handle: ReadHandle) -> Generations:
        read = _own(handle)
        if read.table is None or read.state.status is not ReadStatus.DONE:
            raise ValueError("not a finished read of generations")
        return read.table.copy()

    def poll(self, handle: ReadHandle) -> ReadState:
        self.progress()
        return _own(handle).state

    def release(self, handle: ReadHandle) -> None:
        read = _own(handle)
        if read.state.status is ReadStatus.PENDING:
            raise ValueError("a pending read cannot be released: its bytes would still land")
        if read in self._reads:
            self._reads.remove(read)

    def progress(self) -> None:
        self._fabric.serve(self._descriptor.worker)

    def close(self) -> None:
        self._fabric.withdraw(self._reads)
        self._fabric.leave(self._descriptor.worker)
        self._reads.clear()
        self._peers.clear()

    def _peer(self, peer: WorkerKey) -> PeerDescriptor:
        descriptor = self._peers.get(peer)
        if descriptor is None:
            raise TransferError(Fault.PEER_UNKNOWN, f"{peer} is not connected")
        if not self._fabric.serves(peer):
            raise TransferError(Fault.PEER_LOST, f"the connection to {peer} broke")
        return descriptor

    def _post(self, read: _Read) -> _Read:
        self._reads.append(read)
        self._fabric.post(read)
        return read


def _own(handle: ReadHandle) -> _Read:
    if not isinstance(handle, _Read):
        raise TypeError(f"{type(handle).__name__} is not a read of this agent")
    return handle
