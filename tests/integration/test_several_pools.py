# SPDX-License-Identifier: Apache-2.0
"""One control process, one Ray and one router with three pools: a model's short and long prompts apart, and another model."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.cluster import Cluster, running_cluster
from tests.support.oracle import oracle
from tests.support.waiting import until_told
from twinpool.client import request
from twinpool.config import RpcConfig
from twinpool.errors import TwinpoolError
from twinpool.router_client import RouterClient
from twinpool.rpc import channel
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import control_pb2_grpc, router_pb2
from twinpool.v1.inference_pb2 import TokenizeRequest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LONG = 64
"""Tokens of the shortest prompt for the pool of long ones."""
BLOCK = 16
WAIT_SECONDS = 180.0


@pytest.fixture(scope="module")
def pools(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The pool ``default`` for short prompts, ``long`` for long ones of the same model, ``llama`` for another model."""
    settings: dict[str, object] = {
        "worker.threads": 1,
        "pools.prompt_tokens_most": LONG - 1,
        "pools.further": {
            "long": {"prompt_tokens_least": LONG, "kv": {"num_blocks": 96}},
            "llama": {"model": {"path": str(checkpoints["llama"])}},
        },
    }
    with running_cluster(tmp_path_factory.mktemp("pools"), checkpoints["deepseek_v3"], settings) as running:
        yield running


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, 250) for _ in range(length)]


async def check(cluster: Cluster, model: Path, tokens: list[int], request_id: str) -> tuple[str, int]:
    """A greedy answer against the oracle; the pool that gave it, and how many of the prompt's tokens were cached."""
    expected = oracle(model).greedy(tokens, 5, ignore_eos=True)
    asked = request(tokens, model=model.name, max_tokens=5, temperature=0.0, ignore_eos=True)
    asked.request_id = request_id
    async with cluster.client() as client:
        answer = await client.complete(asked, timeout=60)
    assert answer.token_ids == [expected]
    return (await trace(cluster, request_id)).pool, answer.finished.usage.cached_tokens


async def trace(cluster: Cluster, request_id: str) -> router_pb2.TraceRequestResponse:
    async with RouterClient(cluster.state.router_endpoints[0]) as router:
        return await router.trace(request_id)


async def incarnations(cluster: Cluster, pool: str) -> dict[str, int]:
    found = [record for record in await cluster.workers() if record.pool == pool]
    return {record.worker.name: record.worker.incarnation for record in found}


async def status(cluster: Cluster, pool: str) -> pb.PoolStatus:
    async with channel(cluster.state.control_endpoint, RpcConfig()) as connection:
        stub = control_pb2_grpc.ControlServiceStub(connection)
        (found,) = (await stub.ListPools(pb.ListPoolsRequest(pool=pool), timeout=10)).pools
        return found


async def is_ready(cluster: Cluster, pool: str, workers: int) -> bool:
    """Whether the pool has so many workers, all of them ready, and the router sees them."""
    replicas = (await status(cluster, pool)).replicas
    if [replica.phase for replica in replicas] != [pb.REPLICA_PHASE_READY] * workers:
        return False
    own = await incarnations(cluster, pool)
    async with RouterClient(cluster.state.router_endpoints[0]) as router:
        seen = {each.worker.name: each.worker.incarnation for each in (await router.inspect()).workers}
    return len(own) == workers and all(seen.get(name) == number for name, number in own.items())


async def scale(cluster: Cluster, pool: str, decode: int) -> None:
    async with channel(cluster.state.control_endpoint, RpcConfig()) as connection:
        stub = control_pb2_grpc.ControlServiceStub(connection)
        begun = await stub.ScalePool(pb.ScalePoolRequest(pool=pool, decode=decode), timeout=10)

        async def ended() -> bool:
            asked = pb.GetOperationRequest(id=begun.operation.id)
            now = (await stub.GetOperation(asked, timeout=10)).operation
            assert now.state != pb.OPERATION_STATE_FAILED, now.error
            return now.state == pb.OPERATION_STATE_SUCCEEDED

        await until_told(ended, WAIT_SECONDS)


