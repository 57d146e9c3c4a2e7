# SPDX-License-Identifier: Apache-2.0
"""The RayCluster of the chart as processes: nodes as KubeRay starts them, the controller as rendered, each in namespaces of its own."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import kuberay, netns_pods
from tests.support.chart import Helm, merged
from tests.support.netns_kubelet import START_SECONDS, begin, ready
from tests.support.netns_pods import NAMESPACE, NetPod, NetWorld
from tests.support.policies import End, Policies
from tests.support.waiting import until_told
from twinpool.client import Client, request

pytestmark = [pytest.mark.chart, pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

PART = "app.kubernetes.io/component"
VALUES = {
    "ray": {"mode": "raycluster"},
    "decode": {"replicas": 2},
    # A hand-off each, and nothing measured before.
    "config": {"router": {"local_prefill": False}, "worker": {"calibration_seconds": 0}},
}


SECOND = {"models": {"other": {"tiny": {"family": "llama"}, "decode": {"replicas": 1}}}}
"""Another model, with a pool of its own."""


@pytest.fixture
def world(helm: Helm, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[NetWorld]:
    for binary in ("etcd", "etcdctl", "ss"):
        if shutil.which(binary) is None:
            pytest.skip(f"no {binary}")
    if why := netns_pods.usable():
        pytest.skip(why)
    docs = helm.docs(merged(VALUES, getattr(request, "param", {})), "values-dev.yaml")
    (cluster,) = (doc for doc in docs if doc["kind"] == "RayCluster")
    with NetWorld([*docs, *kuberay.pods(cluster, NAMESPACE)], tmp_path) as running:
        yield running


async def up(world: NetWorld) -> None:
    etcd = world.of("etcd")
    await begin(world, etcd)
    await ready(world, etcd, "auth")
    await begin(world, world.of("ray"))
    parts = [pod for part in ("prefill", "decode", "control", "router") for pod in world.all_of(part)]
    await asyncio.gather(*(begin(world, pod) for pod in parts))
    for pod in (world.of("ray"), *parts):
        await ready(world, pod)


async def answers(endpoint: str, name: str = "tiny") -> None:
    async with Client(endpoint) as client:

        async def serves() -> bool:
            return any(model.ready and model.name == name for model in await client.models())

        await until_told(serves, START_SECONDS)
        asked = request(
            prompt="a prompt that is long enough for blocks", model=name, max_tokens=4, ignore_eos=True
        )
        answer = await client.complete(asked)
        assert answer.finished.usage.completion_tokens == 4


def workers(world: NetWorld) -> dict[str, dict[str, Any]]:
    """What `twinpool get workers` in the controller's pod lists, by name."""
    text = world.execute(world.of("control"), "twinpool", "get", "workers", "-o", "json")
    return {each["name"]: each for each in json.loads(text)}


def where(world: NetWorld, worker: dict[str, Any]) -> NetPod:
    """The pod in which a worker runs."""
    (pod,) = (pod for pod in world.pods.values() if pod.ip == worker["endpoint"].rpartition(":")[0])
    return pod


async def listed(world: NetWorld, *names: str) -> dict[str, dict[str, Any]]:
    """The workers, once they are these and all are ready."""
    found: dict[str, dict[str, Any]] = {}

    async def are() -> bool:
        found.clear()
        found.update(await asyncio.to_thread(workers, world))
        return found.keys() == set(names) and all(each["state"] == "ready" for each in found.values())

    await until_told(are, START_SECONDS)
    return found


async def command(world: NetWorld, *words: str) -> None:
    """An operator's command in the controller's pod, to its end."""
    await asyncio.to_thread(world.execute, world.of("control"), "twinpool", *words, "--wait", "--yes")


def unknown_connections(world: NetWorld) -> set[tuple[str, str, int]]:
    """Those that are open and that the policies do not allow; Ray's own have to be among those that are open."""
    policies = Policies(world.docs)
    seen = [
        (End(source.name, NAMESPACE, source.labels), End(target.name, NAMESPACE, target.labels), port)
        for source, target, port in world.connections()
    ]
    kinds = {(source.labels[PART], target.labels[PART], port) for source, target, port in seen}
    assert {(each, "ray", 6379) for each in ("prefill", "decode", "control")} <= kinds, kinds
    assert ("ray", "prefill", 6380) in kinds, kinds
    assert {pair[:2] for pair in kinds} >= {
        ("router", "decode"),
        ("router", "prefill"),
        ("decode", "prefill"),
    }
    return {
        (source.name, target.name, port)
        for source, target, port in seen
        if not policies.allow(source, target, port)
    }


