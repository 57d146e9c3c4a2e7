# SPDX-License-Identifier: Apache-2.0
"""The RayCluster of the chart: nodes as KubeRay starts them, the controller as rendered, each on a host of its own behind its policies."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.pods.ray_pods import add, answers, install, listed, where, with_head, workers
from tests.pods.release import Release
from tests.support.chart import Helm

pytestmark = [
    pytest.mark.chart,
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.asyncio(loop_scope="module"),
]

PART = "app.kubernetes.io/component"
VALUES = {
    "ray": {"mode": "raycluster"},
    # Another model, with a pool of its own.
    "models": {"other": {"tiny": {"family": "llama"}, "decode": {"replicas": 1}}},
    "prefill": {"startTimeoutSeconds": 600},
    "decode": {"replicas": 2, "startTimeoutSeconds": 600},
    # A hand-off each, and nothing measured before.
    "config": {"router": {"local_prefill": False}, "worker": {"calibration_seconds": 0}},
}
TINY = ("tiny-prefill-0", "tiny-decode-0", "tiny-decode-1")
OTHER = ("other-prefill-0", "other-decode-0")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def release(helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Release]:
    docs = with_head(helm.docs(VALUES, "values-dev.yaml"))
    async with Release(docs, tmp_path_factory.mktemp("release")) as made:
        await install(made)
        yield made


async def command(release: Release, *words: str) -> None:
    """An operator's command in the controller's pod, to its end."""
    (control,) = release.of("control")
    await control.execute("twinpool", *words, "--wait", "--yes")


def check(release: Release) -> None:
    """Nothing that is needed was refused, and Ray's own connections are among those that are open."""
    release.check()
    kinds = release.connections()
    assert {(each, "ray", 6379) for each in ("prefill", "decode", "control")} <= kinds, kinds
    assert ("ray", "prefill", 6380) in kinds, kinds
    pairs = {kind[:2] for kind in kinds}
    assert pairs >= {("router", "decode"), ("router", "prefill"), ("decode", "prefill")}, pairs


async def test_the_controller_runs_the_pools_of_two_models(release: Release) -> None:
    """Each worker in a pod of its own pool and role; both models answer."""
    found = await listed(release, *TINY, *OTHER)
    for name, each in found.items():
        labels = where(release, each).labels
        assert name.startswith(f"{labels['twinpool.dev/pool']}-{labels[PART]}-")
        assert each["model"] == labels["twinpool.dev/model"]
    assert len({where(release, each).name for each in found.values()}) == len(found)
    for model in ("tiny", "other"):
        await answers(release, model)
    check(release)
    await release.complete("rel-twinpool-test")


async def test_operators_change_a_pool_and_no_other(release: Release) -> None:
    """What they could not ask of StatefulSets: numbers, and roles."""
    before = await listed(release, *TINY, *OTHER)
    await command(release, "scale", "tiny", "--decode", "1")
    now = await workers(release)
    assert len(now) == len(before) - 1
    await answers(release)
    await command(release, "scale", "tiny", "--decode", "2")
    await listed(release, *TINY, *OTHER)
    await command(release, "flip", "tiny-decode-1", "--to", "prefill")
    found = await listed(release, *TINY, *OTHER)
    assert found["tiny-decode-1"]["role"] == "prefill"
    assert where(release, found["tiny-decode-1"]).component == "decode"
    for model in ("tiny", "other"):
        await answers(release, model)
    assert {name: found[name]["incarnation"] for name in OTHER} == {
        name: before[name]["incarnation"] for name in OTHER
    }
    await command(release, "flip", "tiny-decode-1", "--to", "decode")
    check(release)


async def test_a_pod_that_is_deleted_drains_and_the_next_one_takes_its_worker(release: Release) -> None:
    found = await listed(release, *TINY, *OTHER)
    pod = where(release, found["tiny-decode-0"])
    await pod.hook(pod.spec["containers"][0])
    # It has left by itself when the hook returns: its lease is given back.
    now = await workers(release)
    before = found["tiny-decode-0"]["incarnation"]
    assert now.get("tiny-decode-0", {}).get("incarnation") != before
    assert "asked_to_leave_by_node" in pod.sandboxes[pod.spec["containers"][0]["name"]].log.read_text()
    await answers(release)
    await release.remove(pod, at_once=True)
    # KubeRay makes another pod of the group in its place.
    await add(release, {"metadata": {"name": pod.name, **pod.template["metadata"]}, **pod.template})
    await release.ready(release.of("decode"))
    found = await listed(release, *TINY, *OTHER)
    assert found["tiny-decode-0"]["incarnation"] != before
    await answers(release)


@pytest.mark.parametrize("token", ["", "not-the-token-of-this-cluster-0123456789"])
async def test_nobody_without_the_token_reaches_ray(release: Release, token: str) -> None:
    (head,) = release.of("ray")
    env = f"RAY_AUTH_TOKEN={token}" if token else "RAY_AUTH_MODE=disabled"
    check = ("ray", "health-check", "--address", f"{head.ip}:6379")
    # From where Ray's ports are open.
    (control,) = release.of("control")
    with pytest.raises(AssertionError, match=r"(?i)auth|token"):
        await control.execute("env", "-u", "RAY_AUTH_TOKEN_PATH", env, *check)
    await control.execute(*check)
