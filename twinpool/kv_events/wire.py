# SPDX-License-Identifier: Apache-2.0
"""KV events on the wire, in the layout of vLLM's ``kv_events`` so that existing indexers can subscribe.

A message has three frames: topic, sequence (8 bytes, big-endian), payload. The payload is msgpack: an array
``[ts, events, data_parallel_rank, incarnation, blocks, digest]``, of which vLLM has the first three (decoders skip what
follows), and each event is a map with its kind under ``type``.

Other than in vLLM:

- ``token_ids`` is always empty. Tokens are a user's text; who matches prefixes needs the hashes alone.
- Hashes are 16 bytes and already cover tenant and adapter, so ``lora_id`` and ``lora_name`` are null.
- A sequence number is one of an *incarnation*, which is in the topic and in each payload. It never goes back.
- ``blocks`` and ``digest`` are of the worker's whole set after the batch, copies in host memory counted apart: a subscriber
  checks itself with them.
- Between events, messages under the topic ``alive@...`` say which sequence number comes next, so that the loss of the
  last message and a silent worker are noticed. Subscribers of ``kv@`` do not see them.

The replay socket (ROUTER) takes ``["", start]`` and answers as vLLM's: ``["", sequence, payload]`` for each batch from
``start`` on that it still has, then ``["", END_SEQUENCE, ""]``. It also takes ``["", "snapshot", ""]``: the answer is the
whole set as ``BlockStored`` events in messages whose sequence is the one that comes after the snapshot, then the same end.
"""

import math
from typing import Final

import msgspec

from twinpool.ids import WorkerKey, to_hex64
from twinpool.kv_events.hashes import HASH_BYTES

EVENTS: Final = "kv"
"""First part of the topic of events."""

ALIVE: Final = "alive"
"""First part of the topic of signs of life."""

SNAPSHOT: Final = b"snapshot"
"""Asks the replay socket for the whole set."""

SEQUENCE_MAX: Final = (1 << 62) - 1
"""The greatest number of a batch: a worker that told a million a second would need 146,000 years. What lies beyond is no number
of ours, and the one after it can still be written."""

END_SEQUENCE: Final = (-1).to_bytes(8, "big", signed=True)
"""Sequence frame of the last message of an answer."""

DEVICE_MEDIUM: Final = "GPU"
"""``medium`` of blocks in the KV pool, as vLLM says it, whatever the device is."""

HOST_MEDIUM: Final = "CPU"
"""``medium`` of copies in host memory. A block that has copies in both tiers is stored and removed in each."""


class EventDecodeError(ValueError):
    """A payload that no worker of ours could have sent."""


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """A chain of blocks can be found from now on. ``parent_block_hash`` is the block before the first; None: the first
    is the first of a prompt."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks can't be found any more: the last copy of each on this worker is gone."""

    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """The set is empty."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events that belong together. ``ts``: seconds since the epoch, never going back within an incarnation."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None
    incarnation: int = 0
    blocks: int = 0
    digest: int = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(KVEventBatch)


def stored(
    hashes: list[bytes], parent: bytes | None, block_tokens: int, medium: str = DEVICE_MEDIUM
) -> BlockStored:
    """A BlockStored with what is always the same filled in."""
    return BlockStored(hashes, parent, [], block_tokens, None, medium, None)


def removed(hashes: list[bytes], medium: str = DEVICE_MEDIUM) -> BlockRemoved:
    """A BlockRemoved of one tier."""
    return BlockRemoved(hashes, medium)


def encode(batch: KVEventBatch) -> bytes:
    """The payload."""
    return _encoder.encode(batch)


def decode(payload: bytes) -> KVEventBatch:
    """The batch in a payload. Raises EventDecodeError, also for hashes that are not 16 bytes."""
    try:
        batch = _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise EventDecodeError(f"not a batch of KV events: {error}") from None
    if not math.isfinite(batch.ts):
        # It would be later than all that comes, or than nothing.
        raise EventDecodeError("the time of a batch is not finite")
    for event in batch.events:
        if isinstance(event, AllBlocksCleared):
            continue
        if any(len(name) != HASH_BYTES for name in event.block_hashes):
            raise EventDecodeError("a block hash does not have 16 bytes")
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            if parent is not None and len(parent) != HASH_BYTES:
                raise EventDecodeError("the hash of a parent does not have 16 bytes")
    return batch


def worker_prefix(kind: str, name: str) -> bytes:
    """What the topics of all incarnations of a worker begin with. A name has no dot, so no other worker's topic does."""
    return f"{kind}@{name}.".encode()


def topic(kind: str, worker: WorkerKey, model: str) -> bytes:
    """The topic of a worker's messages: ``kind@worker.incarnation@model``."""
    return worker_prefix(kind, worker.name) + f"{to_hex64(worker.incarnation)}@{model}".encode()


def write_sequence(sequence: int) -> bytes:
    """The sequence frame."""
    return sequence.to_bytes(8, "big")


def read_sequence(frame: bytes) -> int:
    """The number in a sequence frame. Raises EventDecodeError."""
    if len(frame) != 8:
        raise EventDecodeError(f"the sequence frame has {len(frame)} bytes, not 8")
    sequence = int.from_bytes(frame, "big")
    if sequence > SEQUENCE_MAX:
        raise EventDecodeError(f"the number {sequence} is beyond {SEQUENCE_MAX}")
    return sequence
