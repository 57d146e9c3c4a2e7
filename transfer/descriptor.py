# SPDX-License-Identifier: Apache-2.0
"""Worker descriptors on the wire: built from addresses, and checked in full before anything is loaded from one.

A peer's descriptor is the one message whose bytes end up in NIXL. NIXL has no authentication, and a metadata blob
that lost a byte poisons the peer's name in the receiving agent for ever, so every check happens before.
"""

from __future__ import annotations

import hashlib

from twinpool.ids import SHOWN_CHARS, WorkerKey
from twinpool.transfer.base import (
    GENERATION_BYTES,
    MEMORY_TYPES,
    Fault,
    MemoryRegion,
    MemoryType,
    PeerDescriptor,
    TransferError,
)
from twinpool.transfer.shard import KvShard, mismatch
from twinpool.v1 import handoff_pb2, worker_pb2

METADATA_BYTES_MAX = 1 << 20
"""Largest agent metadata that is accepted; real ones are 0.4-3 KB."""

_ADDRESS_END = 1 << 64


class DescriptorError(TransferError):
    """A peer's descriptor is refused; ``field`` names what is wrong. Unequal fingerprints are ``field`` "fingerprint"."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(Fault.PEER_REFUSED, f"{field}: {detail}")
        self.field = field


def agent_name(worker: WorkerKey) -> str:
    """The NIXL name of a worker's agent: another for each incarnation, so a stale or poisoned name never returns."""
    return str(worker)


def worker_message(worker: WorkerKey) -> worker_pb2.WorkerId:
    """``worker`` as it stands on the wire."""
    return worker_pb2.WorkerId(name=worker.name, incarnation=worker.incarnation)


def worker_key(message: worker_pb2.WorkerId) -> WorkerKey:
    """The inverse of :func:`worker_message`. Raises DescriptorError if it names no worker."""
    try:
        return WorkerKey(message.name, message.incarnation)
    except ValueError as error:
        raise DescriptorError("worker", str(error)) from None


def to_message(descriptor: PeerDescriptor) -> handoff_pb2.WorkerDescriptor:
    """``descriptor`` as it stands on the wire, with the checksum of its metadata."""
    return handoff_pb2.WorkerDescriptor(
        worker=worker_message(descriptor.worker),
        fingerprint=descriptor.fingerprint,
        pool=_region_message(descriptor.pool),
        block_bytes=descriptor.block_bytes,
        num_blocks=descriptor.num_blocks,
        generations=_region_message(descriptor.generations),
        agent_name=descriptor.agent_name,
        agent_metadata=descriptor.agent_metadata,
        agent_metadata_sha256=hashlib.sha256(descriptor.agent_metadata).digest(),
        shard=None if descriptor.shard is None else _shard_message(descriptor.shard),
    )


def from_message(
    message: handoff_pb2.WorkerDescriptor, *, own: PeerDescriptor, expected: WorkerKey | None = None
) -> PeerDescriptor:
    """Checks a peer's descriptor against ``own`` and returns it.

    ``expected`` is whom the caller means to talk to (a reader knows its owner; an owner takes any reader).
    Raises DescriptorError naming the field, the peer's value and ours.
    """
    worker = worker_key(message.worker)
    if expected is not None and worker != expected:
        raise DescriptorError(
            "worker", f"this is {worker}, not {expected}: it was restarted or the endpoint moved"
        )
    if worker == own.worker:
        raise DescriptorError("worker", f"{worker} is this worker itself")
    shard = _shard(message, worker)
    _check_layout(message, own, worker, shard)
    generations = _region(message.generations, "generations")
    if generations.memory_type != "DRAM" or generations.address % GENERATION_BYTES:
        raise DescriptorError("generations", "the table must be 8-byte aligned host memory")
    _check_metadata(message, worker)
    return PeerDescriptor(
        worker=worker,
        fingerprint=message.fingerprint,
        pool=_region(message.pool, "pool"),
        block_bytes=message.block_bytes,
        num_blocks=message.num_blocks,
        generations=generations,
        agent_name=message.agent_name,
        agent_metadata=message.agent_metadata,
        shard=shard,
    )


