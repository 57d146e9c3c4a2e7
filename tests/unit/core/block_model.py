# SPDX-License-Identifier: Apache-2.0
"""What BlockManager does, said slowly: one dictionary entry a block, no lists, no counters."""

from dataclasses import dataclass, field


@dataclass
class ModelBlock:
    refs: int = 0
    pins: int = 0
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


class BlockModel:
    def __init__(self, count: int) -> None:
        self.blocks = [ModelBlock() for _ in range(count)]
        self.transfers: dict[int, ModelTransfer] = {}
        self.ticks = 0

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
        """The manager gave these blocks out; they must have been free, or the oldest of the cached ones."""
        for index in given:
            free = self.free()
            if free:
                assert index in free, f"{index} was given out while others were free"
            else:
                oldest = self.oldest()
                assert index == oldest, f"{index} was evicted before {oldest}"
            self.blocks[index] = ModelBlock(refs=1, held=True, generation=self.blocks[index].generation)

    def oldest(self) -> int:
        cached = self.cached()
        leaves = {i for i in cached if not any(other.parent == i for other in self.blocks)}
        return min(leaves, key=lambda index: self.blocks[index].idle_since)

    def evict_all(self) -> int:
        cached = self.cached()
        for index in cached:
            self.blocks[index] = ModelBlock(generation=self.blocks[index].generation)
        return len(cached)

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
