# SPDX-License-Identifier: Apache-2.0
"""Prefixes pulled between real worker processes over NIXL, with digests and poisoned pools; the test plays the router, and
at the end asks a real one.

The tokens are the oracle's whether the prefix was pulled or, because its owner could not give it, computed.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.fleet import BLOCK, Fleet, running_fleet
from tests.support.quiescence import inspect
from tests.support.steps import Legs, legs, prompt
from tests.support.worker_client import Answer, Request, WorkerProcess, wait_until
from twinpool.client import Client
from twinpool.client import request as ask_for
from twinpool.v1 import inference_pb2 as inference
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.control_pb2 import WorkerRecord

pytestmark = pytest.mark.integration

WORKERS = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"}
FETCH_DEADLINE_SECONDS = 2.0
FIRST, GENERATED = 2 * BLOCK + 5, 3 * BLOCK
"""The first turn's prompt and answer: together five full blocks, of which two are the prompt's."""


@dataclass
class Fetching(Request):
    """A request whose prefix is named to the prefill leg, or to the decode leg."""

    source: pb.PrefixSource | None = None
    decode_source: pb.PrefixSource | None = None

    def prefill(self, reader: WorkerRecord, cached: int) -> pb.SessionRequest:
        message = super().prefill(reader, cached)
        if self.source is not None:
            message.prefill.prefix.CopyFrom(self.source)
        return message

    def decode(self, owner: WorkerRecord) -> pb.SessionRequest:
        message = super().decode(owner)
        if self.decode_source is not None:
            message.decode.prefix.CopyFrom(self.decode_source)
        return message


def source(worker: WorkerProcess, blocks: int) -> pb.PrefixSource:
    return pb.PrefixSource(owner=worker.record.worker, endpoint=worker.endpoint, blocks=blocks)


@pytest.fixture(scope="module")
def shared(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    settings = {"transfer.fetch_deadline_seconds": FETCH_DEADLINE_SECONDS}
    directory = tmp_path_factory.mktemp("fetch")
    with running_fleet(directory, checkpoints["deepseek_v3"], WORKERS, settings) as fleet:
        yield fleet


@pytest.fixture
async def fleet(shared: Fleet) -> AsyncIterator[Fleet]:
    yield shared
    shared.clear_faults()
    await shared.assert_quiet(within=10.0)


async def first_turn(walk: Legs, seed: int) -> list[int]:
    """One request to its end; the next turn's prompt, the first five blocks of which lie on the decode worker."""
    tokens = prompt(FIRST, seed)
    answer = await walk.generate(walk.fleet.request(tokens, f"turn-1-{seed}", max_tokens=GENERATED, stop=()))
    assert answer.tokens == [walk.fleet.oracle.greedy(tokens, GENERATED, ignore_eos=True)]
    return tokens + answer.tokens[0] + prompt(7, seed)


async def ask(walk: Legs, request: Request) -> tuple[pb.PrefillDone, Answer]:
    """A request to its end, against the oracle."""
    done = await walk.prefilled(request)
    answer = await walk.rest(request, done)
    assert answer.tokens == [walk.fleet.oracle.greedy(request.tokens, request.max_tokens)]
    return done, answer


def request(fleet: Fleet, tokens: list[int], name: str, **spec: object) -> Fetching:
    plain = fleet.request(tokens, name, max_tokens=6)
    return Fetching(plain.tokens, name, plain.fingerprint, max_tokens=6, stop=plain.stop, **spec)  # type: ignore[arg-type]


async def bytes_read(worker: WorkerProcess) -> int:
    return (await inspect(worker.endpoint)).bytes_read


def fetches(fleet: Fleet, name: str, reason: str) -> float:
    return fleet.metric(name, "twinpool_worker_prefix_fetches_total", reason=reason)


async def test_the_next_turn_is_pulled_from_the_decode_worker(fleet: Fleet) -> None:
    owner, reader = fleet.workers["decode-0"], fleet.workers["prefill-1"]
    async with legs(fleet) as walk, legs(fleet, "prefill-1") as other:
        tokens = await first_turn(walk, 1)
        before, handed = await bytes_read(reader), await bytes_read(owner)
        done, answer = await ask(other, request(fleet, tokens, "turn-2", source=source(owner, 5)))
        assert done.cached_tokens == 5 * BLOCK
        assert done.fetched.owner_blocks == 5
        size = BLOCK * owner.record.kv_bytes_per_token
        moved = await bytes_read(reader) - before
        assert moved == done.fetched.stats.bytes == 5 * size
        assert await bytes_read(owner) - handed == answer.bytes == size, (
            "the decode worker gets the new block alone"
        )
        assert fetches(fleet, "prefill-1", "FETCHED") >= 1


async def test_a_prefill_worker_pulls_from_another(fleet: Fleet) -> None:
    async with legs(fleet) as walk, legs(fleet, "prefill-1", "decode-1") as other:
        tokens = prompt(6 * BLOCK, 2)
        await walk.check(tokens, "here")
        there = request(fleet, tokens, "there", source=source(fleet.workers["prefill-0"], 6))
        done, answer = await ask(other, there)
        assert done.cached_tokens == 5 * BLOCK, "the last block holds the last token, which is computed"
        assert answer.bytes == 6 * BLOCK * fleet.workers["decode-1"].record.kv_bytes_per_token


