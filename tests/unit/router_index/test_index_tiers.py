# SPDX-License-Identifier: Apache-2.0
"""Copies in host memory, on the wire, in etcd and in the index: apart from those in the KV pool, and as good to find."""

import numpy as np

from tests.support.cache_world import BLOCK_TOKENS, CHAINS
from tests.support.event_world import core_with
from twinpool._core import RouterCore
from twinpool.ids import WorkerKey
from twinpool.kv_events import (
    HOST_MEDIUM,
    BlockRemoved,
    BlockStored,
    CacheState,
    KVEventBatch,
    decode,
    digest,
    encode,
    read_state,
    split,
    wire,
)
from twinpool.router.index.mirror import Mirror, Need
from twinpool.v1.locality_pb2 import LocalitySegment

KEY = WorkerKey("w", 1)
CHAIN = CHAINS[0][1]
NAMES = split(CHAIN.tobytes()[: 16 * 4])
RAW = b"".join(NAMES)


def batch(events: list[BlockStored | BlockRemoved], device: bytes, host: bytes, ts: float) -> KVEventBatch:
    """A batch after which the worker holds these, as it comes off the wire."""
    check = digest(device) ^ digest(host, host=True)
    blocks = (len(device) + len(host)) // 16
    made = KVEventBatch(ts, [*events], incarnation=1, blocks=blocks, digest=check)
    return decode(encode(made))


def held(core: RouterCore, tier: str) -> set[bytes]:
    return set(split(np.asarray(core.index_hashes(KEY.name, KEY.incarnation, tier=tier)).tobytes()))


def started() -> tuple[RouterCore, Mirror]:
    core = core_with(KEY)
    mirror = Mirror(core, KEY)
    mirror.snapshot([(0, batch([], b"", b"", 1.0))])
    assert mirror.need is None
    return core, mirror


def test_a_block_moves_from_the_pool_to_the_host_and_is_found_all_the_time() -> None:
    core, mirror = started()
    mirror.event(0, batch([wire.stored(NAMES, None, BLOCK_TOKENS)], RAW, b"", 2.0))
    # The last two go to the host before the pool forgets them.
    tail = NAMES[2:]
    events = [wire.stored(tail, NAMES[1], BLOCK_TOKENS, HOST_MEDIUM), wire.removed(tail)]
    mirror.event(1, batch(list(events), RAW[:32], RAW[32:], 3.0))
    assert mirror.need is None
    assert (held(core, "device"), held(core, "host")) == (set(NAMES[:2]), set(tail))
    assert dict(core.longest_prefix(CHAIN)) == {"w": 4}
    mirror.event(2, batch([wire.removed(tail, HOST_MEDIUM)], RAW[:32], b"", 4.0))
    assert mirror.need is None
    assert dict(core.longest_prefix(CHAIN)) == {"w": 2}
    assert held(core, "host") == set()


def test_a_copy_in_the_other_tier_is_no_copy_in_this_one() -> None:
    _, mirror = started()
    # As many blocks as the worker says, in the wrong tier: the digests differ.
    mirror.event(0, batch([wire.stored(NAMES, None, BLOCK_TOKENS)], b"", RAW, 2.0))
    assert mirror.need == Need("snapshot", "digest")


def test_a_snapshot_holds_both_tiers() -> None:
    core = core_with(KEY)
    mirror = Mirror(core, KEY)
    events = [
        wire.stored(NAMES[:2], None, BLOCK_TOKENS),
        wire.stored(NAMES[1:], NAMES[0], BLOCK_TOKENS, HOST_MEDIUM),
    ]
    mirror.snapshot([(7, batch(list(events), RAW[:32], RAW[16:], 1.0))])
    assert mirror.need is None
    assert mirror.blocks == 5, "the block that is in both counts twice"
    assert (held(core, "device"), held(core, "host")) == (set(NAMES[:2]), set(NAMES[1:]))


def test_segments_hold_both_tiers() -> None:
    base = LocalitySegment(
        incarnation=1, generation=1, parts=1, next_sequence=5, stored=RAW[:48], host_stored=RAW[32:], blocks=5
    )
    base.digest = digest(RAW[:48]) ^ digest(RAW[32:], host=True)
    delta = LocalitySegment(
        incarnation=1,
        generation=1,
        from_sequence=5,
        next_sequence=6,
        removed=RAW[32:48],
        host_removed=RAW[48:],
    )
    delta.blocks, delta.digest = 3, digest(RAW[:32]) ^ digest(RAW[32:48], host=True)
    state = read_state([base.SerializeToString(), delta.SerializeToString()], 1)
    assert state == CacheState(RAW[:32], 6, RAW[32:48])
    core = core_with(KEY)
    mirror = Mirror(core, KEY)
    assert state is not None
    mirror.adopt(state)
    assert (held(core, "device"), held(core, "host")) == (set(NAMES[:2]), {NAMES[2]})
    assert dict(core.longest_prefix(CHAIN)) == {"w": 3}
    # A tier that is not what was written makes the whole delta worthless.
    delta.host_removed = b""
    assert read_state([base.SerializeToString(), delta.SerializeToString()], 1) == CacheState(
        RAW[:48], 5, RAW[32:]
    )
