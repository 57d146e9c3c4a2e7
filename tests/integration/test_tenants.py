# SPDX-License-Identifier: Apache-2.0
"""Tenants of a real cluster: one that floods it does not keep another one waiting, and finds none of its prompts; keys are changed
while it works."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.integration.test_oracle import random_prompt
from tests.support.cluster import Cluster, running_cluster
from tests.support.oracle import oracle
from tests.support.waiting import until, until_told
from twinpool.client import Client, request
from twinpool.errors import TwinpoolError
from twinpool.router_client import RouterClient
from twinpool.rpc import digest_of
from twinpool.v1 import inference_pb2 as pb
from twinpool.v1 import router_pb2

pytestmark = pytest.mark.integration

BLOCK = 16
SLOTS = 4
FLOOD = 60
LOUD, QUIET, FRESH, OPERATOR = "tp-loud", "tp-quiet", "tp-fresh", "tp-operator"


def write_tenants(path: Path, *quiet: str) -> None:
    """Replaces the file at once. ``quiet``: keys of that tenant."""
    part = path.with_suffix(".part")
    tenants = [
        {"name": "loud", "keys": [digest_of(LOUD)]},
        {"name": "quiet", "keys": [digest_of(key) for key in quiet]},
    ]
    part.write_text(yaml.safe_dump({"tenants": tenants, "operators": {"keys": [digest_of(OPERATOR)]}}))
    part.rename(path)


@pytest.fixture(scope="module")
def shared(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A small cluster of two tenants."""
    home = tmp_path_factory.mktemp("tenants")
    path = home / "tenants.yaml"
    write_tenants(path, QUIET)
    settings = {"router.tenants_file": str(path), "scheduler.max_num_seqs": SLOTS}
    with running_cluster(home / "cluster", checkpoints["llama"], settings) as running:
        yield running


def client(cluster: Cluster, key: str) -> Client:
    return Client(cluster.state.router_endpoints[0], key=key)


async def test_a_flood_of_one_tenant_does_not_keep_another_waiting(shared: Cluster) -> None:
    """Counted in answers, not in seconds: how many of the flood end while a request of the other tenant is served."""
    async with client(shared, LOUD) as loud, client(shared, QUIET) as quiet:
        vocab = (await loud.models())[0].vocab_size
        ended = 0
        prompts = [random_prompt(1000 + number, BLOCK, vocab) for number in range(3)]
        expected = [oracle(shared.model).greedy(prompt, 4, ignore_eos=True) for prompt in prompts]

        async def one(number: int) -> None:
            nonlocal ended
            message = request(
                random_prompt(number, 2 * BLOCK, vocab), max_tokens=40, temperature=0.0, ignore_eos=True
            )
            await loud.complete(message, timeout=300)
            ended += 1

        flood = [asyncio.create_task(one(number)) for number in range(FLOOD)]
        await until(lambda: ended >= SLOTS)
        overtaken = []
        for prompt, tokens in zip(prompts, expected, strict=True):
            before = ended
            message = request(prompt, max_tokens=4, temperature=0.0, ignore_eos=True)
            answer = await quiet.complete(message, timeout=300)
            assert answer.token_ids == [tokens]
            overtaken.append(ended - before)
        assert ended < FLOOD, "the flood was over before it was tried"
        # What runs already ends first, and a fair share of what comes next.
        assert max(overtaken) <= 4 * SLOTS, overtaken
        await asyncio.gather(*flood)
        usage = await quiet.usage()
        assert (usage.tenant, usage.requests, usage.completion_tokens) == ("quiet", 3, 12)
    await shared.assert_quiescent()


