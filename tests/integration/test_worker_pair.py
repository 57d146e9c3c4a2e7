# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode worker as real processes, real NIXL, real store; the test plays the router.

The oracle is ``transformers`` on the same weights. After each test both workers hold nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.support.oracle import Oracle, oracle
from tests.support.quiescence import assert_quiescent, inspect
from tests.support.waiting import until
from tests.support.worker_client import (
    Answer,
    AttemptFailedError,
    Request,
    RouterSession,
    WorkerProcess,
    generate,
    next_message,
    start_worker,
    wait_ready,
    wait_until,
)
from twinpool.config import ClusterConfig
from twinpool.store import Keys, Store, connect_store, start_store
from twinpool.v1 import worker_pb2 as pb

pytestmark = pytest.mark.integration

BLOCK = 16
EDGES = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 5 * BLOCK)
# One family over etcd (where it is installed), the other over the store that needs no binary.
PREFER_EMBEDDED = {"llama": False, "deepseek_v3": True}


@dataclass
class Pair:
    """Two workers of one model and their store."""

    store: Store
    endpoint: str
    model: Path
    directory: Path
    prefill: WorkerProcess
    decode: WorkerProcess

    @property
    def oracle(self) -> Oracle:
        return oracle(self.model)

    def request(self, prompt: Sequence[int], name: str, **spec: object) -> Request:
        eos = list(self.prefill.record.eos_token_ids)
        return Request(prompt, name, self.prefill.record.fingerprint, **({"stop": eos} | spec))  # type: ignore[arg-type]

    def restart(self, role: str) -> WorkerProcess:
        """A new process under the old name."""
        name = getattr(self, role).name
        fresh = start_worker(role, name, self.model, self.endpoint, self.directory)
        setattr(self, role, fresh)
        return fresh

    async def assert_quiet(self) -> None:
        await assert_quiescent([self.prefill.endpoint, self.decode.endpoint])


@asynccontextmanager
async def _sessions(pair: Pair) -> AsyncIterator[tuple[RouterSession, RouterSession]]:
    to_p, to_d = RouterSession(pair.prefill.record), RouterSession(pair.decode.record)
    try:
        await to_p.open()
        await to_d.open()
        yield to_p, to_d
    finally:
        await to_p.close()
        await to_d.close()


