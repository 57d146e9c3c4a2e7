# SPDX-License-Identifier: Apache-2.0
"""A live pool that rebalances itself follows a load that turns from long prompts to long answers, and then stands still.

What the loads ask for is counted in what a slow machine hardly changes: the share of the time in which prefill workers run steps, and
sequences over the seats of decode workers.
"""

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.faults.test_rebalance import ROLES, Pool
from tests.support.cluster import Cluster, running_cluster
from tests.support.oracle import oracle
from tests.support.steps import prompt
from tests.support.waiting import until_told
from twinpool.client import request
from twinpool.config import RpcConfig
from twinpool.control.rebalance.history import Move, reversals
from twinpool.control.rebalance.loop import move_of
from twinpool.rpc import channel
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import control_pb2_grpc

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(900)]

SEATS = 16
WINDOW_SECONDS = 6.0
REVERSAL_SECONDS = 60.0
CONVERGES_SECONDS = 90.0
HELD_SECONDS = 4 * WINDOW_SECONDS
"""How long a split that was reached is watched."""
SAMPLE = 10
"""Answers of a load that are compared with the oracle."""


@dataclass
class Load:
    """Clients that ask without a pause."""

    cluster: Cluster
    prompt_tokens: int
    answer_tokens: int
    clients: int
    seed: int
    answers: list[tuple[list[int], list[int]]] = field(default_factory=list)
    stopped: bool = False

    async def client(self, number: int) -> None:
        """Asks for one answer after the other; no prompt comes twice. Raises what went wrong."""
        async with self.cluster.client() as client:
            for turn in itertools.count():
                if self.stopped:
                    return
                tokens = prompt(self.prompt_tokens, self.seed + 1000 * turn + number)
                message = request(tokens, max_tokens=self.answer_tokens, temperature=0.0, ignore_eos=True)
                answer: list[int] = []
                async for event in client.stream(message, timeout=120.0):
                    answer += event.tokens.token_ids
                assert len(answer) == self.answer_tokens
                self.answers.append((tokens, answer))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """At the end each client finishes what it has asked; then a sample of the answers is compared."""
        clients = [asyncio.create_task(self.client(number)) for number in range(self.clients)]
        try:
            yield
        finally:
            self.stopped = True
            await asyncio.gather(*clients)
        for tokens, answer in random.Random(1).sample(self.answers, SAMPLE):
            assert answer == oracle(self.cluster.model).greedy(tokens, self.answer_tokens, ignore_eos=True)


class Auto(Pool):
    """One that nobody tells what to do."""

    async def ready(self) -> tuple[int, int]:
        """Prefill and decode workers that are ready."""
        records = await self.cluster.workers()
        ready = [ROLES[record.role] for record in records if record.state == pb.WORKER_STATE_READY]
        return ready.count("prefill"), ready.count("decode")

    async def flips(self) -> list[Move]:
        """In the order in which they began."""
        async with channel(self.cluster.state.control_endpoint, RpcConfig()) as connection:
            stub = control_pb2_grpc.ControlServiceStub(connection)
            found = await stub.ListOperations(pb.ListOperationsRequest(), timeout=10)
        moves = [move_of(each) for each in found.operations if each.kind == pb.OPERATION_KIND_FLIP]
        return sorted((move for move in moves if move is not None), key=lambda move: move.began)

    async def settles(self, prefill: int, decode: int) -> float:
        """Waits for a split, then sees that it stays. Seconds until it was there."""
        began = time.monotonic()

        async def there() -> bool:
            return await self.ready() == (prefill, decode)

        await until_told(there, CONVERGES_SECONDS)
        took = time.monotonic() - began
        flips = len(await self.flips())
        end = time.monotonic() + HELD_SECONDS
        while time.monotonic() < end:
            assert (await self.ready(), len(await self.flips())) == ((prefill, decode), flips)
        return took


@pytest.fixture
def pool(checkpoint: Path, tmp_path: Path) -> Iterator[Auto]:
    settings = {
        "pools.prefill_workers": 2,
        "pools.decode_workers": 2,
        "worker.threads": 1,
        "kv.num_blocks": 4096,
        "scheduler.max_chunk_tokens": 128,
        "scheduler.max_batched_tokens": 256,
        "scheduler.max_num_seqs": SEATS,
        "router.finish_seconds": 0.0,
        "rebalance.auto": True,
        # Far below what the loads ask of the role that they are for, far above what they ask of the other one.
        "rebalance.utilisation_high": 0.6,
        "rebalance.utilisation_low": 0.4,
        "rebalance.interval_seconds": 0.5,
        "rebalance.window_seconds": WINDOW_SECONDS,
        "rebalance.confirm_seconds": 1.5,
        "rebalance.cooldown_seconds": 2,
        "rebalance.dwell_seconds": 4,
        "rebalance.reversal_seconds": REVERSAL_SECONDS,
        "rebalance.flip_seconds": 1,
        "rebalance.horizon_seconds": 120,
        "rebalance.ttft_seconds": 0.5,
        "rebalance.itl_seconds": 1.0,
    }
    with running_cluster(tmp_path, checkpoint, settings) as cluster:
        yield Auto(cluster)


async def test_a_pool_follows_a_load_that_turns_and_does_not_swing(pool: Auto) -> None:
    assert await pool.ready() == (2, 2)
    async with Load(pool.cluster, prompt_tokens=1500, answer_tokens=2, clients=6, seed=11).running():
        first = await pool.settles(3, 1)
    async with Load(pool.cluster, prompt_tokens=8, answer_tokens=200, clients=3 * SEATS, seed=13).running():
        second = await pool.settles(1, 3)
    flips = await pool.flips()
    print(f"3:1 after {first:.1f} s, 1:3 after {second:.1f} s")
    assert [move.to for move in flips] == ["prefill", "decode", "decode"]
    assert all(move.succeeded for move in flips)
    # The one that the load brought.
    assert max(reversals(flips, move.began - REVERSAL_SECONDS) for move in flips) == 1
    code, events, error = await pool.command("get", "events")
    assert code == 0, error
    print(*(each["message"] for each in events if each["reason"].startswith("Rebalance")), sep="\n")
    reasons = [each["reason"] for each in events if each["reason"].startswith("Rebalance")]
    assert [reason for reason in reasons if reason != "RebalanceHeld"] == [
        "RebalanceMorePrefill",
        "RebalanceMoreDecode",
        "RebalanceMoreDecode",
    ]
    await pool.cluster.assert_quiescent()
