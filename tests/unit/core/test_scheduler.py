# SPDX-License-Identifier: Apache-2.0
"""StepScheduler in a miniature worker, driven at random."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_world import BLOCK, ROOT, World, next_token

from twinpool._core import CoreError, SchedulerConfig, hash_blocks

# Few different tokens and few lengths, so that prompts share prefixes.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=2).flatmap(
    lambda base: st.integers(1, 11).map(lambda length: (base * 11)[:length])
)
LIMITS = st.integers(1, 9)
PREEMPTIBLE = st.sampled_from([True, True, True, False])


class SchedulerMachine(RuleBasedStateMachine):
    """Commands may come between plan and advance too, as they do from other threads."""

    @initialize(
        blocks=st.integers(6, 14),
        seats=st.integers(1, 5),
        extra=st.integers(0, 8),
        chunk=st.integers(1, 9),
        policy=st.sampled_from(["fcfs", "priority", "shortest_uncached"]),
        overtaken=st.integers(0, 3),
        host=st.sampled_from([0, 0, 1, 4, 12]),
    )
    def setup(
        self, blocks: int, seats: int, extra: int, chunk: int, policy: str, overtaken: int, host: int
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=seats,
            max_batched_tokens=seats + extra,
            max_chunk_tokens=chunk,
            policy=policy,
            max_overtaken=overtaken,
            host_blocks=host,
        )
        self.world = World(blocks, config)
        self.arrivals = 0.0
        self.transfers = 0

    def _arrival(self) -> float:
        self.arrivals += 1
        return self.arrivals

    @rule(prompt=PROMPTS, limit=st.integers(0, 9), priority=st.integers(-1, 1), preemptible=PREEMPTIBLE)
    def add(self, prompt: list[int], limit: int, priority: int, preemptible: bool) -> None:
        self.world.add(prompt, limit, priority, self._arrival(), preemptible)

    @rule(prompt=PROMPTS, limit=LIMITS, priority=st.integers(-1, 1), preemptible=PREEMPTIBLE)
    def reserve(self, prompt: list[int], limit: int, priority: int, preemptible: bool) -> None:
        self.world.reserve(prompt, limit, priority, self._arrival(), preemptible)

    @precondition(
        lambda self: any(known.reserved and not known.outputs for known in self.world.known.values())
    )
    @rule(data=st.data())
    def arrive_and_start(self, data: st.DataObject) -> None:
        seq = data.draw(
            st.sampled_from([s for s, k in self.world.known.items() if k.reserved and not k.outputs])
        )
        self.world.arrive(seq)
        self.world.start(seq, next_token(self.world.known[seq].prompt))

    @precondition(
        lambda self: any(known.reserved and not known.outputs for known in self.world.known.values())
    )
    @rule(data=st.data(), late=st.integers(90, 99))
    def transfer_fails(self, data: st.DataObject, late: int) -> None:
        seq = data.draw(
            st.sampled_from([s for s, k in self.world.known.items() if k.reserved and not k.outputs])
        )
        for fork in self.world.known[seq].forks:
            if fork in self.world.known:
                self.world.remove(fork)
        self.world.fail(seq, late)

    @precondition(lambda self: self.world.quarantined)
    @rule()
    def transfer_drains(self) -> None:
        self.world.manager.unquarantine(self.world.quarantined.pop(0))

    @precondition(lambda self: any(k.reserved and k.outputs for k in self.world.known.values()))
    @rule(data=st.data())
    def fork_a_fork_that_waits(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from([s for s, k in self.world.known.items() if k.reserved and k.outputs]))
        with pytest.raises(CoreError, match="fork the sequence that it starts with"):
            self.world.scheduler.fork(seq, 1, max_new_tokens=1)

    @precondition(lambda self: any(k.reserved != bool(k.outputs) for k in self.world.known.values()))
    @rule(data=st.data(), first=st.integers(0, 49), limit=LIMITS)
    def fork(self, data: st.DataObject, first: int, limit: int) -> None:
        parents = [s for s, k in self.world.known.items() if k.reserved != bool(k.outputs)]
        self.world.fork(data.draw(st.sampled_from(parents)), first, limit)

    @precondition(lambda self: self.world.known)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.world.remove(data.draw(st.sampled_from(sorted(self.world.known))))

    @precondition(lambda self: any(known.finished for known in self.world.known.values()))
    @rule(data=st.data())
    def pin_and_remove(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from([s for s, k in self.world.known.items() if k.finished]))
        self.transfers += 1
        self.world.pin(self.transfers, seq)
        self.world.remove(seq)

    @precondition(lambda self: self.world.pinned)
    @rule()
    def unpin(self) -> None:
        self.world.unpin(next(iter(self.world.pinned)))

    @precondition(lambda self: self.world.plan is None)
    @rule()
    def plan(self) -> None:
        self.world.begin_step()

    @precondition(lambda self: self.world.plan is not None)
    @rule()
    def finish(self) -> None:
        self.world.finish_step()

    @precondition(lambda self: self.world.plan is None)
    @rule(count=st.integers(1, 6))
    def run(self, count: int) -> None:
        for _ in range(count):
            if self.world.begin_step():
                self.world.finish_step()

    @precondition(lambda self: self.world.plan is not None)
    @rule()
    def abort(self) -> None:
        self.world.abort_step()

    @rule()
    def poison(self) -> None:
        self.world.poison()

    @precondition(lambda self: self.world.plan is None)
    @rule()
    def reset_cache(self) -> None:
        self.world.manager.reset_cache()

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        """Everything in flight ends: each sequence has its whole output and every block comes back."""
        if not hasattr(self, "world"):
            return
        world = self.world
        if world.plan is not None:
            world.finish_step()
        for transfer in list(world.pinned):
            world.unpin(transfer)
        while world.quarantined:
            world.manager.unquarantine(world.quarantined.pop())
        for seq, known in list(world.known.items()):
            if known.reserved and seq in world.known:
                world.remove(seq)
        for _ in range(2000):
            for seq in [seq for seq, known in world.known.items() if known.finished]:
                known = world.known[seq]
                assert known.outputs == known.expected()
                world.remove(seq)
            if not world.known:
                break
            assert world.begin_step(), (
                "nothing runs although sequences are unfinished and nothing else holds blocks"
            )
            world.finish_step()
            world.check()
        assert not world.known, "sequences never end"
        assert world.manager.available_blocks == world.manager.num_blocks
        assert (world.scheduler.running, world.scheduler.waiting, world.scheduler.waiting_tokens) == (0, 0, 0)


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


def test_plan_arrays_have_the_promised_types() -> None:
    world = World(8, SchedulerConfig())
    world.add([1] * 6, 3, 0, 0.0)
    plan = world.scheduler.plan(0.0)
    for name, dtype in {
        "seq": np.int64,
        "token_ids": np.int32,
        "positions": np.int32,
        "q_start": np.int32,
        "context": np.int32,
        "block_table": np.int32,
        "slots": np.int64,
        "sample": np.uint8,
        "preempted": np.int64,
        "copies": np.int32,
        "swap_out": np.int32,
        "swap_in": np.int32,
    }.items():
        assert getattr(plan, name).dtype == dtype, name
    assert plan.block_table.shape == (1, 2)
    assert plan.copies.shape == plan.swap_out.shape == plan.swap_in.shape == (0, 2)


def test_views_outlive_plan_and_scheduler() -> None:
    world = World(8, SchedulerConfig())
    world.add([1] * 6, 3, 0, 0.0)
    plan = world.scheduler.plan(0.0)
    table, tokens = plan.block_table, plan.token_ids
    world.scheduler.advance(plan, np.array([1], np.int32))
    del plan, world
    assert table.tolist() == [[0, 1]]
    assert tokens.tolist() == [1] * 6


def test_an_empty_plan_need_not_come_back() -> None:
    world = World(8, SchedulerConfig())
    first = world.scheduler.plan(0.0)
    second = world.scheduler.plan(0.0)
    assert first.empty
    assert second.block_table.shape == (0, 0)
    world.scheduler.advance(second, np.zeros(0, np.int32))
    world.scheduler.abort_plan(first)


def test_arguments_of_the_wrong_kind_are_named() -> None:
    world = World(8, SchedulerConfig())
    tokens = np.arange(6, dtype=np.int32)
    hashes = hash_blocks(ROOT, tokens, BLOCK)
    with pytest.raises(TypeError, match="tokens must be an aligned C-contiguous array of int32"):
        world.scheduler.add(tokens.astype(np.int64), hashes, ROOT, max_new_tokens=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="root must be 16 bytes"):
        world.scheduler.add(tokens, hashes, b"", max_new_tokens=1)
    with pytest.raises(CoreError, match="1 full blocks, not 0 hashes"):
        world.scheduler.add(tokens, hashes[:0], ROOT, max_new_tokens=1)
    with pytest.raises(CoreError, match="there is no sequence 1"):
        world.scheduler.blocks(1)
    with pytest.raises(CoreError, match="policy"):
        World(8, SchedulerConfig(policy="lifo"))


def run_out(world: World, steps_max: int = 500) -> None:
    """Runs until every sequence is finished."""
    for _ in range(steps_max):
        if all(known.finished for known in world.known.values()):
            return
        if world.begin_step():
            world.finish_step()
        world.check()
    raise AssertionError("sequences never end")


def crowded(host_blocks: int) -> World:
    """Two sequences that each fit into the pool, but not both."""
    world = World(5, SchedulerConfig(host_blocks=host_blocks))
    for prompt, limit, arrival in (([1] * 6, 12, 0.0), ([2] * 3, 9, 1.0)):
        seq = world.reserve(prompt, limit, 0, arrival)
        assert seq is not None
        world.arrive(seq)
        world.start(seq, next_token(prompt))
    return world


def test_a_swapped_sequence_goes_on_where_it_was() -> None:
    """None of its tokens is computed again, although the cache has lost its blocks meanwhile."""
    world = crowded(host_blocks=4)
    computed: dict[int, list[int]] = {seq: [] for seq in world.known}
    while not all(known.finished for known in world.known.values()):
        if world.begin_step():
            plan = world.plan
            assert plan is not None
            for index, seq in enumerate(plan.seq.tolist()):
                computed[seq] += plan.positions[plan.q_start[index] : plan.q_start[index + 1]].tolist()
            world.finish_step()
        else:
            for seq in [seq for seq, known in world.known.items() if known.finished]:
                assert world.known[seq].outputs == world.known.pop(seq).expected()
                world.scheduler.remove(seq)
                world.manager.reset_cache()
                world.poison()
        world.check()
    assert world.swapped > 0
    for positions in computed.values():
        assert positions == sorted(set(positions)), "a position was computed twice"
    assert world.scheduler.host_blocks_used == 0


def test_what_does_not_fit_into_host_memory_is_recomputed() -> None:
    world = crowded(host_blocks=1)
    while not any(known.finished for known in world.known.values()):
        assert world.begin_step()
        world.finish_step()
    assert world.scheduler.waiting == 1
    assert world.swapped == 0
    for seq in [seq for seq, known in world.known.items() if known.finished]:
        world.remove(seq)
    run_out(world)


def test_a_swap_whose_step_failed_does_not_count() -> None:
    world = crowded(host_blocks=4)
    while not world.swapped:
        assert world.begin_step()
        if world.swapped:
            world.abort_step()
        else:
            world.finish_step()
    assert world.scheduler.host_blocks_used == 0
    while world.known:
        for seq in [seq for seq, known in world.known.items() if known.finished]:
            assert world.known[seq].outputs == world.known[seq].expected()
            world.remove(seq)
        if world.begin_step():
            world.finish_step()
        world.check()
