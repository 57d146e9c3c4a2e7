# SPDX-License-Identifier: Apache-2.0
"""The chart's pods as the chart has them, each on a host of its own, with its policies: served, guarded, upgraded under load."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.chart.test_network import PORTS
from tests.pods.clients import Load, doors, run
from tests.pods.controllers import Controllers
from tests.pods.release import Release
from tests.support.chart import ROOT, Doc, Helm, merged
from tests.support.oracle import oracle
from tests.support.policies import End, Policies
from tests.support.quiescence import assert_quiescent

pytestmark = [
    pytest.mark.integration,
    pytest.mark.chart,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.asyncio(loop_scope="module"),
]

EXAMPLE = ROOT / "examples" / "agent"
TEMPLATE = "chatml_tools.jinja"
TOKENS = 60
VALUES: dict[str, Any] = {
    # A hand-off each, and nothing measured before.
    "config": {"router": {"local_prefill": False}, "worker": {"calibration_seconds": 0}},
    "models": {"tiny": {"config": {"kv": {"num_blocks": 256}}}},
    "router": {
        "replicas": 2,
        "config": {"router": {"chat_template": f"/etc/twinpool/chat/{TEMPLATE}"}},
        "extraVolumes": [{"name": "chat", "configMap": {"name": "chat"}}],
        "extraVolumeMounts": [{"name": "chat", "mountPath": "/etc/twinpool/chat", "readOnly": True}],
    },
    # So many start at once on a machine that may have few cores.
    "prefill": {"replicas": 2, "startTimeoutSeconds": 600},
    "decode": {"replicas": 2, "startTimeoutSeconds": 600},
    # An upgrade restarts etcd, too: its volume stays.
    "etcd": {"persistence": {"enabled": True}},
}


def render(helm: Helm, values: dict[str, Any] | None = None, old: list[Doc] | None = None) -> list[Doc]:
    """The manifests, and a ConfigMap of the user's. ``old``: those of the release that is there: its passwords stay."""
    docs = helm.docs(merged(VALUES, values or {}), "values-dev.yaml")
    chat = {"kind": "ConfigMap", "metadata": {"name": "chat"}}
    docs.append(chat | {"data": {TEMPLATE: (EXAMPLE / TEMPLATE).read_text()}})
    if old is not None:
        docs = [doc for doc in docs if doc["kind"] != "Secret"]
        docs += [doc for doc in old if doc["kind"] == "Secret"]
    return docs


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Controllers]:
    async with Release(render(helm), tmp_path_factory.mktemp("release")) as release:
        controllers = Controllers(release)
        await controllers.install()
        yield controllers


async def at_rest(release: Release) -> None:
    """No worker holds anything, and nothing was refused or had to be mended."""
    workers = [*release.of("prefill"), *release.of("decode")]
    await assert_quiescent([f"{pod.ip}:50052" for pod in workers], within=60)
    release.check()


async def test_the_agent_of_the_examples_is_served(site: Controllers, checkpoint: Path) -> None:
    """By the name of the routers' Service, over both protocols; and so are tokens, which are those of the oracle."""
    release = site.release
    host = await release.client("agent", {"app": "agent"})
    said = []
    for way, address in (
        ("--http", "rel-twinpool-router.ns.svc:8000"),
        ("--grpc", "rel-twinpool-router:50051"),
    ):
        command = ("python", str(EXAMPLE / "agent.py"), way, address)
        printed = await run(release, host, f"agent{way}", *command)
        turns = re.findall(r"^ *\d+ ms +\d+ of +\d+ cached  (.*)$", printed, re.MULTILINE)
        assert [turn.partition("(")[0] for turn in turns[:2]] == ["weather", "trains"], printed
        assert len(turns) == 3, printed
        said.append(turns)
    assert said[0] == said[1]
    async with Load(release, await release.client("load-agent", {"app": "load"}), 2, TOKENS) as load:
        await load.more(4)
        await load.finish()
    load.check(oracle(checkpoint))
    await at_rest(release)


async def test_helm_test_succeeds(site: Controllers) -> None:
    await site.release.complete("rel-twinpool-test")
    site.release.check()


