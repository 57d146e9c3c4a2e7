# SPDX-License-Identifier: Apache-2.0
"""A release of two models and three pools as processes: both answer, each pool what it takes, and an upgrade of one pool holds up no
other."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.chart.test_processes import START_SECONDS, page, secrets_of, started, unknown_connections, up
from tests.support.chart import Helm
from tests.support.pods import Pod, World
from tests.support.waiting import until_told
from twinpool.client import Client, request

pytestmark = [pytest.mark.chart, pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

LONG = 128
VALUES = {
    # A hand-off each, and nothing measured before.
    "config": {"router": {"local_prefill": False}, "worker": {"calibration_seconds": 0}},
    # Of the three pools of a model two say all of it.
    "models": {"chat": {"pools": {"urgent": None}}},
}


@pytest.fixture
def world(helm: Helm, tmp_path: Path) -> Iterator[World]:
    for binary in ("etcd", "etcdctl"):
        if shutil.which(binary) is None:
            pytest.skip(f"no {binary}")
    docs = helm.docs(VALUES, "values-dev.yaml", "values-two-models.yaml")
    with World(docs, tmp_path, secrets_of(docs)) as running:
        yield running


def counts(world: World) -> dict[str, int]:
    """Requests that the router has accepted, by pool."""
    text = page(f"http://{world.of('router').ip}:9090/metrics").decode()
    found = re.findall(r"^twinpool_router_pool_requests_total\{([^}]*)\} ([\d.e+]+)$", text, re.MULTILINE)
    return {
        match[1]: int(float(count))
        for labels, count in found
        if (match := re.search(r'pool="([^"]+)"', labels))
    }


async def ask(client: Client, model: str, tokens: int) -> None:
    asked = request(prompt=[7] * tokens, model=model, max_tokens=4, ignore_eos=True)
    answer = await client.complete(asked)
    assert answer.finished.usage.completion_tokens == 4
    assert answer.finished.usage.prompt_tokens == tokens


async def upgrade(world: World, pod: Pod) -> None:
    """Ends a worker, and starts it with other blocks: its KV has another form."""
    assert world.stop(pod) == 0, world.log(pod)
    file = pod.mounts["/etc/twinpool/config"] / "config.yaml"
    told = yaml.safe_load(file.read_text())
    told["kv"]["block_tokens"] *= 2
    file.write_text(yaml.safe_dump(told))
    world.start(pod)
    await started(world, pod)


async def test_both_models_answer_each_pool_what_it_takes(world: World) -> None:
    await up(world)
    world.run(world.of("test"))
    async with Client(f"{world.of('router').ip}:50051") as client:
        assert [model.name for model in await client.models()] == ["chat", "code-model"]
        assert b'"code-model"' in page(f"http://{world.of('router').ip}:8000/v1/models")
        await ask(client, "chat", 20)
        await ask(client, "chat", LONG)
        await ask(client, "chat", LONG + 20)
        await ask(client, "code-model", LONG)
        assert counts(world) == {"chat": 1, "chat-long": 2, "code": 1}
        listed = await world.execute(world.of("control"), "twinpool", "get", "pools", "-o", "name")
        assert listed.split() == ["chat", "chat-long", "code"]
        assert unknown_connections(world) == set()
        # As docs/operations.md has it; of several models one has to be named.
        router = world.of("router")
        typed = ("generate", "--endpoint", f"{router.ip}:50051", "--model", "code-model", "--max-tokens", "4")
        await world.execute(router, "twinpool", *typed, "Hello")
        assert counts(world) == {"chat": 1, "chat-long": 2, "code": 2}

        # A worker of one pool with another fingerprint pairs with nobody; the other pools do not notice.
        (prefill,) = (pod for pod in world.all_of("prefill") if pod.labels["twinpool.dev/pool"] == "code")
        (decode,) = (pod for pod in world.all_of("decode") if pod.labels["twinpool.dev/pool"] == "code")

        async def ready(wanted: bool) -> None:
            async def are() -> bool:
                models = {model.name: model.ready for model in await client.models()}
                assert models["chat"]
                return models["code-model"] == wanted

            await until_told(are, START_SECONDS)

        await upgrade(world, decode)
        await ready(False)
        await ask(client, "chat", 21)
        await ask(client, "chat", LONG + 21)
        await upgrade(world, prefill)
        await ready(True)
        await ask(client, "code-model", 22)
    assert counts(world) == {"chat": 2, "chat-long": 3, "code": 3}
