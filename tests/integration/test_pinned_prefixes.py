# SPDX-License-Identifier: Apache-2.0
"""Pinned prefixes of a real cluster with tiny pools: what they keep, what they leave, and how they end."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_oracle import random_prompt
from tests.support.cluster import Cluster, running_cluster
from tests.support.oracle import oracle
from tests.support.quiescence import inspect
from tests.support.waiting import GIVE_UP_SECONDS, until_told
from twinpool.client import Client, request
from twinpool.errors import TwinpoolError
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import worker_pb2
from twinpool.v1.control_pb2 import WORKER_STATE_READY, WorkerRecord

pytestmark = pytest.mark.integration

BLOCK = 16
BLOCKS = 24
PINNED = 6
"""A quarter of a pool: what may be pinned."""


@pytest.fixture(scope="module")
def shared(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp("pins")
    with running_cluster(home, checkpoints["deepseek_v3"], {"kv.num_blocks": BLOCKS}) as running:
        yield running


async def ask(
    cluster: Cluster, client: Client, prompt: list[int], tokens: int = 4, session: str = ""
) -> pb.Usage:
    """One request against the oracle; what the workers found cached."""
    message = request(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True, session_id=session)
    answer = await client.complete(message, timeout=120)
    assert answer.token_ids == [oracle(cluster.model).greedy(prompt, tokens, ignore_eos=True)]
    return answer.finished.usage


async def pressure(cluster: Cluster, client: Client, vocab: int, seed: int) -> None:
    """Twice as much as both pools hold."""
    for number in range(8):
        await ask(cluster, client, random_prompt(seed + number, 6 * BLOCK, vocab), 2)


async def worker(cluster: Cluster, name: str) -> WorkerRecord:
    return next(record for record in await cluster.workers() if record.worker.name == name)


async def counts(cluster: Cluster, name: str) -> worker_pb2.InspectResponse:
    return await inspect((await worker(cluster, name)).endpoint)


async def test_a_pinned_prefix_outlives_pressure_until_it_is_released(shared: Cluster) -> None:
    async with shared.client() as client:
        vocab = (await client.models())[0].vocab_size
        kept, lost = (random_prompt(seed, PINNED * BLOCK + 3, vocab) for seed in (1, 2))
        warmed = await client.warm(request(kept, session_id="s"), pin_seconds=600)
        await client.warm(request(lost))
        pin = warmed.pin
        assert (pin.tokens, warmed.cached_tokens) == (PINNED * BLOCK, 0)
        await pressure(shared, client, vocab, 100)
        held = await counts(shared, pin.worker)
        assert (held.prefix_pins, held.prefix_pinned_blocks) == (1, PINNED)
        await shared.assert_quiescent()

        found = await ask(shared, client, kept + random_prompt(3, 5, vocab), session="s")
        assert (found.cached_tokens, found.decode_cached_tokens) == (PINNED * BLOCK, 0)
        assert (await ask(shared, client, lost)).cached_tokens == 0
        with pytest.raises(TwinpoolError, match="PIN_CAPACITY"):
            await client.warm(request(random_prompt(4, BLOCK, vocab)), pin_seconds=5)

        told = await client.release(session_id="s")
        assert (told.pins, told.tokens, told.unreachable_workers) == (1, PINNED * BLOCK, 0)
        assert told.demoted_tokens >= PINNED * BLOCK
        assert (await client.release(session_id="s")).pins == 0
        await pressure(shared, client, vocab, 200)
        assert (await ask(shared, client, kept)).cached_tokens == 0
    await shared.assert_quiescent()


async def test_a_pin_that_has_expired_keeps_nothing(shared: Cluster) -> None:
    async with shared.client() as client:
        vocab = (await client.models())[0].vocab_size
        prompt = random_prompt(11, PINNED * BLOCK + 3, vocab)
        pin = (await client.warm(request(prompt), pin_seconds=1)).pin

        async def over() -> bool:
            return not (await counts(shared, pin.worker)).prefix_pins

        await until_told(over)
        await pressure(shared, client, vocab, 300)
        assert (await ask(shared, client, prompt)).cached_tokens == 0
    await shared.assert_quiescent()


async def test_a_request_that_needs_the_whole_pool_is_served_although_a_part_is_pinned(
    shared: Cluster,
) -> None:
    async with shared.client() as client:
        vocab = (await client.models())[0].vocab_size
        prompt = random_prompt(21, PINNED * BLOCK, vocab)
        pin = (await client.warm(request(prompt), pin_seconds=600)).pin
        large = random_prompt(22, (BLOCKS - 3) * BLOCK, vocab)
        await ask(shared, client, large)
        assert (await counts(shared, pin.worker)).prefix_pins == 0, "it gave way"
    await shared.assert_quiescent()


async def test_warm_restores_what_a_worker_s_death_has_ended(shared: Cluster) -> None:
    async with shared.client() as client:
        vocab = (await client.models())[0].vocab_size
        message = request(random_prompt(31, PINNED * BLOCK + 3, vocab))
        pin = (await client.warm(message, pin_seconds=600)).pin
        before = await worker(shared, pin.worker)
        os.kill(before.pid, signal.SIGKILL)

        async def back() -> bool:
            return any(
                record.role == before.role
                and record.state == WORKER_STATE_READY
                and record.worker.incarnation != before.worker.incarnation
                for record in await shared.workers()
            )

        await until_told(back, 4 * GIVE_UP_SECONDS)
        again = await client.warm(message, pin_seconds=600, timeout=120)
        assert (again.pin.id, again.pin.tokens) == (pin.id, PINNED * BLOCK)
        held = await counts(shared, again.pin.worker)
        assert (held.prefix_pins, held.prefix_pinned_blocks) == (1, PINNED)
        assert (await client.release(pin_id=pin.id)).pins == 1
    await shared.assert_quiescent()