async def test_policies_hold(site: Controllers) -> None:
    """Every pod, and a stranger, tries every pod at every port of the design: what comes through is what the policies say."""
    release = site.release
    host = await release.client("stranger", {"app": "stranger"})
    policies = Policies(release.manifests.docs)
    pods = [pod for pod in release.pods.values() if not pod.terminating]
    assert {pod.component for pod in pods} == {"router", "prefill", "decode", "control", "etcd"}
    release.check()
    sources = [
        (End("stranger", "apps", {"app": "stranger"}), host),
        *((pod.end, pod.place.host) for pod in pods),
    ]
    wrong, opened = [], set()
    for source, place in sources:
        targets = [pod for pod in pods if pod.end != source]
        tries = await doors(place, [(pod.ip, port) for pod in targets for port in PORTS])
        for pod, port in ((pod, port) for pod in targets for port in PORTS):
            told = tries[f"{pod.ip}:{port}"]
            # A port that is allowed and where nobody listens refuses by itself.
            good = ("open", "ECONNREFUSED") if policies.allow(source, pod.end, port) else ("EHOSTUNREACH",)
            wrong += [(source.name, pod.name, port, told)] if told not in good else []
            if told == "open":
                opened.add(
                    (source.labels.get("app.kubernetes.io/component", "stranger"), pod.component, port)
                )
    assert not wrong
    # What is open is no more than the design has, and all of it but replays, transfers (whose port is UCX's choice) and etcd's peers.
    assert {edge for edge in opened if edge[0] == "stranger"} == {
        ("stranger", "router", 50051),
        ("stranger", "router", 8000),
    }
    wanted = {("router", "router", 50051), ("control", "router", 50051)}
    for worker in ("prefill", "decode"):
        wanted |= {("router", worker, port) for port in (50052, 5557)}
        wanted |= {("control", worker, 50052), ("prefill", worker, 50052), ("decode", worker, 50052)}
    wanted |= {(part, "etcd", 2379) for part in ("router", "prefill", "decode", "control")}
    assert wanted <= opened
    # Those were this test's own tries.
    for pod in pods:
        for side in ("in", "out"):
            pod.place.host.sh(f"nft flush set inet pod denied_{side}")
    release.check()


async def test_an_upgrade_and_its_rollback_lose_no_stream(
    site: Controllers, helm: Helm, checkpoint: Path
) -> None:
    """All at once, as `helm upgrade` has it: another image, so every pod is another one, etcd's too."""
    release = site.release
    before = release.manifests.docs
    async with Load(release, await release.client("load-upgrade", {"app": "load"}), 3, TOKENS) as load:
        await load.more(3)
        changed = {"image": {"tag": "next"}, "config": {"log": {"level": "debug"}}}
        for docs in (render(helm, changed, before), before):
            names = {pod.name: pod for pod in release.pods.values()}
            await site.apply(docs)
            assert not [pod for pod in release.pods.values() if names.get(pod.name) is pod]
            replicas = {doc["metadata"]["name"]: doc["spec"]["replicas"] for doc in site.workloads()}
            # Of routers never fewer than there are to be, of the rest one less.
            away = {"rel-twinpool-router": 0}
            least = {name: count - away.get(name, 1) for name, count in replicas.items()}
            assert site.fewest == least
            await load.more(3)
        await load.finish()
    resumed = load.check(oracle(checkpoint))
    print(f"{load.count()} streams, {resumed} resumed")
    assert all(code == 0 for pod in release.gone for code in pod.codes.values())
    await at_rest(release)


async def test_budgets_let_one_pod_of_a_pool_leave_at_a_time(site: Controllers, checkpoint: Path) -> None:
    release = site.release
    async with Load(release, await release.client("load-evict", {"app": "load"}), 2, TOKENS) as load:
        await load.more(2)
        for component in ("decode", "router"):
            first, second = release.of(component)
            assert await site.evict(first)
            assert not await site.evict(second)
            await release.ready(release.of(component))
            assert site.may_leave(second)
        await load.more(2)
        await load.finish()
    load.check(oracle(checkpoint))
    await at_rest(release)