async def test_each_request_goes_to_the_pool_of_its_model_and_length(
    pools: Cluster, checkpoints: dict[str, Path]
) -> None:
    async with pools.client() as client:
        models = await client.models()
    assert [(model.name, model.prefill_workers, model.decode_workers) for model in models] == [
        ("deepseek_v3", 2, 2),
        ("llama", 1, 1),
    ], "each model once, with the workers of all its pools"
    model, other = checkpoints["deepseek_v3"], checkpoints["llama"]
    for length, pool in ((1, "default"), (LONG - 1, "default"), (LONG, "long"), (150, "long")):
        assert (await check(pools, model, prompt(length, length), f"own-{length}"))[0] == pool
        assert (await check(pools, other, prompt(length, length), f"other-{length}"))[0] == "llama"
    told = await trace(pools, f"own-{LONG}")
    assert told.pool_reason.startswith(f"takes prompts of {LONG} to ")
    chosen = told.attempts[0].chosen
    assert {chosen.prefill.name, chosen.decode.name} == {"long-prefill-0", "long-decode-0"}
    assert (await trace(pools, "other-1")).pool_reason == "", "its model has one pool"
    async with pools.client() as client:
        with pytest.raises(TwinpoolError) as caught:
            await client.complete(request(prompt(1, 8), model="nobody", max_tokens=1), timeout=30)
    assert caught.value.reason == "MODEL_NOT_FOUND"
    await pools.assert_quiescent()


async def test_what_one_pool_has_cached_is_not_looked_for_in_another(
    pools: Cluster, checkpoints: dict[str, Path]
) -> None:
    model, short = checkpoints["deepseek_v3"], prompt(1000, 3 * BLOCK + 1)
    assert await check(pools, model, short, "cached-first") == ("default", 0)
    assert await check(pools, model, short, "cached-again") == ("default", 3 * BLOCK)
    grown = [*short, *prompt(1001, LONG)]
    assert await check(pools, model, grown, "grown-first") == ("long", 0)
    assert (await check(pools, model, grown, "grown-again"))[1] == len(grown) // BLOCK * BLOCK
    await pools.assert_quiescent()


async def test_a_pool_that_is_scaled_leaves_the_others_alone(
    pools: Cluster, checkpoints: dict[str, Path]
) -> None:
    before = {pool: await incarnations(pools, pool) for pool in ("default", "long", "llama")}
    await scale(pools, "llama", 2)
    await until_told(lambda: is_ready(pools, "llama", 3), WAIT_SECONDS)
    assert set(await incarnations(pools, "llama")) == {"llama-prefill-0", "llama-decode-0", "llama-decode-1"}
    await check(pools, checkpoints["llama"], prompt(7, 40), "scaled")
    await scale(pools, "llama", 1)
    after = {pool: await incarnations(pools, pool) for pool in ("default", "long")}
    assert after == {pool: before[pool] for pool in after}
    assert (await status(pools, "long")).spec.generation == 1
    await pools.assert_quiescent()


async def test_a_pool_whose_workers_are_all_killed_leaves_the_others_served(
    pools: Cluster, checkpoints: dict[str, Path]
) -> None:
    before = {pool: await incarnations(pools, pool) for pool in ("default", "long", "llama")}
    victims = [record.pid for record in await pools.workers() if record.pool == "llama"]
    assert len(victims) == 2
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    gone, alive = psutil.wait_procs([psutil.Process(pid) for pid in victims if psutil.pid_exists(pid)], 10)
    assert not alive, gone
    model = checkpoints["deepseek_v3"]
    assert (await check(pools, model, prompt(8, 30), "beside-short"))[0] == "default"
    assert (await check(pools, model, prompt(9, 90), "beside-long"))[0] == "long"

    async def healed() -> bool:
        now = await incarnations(pools, "llama")
        fresh = all(now.get(name) not in (None, number) for name, number in before["llama"].items())
        return fresh and await is_ready(pools, "llama", 2)

    await until_told(healed, WAIT_SECONDS)
    assert (await check(pools, checkpoints["llama"], prompt(10, 30), "healed"))[0] == "llama"
    after = {pool: await incarnations(pools, pool) for pool in ("default", "long")}
    assert after == {pool: before[pool] for pool in after}
    await pools.assert_quiescent()


async def test_text_is_read_and_bounded_by_the_model_that_is_asked(
    pools: Cluster, checkpoints: dict[str, Path]
) -> None:
    async with pools.client() as client:
        limits = {model.name: model.max_context_tokens for model in await client.models()}
        for name, most in limits.items():
            asked = request("Pools of several models", model=name, max_tokens=4, temperature=0.0)
            asked.stop.ignore_eos = True
            tokens = await client.tokenize(TokenizeRequest(model=name, text=asked.text))
            answer = await client.complete(asked, timeout=60)
            assert answer.token_ids == [oracle(checkpoints[name]).greedy(tokens, 4, ignore_eos=True)]
            with pytest.raises(TwinpoolError, match=f"the limit is {most - 1}$") as caught:
                await client.complete(request([10] * most, model=name, max_tokens=1), timeout=30)
            assert caught.value.reason == "PROMPT_TOO_LONG"
    await pools.assert_quiescent()