def _check_layout(
    message: handoff_pb2.WorkerDescriptor, own: PeerDescriptor, worker: WorkerKey, shard: KvShard | None
) -> None:
    if message.fingerprint != own.fingerprint:
        raise DescriptorError(
            "fingerprint",
            f"{worker} has {message.fingerprint[:SHOWN_CHARS]!r}, this worker {own.fingerprint!r}: model, dtype, block size and "
            "layout must be equal on both",
        )
    _check_shards(message, own, worker, shard)
    if not 1 <= message.num_blocks < 1 << 31:
        raise DescriptorError("num_blocks", f"{message.num_blocks} is not in 1..2**31-1")
    for name, region, entry in (
        ("pool", message.pool, message.block_bytes),
        ("generations", message.generations, GENERATION_BYTES),
    ):
        if region.length_bytes != message.num_blocks * entry:
            raise DescriptorError(name, f"{region.length_bytes} bytes are not {message.num_blocks} x {entry}")


def _check_shards(
    message: handoff_pb2.WorkerDescriptor, own: PeerDescriptor, worker: WorkerKey, shard: KvShard | None
) -> None:
    """Blocks have to be equally long, or parts of the same rows. Absent shards are whole rows."""
    known = shard or own.shard
    if known is None:
        if message.block_bytes != own.block_bytes:
            raise DescriptorError(
                "block_bytes", f"{worker} has {message.block_bytes}, this worker {own.block_bytes}"
            )
        return
    ours, theirs = own.shard or known.of_degree(1), shard or known.of_degree(1)
    problem = mismatch(ours, theirs)
    if problem is not None:
        raise DescriptorError("shard", f"{worker} has {problem}")
    for who, size, held in (
        (str(worker), message.block_bytes, theirs),
        ("this worker", own.block_bytes, ours),
    ):
        if size != held.block_bytes:
            detail = f"{who} has {size}, rank {held.rank} of {held.degree} of this layout {held.block_bytes}"
            raise DescriptorError("block_bytes", detail)


def _shard(message: handoff_pb2.WorkerDescriptor, worker: WorkerKey) -> KvShard | None:
    if not message.HasField("shard"):
        return None
    shard = message.shard
    try:
        return KvShard(shard.degree, shard.rank, shard.heads, tuple(shard.head_bytes), shard.rows)
    except ValueError as error:
        raise DescriptorError("shard", f"{worker}: {error}") from None


def _shard_message(shard: KvShard) -> handoff_pb2.KvShard:
    return handoff_pb2.KvShard(
        degree=shard.degree,
        rank=shard.rank,
        heads=shard.heads,
        head_bytes=shard.head_bytes,
        rows=shard.rows,
    )


def _check_metadata(message: handoff_pb2.WorkerDescriptor, worker: WorkerKey) -> None:
    if message.agent_name != agent_name(worker):
        raise DescriptorError(
            "agent_name", f"{message.agent_name[:SHOWN_CHARS]!r} is not {agent_name(worker)!r}"
        )
    size = len(message.agent_metadata)
    if not 1 <= size <= METADATA_BYTES_MAX:
        raise DescriptorError("agent_metadata", f"{size} bytes are not in 1..{METADATA_BYTES_MAX}")
    if hashlib.sha256(message.agent_metadata).digest() != message.agent_metadata_sha256:
        raise DescriptorError(
            "agent_metadata", f"the SHA-256 of its {size} bytes does not match: damaged on the way"
        )


def _region(message: handoff_pb2.MemoryRegion, name: str) -> MemoryRegion:
    if message.memory_type not in MEMORY_TYPES:
        raise DescriptorError(
            name, f"memory type {message.memory_type[:SHOWN_CHARS]!r} is not one of {', '.join(MEMORY_TYPES)}"
        )
    if message.address == 0 or message.address + message.length_bytes > _ADDRESS_END:
        raise DescriptorError(
            name, f"{message.length_bytes} bytes at {message.address:#x} are no address range"
        )
    memory_type: MemoryType = "VRAM" if message.memory_type == "VRAM" else "DRAM"
    return MemoryRegion(message.address, message.length_bytes, memory_type, message.device_id)


def _region_message(region: MemoryRegion) -> handoff_pb2.MemoryRegion:
    return handoff_pb2.MemoryRegion(
        address=region.address,
        length_bytes=region.length_bytes,
        memory_type=region.memory_type,
        device_id=region.device_id,
    )
