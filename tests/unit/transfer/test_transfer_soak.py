# SPDX-License-Identifier: Apache-2.0
"""Random hand-offs under random faults in virtual time: what finishes is right, what fails says so, nothing is held.

The pools are so small that blocks are reused all the time, and freed blocks are overwritten at once.
"""

from __future__ import annotations

import random

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.handoff_world import (
    BLOCK_TOKENS,
    LEASE_SECONDS,
    Listener,
    Owner,
    Prefill,
    Reader,
    World,
    expected_bytes,
)
from twinpool.transfer.base import AttemptKey, Fault, failed
from twinpool.transfer.ticket import PromptShape
from twinpool.v1.worker_pb2 import FailureReason


class Case:
    """One attempt and what became of it on both sides."""

    def __init__(self, attempt: AttemptKey, shape: PromptShape, owner: Owner, reader: Reader) -> None:
        self.attempt = attempt
        self.shape = shape
        self.owner = owner
        self.reader = reader
        self.listener: Listener | None = None
        self.prefill: Prefill | None = None
        self.aborted = False


class Soak:
    """A seeded run."""

    def __init__(self, seed: int, faults: bool) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.world = World()
        self.owners = [self.world.owner(f"owner-{i}", num_blocks=14, digests="sample") for i in range(2)]
        self.readers = [self.world.reader(f"reader-{i}", num_blocks=14) for i in range(2)]
        for reader in self.readers:
            for owner in self.owners:
                self.world.link(reader, owner)
        self.cases: list[Case] = []
        if faults:
            self.arm()

    def arm(self) -> None:
        """Plans faults for reads by their number and for messages by chance."""
        pick = self.random
        for reader in self.readers:
            for number in range(3, 400):
                chance = pick.random()
                if chance < 0.05:
                    reader.agent.data.refuse[number] = pick.choice(list(Fault))
                elif chance < 0.10:
                    reader.agent.data.report[number] = failed(pick.choice(list(Fault)), "injected")
                elif chance < 0.30:
                    # Some are longer than the read's deadline, some longer than the lease.
                    reader.agent.data.delay_seconds[number] = pick.uniform(0.01, LEASE_SECONDS + 1)
            for owner in self.owners:
                reader.to_owner[owner.key].drop = lambda _n, m: (
                    m.WhichOneof("message") != "expect" and pick.random() < 0.1
                )
                reader.to_owner[owner.key].duplicate = lambda _n, _m: pick.random() < 0.1
                # That an offer ended may get lost: the generations have to show it.
                reader.from_owner[owner.key].drop = lambda _n, m: (
                    m.WhichOneof("message") in ("released", "failed", "lease_lost") and pick.random() < 0.5
                )
                reader.from_owner[owner.key].duplicate = lambda _n, m: (
                    m.WhichOneof("message") in ("released", "failed", "lease_lost") and pick.random() < 0.2
                )

    def start(self, number: int) -> None:
        pick = self.random
        owner, reader = pick.choice(self.owners), pick.choice(self.readers)
        tokens = pick.choice([1, 15, 16, 17, 32, 33, 64, 70])
        first = pick.randint(0, -(-tokens // BLOCK_TOKENS))
        case = Case(AttemptKey(f"r{number}", 1), PromptShape(tokens, BLOCK_TOKENS, first), owner, reader)
        enough = (
            reader.blocks.free_blocks >= case.shape.wanted_blocks
            and owner.blocks.free_blocks >= case.shape.prompt_blocks
        )
        if not enough:
            return
        self.cases.append(case)
        if pick.random() < 0.8:
            case.listener = reader.expect(case.attempt, owner, case.shape)
            case.prefill = owner.prefill(case.attempt, [reader], case.shape)
        else:
            case.prefill = owner.prefill(case.attempt, [reader], case.shape)
            case.listener = reader.expect(case.attempt, owner, case.shape)
        case.listener.keep = True

    def act(self) -> None:
        pick = self.random
        for case in self.cases:
            if case.prefill is None:
                continue
            chance = pick.random()
            if chance < 0.5:
                if not case.prefill.chunk(pick.randint(1, 2)):
                    case.prefill.drop()
                    case.prefill = None
            elif chance < 0.8:
                case.prefill.complete()
                case.prefill = None
            elif self.faults and chance < 0.84:
                case.owner.book.fail(case.attempt, FailureReason.FAILURE_REASON_INTERNAL, "injected")
                case.prefill.drop()
                case.prefill = None
        for case in self.cases:
            if pick.random() < 0.3:
                self.finish(case)
        if self.faults and self.cases and pick.random() < 0.2:
            # The prefill leg is cancelled; after Complete nothing but pins holds its blocks.
            case = pick.choice(self.cases)
            reason = FailureReason.FAILURE_REASON_INTERNAL
            if case.prefill is None:
                case.owner.book.fail(case.attempt, reason, "injected")
        if self.faults and self.cases and pick.random() < 0.1:
            case = pick.choice(self.cases)
            case.aborted |= case.reader.pulls.abort(self.world.now, case.attempt)

    def run(self) -> None:
        for number in range(40):
            self.start(number)
            self.act()
            self.world.run(self.random.choice([0.0, 0.02, 0.3]))
            self.check()
        while any(case.prefill is not None for case in self.cases):
            self.act()
            self.world.run(0.05)
        self.world.run(3 * LEASE_SECONDS + 10, tick_seconds=0.2)
        for case in self.cases:
            # Its owner's word that it gave up was lost; in the cluster the router ends such an attempt.
            case.aborted |= case.reader.pulls.abort(self.world.now, case.attempt)
            self.finish(case)
        self.world.run(10, tick_seconds=0.2)
        self.check()
        self.world.assert_at_rest()

    def finish(self, case: Case) -> None:
        """The decode of a ready hand-off ends."""
        if case.listener is not None and case.listener.keep and case.listener.events == ["ready"]:
            case.listener.finish()

    def check(self) -> None:
        for owner in self.owners:
            owner.blocks.check()
        for case in self.cases:
            assert case.listener is not None
            events = case.listener.events
            assert events in ([], ["ready"], ["failed"], ["failed", "drained"], ["drained"])
            if events == ["ready"]:
                assert not case.aborted
                assert np.array_equal(
                    case.listener.bytes_when_ready, expected_bytes(case.attempt, case.shape)
                )
            if events == ["drained"]:
                assert case.aborted


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32), st.booleans())
@example(70863278, False)
@example(1, True)
@example(2, False)
def test_random_hand_offs(seed: int, faults: bool) -> None:
    soak = Soak(seed, faults)
    soak.run()
    ready = sum(case.listener is not None and case.listener.events == ["ready"] for case in soak.cases)
    assert all(case.listener is not None and case.listener.events for case in soak.cases)
    if not faults:
        assert ready == len(soak.cases)
