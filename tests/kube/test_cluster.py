# SPDX-License-Identifier: Apache-2.0
"""The chart in a real cluster of Kubernetes: installed, served, upgraded and rolled back under load, a node drained."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.kube.release import AGENT, MODEL_TEMPLATE, NAME, NAMESPACE, NEXT_TAG, WAIT_SECONDS, Load, Release
from tests.support.oracle import oracle
from tests.support.waiting import until_sync

pytestmark = [pytest.mark.integration, pytest.mark.chart, pytest.mark.slow, pytest.mark.timeout(2400)]

TOKENS = 60
PARTS = {"router": 2, "prefill": 2, "decode": 2, "control": 1, "etcd": 1}


def volume(path: Path) -> list[dict[str, Any]]:
    """What a cluster's administrator gives: a namespace, and a volume on the first node."""
    path.mkdir(mode=0o777)
    path.chmod(0o777)
    term = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-0"]}]}
    spec = {
        "capacity": {"storage": "2Gi"},
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "local",
        "local": {"path": str(path)},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}},
    }
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": "local"},
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
        },
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "etcd"}, "spec": spec},
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "chat", "namespace": NAMESPACE},
            "data": {MODEL_TEMPLATE: (AGENT / MODEL_TEMPLATE).read_text()},
        },
    ]


def ready(release: Release) -> dict[str, int]:
    """How many pods of each part are ready."""
    found = dict.fromkeys(PARTS, 0)
    for pod in release.pods():
        conditions = {c["type"]: c["status"] for c in pod["status"]["conditions"]}
        part = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        if part in found and conditions.get("Ready") == "True":
            found[part] += 1
    return found


def at_rest(release: Release) -> None:
    """No worker holds anything."""
    addresses = [pod["status"]["podIP"] for part in ("prefill", "decode") for pod in release.pods(part)]
    source = "import asyncio, sys; from tests.support.quiescence import assert_quiescent; "
    source += "asyncio.run(assert_quiescent(sys.argv[1:], within=60))"
    release.call(
        *release.cluster.inside(sys.executable, "-c", source, *(f"{address}:50052" for address in addresses))
    )


def test_helm_installs_what_becomes_ready(release: Release) -> None:
    made = {"apiVersion": "v1", "kind": "List", "items": volume(release.work / "volume")}
    release.call(release.kubectl_path, "apply", "-f", "-", stdin=json.dumps(made))
    notes = release.change("install")
    assert "STATUS: deployed" in notes
    assert ready(release) == PARTS


def test_helm_test_succeeds(release: Release) -> None:
    assert "Succeeded" in release.helm("test", NAME, "--timeout", "300s")


def test_an_operator_reaches_it_by_a_port_forward(release: Release) -> None:
    workers = json.loads(release.twinpool("get", "workers", "-o", "json"))
    names = {pod["metadata"]["name"] for part in ("prefill", "decode") for pod in release.pods(part)}
    assert {worker["name"] for worker in workers} == names
    assert all(worker["state"] == "ready" for worker in workers)
    checks = json.loads(release.twinpool("doctor", "--kube", "-o", "json"))
    assert checks
    assert not [check for check in checks if check["matters"] and check["status"] == "failed"]


def test_clients_reach_it_by_a_port_forward(release: Release) -> None:
    """The commands of the README and the install page, both protocols by one forward."""
    command = [
        release.kubectl_path,
        "-n",
        NAMESPACE,
        "port-forward",
        f"service/{NAME}-twinpool-router",
        ":50051",
        ":8000",
    ]
    forward = subprocess.Popen(command, env=release.env, stdout=subprocess.PIPE, text=True)
    try:
        assert forward.stdout is not None
        ports: dict[str, str] = {}
        for line in forward.stdout:
            if found := re.match(r"Forwarding from (127\.0\.0\.1:\d+) -> (\d+)", line):
                ports[found[2]] = found[1]
            if len(ports) == 2:
                break
        with urllib.request.urlopen(f"http://{ports['8000']}/v1/models", timeout=60) as reply:
            assert [model["id"] for model in json.load(reply)["data"]] == ["tiny"]
        twinpool = str(Path(sys.executable).with_name("twinpool"))
        asked = ("generate", "--endpoint", ports["50051"], "Hello", "--max-tokens", "5", "-o", "json")
        assert json.loads(release.call(twinpool, *asked))
        assert forward.poll() is None
    finally:
        forward.kill()
        forward.wait()


