# SPDX-License-Identifier: Apache-2.0
"""Two routers over one set of workers: what one has placed, the other knows, both of caches and of load."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, running_cluster
from twinpool.client import Client, request
from twinpool.router_client import RouterClient
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import router_pb2, worker_pb2

pytestmark = pytest.mark.integration

BLOCK = 16


@pytest.fixture(scope="module")
def twin_cluster(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two routers, two prefill workers, one decode worker."""
    settings = {
        "pools.routers": 2,
        "pools.prefill_workers": 2,
        "pools.decode_workers": 1,
        "kv.num_blocks": 1024,
        "worker.threads": 1,
    }
    with running_cluster(tmp_path_factory.mktemp("twin"), checkpoints["deepseek_v3"], settings) as running:
        yield running


@pytest.fixture
async def routers(twin_cluster: Cluster) -> AsyncIterator[list[tuple[Client, RouterClient]]]:
    """A client and an inspector of each router."""
    async with AsyncExitStack() as stack:
        yield [
            (
                await stack.enter_async_context(Client(endpoint)),
                await stack.enter_async_context(RouterClient(endpoint)),
            )
            for endpoint in twin_cluster.state.router_endpoints
        ]


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, 250) for _ in range(length)]


async def holders(router: RouterClient, tokens: list[int]) -> dict[str, int]:
    lookup = router_pb2.LookupPrefixRequest(token_ids=pb.TokenIds(ids=tokens))
    return {each.worker.name: each.blocks for each in (await router.lookup(lookup)).holders}


async def worker_of(router: RouterClient, role: "worker_pb2.Role.ValueType") -> router_pb2.RouterWorker:
    (found,) = [each for each in (await router.inspect()).workers if each.role == role]
    return found


async def test_what_one_has_placed_the_other_finds(routers: list[tuple[Client, RouterClient]]) -> None:
    (one, first), (other, second) = routers
    prompts = [prompt(seed, 40 + 13 * seed) for seed in range(8)]
    for tokens in prompts:
        await one.complete(request(tokens, max_tokens=2, temperature=0.0), timeout=60)
    for tokens in prompts:

        async def same(tokens: list[int] = tokens) -> bool:
            found = await holders(first, tokens)
            return max(found.values(), default=0) == len(tokens) // BLOCK and found == await holders(
                second, tokens
            )

        await until(same)
    # The second one has placed nothing yet, and places by what it has heard.
    assert {each.served for each in (await second.inspect()).workers} == {0}
    for tokens in prompts:
        answer = await other.complete(request(tokens, max_tokens=2, temperature=0.0), timeout=60)
        assert answer.finished.usage.cached_tokens == (len(tokens) - 1) // BLOCK * BLOCK
    view = await second.inspect()
    assert (view.prediction_error, view.predictions) == (0.0, len(prompts))


async def test_each_sees_the_load_of_the_other_as_reported_and_its_own_as_reserved(
    twin_cluster: Cluster, routers: list[tuple[Client, RouterClient]]
) -> None:
    (one, first), (_, second) = routers
    messages = [
        request(prompt(100 + seed, 30), max_tokens=900, temperature=0.0, ignore_eos=True) for seed in range(3)
    ]
    streams = [asyncio.create_task(one.complete(message, timeout=120)) for message in messages]
    try:

        async def seen() -> bool:
            mine, theirs = [await worker_of(router, worker_pb2.ROLE_DECODE) for router in (first, second)]
            # Both hear the worker's own count; only the one that placed them has reservations.
            return (
                mine.reported.running == theirs.reported.running == 3
                and mine.reserved.sequences == 3
                and theirs.reserved.sequences == theirs.reserved.reservations == 0
            )

        await until(seen)
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)

    async def idle() -> bool:
        both = [await worker_of(router, worker_pb2.ROLE_DECODE) for router in (first, second)]
        return all(each.reported.running == each.reserved.sequences == 0 for each in both)

    await until(idle)
    await twin_cluster.assert_quiescent()
