# SPDX-License-Identifier: Apache-2.0
"""The cache of a worker that computes nothing: a real block manager, a real tap and a real publisher."""

import numpy as np

from twinpool._core import BlockManager
from twinpool.config import KvEventsConfig
from twinpool.ids import WorkerKey
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker.kv_events import CacheTap, EventPublisher


class FakeCache:
    """``use`` does what a prefill would: finds the prefix, keeps the rest. Open until ``close``."""

    def __init__(
        self,
        key: WorkerKey,
        num_blocks: int = 256,
        block_tokens: int = 16,
        config: KvEventsConfig | None = None,
        *,
        port: int = 0,
    ) -> None:
        settings = config or KvEventsConfig(heartbeat_seconds=0.1)
        self.key = key
        self.block_tokens = block_tokens
        self.publisher = EventPublisher(
            settings.model_copy(update={"port": port} if port else {}), key, "fake", block_tokens
        )
        self.publisher.open("127.0.0.1")
        self.publisher.start()
        self.generations = np.zeros(num_blocks, np.uint64)
        self.blocks = BlockManager(num_blocks, block_tokens, self.generations)
        self.tap = CacheTap(self.blocks, self.publisher.publish)

    @property
    def port(self) -> int:
        """Where events are published; the replay socket has the next one only if a port was given."""
        return int(self.publisher.events_endpoint.rpartition(":")[2])

    def use(self, hashes: np.ndarray, root: bytes, prompt_tokens: int) -> int:
        """Computes a prompt; how many of its tokens were found."""
        self.tap.saw_root(root)
        usable = (prompt_tokens - 1) // self.block_tokens
        held = self.blocks.acquire_prefix(hashes[:usable])
        found = len(held)
        given = self.blocks.allocate(len(hashes) - found)
        if given is None:
            raise RuntimeError("the fake cache is too small for this prompt")
        parent = hashes[found - 1].tobytes() if found else root
        self.blocks.commit(given, hashes[found:], parent)
        self.blocks.release(np.concatenate([held, given]))
        self.tap.drain()
        return found * self.block_tokens

    def use_prompt(self, prompt: pb.PromptSpec) -> int:
        """As ``use``, of a command."""
        hashes = np.frombuffer(prompt.block_hashes, np.uint8).reshape(-1, 16)
        return self.use(hashes, prompt.root_hash, len(prompt.token_ids) // 4)

    def held(self, prompt: pb.PromptSpec) -> int:
        """Leading full blocks of a prompt that are here."""
        return self.blocks.lookup(np.frombuffer(prompt.block_hashes, np.uint8).reshape(-1, 16))

    def pull(self, owner: "FakeCache", prompt: pb.PromptSpec, blocks: int) -> pb.PrefixFetched:
        """Takes over what ``owner`` has of the prompt's first ``blocks`` blocks."""
        there = min(owner.held(prompt), blocks)
        if there <= self.held(prompt):
            return pb.PrefixFetched(failure=pb.FAILURE_REASON_NOT_CACHED, owner_blocks=there)
        moved = there - self.held(prompt)
        hashes = np.frombuffer(prompt.block_hashes[: 16 * there], np.uint8).reshape(-1, 16)
        self.use(hashes, prompt.root_hash, there * self.block_tokens + 1)
        fetched = pb.PrefixFetched(owner_blocks=there)
        fetched.stats.blocks, fetched.stats.bytes = moved, 2048 * moved
        fetched.stats.read_time.FromMicroseconds(200 * moved)
        return fetched

    def evict(self) -> None:
        """Drops all that nobody holds."""
        self.blocks.reset_cache()
        self.tap.drain()

    def endpoints(self) -> dict[str, str]:
        """For the worker's record."""
        return {
            "events_endpoint": self.publisher.events_endpoint,
            "replay_endpoint": self.publisher.replay_endpoint,
        }

    def close(self) -> None:
        self.publisher.close()
