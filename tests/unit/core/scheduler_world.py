# SPDX-License-Identifier: Apache-2.0
"""A worker in miniature: the scheduler drives a pool whose "KV" of a position is the token itself.

Whatever the scheduler does (cache, share, copy, preempt, recompute), a step must find under its block table exactly the
tokens of its sequence, and each sequence must end with the output that its prompt alone decides.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from twinpool._core import BlockManager, SchedulerConfig, StepPlan, StepScheduler, hash_blocks

BLOCK = 4
ROOT = bytes(16)
POISON = -7
VOCAB = 50


def next_token(tokens: list[int]) -> int:
    """The "model": the next token is a function of all tokens before it."""
    value = 17
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB


@dataclass
class Known:
    """What the model knows of a sequence."""

    prompt: list[int]
    limit: int
    preemptible: bool = True
    outputs: list[int] = field(default_factory=list)
    reserved: bool = False
    arrived: bool = False
    forks: list[int] = field(default_factory=list)

    def expected(self) -> list[int]:
        """All outputs that may come, from the first that is known."""
        tokens = self.prompt + self.outputs[:1]
        outputs = self.outputs[:1]
        while len(outputs) < max(self.limit, 1):
            outputs.append(next_token(tokens))
            tokens.append(outputs[-1])
        return outputs

    @property
    def finished(self) -> bool:
        return not self.reserved and len(self.outputs) >= max(self.limit, 1)


class World:
    def __init__(self, blocks: int, config: SchedulerConfig) -> None:
        self.generations = np.zeros(blocks, np.uint64)
        self.manager = BlockManager(blocks, BLOCK, self.generations)
        self.scheduler = StepScheduler(self.manager, config)
        self.pool: NDArray[np.int32] = np.full((blocks, BLOCK), POISON, np.int32)
        self.host: NDArray[np.int32] = np.full((config.host_blocks, BLOCK), POISON, np.int32)
        self.swapped = 0
        self.known: dict[int, Known] = {}
        self.pinned: dict[int, tuple[NDArray[np.int32], NDArray[np.int32]]] = {}
        self.quarantined: list[NDArray[np.int32]] = []
        self.plan: StepPlan | None = None
        self.removed_in_plan: set[int] = set()

    # --- sequences

    def add(
        self, prompt: list[int], limit: int, priority: int, arrival: float, preemptible: bool = True
    ) -> int:
        tokens = np.array(prompt, np.int32)
        hashes = hash_blocks(ROOT, tokens, BLOCK)
        seq = self.scheduler.add(
            tokens,
            hashes,
            ROOT,
            max_new_tokens=limit,
            priority=priority,
            arrival=arrival,
            preemptible=preemptible,
        )
        self.known[seq] = Known(prompt, limit, preemptible)
        return seq

    def reserve(
        self, prompt: list[int], limit: int, priority: int, arrival: float, preemptible: bool = True
    ) -> int | None:
        tokens = np.array(prompt, np.int32)
        hashes = hash_blocks(ROOT, tokens, BLOCK)
        before = (self.manager.free_blocks, self.manager.cached_blocks)
        seq = self.scheduler.reserve(
            tokens,
            hashes,
            ROOT,
            max_new_tokens=limit,
            priority=priority,
            arrival=arrival,
            preemptible=preemptible,
        )
        if seq is None:
            assert before == (self.manager.free_blocks, self.manager.cached_blocks)
            return None
        self.known[seq] = Known(prompt, limit, preemptible, reserved=True)
        cached = self.scheduler.cached_tokens(seq)
        blocks = self.scheduler.blocks(seq)
        assert self.read(blocks, cached) == prompt[:cached]
        needed = -(-len(prompt) // BLOCK) + 1
        assert len(blocks) == (needed if preemptible else max(needed, -(-(len(prompt) + limit - 1) // BLOCK)))
        return seq

    def arrive(self, seq: int) -> None:
        """The transfer writes what was not cached. What freed blocks held is poisoned before, as a worker does."""
        self.poison()
        known = self.known[seq]
        blocks = self.scheduler.blocks(seq)
        for position in range(self.scheduler.cached_tokens(seq), len(known.prompt)):
            self.pool[blocks[position // BLOCK], position % BLOCK] = known.prompt[position]
        known.arrived = True

    def start(self, seq: int, first: int) -> None:
        self.scheduler.start(seq, first)
        known = self.known[seq]
        known.reserved = False
        known.outputs.append(first)
        for fork in known.forks:
            if fork in self.known:
                self.known[fork].reserved = False

    def fork(self, seq: int, first: int, limit: int) -> int | None:
        child = self.scheduler.fork(seq, first, max_new_tokens=limit)
        if child is not None:
            parent = self.known[seq]
            self.known[child] = Known(
                parent.prompt, limit, parent.preemptible, [first], reserved=parent.reserved
            )
            parent.forks.append(child)
        return child

    def fail(self, seq: int, late: int) -> None:
        """A transfer failed: its blocks go to quarantine, and a late write still lands in them."""
        cached = self.scheduler.cached_tokens(seq) // BLOCK
        blocks = self.scheduler.blocks(seq)[cached:]
        self.manager.quarantine(blocks)
        self.remove(seq)
        self.pool[blocks] = late
        self.quarantined.append(blocks)

    def remove(self, seq: int) -> None:
        self.scheduler.remove(seq)
        del self.known[seq]
        if self.plan is not None and seq in self.plan.seq:
            self.removed_in_plan.add(seq)

    # --- transfers of finished prefills

    def pin(self, transfer: int, seq: int) -> None:
        blocks = self.scheduler.blocks(seq)
        self.manager.pin(transfer, blocks, 1, 1e9)
        self.pinned[transfer] = (blocks, self.pool[blocks])

    def unpin(self, transfer: int) -> None:
        blocks, content = self.pinned.pop(transfer)
        assert (self.pool[blocks] == content).all(), "a pinned block was overwritten"
        assert self.manager.unpin(transfer, 0)

    # --- steps

    def poison(self) -> None:
        self.pool[self.manager.drain_freed()] = POISON

    def read(self, blocks: NDArray[np.int32], count: int) -> list[int]:
        result: list[int] = self.pool[blocks].reshape(-1)[:count].tolist()
        return result

    def begin_step(self) -> bool:
        plan = self.scheduler.plan(0.0)
        self.host[plan.swap_out[:, 1]] = self.pool[plan.swap_out[:, 0]]
        self.swapped += len(plan.swap_out)
        self.poison()
        self.check_shape(plan)
        if plan.empty:
            return False
        self.plan = plan
        return True

    def check_shape(self, plan: StepPlan) -> None:
        count = len(plan.seq)
        assert plan.empty == (count == 0)
        assert len(set(plan.seq.tolist())) == count
        assert plan.q_start[0] == 0
        assert plan.q_start[-1] == len(plan.token_ids) == len(plan.positions) == len(plan.slots)
        queries = np.diff(plan.q_start)
        assert (queries >= 1).all()
        assert (queries[: plan.num_decodes] == 1).all()
        assert set(plan.seq.tolist()) <= set(self.known)
        assert not set(plan.preempted.tolist()) & set(plan.seq.tolist())
        assert all(self.known[seq].preemptible for seq in plan.preempted.tolist())

    def finish_step(self) -> None:
        """What a model runner does, then the check that each sequence sees its own tokens and nothing else."""
        plan = self.plan
        assert plan is not None
        # All at once: a copy must not depend on another one of the same step.
        self.pool[plan.copies[:, 1]] = self.pool[plan.copies[:, 0]]
        self.pool[plan.swap_in[:, 1]] = self.host[plan.swap_in[:, 0]]
        self.pool.reshape(-1)[plan.slots] = plan.token_ids
        sampled = np.zeros(len(plan.seq), np.int32)
        for index, seq in enumerate(plan.seq.tolist()):
            context = int(plan.context[index])
            seen = self.read(plan.block_table[index][plan.block_table[index] >= 0], context)
            sampled[index] = next_token(seen) if plan.sample[index] else 0
            if seq in self.removed_in_plan:
                continue
            known = self.known[seq]
            assert seen == (known.prompt + known.outputs)[:context], "a sequence sees foreign tokens"
            if plan.sample[index]:
                assert context == len(known.prompt) + len(known.outputs)
                known.outputs.append(int(sampled[index]))
        self.scheduler.advance(plan, sampled)
        self.plan = None
        self.removed_in_plan.clear()

    def abort_step(self) -> None:
        """The step failed somewhere: what it was to save in host memory may be anything."""
        assert self.plan is not None
        self.host[self.plan.swap_out[:, 1]] = POISON
        self.scheduler.abort_plan(self.plan)
        self.plan = None
        self.removed_in_plan.clear()

    def check(self) -> None:
        self.manager.check()
        self.scheduler.check()
        for blocks, content in self.pinned.values():
            assert (self.pool[blocks] == content).all(), "a pinned block was overwritten"
        for seq, known in self.known.items():
            assert self.scheduler.output_tokens(seq).tolist() == ([] if known.reserved else known.outputs)
            assert len(known.outputs) <= max(known.limit, 1)
        assert self.scheduler.reserved == sum(known.reserved for known in self.known.values())