async def test_the_controller_runs_the_pool_in_the_ray_cluster(world: NetWorld) -> None:
    """It comes up by role, answers, and takes what operators of Kubernetes could not ask of StatefulSets."""
    await up(world)
    endpoint = f"{world.of('router').ip}:50051"
    both = {"tiny-decode-0", "tiny-decode-1"}
    found = await listed(world, "tiny-prefill-0", *both)
    assert {name: where(world, each).component for name, each in found.items()} == {
        name: name.split("-")[1] for name in found
    }
    assert where(world, found["tiny-decode-0"]) is not where(world, found["tiny-decode-1"])
    await answers(endpoint)
    assert unknown_connections(world) == set()
    world.start(world.of("test"))
    assert await asyncio.to_thread(world.of("test").processes["test"].wait, START_SECONDS) == 0

    await command(world, "scale", "tiny", "--decode", "1")
    (left,) = both & (await listed(world, "tiny-prefill-0", *both & workers(world).keys())).keys()
    await answers(endpoint)
    await command(world, "scale", "tiny", "--decode", "2")
    await listed(world, "tiny-prefill-0", *both)
    await command(world, "flip", "tiny-decode-1", "--to", "prefill")
    found = await listed(world, "tiny-prefill-0", *both)
    assert found["tiny-decode-1"]["role"] == "prefill"
    assert where(world, found["tiny-decode-1"]).component == "decode"
    await answers(endpoint)
    assert unknown_connections(world) == set()
    assert left in found


async def test_a_pod_that_is_deleted_drains_and_the_next_one_takes_its_worker(world: NetWorld) -> None:
    await up(world)
    endpoint = f"{world.of('router').ip}:50051"
    names = ("tiny-prefill-0", "tiny-decode-0", "tiny-decode-1")
    found = await listed(world, *names)
    pod = where(world, found["tiny-decode-0"])
    hook = pod.container()["lifecycle"]["preStop"]["exec"]["command"]
    await asyncio.to_thread(world.execute, pod, *hook)
    # It has left by itself when the hook returns: its lease is given back.
    now = await asyncio.to_thread(workers, world)
    before = found["tiny-decode-0"]["incarnation"]
    assert now.get("tiny-decode-0", {}).get("incarnation") != before
    assert "asked_to_leave_by_node" in world.log(pod)
    await answers(endpoint)
    await asyncio.to_thread(world.stop, pod)
    world.kill(pod)
    # KubeRay makes another pod of the group in its place.
    await begin(world, pod)
    found = await listed(world, *names)
    assert found["tiny-decode-0"]["incarnation"] != before
    await answers(endpoint)


@pytest.mark.parametrize("world", [SECOND], indirect=True)
async def test_the_controller_runs_the_pools_of_two_models(world: NetWorld) -> None:
    """Each worker in a pod of its own pool, and a scale of one pool changes nothing of the other."""
    await up(world)
    endpoint = f"{world.of('router').ip}:50051"
    other = ("other-prefill-0", "other-decode-0")
    found = await listed(world, "tiny-prefill-0", "tiny-decode-0", "tiny-decode-1", *other)
    for name, each in found.items():
        labels = where(world, each).labels
        assert name.startswith(f"{labels['twinpool.dev/pool']}-{labels[PART]}-")
        assert each["model"] == labels["twinpool.dev/model"]
    for model in ("tiny", "other"):
        await answers(endpoint, model)
    assert unknown_connections(world) == set()
    await command(world, "scale", "tiny", "--decode", "1")
    left = await asyncio.to_thread(workers, world)
    assert len(left) == 4
    assert {name: left[name]["incarnation"] for name in other} == {
        name: found[name]["incarnation"] for name in other
    }
    for model in ("tiny", "other"):
        await answers(endpoint, model)


@pytest.mark.parametrize("token", ["", "not-the-token-of-this-cluster-0123456789"])
async def test_nobody_without_the_token_reaches_ray(world: NetWorld, token: str) -> None:
    head = world.of("ray")
    await begin(world, head)
    await ready(world, head)
    env = f"RAY_AUTH_TOKEN={token}" if token else "RAY_AUTH_MODE=disabled"
    check = ["env", "-u", "RAY_AUTH_TOKEN_PATH", env, "ray", "health-check", "--address", f"{head.ip}:6379"]
    with pytest.raises(AssertionError, match=r"(?i)auth|token"):
        await asyncio.to_thread(world.execute, world.of("router"), *check)
    world.execute(head, "ray", "health-check", "--address", f"{head.ip}:6379")
