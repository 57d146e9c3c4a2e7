# SPDX-License-Identifier: Apache-2.0
"""What a worker says of its KV cache, and where: events over ZeroMQ, segments in etcd.

Both carry the number of the event stream, so that a reader of the segments can go on with the events.
"""

from twinpool.kv_events.hashes import HASH_BYTES, digest, join, split
from twinpool.kv_events.segments import CacheState, read_state
from twinpool.kv_events.wire import (
    ALIVE,
    END_SEQUENCE,
    EVENTS,
    HOST_MEDIUM,
    SNAPSHOT,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventDecodeError,
    KVEventBatch,
    decode,
    encode,
    read_sequence,
    topic,
    worker_prefix,
    write_sequence,
)

__all__ = [
    "ALIVE",
    "END_SEQUENCE",
    "EVENTS",
    "HASH_BYTES",
    "HOST_MEDIUM",
    "SNAPSHOT",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "CacheState",
    "EventDecodeError",
    "KVEventBatch",
    "decode",
    "digest",
    "encode",
    "join",
    "read_sequence",
    "read_state",
    "split",
    "topic",
    "worker_prefix",
    "write_sequence",
]
