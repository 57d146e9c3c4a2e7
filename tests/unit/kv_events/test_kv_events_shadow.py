# SPDX-License-Identifier: Apache-2.0
"""The announced set is what can be found here: no more, no less, and always closed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cache_world import BLOCK_TOKENS, CHAINS, CacheWorld
from twinpool._core import BlockManager
from twinpool.kv_events.hashes import split
from twinpool.worker.kv_events.shadow import Change, RawEvent, Shadow
from twinpool.worker.kv_events.tap import CacheTap

ROOT, HASHES = CHAINS[0]
A, B, C, D = split(HASHES[:4].tobytes())


def stored(*names: bytes, after: bytes, rooted: bool = False) -> RawEvent:
    return RawEvent(b"".join(names), after, rooted)


def removed(*names: bytes) -> RawEvent:
    return RawEvent(b"".join(names), None, False)


def test_a_chain_is_announced_with_the_block_before_it() -> None:
    shadow = Shadow()
    assert shadow.apply(stored(A, B, after=ROOT, rooted=True)) == [Change(True, [A, B], None)]
    assert shadow.apply(stored(C, after=B)) == [Change(True, [C], B)]
    assert shadow.apply(removed(C, B)) == [Change(False, [C, B], None)]
    assert shadow.hashes() == A


def test_an_orphan_is_announced_with_its_ancestor() -> None:
    shadow = Shadow()
    shadow.apply(stored(A, after=ROOT, rooted=True))
    assert shadow.apply(stored(C, D, after=B)) == []
    assert shadow.orphans == 2
    assert shadow.apply(stored(B, after=A)) == [Change(True, [B, C, D], A)]
    assert shadow.orphans == 0


def test_what_hangs_on_a_lost_ancestor_is_withdrawn_with_it() -> None:
    shadow = Shadow()
    shadow.apply(stored(C, after=B))
    shadow.apply(stored(A, B, after=ROOT, rooted=True))
    shadow.apply(stored(D, after=C))
    # The block manager knows no link from C to B, so B may go while C and D are held.
    (change,) = shadow.apply(removed(B))
    assert not change.stored
    assert sorted(change.hashes) == sorted([B, C, D])
    assert shadow.hashes() == A
    assert shadow.apply(stored(B, after=A)) == [Change(True, [B, C, D], A)]


def test_an_orphan_that_goes_is_not_waited_for() -> None:
    shadow = Shadow()
    shadow.apply(stored(C, D, after=B))
    assert shadow.apply(removed(D, C)) == []
    assert shadow.apply(stored(A, B, after=ROOT, rooted=True)) == [Change(True, [A, B], None)]
    assert shadow.orphans == 0


def test_events_that_come_twice_change_nothing() -> None:
    shadow = Shadow()
    shadow.apply(stored(A, after=ROOT, rooted=True))
    assert shadow.apply(stored(A, after=ROOT, rooted=True)) == []
    shadow.apply(removed(A))
    assert shadow.apply(removed(A)) == []


def test_one_of_two_copies_goes_and_nothing_is_told() -> None:
    """Two sequences compute the same prompt; the block that is not the published one ends unseen."""
    blocks = BlockManager(8, BLOCK_TOKENS, np.zeros(8, np.uint64))
    told: list[list[RawEvent]] = []
    tap = CacheTap(blocks, told.append)
    tap.saw_root(ROOT)
    first, second = (blocks.allocate(2) for _ in range(2))
    assert first is not None
    assert second is not None
    for copy in (first, second):
        blocks.commit(copy, HASHES[:2], ROOT)
    tap.drain()
    assert told == [[stored(A, B, after=ROOT, rooted=True)]]
    blocks.release(second)
    blocks.allocate(4)
    tap.drain()
    assert len(told) == 1
    assert blocks.lookup(HASHES[:2]) == 2
    blocks.release(first)
    blocks.reset_cache()
    tap.drain()
    assert told[1] == [removed(B, A)]


def closed_set(changes: list[Change], held: set[bytes]) -> None:
    """Applies changes to ``held``, checking that each is a change and that the set stays closed."""
    for change in changes:
        if change.stored:
            before = change.parent
            assert before is None or before in held
            for name in change.hashes:
                assert name not in held
                held.add(name)
        else:
            assert held.issuperset(change.hashes)
            held.difference_update(change.hashes)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(6, 24), lag=st.integers(1, 6))
def test_the_announced_set_is_what_a_new_sequence_would_find(seed: int, num_blocks: int, lag: int) -> None:
    world, shadow = CacheWorld(num_blocks, seed), Shadow()
    held: set[bytes] = set()
    for number in range(120):
        world.step()
        if number % lag:
            continue
        for events in world.drained():
            for event in events:
                closed_set(shadow.apply(event), held)
        assert held == set(split(shadow.hashes())) == world.whole()
        rebuilt: set[bytes] = set()
        closed_set(shadow.chains(), rebuilt)
        assert rebuilt == held


def test_the_random_world_makes_orphans() -> None:
    """Else the property above would not test them."""
    most = 0
    for seed in range(20):
        world, shadow = CacheWorld(10, seed), Shadow()
        for _ in range(200):
            world.step()
            for events in world.drained():
                for event in events:
                    shadow.apply(event)
            most = max(most, shadow.orphans)
    assert most > 0


@pytest.mark.parametrize("count", [70_000])
def test_roots_are_forgotten_in_the_order_of_their_use(count: int) -> None:
    blocks = BlockManager(8, BLOCK_TOKENS, np.zeros(8, np.uint64))
    told: list[list[RawEvent]] = []
    tap = CacheTap(blocks, told.append)
    for number in range(count):
        tap.saw_root(number.to_bytes(16, "big"))
        tap.saw_root(ROOT)
    given_block = blocks.allocate(1)
    assert given_block is not None
    blocks.commit(given_block, HASHES[:1], ROOT)
    tap.drain()
    assert told[0][0].rooted