async def test_two_floods_of_equal_weight_get_equal_shares(shared: Cluster) -> None:
    """Counted in answers of equal size: where the smaller flood has ended, the larger one has got as much."""
    async with client(shared, LOUD) as loud, client(shared, QUIET) as quiet:
        vocab = (await loud.models())[0].vocab_size
        done = {LOUD: 0, QUIET: 0}
        loud_at_the_end = 0

        async def one(key: str, number: int) -> None:
            nonlocal loud_at_the_end
            tokens = random_prompt(5000 + number, 2 * BLOCK, vocab)
            message = request(tokens, max_tokens=12, temperature=0.0, ignore_eos=True)
            await (loud if key == LOUD else quiet).complete(message, timeout=300)
            done[key] += 1
            if done[QUIET] == FLOOD // 2 and not loud_at_the_end:
                loud_at_the_end = done[LOUD]

        numbers = [(LOUD, number) for number in range(FLOOD)]
        numbers += [(QUIET, FLOOD + number) for number in range(FLOOD // 2)]
        await asyncio.gather(*(one(*each) for each in numbers))
        assert done == {LOUD: FLOOD, QUIET: FLOOD // 2}
        # The larger one came first: it has what ran before the other was there, and a turn more or less.
        assert abs(loud_at_the_end - FLOOD // 2) <= 3 * SLOTS, loud_at_the_end
    await shared.assert_quiescent()


async def test_a_key_is_changed_under_load_without_an_error(shared: Cluster) -> None:
    path, key, over, answered = shared.home.parent / "tenants.yaml", QUIET, False, 0
    endpoint = shared.state.router_endpoints[0]

    async def accepted(shown: str) -> bool:
        async with client(shared, shown) as asking:
            try:
                return bool(await asking.models())
            except TwinpoolError as error:
                if error.reason != "UNAUTHENTICATED":
                    raise
                return False

    async def ask(stream: int) -> None:
        """Whatever fails here fails the test."""
        nonlocal answered
        while not over:
            async with Client(endpoint, key=key) as asking:
                tokens = random_prompt(9000 + 100 * stream + answered, 2 * BLOCK, 200)
                await asking.complete(request(tokens, max_tokens=4, ignore_eos=True), timeout=300)
            answered += 1

    async def more(count: int) -> None:
        wanted = answered + count
        await until(lambda: answered >= wanted or any(task.done() for task in load), 300)

    load = [asyncio.create_task(ask(stream)) for stream in range(3)]
    try:
        await more(5)
        write_tenants(path, QUIET, FRESH)
        await until_told(lambda: accepted(FRESH))
        await more(5)
        key = FRESH
        # Those that were asked under the old key.
        await more(len(load) + 5)
        write_tenants(path, FRESH)

        async def refused() -> bool:
            return not await accepted(QUIET)

        await until_told(refused)
        await more(5)
    finally:
        over = True
        try:
            await asyncio.gather(*load)
        finally:
            write_tenants(path, QUIET)
            await until_told(lambda: accepted(QUIET))
    await shared.assert_quiescent()


async def test_no_tenant_finds_what_another_one_has_cached(shared: Cluster) -> None:
    async with client(shared, LOUD) as loud, client(shared, QUIET) as quiet:
        prompt = random_prompt(77, 6 * BLOCK + 3, (await loud.models())[0].vocab_size)

        async def cached(one: Client) -> pb.Usage:
            message = request(prompt, max_tokens=3, temperature=0.0, ignore_eos=True)
            return (await one.complete(message, timeout=300)).finished.usage

        first, again = await cached(loud), await cached(loud)
        assert (first.cached_tokens, first.decode_cached_tokens) == (0, 0)
        assert again.cached_tokens + again.decode_cached_tokens > 0
        router = RouterClient(shared.state.router_endpoints[0], key=OPERATOR)
        async with router:

            async def holders(tenant: str) -> set[str]:
                asked = router_pb2.LookupPrefixRequest(tenant=tenant)
                asked.token_ids.ids.extend(prompt)
                return {holder.worker.name for holder in (await router.lookup(asked)).holders}

            await until_told(lambda: holders("loud"))
            assert await holders("quiet") == set(), "nor does the router's index"
        other = await cached(quiet)
        assert (other.cached_tokens, other.decode_cached_tokens) == (0, 0), (
            "what the workers found is its own alone"
        )
    await shared.assert_quiescent()
