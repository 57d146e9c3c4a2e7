# SPDX-License-Identifier: Apache-2.0
"""What BlockManager does, said slowly: one dictionary entry a block, no lists, no counters."""

from dataclasses import dataclass, field


@dataclass
class ModelBlock:
    refs: int = 0
    pins: int = 0
    prefix_pins: int = 0
    hash: bytes | None = None
    parent: int | None = None
    quarantined: bool = False
    idle_since: int = 0
    held: bool = False
    generation: int = 0


@dataclass
class ModelTransfer:
    blocks: list[int]
    readers: int
    expires_at: float
    finished: set[int] = field(default_factory=set)


@dataclass
class ModelPrefixPin:
    tenant: str
    blocks: list[int]
    expires_at: float


class BlockModel:
    def __init__(self, count: int) -> None:
        self.blocks = [ModelBlock() for _ in range(count)]
        self.transfers: dict[int, ModelTransfer] = {}
        self.prefix_pins: dict[str, ModelPrefixPin] = {}
        self.ticks = 0
        self.front = 0

    # --- views

    def needed(self, index: int) -> bool:
        return index in self.held()

    def held(self) -> set[int]:
        """Blocks with a reference or a pin, and all their ancestors."""
        found: set[int] = set()
        for index, block in enumerate(self.blocks):
            current: int | None = index if block.refs or block.pins else None
            while current is not None and current not in found:
                found.add(current)
                current = self.blocks[current].parent
        return found

    def quarantined(self) -> set[int]:
        return {index for index, block in enumerate(self.blocks) if block.quarantined}

    def cached(self) -> set[int]:
        return {index for index, block in enumerate(self.blocks) if block.hash is not None} - self.held()

    def evictable(self) -> set[int]:
        return {index for index in self.cached() if not self.blocks[index].prefix_pins}

    def prefix_pinned(self, tenant: str | None = None) -> set[int]:
        pins = self.prefix_pins.values()
        return {index for pin in pins if tenant in (None, pin.tenant) for index in pin.blocks}

    def children(self, index: int) -> set[int]:
        return {other for other, block in enumerate(self.blocks) if block.parent == index}

    def free(self) -> set[int]:
        return set(range(len(self.blocks))) - self.held() - self.cached() - self.quarantined()

    def published(self, wanted: bytes) -> int | None:
        return next((index for index, block in enumerate(self.blocks) if block.hash == wanted), None)

    def prefix(self, hashes: list[bytes]) -> list[int]:
        found: list[int] = []
        for wanted in hashes:
            index = self.published(wanted)
            if index is None:
                break
            found.append(index)
        return found

    # --- changes

    def took(self, given: list[int]) -> None:
        """The manager gave these blocks out: no more of the cached ones than it had to, the oldest ones."""
        assert len(set(given)) == len(given)
        for _ in range(len(given) - len(self.free())):
            oldest = self.oldest()
            self.blocks[oldest] = ModelBlock(generation=self.blocks[oldest].generation)
        strangers = set(given) - self.free()
        assert not strangers, (
            f"{strangers} were given out while others were free, or evicted before older ones"
        )
        for index in given:
            self.blocks[index] = ModelBlock(refs=1, held=True, generation=self.blocks[index].generation)

    def oldest(self) -> int:
        leaves = {index for index in self.evictable() if not self.children(index)}
        return min(leaves, key=lambda index: self.blocks[index].idle_since)

    def evict_all(self) -> int:
        for name in list(self.prefix_pins):
            self.end_prefix_pin(name)
        cached = self.cached()
        for index in cached:
            self.blocks[index] = ModelBlock(generation=self.blocks[index].generation)
        return len(cached)

    def end_prefix_pin(self, name: str) -> None:
        for index in reversed(self.prefix_pins.pop(name).blocks):
            block = self.blocks[index]
            block.prefix_pins -= 1
            if not block.prefix_pins and not self.needed(index):
                self.ticks += 1
                block.idle_since = self.ticks

    def demote(self, indexes: list[int]) -> int:
        """``indexes``: of blocks whose content is still the same."""
        demoted: list[int] = []
        for index in reversed(indexes):
            fit = index in self.evictable() and index not in demoted
            if fit and self.children(index) <= set(demoted):
                demoted.append(index)
        self.front -= len(demoted)
        for place, index in enumerate(demoted):
            self.blocks[index].idle_since = self.front + place
        return len(demoted)

    def drop(self, indexes: list[int], *, pins: bool) -> None:
        for index in reversed(indexes):
            block = self.blocks[index]
            if pins:
                block.pins -= 1
            else:
                block.refs -= 1
            self.settle(index)

    def settle(self, index: int) -> None:
        """After a reference or a pin is gone: what nobody needs now ages or goes, the child before its parent."""
        current: int | None = index
        while current is not None and not self.needed(current):
            block = self.blocks[current]
            if not block.held:
                return
            parent = block.parent
            if block.hash is None:
                self.blocks[current] = ModelBlock(generation=block.generation)
            else:
                self.ticks += 1
                block.idle_since = self.ticks
                block.held = False
            current = parent

    def mark_held(self) -> None:
        for index in self.held():
            self.blocks[index].held = True