async def test_a_decode_worker_pulls_from_another(fleet: Fleet) -> None:
    reader = fleet.workers["decode-1"]
    async with legs(fleet) as walk, legs(fleet, "prefill-1", "decode-1") as other:
        tokens = await first_turn(walk, 3)
        moving = request(fleet, tokens, "moving", decode_source=source(fleet.workers["decode-0"], 5))
        before = await bytes_read(reader)
        done, answer = await ask(other, moving)
        size = BLOCK * reader.record.kv_bytes_per_token
        assert done.cached_tokens == 0
        assert answer.bytes == size, "five blocks were there when the sixth came"
        assert await bytes_read(reader) - before == 6 * size


async def test_a_prefix_that_the_owner_has_evicted_is_computed(fleet: Fleet) -> None:
    owner = fleet.workers["decode-0"]
    async with legs(fleet) as walk, legs(fleet, "prefill-1") as other:
        tokens = await first_turn(walk, 4)
        for number in range(4):
            await walk.check(prompt(10 * BLOCK, 400 + number), f"pressure-{number}", max_tokens=2)
        done, _ = await ask(other, request(fleet, tokens, "gone", source=source(owner, 5)))
        assert done.fetched.failure == pb.FAILURE_REASON_NOT_CACHED
        assert done.fetched.owner_blocks == 0
        assert done.cached_tokens == 0
        assert fetches(fleet, "prefill-1", "FAILURE_REASON_NOT_CACHED") >= 1


async def test_blocks_that_are_being_read_survive_pressure_on_their_owner(fleet: Fleet) -> None:
    owner, faults = fleet.workers["decode-0"], fleet.faults("prefill-1")
    async with legs(fleet) as walk, legs(fleet, "prefill-1") as other:
        tokens = await first_turn(walk, 5)
        held = faults.read("hold")
        slow = asyncio.create_task(ask(other, request(fleet, tokens, "slow", source=source(owner, 5))))
        await faults.reached("data", held)
        for number in range(3):
            await walk.check(prompt(8 * BLOCK, 500 + number), f"squeeze-{number}", max_tokens=2)
        pinned = (await inspect(owner.endpoint)).pinned_blocks
        # A reader that has waited for too long has given them up.
        given_up = (await inspect(fleet.workers["prefill-1"].endpoint)).quarantined_blocks == 5
        assert pinned == 5 or given_up
        faults.free()
        done, _ = await slow
        # Whether the pull was in time or given up, the answer is right; which of them depends on the machine.
        assert done.cached_tokens in (0, 5 * BLOCK)


async def test_a_read_that_fails_is_made_up_for(fleet: Fleet) -> None:
    owner, faults = fleet.workers["decode-0"], fleet.faults("prefill-1")
    async with legs(fleet) as walk, legs(fleet, "prefill-1") as other:
        tokens = await first_turn(walk, 6)
        faults.read("refuse", value="BACKEND")
        done, _ = await ask(other, request(fleet, tokens, "refused", source=source(owner, 5)))
        assert done.fetched.failure == pb.FAILURE_REASON_TRANSFER
        assert done.cached_tokens == 0


async def test_a_read_that_hangs_is_given_up_and_its_bytes_land_in_quarantine(fleet: Fleet) -> None:
    owner, reader, faults = fleet.workers["decode-0"], fleet.workers["prefill-1"], fleet.faults("prefill-1")
    async with legs(fleet) as walk, legs(fleet, "prefill-1") as other:
        tokens = await first_turn(walk, 7)
        held = faults.read("hold")
        task = asyncio.create_task(ask(other, request(fleet, tokens, "late", source=source(owner, 5))))
        await faults.reached("data", held)
        done, _ = await task
        assert done.fetched.failure == pb.FAILURE_REASON_TRANSFER
        assert done.fetched.wait_time.ToNanoseconds() >= FETCH_DEADLINE_SECONDS * 1e9
        assert (await inspect(reader.endpoint)).quarantined_blocks == 5
        faults.free()
        await wait_until(lambda counts: counts.quarantined_blocks == 0, reader.endpoint)


async def test_a_cancel_while_the_prefix_is_pulled(fleet: Fleet) -> None:
    owner, faults = fleet.workers["decode-0"], fleet.faults("prefill-1")
    async with legs(fleet) as walk, legs(fleet, "prefill-1") as other:
        tokens = await first_turn(walk, 8)
        held = faults.read("hold")
        doomed = request(fleet, tokens, "doomed", source=source(owner, 5))
        cached = await other.reserve(doomed)
        other.prefill.send(doomed.prefill(other.decode.record, cached))
        await faults.reached("data", held)
        await other.cancel(doomed)
        await fleet.assert_quiet("decode-0")
        faults.free()


# --- with a router that chooses


