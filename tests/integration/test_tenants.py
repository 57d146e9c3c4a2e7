# SPDX-License-Identifier: Apache-2.0
"""Tenants of a real cluster: one that floods it does not keep another one waiting, and finds none of its prompts."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.integration.test_oracle import random_prompt
from tests.support.cluster import Cluster, running_cluster
from tests.support.oracle import oracle
from tests.support.waiting import until
from twinpool.client import Client, request
from twinpool.rpc import digest_of
from twinpool.v1 import inference_pb2 as pb

pytestmark = pytest.mark.integration

BLOCK = 16
SLOTS = 4
FLOOD = 60
LOUD, QUIET = "tp-loud", "tp-quiet"


@pytest.fixture(scope="module")
def shared(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A small cluster of two tenants."""
    home = tmp_path_factory.mktemp("tenants")
    path = home / "tenants.yaml"
    tenants = [{"name": "loud", "keys": [digest_of(LOUD)]}, {"name": "quiet", "keys": [digest_of(QUIET)]}]
    path.write_text(yaml.safe_dump({"tenants": tenants}))
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


async def test_no_tenant_finds_what_another_one_has_cached(shared: Cluster) -> None:
    async with client(shared, LOUD) as loud, client(shared, QUIET) as quiet:
        prompt = random_prompt(77, 6 * BLOCK + 3, (await loud.models())[0].vocab_size)

        async def cached(one: Client) -> pb.Usage:
            message = request(prompt, max_tokens=3, temperature=0.0, ignore_eos=True)
            return (await one.complete(message, timeout=300)).finished.usage

        first, again = await cached(loud), await cached(loud)
        assert (first.cached_tokens, first.decode_cached_tokens) == (0, 0)
        assert again.cached_tokens + again.decode_cached_tokens > 0
        other = await cached(quiet)
        assert (other.cached_tokens, other.decode_cached_tokens) == (0, 0), (
            "what the workers found is its own alone"
        )
    await shared.assert_quiescent()
