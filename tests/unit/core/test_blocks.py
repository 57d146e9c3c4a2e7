# SPDX-License-Identifier: Apache-2.0
"""BlockManager against a slow model, step by step."""

import numpy as np
import pytest
from block_model import BlockModel, ModelPrefixPin, ModelTransfer
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from twinpool._core import BlockManager, CoreError, hash_blocks

BLOCK_TOKENS = 2
ROOT = bytes(16)


def chain(tokens: list[int]) -> NDArray[np.uint8]:
    return hash_blocks(ROOT, np.repeat(np.array(tokens, np.int32), BLOCK_TOKENS), BLOCK_TOKENS)


def ids(blocks: list[int]) -> NDArray[np.int32]:
    return np.array(blocks, np.int32)


CHAINS = st.lists(st.integers(0, 1), min_size=1, max_size=4)


class BlockMachine(RuleBasedStateMachine):
    """Holders take a cached prefix and new blocks, publish, share, let go; transfers pin and end."""

    @initialize(count=st.integers(1, 9))
    def setup(self, count: int) -> None:
        self.generations = np.zeros(count, np.uint64)
        self.manager = BlockManager(count, BLOCK_TOKENS, self.generations)
        self.model = BlockModel(count)
        self.holders: list[tuple[list[int], list[int]]] = []  # tokens of the chain, blocks
        self.quarantine: list[list[int]] = []
        self.gone: list[tuple[list[int], NDArray[np.uint64]]] = []
        self.stored: set[bytes] = set()
        self.parents: dict[bytes, bytes] = {}
        self.now = 0.0

    # --- sequences

    @rule(tokens=CHAINS, spare=st.integers(0, 1))
    def begin(self, tokens: list[int], spare: int) -> None:
        hashes = chain(tokens)
        wanted = self.model.prefix([row.tobytes() for row in hashes])
        assert self.manager.lookup(hashes) == len(wanted)
        prefix = self.manager.acquire_prefix(hashes).tolist()
        assert prefix == wanted
        for index in prefix:
            self.model.blocks[index].refs += 1
        self.model.mark_held()
        count = len(tokens) - len(prefix) + spare
        before = self.generations.copy()
        fresh = self.manager.allocate(count)
        if fresh is None:
            assert count > len(self.model.free()) + len(self.model.evictable())
            self.manager.release(ids(prefix))
            self.model.drop(prefix, pins=False)
            return
        self.model.took(fresh.tolist())
        assert (self.generations[fresh] > before[fresh]).all()
        self.holders.append((tokens, [*prefix, *fresh.tolist()]))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), swap=st.booleans())
    def publish(self, data: st.DataObject, swap: bool) -> None:
        tokens, blocks = data.draw(st.sampled_from(self.holders))
        first = data.draw(st.integers(0, len(tokens) - 1))
        hashes = chain(tokens)
        parent = ROOT if first == 0 else hashes[first - 1].tobytes()
        own = blocks[first : len(tokens)]
        published = self.manager.commit(ids(own), hashes[first:], parent).tolist()
        self.parents.update(
            zip(
                (row.tobytes() for row in hashes[first:]), (parent, *map(bytes, hashes[first:])), strict=False
            )
        )
        before = self.model.published(parent)
        for offset, (block, row) in enumerate(zip(own, hashes[first:], strict=True)):
            known = self.model.published(row.tobytes())
            if known is None:
                self.model.blocks[block].hash = row.tobytes()
                self.model.blocks[block].parent = before
                known = block
            assert published[offset] == known
            before = known
        self.model.mark_held()
        if swap:
            self.manager.reference(ids(published))
            for index in published:
                self.model.blocks[index].refs += 1
            self.model.mark_held()
            self.manager.release(ids(own))
            self.model.drop(own, pins=False)
            blocks[first : len(tokens)] = published

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        tokens, blocks = data.draw(st.sampled_from(self.holders))
        self.manager.reference(ids(blocks))
        for index in blocks:
            self.model.blocks[index].refs += 1
        self.holders.append((tokens, list(blocks)))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        _, blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.gone.append((blocks, self.generations[blocks]))
        self.manager.release(ids(blocks))
        self.model.drop(blocks, pins=False)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release_too_often(self, data: st.DataObject) -> None:
        _, blocks = data.draw(st.sampled_from(self.holders))
        often = blocks * (max(self.model.blocks[index].refs for index in blocks) + 1)
        with pytest.raises(CoreError, match="released more often"):
            self.manager.release(ids(often))

    # --- transfers

    @precondition(lambda self: self.holders)
    @rule(
        data=st.data(),
        transfer=st.integers(1, 3),
        readers=st.integers(1, 2),
        lease=st.integers(1, 5),
    )
    def pin(self, data: st.DataObject, transfer: int, readers: int, lease: int) -> None:
        _, blocks = data.draw(st.sampled_from(self.holders))
        part = blocks[data.draw(st.integers(0, len(blocks))) :]
        known = self.model.transfers.get(transfer)
        if known is not None and known.readers != readers:
            with pytest.raises(CoreError, match="readers"):
                self.manager.pin(transfer, ids(part), readers, self.now + lease)
            return
        self.manager.pin(transfer, ids(part), readers, self.now + lease)
        if known is None:
            self.model.transfers[transfer] = ModelTransfer(list(part), readers, self.now + lease)
        else:
            known.blocks.extend(part)
            known.expires_at = max(known.expires_at, self.now + lease)
        for index in part:
            self.model.blocks[index].pins += 1

    @rule(transfer=st.integers(1, 3), reader=st.integers(0, 1))
    def unpin(self, transfer: int, reader: int) -> None:
        known = self.model.transfers.get(transfer)
        assert self.manager.unpin(transfer, reader) == (known is not None)
        if known is not None:
            known.finished.add(reader)
            if len(known.finished) == known.readers:
                self.model.drop(self.model.transfers.pop(transfer).blocks, pins=True)

    @rule(transfer=st.integers(1, 3), lease=st.integers(1, 5))
    def renew(self, transfer: int, lease: int) -> None:
        known = self.model.transfers.get(transfer)
        assert self.manager.renew(transfer, self.now + lease) == (known is not None)
        if known is not None:
            known.expires_at = max(known.expires_at, self.now + lease)

    @rule(passed=st.integers(0, 3))
    def expire(self, passed: int) -> None:
        self.now += passed
        over = sorted(
            (transfer.expires_at, name)
            for name, transfer in self.model.transfers.items()
            if transfer.expires_at <= self.now
        )
        assert self.manager.expire(self.now) == [name for _, name in over]
        for _, name in over:
            self.model.drop(self.model.transfers.pop(name).blocks, pins=True)

    # --- prefix pins

    @rule(
        tokens=CHAINS,
        tenant=st.sampled_from("tu"),
        lease=st.integers(1, 5),
        max_pins=st.integers(1, 3),
        max_blocks=st.integers(0, 6),
        max_tenant_blocks=st.integers(0, 4),
    )
    def pin_prefix(
        self,
        tokens: list[int],
        tenant: str,
        lease: int,
        max_pins: int,
        max_blocks: int,
        max_tenant_blocks: int,
    ) -> None:
        hashes, model = chain(tokens), self.model
        blocks = model.prefix([row.tobytes() for row in hashes])
        name = f"{tenant}{tokens}"
        refusal, count, ends = self.manager.pin_prefix(
            name,
            tenant,
            "",
            hashes,
            self.now + lease,
            max_pins=max_pins,
            max_blocks=max_blocks,
            max_tenant_blocks=max_tenant_blocks,
        )
        known = model.prefix_pins.get(name)
        if len(blocks) < len(tokens):
            assert (refusal, count) == ("missing", len(blocks))
        elif len(model.prefix_pinned(tenant) | set(blocks)) > max_tenant_blocks:
            assert refusal == "tenant_blocks"
        elif len(model.prefix_pinned() | set(blocks)) > max_blocks:
            assert refusal == "blocks"
        elif known is not None:
            known.expires_at = max(known.expires_at, self.now + lease)
            assert (refusal, count, ends) == ("", len(blocks), known.expires_at)
        elif len(model.prefix_pins) >= max_pins:
            assert refusal == "pins"
        else:
            assert (refusal, count, ends) == ("", len(blocks), self.now + lease)
            model.prefix_pins[name] = ModelPrefixPin(tenant, blocks, self.now + lease)
            for index in blocks:
                model.blocks[index].prefix_pins += 1

    @precondition(lambda self: self.model.prefix_pins)
    @rule(data=st.data(), tenant=st.sampled_from("tu"))
    def unpin_prefix(self, data: st.DataObject, tenant: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.prefix_pins)))
        pin = self.model.prefix_pins[name]
        count, blocks = self.manager.unpin_prefixes(tenant, pin=name)
        assert count == (tenant == pin.tenant)
        assert blocks.tolist() == (pin.blocks if count else [])
        if count:
            self.model.end_prefix_pin(name)

    @rule(passed=st.integers(0, 3))
    def expire_prefix_pins(self, passed: int) -> None:
        self.now += passed
        pins = self.model.prefix_pins
        over = sorted((pin.expires_at, name) for name, pin in pins.items() if pin.expires_at <= self.now)
        assert self.manager.expire_prefix_pins(self.now) == len(over)
        for _, name in over:
            self.model.end_prefix_pin(name)
        assert self.manager.next_prefix_expiry() == min(
            (pin.expires_at for pin in pins.values()), default=None
        )

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def demote(self, data: st.DataObject) -> None:
        blocks, generations = data.draw(st.sampled_from(self.gone))
        same = [b for b, before in zip(blocks, generations, strict=True) if self.generations[b] == before]
        assert self.manager.demote(ids(blocks), generations) == self.model.demote(same)

    # --- quarantine, cache, events

    @rule(count=st.integers(1, 3))
    def quarantine_fresh(self, count: int) -> None:
        fresh = self.manager.allocate(count)
        if fresh is None:
            assert count > len(self.model.free()) + len(self.model.evictable())
            return
        self.model.took(fresh.tolist())
        self.manager.quarantine(fresh)
        for index in fresh.tolist():
            self.model.blocks[index].refs = 0
            self.model.blocks[index].quarantined = True
        self.quarantine.append(fresh.tolist())

    @precondition(lambda self: self.quarantine)
    @rule()
    def unquarantine(self) -> None:
        blocks = self.quarantine.pop(0)
        self.manager.unquarantine(ids(blocks))
        for index in blocks:
            self.model.blocks[index].quarantined = False
            self.model.blocks[index].held = False

    @rule()
    def reset(self) -> None:
        assert self.manager.reset_cache() == self.model.evict_all()

    @rule()
    def poison(self) -> None:
        freed = set(self.manager.drain_freed().tolist())
        assert freed <= self.model.free()

    @rule()
    def read_events(self) -> None:
        for kind, hashes, parent in self.manager.drain_events():
            for row in hashes:
                if kind == "stored":
                    assert self.parents[row.tobytes()] == parent
                    assert row.tobytes() not in self.stored
                    self.stored.add(row.tobytes())
                    parent = row.tobytes()
                else:
                    self.stored.remove(row.tobytes())
        assert self.stored == {block.hash for block in self.model.blocks if block.hash is not None}

    @invariant()
    def counts_agree(self) -> None:
        self.manager.check()
        model = self.model
        free, cached, held = len(model.free()), len(model.cached()), len(model.held())
        assert self.manager.free_blocks == free
        assert self.manager.cached_blocks == cached
        assert self.manager.held_blocks == held
        assert self.manager.quarantined_blocks == len(model.quarantined())
        assert self.manager.pinned_blocks == sum(block.pins > 0 for block in model.blocks)
        assert self.manager.pinned_transfers() == len(model.transfers)
        assert self.manager.available_blocks == free + len(model.evictable())
        assert self.manager.prefix_pinned_blocks == len(model.prefix_pinned())
        assert self.manager.prefix_pins == len(model.prefix_pins)
        for pin in model.prefix_pins.values():
            assert all(model.blocks[index].hash is not None for index in pin.blocks)


BlockMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlockMachine = BlockMachine.TestCase


def test_constructor_checks_the_generations() -> None:
    with pytest.raises(CoreError, match="one entry a block"):
        BlockManager(3, 16, np.zeros(4, np.uint64))
    with pytest.raises(TypeError, match="generations must be an aligned C-contiguous array of uint64"):
        BlockManager(4, 16, np.zeros(4, np.int64))  # type: ignore[arg-type]
    frozen = np.zeros(4, np.uint64)
    frozen.flags.writeable = False
    with pytest.raises(TypeError, match="writable"):
        BlockManager(4, 16, frozen)


def test_generations_stay_alive_and_are_raised_in_place() -> None:
    generations = np.zeros(4, np.uint64)
    address = generations.ctypes.data
    manager = BlockManager(4, 16, generations)
    blocks = manager.allocate(2)
    assert blocks is not None
    assert generations.tolist() == [1, 1, 0, 0]
    assert generations.ctypes.data == address


def test_arguments_of_the_wrong_kind_are_named() -> None:
    manager = BlockManager(4, 16, np.zeros(4, np.uint64))
    with pytest.raises(TypeError, match="blocks must be an aligned C-contiguous array of int32, not int64"):
        manager.release(np.array([1], np.int64))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"hashes must have the shape \[n, 16\]"):
        manager.lookup(np.zeros((2, 8), np.uint8))
    with pytest.raises(ValueError, match="parent must be 16 bytes"):
        manager.commit(ids([]), np.zeros((0, 16), np.uint8), b"")