@asynccontextmanager
async def routed(fleet: Fleet, settings: dict[str, object]) -> AsyncIterator[Client]:
    """A client of a router of its own."""
    await fleet.start_router(settings)
    try:
        async with fleet.client() as client:
            yield client
        await fleet.assert_router_quiet()
    finally:
        assert fleet.router is not None
        fleet.router.terminate()
        await asyncio.to_thread(fleet.router.wait, 30)


async def turn(
    fleet: Fleet, client: Client, tokens: list[int], max_tokens: int
) -> inference.GenerateFinished:
    """One request against the oracle; its last event. Appends the answer to ``tokens``."""
    expected = fleet.oracle.greedy(tokens, max_tokens, ignore_eos=True)
    answer = await client.complete(
        ask_for(tokens, max_tokens=max_tokens, temperature=0.0, ignore_eos=True), timeout=60
    )
    assert answer.token_ids == [expected]
    tokens += expected
    return answer.finished


async def test_a_router_lets_the_next_turn_pull_what_the_decode_worker_has(fleet: Fleet) -> None:
    """Tokens are said to be dear and pulls cheap."""
    settings = {"router.local_prefill": False, "router.prior_prefill_token_seconds": 0.05}
    async with routed(fleet, settings) as client:
        tokens, pulled = prompt(FIRST, 20), 0
        await turn(fleet, client, tokens, GENERATED)
        for number in range(3):
            tokens += prompt(7, 20 + number)
            done = await turn(fleet, client, tokens, BLOCK)
            assert done.prefix_fetch.bytes == done.prefix_fetch.blocks * BLOCK * bytes_per_token(fleet)
            assert done.usage.cached_tokens >= done.prefix_fetch.blocks * BLOCK
            pulled += done.prefix_fetch.bytes
        assert pulled > 0
        assert fleet.router_metric("twinpool_router_prefix_fetched_bytes_total") == pulled
        assert fleet.router_metric("twinpool_router_prefix_fetches_total", reason="FETCHED") >= 1


async def test_a_router_lets_a_decode_worker_compute_a_short_suffix(fleet: Fleet) -> None:
    """Hand-offs are said to be dear, and what it costs running streams to weigh nothing."""
    settings = {"router.local_prefill": True, "router.prior_transfer_seconds": 5.0, "router.harm_weight": 0.0}
    async with routed(fleet, settings) as client:
        tokens, local = prompt(FIRST, 30), 0
        await turn(fleet, client, tokens, GENERATED)
        for number in range(4):
            tokens += prompt(5, 30 + number)
            done = await turn(fleet, client, tokens, 9)
            if done.prefill_worker == done.decode_worker:
                local += 1
                assert done.handoff.bytes == 0
                assert done.handoff.blocks == 0
        assert local > 0
        assert fleet.router_metric("twinpool_router_local_prefills_total") >= local


async def test_many_at_once_whatever_the_router_chooses(fleet: Fleet) -> None:
    """Pools of 24 blocks: prompts that share a beginning are pulled, computed here and there, refused and preempted."""
    async with routed(
        fleet, {"router.local_prefill": True, "router.prior_prefill_token_seconds": 0.001}
    ) as client:
        shared = prompt(3 * BLOCK, 40)
        prompts = [
            [*(shared if number % 2 else []), *prompt(3 + 5 * number, 41 + number)] for number in range(12)
        ]
        for _ in range(2):
            await asyncio.gather(*(turn(fleet, client, tokens, 10) for tokens in prompts))


def bytes_per_token(fleet: Fleet) -> int:
    return next(iter(fleet.workers.values())).record.kv_bytes_per_token


# The last tests end a worker.


async def test_an_owner_that_is_killed_while_it_is_asked(fleet: Fleet) -> None:
    owner = fleet.workers["decode-1"]
    async with legs(fleet) as walk:
        async with legs(fleet, "prefill-0", "decode-1") as there:
            tokens = await first_turn(there, 9)
            # The link to it stands already.
            await ask(walk, request(fleet, tokens, "warm", source=source(owner, 5)))
        async with legs(fleet, "prefill-1") as other:
            await ask(other, request(fleet, prompt(40, 90), "link", source=source(owner, 2)))
            owner.process.send_signal(signal.SIGSTOP)
            task = asyncio.create_task(ask(other, request(fleet, tokens, "orphan", source=source(owner, 5))))
            await fleet.faults("prefill-1").reached("to_owner:fetch", 2)
            owner.kill()
            done, _ = await task
            assert done.fetched.failure == pb.FAILURE_REASON_PEER_LOST
            assert done.cached_tokens == 0
    fleet.start("decode", "decode-1")
    await fleet.ready("decode-1")


async def test_an_owner_that_stands_still(fleet: Fleet) -> None:
    owner = fleet.workers["decode-1"]
    async with legs(fleet, "prefill-0", "decode-1") as there:
        tokens = await first_turn(there, 10)
    async with legs(fleet, "prefill-1") as other:
        owner.process.send_signal(signal.SIGSTOP)
        try:
            done, _ = await ask(other, request(fleet, tokens, "still", source=source(owner, 5)))
            assert done.fetched.failure in (pb.FAILURE_REASON_TRANSFER, pb.FAILURE_REASON_PEER_LOST)
        finally:
            owner.process.send_signal(signal.SIGCONT)