@pytest.fixture(scope="module", params=sorted(PREFER_EMBEDDED))
def pair(
    request: pytest.FixtureRequest, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    family: str = request.param
    directory = tmp_path_factory.mktemp(f"pair-{family}")
    server = start_store(directory / "store", prefer_embedded=PREFER_EMBEDDED[family])
    store = connect_store(ClusterConfig(etcd_endpoints=(server.endpoint,)))
    workers = [
        start_worker(role, f"{role}-0", checkpoints[family], server.endpoint, directory)
        for role in ("prefill", "decode")
    ]
    made = Pair(store, server.endpoint, checkpoints[family], directory, workers[0], workers[1])

    async def ready() -> None:
        await asyncio.gather(*(wait_ready(store, worker) for worker in workers))

    try:
        asyncio.run(ready())
        yield made
        keys = Keys("test")
        for worker in (made.decode, made.prefill):
            assert worker.stop() == 0, worker.logs()
        assert not store.list_prefix(keys.workers(None)).items, "a clean stop leaves no record"
    finally:
        for worker in (made.decode, made.prefill, *workers):
            if worker.process.poll() is None:
                worker.kill()
        store.close()
        server.stop()


# What only concerns processes is the same for every model.
one_model = pytest.mark.parametrize("pair", ["llama"], indirect=True)


def _prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(1000 * seed + length).integers(8, 500, length).tolist()


async def test_greedy_tokens_are_those_of_transformers(pair: Pair) -> None:
    async with _sessions(pair) as (to_p, to_d):
        for length in EDGES:
            prompt = _prompt(length)
            answer = await generate(to_p, to_d, pair.request(prompt, f"edge-{length}", max_tokens=10))
            assert answer.tokens == [pair.oracle.greedy(prompt, 10)], f"length {length}"
            await pair.assert_quiet()
        counts = await inspect(pair.decode.endpoint)
        assert counts.bytes_read > 0
        assert counts.fence_failures == 0


async def test_a_prompt_that_the_decode_worker_has_cached(pair: Pair) -> None:
    async with _sessions(pair) as (to_p, to_d):
        for length in (BLOCK, BLOCK + 3, 3 * BLOCK):
            prompt = _prompt(length, seed=1)
            expected = [pair.oracle.greedy(prompt, 6)]
            for turn in ("first", "second"):
                answer = await generate(
                    to_p, to_d, pair.request(prompt, f"cached-{length}-{turn}", max_tokens=6)
                )
                assert answer.tokens == expected
            assert answer.decode_cached_blocks == length // BLOCK
            partial = length % BLOCK != 0
            assert answer.bytes == (partial * BLOCK * pair.prefill.record.kv_bytes_per_token)
            await pair.assert_quiet()


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_few_tokens(pair: Pair, max_tokens: int) -> None:
    prompt = _prompt(2 * BLOCK + 2, seed=2)
    async with _sessions(pair) as (to_p, to_d):
        request = pair.request(prompt, f"few-{max_tokens}", max_tokens=max_tokens)
        answer = await generate(to_p, to_d, request)
        assert answer.tokens == [pair.oracle.greedy(prompt, max_tokens)]
        await pair.assert_quiet()


async def test_the_first_token_ends_the_answer(pair: Pair) -> None:
    prompt = _prompt(BLOCK + 9, seed=3)
    first = pair.oracle.greedy(prompt, 1)
    async with _sessions(pair) as (to_p, to_d):
        answer = await generate(to_p, to_d, pair.request(prompt, "stop-first", max_tokens=9, stop=first))
        assert answer.tokens == [first]
        await pair.assert_quiet()
        assert to_d.step_messages == 0


async def test_two_choices(pair: Pair) -> None:
    prompt = _prompt(BLOCK + 5, seed=4)
    async with _sessions(pair) as (to_p, to_d):
        greedy = await generate(to_p, to_d, pair.request(prompt, "two-greedy", n=2, max_tokens=8))
        assert greedy.tokens == [pair.oracle.greedy(prompt, 8)] * 2
        drawn = [
            await generate(
                to_p, to_d, pair.request(prompt, f"two-{turn}", n=2, max_tokens=8, temperature=2.0)
            )
            for turn in range(2)
        ]
        assert drawn[0].tokens == drawn[1].tokens, "the same seed draws the same tokens"
        assert drawn[0].tokens[0] != drawn[0].tokens[1], "choices draw for themselves"
        await pair.assert_quiet()


async def test_eight_at_once_in_small_pools(pair: Pair) -> None:
    prompts = [_prompt(7 + 9 * number, seed=5) for number in range(8)]
    async with _sessions(pair) as (to_p, to_d):
        answers = await asyncio.gather(
            *(_patient(pair, to_p, to_d, prompt, f"many-{i}") for i, prompt in enumerate(prompts))
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == [pair.oracle.greedy(prompt, 12)]
        await pair.assert_quiet()


async def _patient(
    pair: Pair, to_p: RouterSession, to_d: RouterSession, prompt: list[int], name: str
) -> Answer:
    """As a router: refused for lack of room, placed anew under the next attempt."""
    for attempt in range(1, 200):
        try:
            return await generate(to_p, to_d, pair.request(prompt, name, attempt=attempt, max_tokens=12))
        except AttemptFailedError as error:
            if error.reason != pb.FAILURE_REASON_NO_CAPACITY:
                raise
            await asyncio.sleep(0.02)
    raise AssertionError("never had room")


@pytest.mark.parametrize("phase", ["reserved", "prefill", "handoff", "decode"])
async def test_cancel_in_every_phase(pair: Pair, phase: str) -> None:
    prompt = _prompt(20 * BLOCK + 3, seed=6)
    async with _sessions(pair) as (to_p, to_d):
        request = pair.request(prompt, f"cancel-{phase}", max_tokens=200, stop=())
        from_d, from_p = to_d.attempt(request.request_id), to_p.attempt(request.request_id)
        to_d.send(request.decode(pair.prefill.record))
        reserved = (await next_message(from_d, "decode")).reserved
        if phase != "reserved":
            to_p.send(request.prefill(pair.decode.record, reserved.cached_blocks))
        if phase in ("handoff", "decode"):
            await next_message(from_p, "prefill")
        if phase == "decode":
            await until(lambda: to_d.step_messages > 2)
        to_d.send(request.cancel())
        to_p.send(request.cancel())
        for queue, leg in ((from_d, "decode"), (from_p, "prefill")):
            assert await _end_of(queue, leg) == "cancelled"
        await pair.assert_quiet()
        # The same prompt still comes out right: nothing half-read was kept.
        again = pair.request(prompt, f"after-cancel-{phase}", max_tokens=4)
        assert (await generate(to_p, to_d, again)).tokens == [pair.oracle.greedy(prompt, 4)]
        await pair.assert_quiet()


async def _end_of(queue: "asyncio.Queue[pb.SessionResponse]", leg: str) -> str:
    """The last word on an attempt. A leg that the other leg's cancel reached first has failed before."""
    while True:
        message = await asyncio.wait_for(queue.get(), 60)
        kind = message.WhichOneof("message")
        assert kind is not None
        if kind == "cancelled":
            return kind
        if kind == "failed":
            # The owner may have given its blocks away before the reader heard of the cancel: then the fence speaks.
            assert message.failed.reason in (pb.FAILURE_REASON_PEER_LOST, pb.FAILURE_REASON_FENCED), leg


async def test_a_router_that_dies_leaves_nothing(pair: Pair) -> None:
    to_p, to_d = RouterSession(pair.prefill.record), RouterSession(pair.decode.record)
    await to_p.open()
    await to_d.open()
    request = pair.request(_prompt(6 * BLOCK, seed=7), "orphan", max_tokens=300, stop=())
    running = asyncio.create_task(generate(to_p, to_d, request))
    await until(lambda: to_d.step_messages > 2)
    await to_p.drop()
    await to_d.drop()
    running.cancel()
    await pair.assert_quiet()
    assert (await inspect(pair.decode.endpoint)).sessions == 0


@one_model
async def test_sigkill_of_the_prefill_worker(pair: Pair) -> None:
    before = pair.prefill.record.worker.incarnation
    to_p, to_d = RouterSession(pair.prefill.record), RouterSession(pair.decode.record)
    await to_p.open()
    await to_d.open()
    prompt = _prompt(3 * BLOCK, seed=8)
    undisturbed = await generate(to_p, to_d, pair.request(prompt, "calm", max_tokens=250, stop=()))
    waiting = pair.request(_prompt(50, seed=9), "waits", max_tokens=5)
    running = pair.request(prompt, "runs", max_tokens=250, stop=())
    to_d.step_messages = 0
    decoding = asyncio.create_task(generate(to_p, to_d, running))
    await until(lambda: to_d.step_messages > 2 or decoding.done())
    queue = to_d.attempt(waiting.request_id)
    to_d.send(waiting.decode(pair.prefill.record))
    assert (await next_message(queue, "decode")).WhichOneof("message") == "reserved"
    pair.prefill.kill()
    with pytest.raises(AttemptFailedError) as caught:
        await next_message(queue, "decode")
    assert caught.value.reason == pb.FAILURE_REASON_PEER_LOST
    assert not decoding.done()
    assert (await decoding).tokens == undisturbed.tokens, "what decodes needs its owner no more"
    await assert_quiescent([pair.decode.endpoint])
    await to_p.close()
    await wait_ready(pair.store, pair.restart("prefill"))
    assert pair.prefill.record.worker.incarnation != before
    await to_d.close()
    async with _sessions(pair) as (again_p, again_d):
        fresh = await generate(again_p, again_d, pair.request(prompt, "again", max_tokens=6))
        assert fresh.tokens == [pair.oracle.greedy(prompt, 6)]
        await pair.assert_quiet()


@one_model
async def test_sigkill_of_the_decode_worker(pair: Pair) -> None:
    to_p, to_d = RouterSession(pair.prefill.record), RouterSession(pair.decode.record)
    await to_p.open()
    await to_d.open()
    prompt = _prompt(20 * BLOCK, seed=10)
    request = pair.request(prompt, "lost", max_tokens=5)
    queue = to_d.attempt(request.request_id)
    to_d.send(request.decode(pair.prefill.record))
    reserved = (await next_message(queue, "decode")).reserved
    to_p.send(request.prefill(pair.decode.record, reserved.cached_blocks))
    await wait_until(
        lambda counts: counts.pinned_blocks > 0 or counts.cached_blocks > 0, pair.prefill.endpoint
    )
    pair.decode.kill()
    # The reader's death frees its pins long before the lease of 30 s would.
    await assert_quiescent([pair.prefill.endpoint])
    await to_d.close()
    await to_p.close()
    await wait_ready(pair.store, pair.restart("decode"))
    async with _sessions(pair) as (again_p, again_d):
        fresh = await generate(again_p, again_d, pair.request(prompt, "again-d", max_tokens=6))
        assert fresh.tokens == [pair.oracle.greedy(prompt, 6)]
        await pair.assert_quiet()


@one_model
async def test_sigterm_finishes_what_runs(pair: Pair) -> None:
    prompt = _prompt(BLOCK, seed=11)
    async with _sessions(pair) as (to_p, to_d):
        undisturbed = await generate(to_p, to_d, pair.request(prompt, "calm-d", max_tokens=300, stop=()))
        request = pair.request(prompt, "last", max_tokens=300, stop=())
        to_d.step_messages = 0
        running = asyncio.create_task(generate(to_p, to_d, request))
        await until(lambda: to_d.step_messages > 2 or running.done())
        pair.decode.process.terminate()
        assert (await running).tokens == undisturbed.tokens
        assert await asyncio.to_thread(pair.decode.process.wait, 20) == 0, pair.decode.logs()
    await wait_ready(pair.store, pair.restart("decode"))
    await pair.assert_quiet()


@one_model
def test_a_bad_checkpoint_is_named_and_never_registers(pair: Pair, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in pair.model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4096])
    worker = start_worker("prefill", "broken-0", broken, pair.endpoint, tmp_path)
    assert worker.process.wait(60) == 1
    assert "CHECKPOINT_INVALID" in worker.logs()
    assert "model.safetensors" in worker.logs()
    assert "registration_changed" not in worker.logs()
    assert pair.store.get(Keys("test").worker("default", "broken-0")) is None