def test_the_agent_of_the_examples_is_served(release: Release, checkpoint: Path) -> None:
    """By the routers' Service, over both protocols; and so are tokens, which are those of the oracle."""
    address = release.address(f"{NAME}-twinpool-router")
    said = []
    for way, port in (("--http", 8000), ("--grpc", 50051)):
        agent = [sys.executable, str(AGENT / "agent.py"), way, f"{address}:{port}"]
        printed = release.call(*release.cluster.inside(*agent))
        turns = re.findall(r"^ *\d+ ms +\d+ of +\d+ cached  (.*)$", printed, re.MULTILINE)
        assert [turn.partition("(")[0] for turn in turns[:2]] == ["weather", "trains"], printed
        said.append(turns)
    assert said[0] == said[1]
    with Load(release, "agent", 2, TOKENS) as load:
        load.more(4)
        load.finish()
    load.check(oracle(checkpoint))
    at_rest(release)


def test_an_upgrade_and_its_rollback_lose_no_stream(release: Release, checkpoint: Path) -> None:
    """Another image, so every pod is another one, etcd's too."""
    with Load(release, "upgrade", 3, TOKENS) as load:
        load.more(3)
        before = {pod["metadata"]["uid"] for pod in release.pods()}
        release.change("upgrade", "--set", f"image.tag={NEXT_TAG},config.log.level=debug")
        assert ready(release) == PARTS
        assert not before & {pod["metadata"]["uid"] for pod in release.pods()}
        load.more(3)
        release.helm("rollback", NAME, "1", "--wait", "--timeout", "600s")
        assert ready(release) == PARTS
        assert {c["image"] for pod in release.pods() for c in pod["spec"]["containers"]} == {
            "localhost/twinpool:0.1.0"
        }
        load.more(3)
        load.finish()
    resumed = load.check(oracle(checkpoint))
    print(f"{load.count()} streams, {resumed} resumed at most")
    at_rest(release)


def test_a_node_is_drained(release: Release, checkpoint: Path) -> None:
    """By `kubectl drain`, which obeys the budgets: all that was on the second node comes to the first one, and no stream is lost."""
    with Load(release, "drain", 2, TOKENS) as load:
        load.more(2)
        there = [pod for pod in release.pods() if pod["spec"]["nodeName"] == "node-1"]
        assert there, "the scheduler put nothing on the second node"
        release.kubectl("drain", "node-1", "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=600s")
        assert not [pod for pod in release.pods() if pod["spec"]["nodeName"] == "node-1"]
        for part in ("router", "prefill", "decode", "control"):
            release.kubectl(
                "wait",
                "pod",
                "-l",
                f"app.kubernetes.io/component={part}",
                "--for=condition=Ready",
                "--timeout=600s",
            )
        assert ready(release) == PARTS
        load.more(2)
        load.finish()
    load.check(oracle(checkpoint))
    release.kubectl("uncordon", "node-1")
    at_rest(release)


def test_nothing_is_left_of_it(release: Release) -> None:
    """After `helm uninstall` there is no object of the release's but the passwords of etcd, whose volume is kept, and helm's own test."""
    release.helm("uninstall", NAME, "--wait", "--timeout", "600s")
    kinds = "deployments,statefulsets,services,configmaps,secrets,networkpolicies,poddisruptionbudgets,serviceaccounts,pods"

    def left() -> set[tuple[str, str]]:
        label = f"app.kubernetes.io/instance={NAME}"
        found = json.loads(release.kubectl("get", kinds, "-l", label, "-o", "json"))["items"]
        return {(item["kind"], item["metadata"]["name"]) for item in found} - {
            ("Pod", f"{NAME}-twinpool-test")
        }

    # helm waits for what it has made itself, not for the pods of that: they drain.
    kept = {("Secret", f"{NAME}-twinpool-etcd-auth")}
    until_sync(lambda: left() == kept, WAIT_SECONDS)
